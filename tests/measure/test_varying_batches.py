"""FLOP/s of batches that vary in size match FLOPs worked out by hand or counted for each shape."""

from __future__ import annotations

import csv
import json
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from lightning_modelprof.inspect.flops.count import count_flops
from lightning_modelprof.reading import read_report
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.steps import StepTag
from tests.support import fits
from tests.support.fits import fit_quietly, make_trainer, table_of

pytestmark = pytest.mark.slow

make_callback = partial(fits.make_callback, flops=True, active=0)
WIDTH = 4


class Batches(Dataset):
    """Ready-made batches of given shapes."""

    def __init__(self, shapes):
        self.shapes = shapes

    def __len__(self):
        return len(self.shapes)

    def __getitem__(self, index):
        return torch.ones(self.shapes[index]), torch.zeros(self.shapes[index][0])


def loader(shapes):
    return DataLoader(Batches(shapes), batch_size=None)


class Attention(LightningModule):
    """One attention head over a batch of sequences."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch):
        queries, keys, values = self.inner(batch).chunk(3, dim=-1)
        return self.outer((queries @ keys.transpose(1, 2)).softmax(-1) @ values)

    def training_step(self, batch, batch_idx):
        return self(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def forward_flops(shape):
    """Two FLOPs per multiply-add: B L d 3d, twice B L L d, and B L d d."""
    batch, length, width = shape
    return 2 * (4 * batch * length * width**2 + 2 * batch * length**2 * width)


def step_flops(shape):
    """Backward is twice forward, minus the gradient of the data, which isn't needed."""
    batch, length, width = shape
    return 3 * forward_flops(shape) - 2 * batch * length * width * 3 * width


class Convolutions(Attention):
    """Strides without padding, so that FLOPs aren't an exact polynomial of height and width."""

    def __init__(self):
        LightningModule.__init__(self)
        parts = nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2), nn.ReLU(), nn.Conv2d(4, 4, 3, 2)
        self.layers = nn.Sequential(*parts)

    def forward(self, batch):
        return self.layers(batch)


def counted(model, shape):
    return sum(count_flops(model, torch.ones(shape), loss_fn=torch.mean).flops.values())


def run(folder, module, data, *others, trainer=None, **kwargs):
    callback = make_callback(folder, **({"skip_first": 5} | kwargs))
    fit_quietly(make_trainer(folder, callback, *others, **(trainer or {})), module, data)
    return callback


def clean_steps(callback):
    return callback.run.ranks[0].steps.clean()


def mean_flops(callback):
    """FLOPs of a mean clean step, from the reported FLOP/s and step time."""
    summary = callback.report.summary
    return summary.flops.flops_per_s * summary.benchmark.batch_cost_ns.avg / 1e9


def true_mean(callback, shapes, flops=step_flops):
    steps = clean_steps(callback).step.tolist()
    return sum(flops(shapes[step % len(shapes)]) for step in steps) / len(steps)


def seeded(make, num):
    chance = random.Random(3)
    return [make(chance) for _ in range(num)]


def tokens(chance):
    length = chance.randrange(8, 96)
    return max(1, 512 // length), length, WIDTH


LENGTHS = {
    "a curriculum that switches late": [(8, 8, WIDTH)] * 12 + [(8, 128, WIDTH)] * 48,
    "a curriculum that grows": [(2, 8 + step, WIDTH) for step in range(90)],
    "buckets": seeded(lambda chance: (4, chance.choice((8, 16, 32, 64)), WIDTH), 60),
    "padded to the longest": seeded(lambda chance: (4, chance.randrange(10, 100), WIDTH), 60),
    "batches of about as many tokens": seeded(tokens, 60),
    "a smaller last batch": ([(8, 16, WIDTH)] * 15 + [(3, 16, WIDTH)]) * 3,
    "batch sizes": seeded(lambda chance: (chance.randrange(1, 33), 16, WIDTH), 60),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_varying_lengths_and_batch_sizes(tmp_path, name):
    """FLOPs are sums of products of dimensions here, so they're exact."""
    shapes = LENGTHS[name]
    callback = run(tmp_path, Attention(), loader(shapes))
    assert mean_flops(callback) == pytest.approx(true_mean(callback, shapes), rel=1e-6)
    assert len(clean_steps(callback)) > len(shapes) / 2
    flops = callback.report.summary.flops
    assert flops.mean_step.error < 1e-6
    assert flops.mean_step.counted <= 16
    # Tables and saved files agree.
    model = dict(zip(("FLOPs", "MACs"), table_of(callback.report, "flops").rows[0][1:3], strict=True))
    assert model["FLOPs"] == pytest.approx(true_mean(callback, shapes), abs=1)
    assert "all figures are for the mean clean step" in " ".join(table_of(callback.report, "flops").notes)
    again = read_report(tmp_path / "modelprof").summary.flops
    assert again.flops_per_s == pytest.approx(flops.flops_per_s, rel=1e-12)


IMAGES = {
    "height and width": lambda chance: (2, 1, chance.randrange(24, 96), chance.randrange(24, 96)),
    "squares": lambda chance: (2, 1, *[chance.randrange(24, 96)] * 2),
    "batch, height and width": lambda chance: (
        chance.randrange(1, 6),
        1,
        chance.randrange(24, 96),
        chance.randrange(24, 96),
    ),
}


@pytest.mark.parametrize("name", IMAGES)
def test_varying_image_sizes(tmp_path, name):
    shapes, model = seeded(IMAGES[name], 45), Convolutions()
    callback = run(tmp_path, model, loader(shapes))
    known = {shape: counted(model, shape) for shape in set(shapes)}
    assert mean_flops(callback) == pytest.approx(true_mean(callback, shapes, known.get), rel=0.03)
    mean = callback.report.summary.flops.mean_step
    assert 0 < mean.error <= 0.03
    assert mean.fitted > 10


def test_padding_collate_fn(tmp_path):
    """A collate_fn pads to the batch's longest item; the data is shuffled, over two epochs."""
    chance = random.Random(5)
    items = [torch.ones(chance.randrange(5, 60), WIDTH) for _ in range(160)]
    shapes = []

    class Notes(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            shapes.append(tuple(batch[0].shape))

    def collate(sequences):
        return pad_sequence(sequences, batch_first=True), torch.tensor([len(one) for one in sequences])

    data = DataLoader(items, batch_size=3, shuffle=True, collate_fn=collate)
    callback = run(tmp_path, Attention(), data, Notes(), trainer={"max_epochs": 2})
    assert len({shape[0] for shape in shapes}) == 2, "the last batch is smaller"
    assert mean_flops(callback) == pytest.approx(true_mean(callback, shapes), rel=1e-6)


class EncoderDecoder(Attention):
    """Two lengths that vary independently: the decoder's attention to the encoder, and two more products."""

    def forward(self, batch):
        source, target = batch["source"], batch["target"]
        keys = self.outer(source)
        keys = keys @ (keys.transpose(1, 2) @ source)
        return (self.outer(target) @ keys.transpose(1, 2)) @ keys

    def training_step(self, batch, batch_idx):
        return self(batch).mean()


def test_two_varying_lengths(tmp_path):
    """FLOPs have products of either length and of both."""
    pairs = seeded(lambda chance: (chance.randrange(5, 50), chance.randrange(5, 50)), 70)
    batches = [{"source": torch.ones(2, s, WIDTH), "target": torch.ones(2, t, WIDTH)} for s, t in pairs]
    model = EncoderDecoder()
    callback = run(tmp_path, model, DataLoader(batches, batch_size=None))
    steps = clean_steps(callback).step.tolist()
    flops = {s: sum(count_flops(model, batches[s], loss_fn=torch.mean).flops.values()) for s in steps}
    assert mean_flops(callback) == pytest.approx(sum(flops.values()) / len(steps), rel=1e-6)


def test_equal_batches_report_exact_flops(tmp_path):
    callback = run(tmp_path, Attention(), loader([(4, 16, WIDTH)] * 20))
    flops = callback.report.summary.flops
    assert flops.mean_step is None
    assert mean_flops(callback) == pytest.approx(step_flops((4, 16, WIDTH)), rel=1e-12)
    assert not [one for one in callback.report.tables if one.id == "flops_by_size"]
    cost = callback.run.ranks[0].model_cost
    assert [one.step for one in cost.size_counts] == [cost.count.step]
    assert cost.batch_sizes.shapes == (((4, 16, WIDTH), (4,)),)
    table = table_of(callback.report, "flops")
    assert not any("size" in note for note in table.notes), table.notes
    assert table.rows[0][4] == step_flops((4, 16, WIDTH)) / 4


def test_gradient_accumulation(tmp_path):
    """The optimizer adds its own FLOPs in one of three batches, whatever their length."""

    class Muon(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            with torch.enable_grad():
                loss = closure()
            torch.ones(8, 8) @ torch.ones(8, 8)
            return loss

    class Model(Attention):
        def configure_optimizers(self):
            return Muon(self.parameters(), {})

    shapes = seeded(lambda chance: (2, chance.randrange(8, 64), WIDTH), 66)
    callback = run(tmp_path, Model(), loader(shapes), trainer={"accumulate_grad_batches": 3})
    flops = callback.report.summary.flops
    step_s = callback.report.summary.benchmark.batch_cost_ns.avg / 1e9
    assert flops.flops_per_s * step_s == pytest.approx(true_mean(callback, shapes), rel=1e-6)
    clean = clean_steps(callback)
    stepping = float(((clean.tags & int(StepTag.NO_OPTIMIZER_STEP)) == 0).mean())
    hardware = true_mean(callback, shapes) + stepping * 2 * 8**3
    assert flops.mean_step.hardware_flops == pytest.approx(hardware, rel=1e-6)


@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
def test_evaluation_loops_with_varying_lengths(tmp_path, loop):
    class Model(Attention):
        test_step = predict_step = Attention.validation_step

    shapes = seeded(lambda chance: (2, chance.randrange(8, 64), WIDTH), 50)
    callback = make_callback(tmp_path, skip_first=5)
    getattr(make_trainer(tmp_path, callback), loop)(Model(), loader(shapes))
    assert mean_flops(callback) == pytest.approx(true_mean(callback, shapes, forward_flops), rel=1e-6)


def test_compiled_model_is_counted_on_copies(tmp_path):
    torch._dynamo.reset()
    model = Attention()
    model.outer = torch.compile(model.outer, backend="eager", dynamic=True)
    shapes = seeded(lambda chance: (2, chance.choice((8, 16, 24, 40)), WIDTH), 40)
    callback = run(tmp_path, model, loader(shapes))
    assert callback.report.summary.flops.on_fake_tensors
    assert mean_flops(callback) == pytest.approx(true_mean(callback, shapes), rel=1e-6)


def test_counted_steps_are_few_and_not_clean(tmp_path):
    shapes = seeded(lambda chance: (2, chance.randrange(8, 64), WIDTH), 80)
    callback = run(tmp_path, Attention(), loader(shapes))
    record = callback.run.ranks[0]
    steps = [one.step for one in record.model_cost.size_counts]
    assert len(set(steps)) == len(steps) <= 6
    tags = dict(zip(record.steps.step.tolist(), record.steps.tags.tolist(), strict=True))
    assert all(tags[step] & StepTag.INSPECTED for step in steps)
    assert sum(record.model_cost.batch_sizes.clean_steps) == len(clean_steps(callback))


def test_no_size_is_counted_in_window(tmp_path):
    """The size changes in the middle of a window and is counted after it."""
    shapes = [(4, 8, WIDTH)] * 24 + [(4, 64, WIDTH)] * 36
    callback = run(tmp_path, Attention(), loader(shapes), active=6, wait=16, warmup=1, repeat=1)
    (window,) = callback.run.ranks[0].windows
    assert 24 in window.recorded_steps
    (step,) = (one.step for one in callback.run.ranks[0].model_cost.size_counts if one.step > 20)
    assert step > window.last_step
    assert mean_flops(callback) == pytest.approx(true_mean(callback, shapes), rel=1e-6)


class Chaos(Attention):
    """FLOPs that can't be fitted to the shapes."""

    def training_step(self, batch, batch_idx):
        length = batch[0].shape[1]
        return super().training_step((batch[0].repeat(1, 1 + length * 7919 % 13, 1), None), batch_idx)


def test_failed_fit_shows_dash_with_reason(tmp_path):
    shapes = seeded(lambda chance: (2, chance.randrange(8, 60), WIDTH), 60)
    callback = run(tmp_path, Chaos(), loader(shapes))
    section, table = callback.report.summary.flops, table_of(callback.report, "flops")
    assert section.flops_per_s is None
    assert "no fit through the" in section.mean_step.note
    assert [row[4:] for row in table.rows if row[0] == "Model"] == [(None, None, None)]
    assert any("No FLOP/s and no shares: batch sizes vary, no fit" in note for note in table.notes)
    assert callback.run.ranks[0].model_cost.count.step is not None


def test_modules_have_no_rate_if_sizes_vary(tmp_path):
    shapes = seeded(lambda chance: (2, chance.randrange(8, 64), WIDTH), 30)
    callback = run(tmp_path, Attention(), loader(shapes))
    table = table_of(callback.report, "module_tree")
    assert "forward_ns" in [column.key for column in table.columns]
    assert not any("flops_per_s" in column.key for column in table.columns)
    assert any("there are no FLOP/s" in note for note in table.notes)


def test_logged_flops_belong_to_logged_steps(tmp_path):
    """A logger gets the FLOP/s of the steps since its last point, not of the counted step."""
    logger = CSVLogger(tmp_path)
    shapes = [(4, 8, WIDTH)] * 20 + [(4, 64, WIDTH)] * 20
    trainer = {"logger": logger, "log_every_n_steps": 10}
    run(tmp_path, Attention(), loader(shapes), trainer=trainer, peak_flops_per_s=1e9, skip_first=0)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row.get("modelprof/flops_per_s")]
    means = [float(r["modelprof/flops_per_s"]) * float(r["modelprof/batch_cost_ms"]) / 1e3 for r in logged]
    assert means == pytest.approx([step_flops(shapes[0])] * 2 + [step_flops(shapes[-1])] * 2)
    for row in logged:
        assert float(row["modelprof/mfu"]) == pytest.approx(float(row["modelprof/flops_per_s"]) / 1e9)


def test_counting_does_not_change_training(tmp_path):
    shapes = seeded(lambda chance: (2, chance.randrange(8, 64), WIDTH), 30)
    weights = []
    for callbacks in ([], [make_callback(tmp_path)]):
        torch.manual_seed(0)
        module = Attention()
        fit_quietly(make_trainer(tmp_path, *callbacks), module, loader(shapes))
        weights.append(torch.cat([one.detach().flatten() for one in module.parameters()]))
    assert torch.equal(*weights)


def test_run_of_older_version_keeps_figures(tmp_path):
    """Its file has no sizes, and its figures stay as they were."""
    callback = run(tmp_path, Attention(), loader([(4, 16, WIDTH)] * 20))
    file = tmp_path / "modelprof" / "run.json"
    raw = json.loads(file.read_text())
    cost = raw["ranks"][0]["model_cost"]
    for name in ("size_counts", "size_counts_note", "batch_sizes"):
        del cost[name]
    del cost["times"]["sizes"]
    file.write_text(json.dumps(raw))
    assert load_run(file).ranks[0].model_cost.batch_sizes is None
    flops = read_report(file).summary.flops
    assert flops.flops_per_s == callback.report.summary.flops.flops_per_s


class Alternating(Attention):
    """Two networks in turn, on equal batches."""

    def training_step(self, batch, batch_idx):
        data, _ = batch
        return self(data).mean() if batch_idx % 4 == 0 else self.outer(data).mean()


class Thawed(Attention):
    """Trains its first layer only later."""

    def on_train_batch_start(self, batch, batch_idx):
        self.inner.requires_grad_(batch_idx > 20)


class Growing(Attention):
    """Creates its input in the step, from what the batch doesn't show."""

    def training_step(self, batch, batch_idx):
        return self(torch.ones(4, 8 if batch_idx < 20 else 256, WIDTH)).mean()


@pytest.mark.parametrize("model", [Alternating, Thawed, Growing])
def test_equal_batches_with_different_flops_have_no_rate(tmp_path, model):
    """A single count would give a wrong rate for all, so the report names the steps that differ."""
    callback = run(tmp_path, model(), loader([(4, 16, WIDTH)] * 60))
    table = table_of(callback.report, "flops")
    counts = callback.run.ranks[0].model_cost.size_counts
    assert counts[0].total != counts[-1].total
    assert table.rows[0][5] is None
    (note,) = [note for note in table.notes if note.startswith("No FLOP/s")]
    assert f"{counts[0].total:,} in step {counts[0].step}" in note
    assert f"{counts[-1].total:,} in step {counts[-1].step}" in note
    assert callback.report.summary.flops.flops_per_s is None


def test_size_is_recounted_less_and_less_often(tmp_path):
    callback = run(tmp_path, Attention(), loader([(4, 16, WIDTH)] * 300))
    record = callback.run.ranks[0]
    steps = [one.step for one in record.model_cost.size_counts]
    assert [step - steps[0] for step in steps] == [0, 25, 26, 27, 82, 247]
    tags = dict(zip(record.steps.step.tolist(), record.steps.tags.tolist(), strict=True))
    assert all(tags[step] & StepTag.INSPECTED for step in steps)
    assert mean_flops(callback) == pytest.approx(step_flops((4, 16, WIDTH)), rel=1e-12)


def test_size_is_not_recounted_in_window_or_on_copies(tmp_path):
    callback = run(
        tmp_path, Attention(), loader([(4, 16, WIDTH)] * 70), active=20, wait=16, warmup=1, repeat=1
    )
    (window,) = callback.run.ranks[0].windows
    steps = [one.step for one in callback.run.ranks[0].model_cost.size_counts]
    assert window.recorded_steps[0] <= steps[0] + 25 <= window.recorded_steps[-1], "else it shows nothing"
    assert len(steps) > 1
    assert not set(steps) & set(window.recorded_steps)
    torch._dynamo.reset()
    model = Attention()
    model.outer = torch.compile(model.outer, backend="eager")
    callback = run(tmp_path / "compiled", model, loader([(4, 16, WIDTH)] * 60))
    assert len(callback.run.ranks[0].model_cost.size_counts) == 1


def test_compiled_model_is_recounted_after_thawing(tmp_path):
    """A copy is counted again once other parameters are trained: the backward of ``inner`` is added."""

    class Thawed(Attention):
        def training_step(self, batch, batch_idx):
            if batch_idx == 20:
                self.requires_grad_(True)
            return super().training_step(batch, batch_idx)

    torch._dynamo.reset()
    model = Thawed()
    model.outer = torch.compile(model.outer, backend="eager")
    for frozen in list(model.parameters())[1:]:
        frozen.requires_grad_(False)
    callback = run(tmp_path, model, loader([(4, 16, WIDTH)] * 160))
    first, again = callback.run.ranks[0].model_cost.size_counts
    assert first.step < 20 < again.step <= 20 + 2 * 25
    assert first.total < again.total
    assert "batches of the same size differ in FLOPs" in callback.report.summary.flops.mean_step.note
