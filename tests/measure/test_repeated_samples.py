"""Samples of an index are compared across epochs in real fits, without changing training."""

from __future__ import annotations

import gc
import random
import time
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_modelprof.measure.steps.repeated_samples import ENOUGH, NUM_WATCHED, RepeatedSampleWatch, _hash
from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.rules.engine import judge
from lightning_modelprof.report.rules.input import repeated_work
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.batches import RepeatedSamples
from tests.support.diagnosed import analysis_of, only, steps_of, with_loader
from tests.support.fits import Net, Numbers, fit_quietly, loop_of_trainer, make_callback, make_trainer

pytestmark = pytest.mark.slow


class Calls(Numbers):
    """Records the indices asked for."""

    def __init__(self, size=64):
        super().__init__(size)
        self.asked = []

    def __getitem__(self, index):
        self.asked.append(index)
        return super().__getitem__(index)


class Augmented(Numbers):
    """Flips one sample in two."""

    def __getitem__(self, index):
        row, target = super().__getitem__(index)
        return (row.flip(0) if torch.rand(()) < 0.5 else row), target


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Numbers(32))


def fit(folder, data, *, epochs=4, seed=1, module=None, with_callback=True, **arguments):
    torch.manual_seed(seed)
    random.seed(seed)
    callbacks = [make_callback(folder)] if with_callback else []
    trainer = make_trainer(folder, *callbacks, max_epochs=epochs)
    module = module or Net()
    loaded = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=8, **arguments)
    fit_quietly(trainer, module, loaded)
    if not with_callback:
        return module
    return callbacks[0].run.ranks[0].repeated


@pytest.mark.parametrize("arguments", [{}, {"shuffle": True}, {"shuffle": True, "num_workers": 2}])
def test_same_samples_are_found(tmp_path, arguments):
    seen = fit(tmp_path, Numbers(64), epochs=6, **arguments)
    assert seen.note == ""
    assert seen.num_equal == seen.num_compared >= 12
    assert seen.num_indices <= NUM_WATCHED
    assert seen.sample_bytes == 8 * 4 + 4
    assert seen.num_samples == 64


@pytest.mark.parametrize("num_workers", [0, 2])
def test_persistent_workers_are_watched(tmp_path, num_workers):
    """Their iterator is the same in each epoch."""
    arguments = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    seen = fit(tmp_path, Numbers(64), epochs=8, shuffle=True, **arguments)
    assert seen.num_equal == seen.num_compared >= 12


@pytest.mark.parametrize(("seed", "num_workers"), [(0, 0), (1, 0), (2, 0), (0, 2)])
def test_augmented_samples_are_not_equal(tmp_path, seed, num_workers):
    """With workers, which start slowly, one seed is enough: each epoch draws new numbers."""
    seen = fit(tmp_path, Augmented(64), shuffle=True, seed=seed, epochs=6, num_workers=num_workers)
    assert seen.num_equal < seen.num_compared


def test_watch_stops_after_enough_comparisons(tmp_path):
    seen = fit(tmp_path, Numbers(128), epochs=20)
    assert ENOUGH <= seen.num_compared <= ENOUGH + NUM_WATCHED


def test_one_epoch_compares_nothing(tmp_path):
    seen = fit(tmp_path, Numbers(64), epochs=1)
    assert (seen.num_compared, seen.num_equal) == (0, 0)
    assert "no dataset index" in seen.note


class Batches:
    def __iter__(self):
        return iter([Numbers(8)[:8]] * 4)


class Texts(Numbers):
    def __getitem__(self, index):
        return (*super().__getitem__(index), str(index))


class Speaking(Net):
    def loss(self, batch):
        return super().loss(batch[:2])


@pytest.mark.parametrize(
    ("data", "module", "why"),
    [
        (DataLoader(Stream(), batch_size=8), None, "iterable"),
        (DataLoader([Numbers(8)[:8]], batch_size=None), None, "doesn't build batches from single samples"),
        (Batches(), None, "torch DataLoader"),
        (DataLoader(Texts(32), batch_size=8), Speaking, "one row per sample"),
    ],
)
def test_note_says_why_samples_cannot_be_compared(tmp_path, data, module, why):
    callback = make_callback(tmp_path)
    trainer = make_trainer(tmp_path, callback, max_epochs=2)
    fit_quietly(trainer, Net() if module is None else module(), data)
    seen = callback.run.ranks[0].repeated
    assert why in seen.note
    assert seen.num_compared == 0


def test_watch_changes_no_index_weight_or_random_number(tmp_path):
    after = []
    for with_callback in (False, True):
        data = Calls()
        module = Net(dropout=0.5)
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_()
        fit(tmp_path, data, module=module, shuffle=True, with_callback=with_callback)
        weights = [parameter.detach().clone() for parameter in module.parameters()]
        after.append((data.asked, weights, torch.rand(3), random.random()))
    (asked, weights, drawn, other), (asked_too, weights_too, drawn_too, other_too) = after
    assert asked == asked_too
    assert all(map(torch.equal, weights, weights_too))
    assert torch.equal(drawn, drawn_too)
    assert other == other_too


def test_torch_iterators_are_restored_and_released(tmp_path):
    """Also if the epoch continues after the watch ends, as it does after an internal error."""
    loader = DataLoader(Numbers(64), batch_size=8)
    iterator = iter(loader)

    class Loop:
        class _data_fetcher:
            batches = ()

    Loop._combined_loader = type("Loader", (), {"_iterator": type("Modes", (), {"iterators": [iterator]})})
    trainer = type("Trainer", (), {"fit_loop": Loop})
    watch, inner = RepeatedSampleWatch(loop_of_trainer(trainer)), iterator._sampler_iter
    watch.begin_batch(next(iterator))
    assert iterator._sampler_iter is not inner
    watch.begin_batch(next(iterator))
    watch.close()
    assert iterator._sampler_iter is inner
    assert len(list(iterator)) == 6
    holders = [one for one in gc.get_referrers(iterator) if one is watch or one is vars(watch)]
    assert holders == []


def test_internal_error_ends_only_watch(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "lightning_modelprof.measure.steps.repeated_samples._hash",
        lambda *_: (_ for _ in ()).throw(KeyError("x")),
    )
    seen = fit(tmp_path, Numbers(64))
    assert "couldn't be compared" in seen.note


class Odd:
    def __iter__(self):
        return iter([[0, 1, "x"], [2, 3, 4]] * 4)

    def __len__(self):
        return 8


def test_indices_may_have_any_type(tmp_path):
    class Data(Numbers):
        def __getitem__(self, index):
            return super().__getitem__(0 if index == "x" else index)

    assert fit(tmp_path, DataLoader(Data(8), batch_sampler=Odd())).num_equal > 0


def test_hash_depends_on_sample_not_position():
    batch = {"x": torch.arange(12.0).reshape(4, 3), "y": [torch.arange(4)]}
    turned = {"x": batch["x"].flip(0), "y": [batch["y"][0].flip(0)]}
    assert _hash(batch, 4, 1) == _hash(turned, 4, 2)
    assert _hash(batch, 4, 1) != _hash(batch, 4, 2)
    assert _hash(batch, 4, 1)[1] == 3 * 4 + 8


def test_change_anywhere_in_large_sample_changes_hash():
    image = torch.zeros(2, 3, 256, 256)
    image[1, :, 100:120, 90:140] = 1
    assert _hash(image, 2, 0)[0] != _hash(image, 2, 1)[0]


class Slow(Numbers):
    def __getitem__(self, index):
        time.sleep(0.004)
        return super().__getitem__(index)


class SlowAugmented(Slow, Augmented):
    pass


@pytest.mark.parametrize(
    ("data", "status"), [(Slow, Status.FOUND), (SlowAugmented, Status.CLEAN), (Numbers, Status.CLEAN)]
)
def test_finding_in_fit_that_waits_for_batches(tmp_path, data, status):
    callback = make_callback(tmp_path)
    trainer = make_trainer(tmp_path, callback, max_epochs=6)
    fit_quietly(trainer, Net(), DataLoader(data(32), batch_size=8, shuffle=True))
    finding = next(one for one in callback.report.findings if one.kind == "repeated_work")
    assert finding.status is status, finding
    if status is Status.FOUND:
        assert finding.locations[0].function == "Slow.__getitem__"


# The rule

SAME = RepeatedSamples(num_indices=16, num_compared=32, num_equal=32, sample_bytes=1 << 20, num_samples=1_000)
WAITING = {"dataloader": 20, "forward": 20}


def evaluate(seen=SAME, *, setup=None, phases=None, **info):
    setup = setup or with_loader(batch_size=8)
    steps = steps_of(**(phases or WAITING))
    return only(judge(repeated_work, analysis_of(steps, repeated=seen, setup=setup, **info)))


def test_finding_states_cache_size():
    finding = evaluate()
    assert finding.status is Status.FOUND
    assert finding.severity is Severity.INFO
    assert finding.saving_ns_per_step is None
    assert "all 1,000 take 1,000 MiB." in finding.action
    assert {one.label: one.value for one in finding.evidence}["cache size for all samples"] == 1_000 << 20
    assert finding.locations[0].line == 7
    workers = evaluate(setup=with_loader(batch_size=8, num_workers=2, dataset=None, collate=None))
    assert "per worker" in workers.action


@pytest.mark.parametrize(
    ("seen", "status"),
    [
        (replace(SAME, num_equal=31), Status.CLEAN),
        (replace(SAME, num_compared=11, num_equal=11), Status.NOT_EVALUATED),
        (replace(SAME, num_compared=12, num_equal=12), Status.FOUND),
        (RepeatedSamples(note="the dataset is iterable"), Status.NOT_EVALUATED),
        (None, Status.NOT_EVALUATED),
    ],
)
def test_found_only_if_all_samples_are_equal(seen, status):
    assert evaluate(seen).status is status


def test_found_only_if_training_waits_for_data():
    assert evaluate(phases={"dataloader": 0.5, "forward": 20}).status is Status.CLEAN
    assert evaluate(loop="test").status is Status.NOT_EVALUATED
    # 20 ms for 512 samples is what indexing rows takes
    assert evaluate(setup=with_loader(batch_size=512)).status is Status.CLEAN


def test_repeated_samples_are_saved_with_run(tmp_path):
    callback = make_callback(tmp_path)
    trainer = make_trainer(tmp_path, callback, max_epochs=3)
    fit_quietly(trainer, Net(), DataLoader(Numbers(64), batch_size=8))
    [file] = tmp_path.rglob("run.json")
    assert load_run(file).ranks[0].repeated == callback.run.ranks[0].repeated
    assert callback.run.ranks[0].repeated.num_compared > 0
