"""Findings on slow validation: the slow part, its line and its fix.

The slow trainings sleep, so a busy machine changes nothing: the sampler always finds the training thread
asleep there.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import Logger
from torch.utils.data import DataLoader, get_worker_info
from torchmetrics import Metric

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.measure.setup import training_setup
from lightning_modelprof.place import Place
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.model import Status
from lightning_modelprof.report.rules.engine import judge
from lightning_modelprof.report.rules.validation import long_sanity_check, validation_share
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.phases import PARTS, PartTime, ValidationTimes
from lightning_modelprof.run.records import ActionTime, OutsideLoop
from lightning_modelprof.run.setup import DeviceSetup, LoaderSetup
from lightning_modelprof.run.stacks import SampledStack, StackFrame, StackSamples
from tests.support.diagnosed import MS, SETUP, analysis_of, only, steps_of
from tests.support.fits import Net, Numbers, report_of, run_fit

HERE = str(Path(__file__))
LESS_OFTEN = "validate less"
SLOW_S = 0.02

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]


def line_of(mark: str) -> int:
    """Number of the line that ends in ``# @mark``."""
    lines = Path(HERE).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# @{mark}"))


# Trainings that are slow in one part of their validations


class SlowNumbers(Numbers):
    def __getitem__(self, index: int) -> Any:
        time.sleep(SLOW_S)  # @dataset
        return super().__getitem__(index)


class SlowTransfer(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.validating:
            time.sleep(SLOW_S)  # @transfer
        return batch


class SlowStep(Net):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.loss(batch)
        time.sleep(SLOW_S)  # @step


class SlowHook(Net):
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        time.sleep(SLOW_S)  # @hook


class SlowEnd(Net):
    def on_validation_epoch_end(self) -> None:
        self.summarize()  # @end

    def summarize(self) -> None:
        time.sleep(6 * SLOW_S)  # @summary


class SlowMetric(Metric):
    full_state_update = False

    def __init__(self, update_s: float = 0.0, compute_s: float = 0.0) -> None:
        super().__init__()
        self.update_s, self.compute_s = update_s, compute_s
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, value: torch.Tensor) -> None:
        time.sleep(self.update_s)  # @update
        self.total += value

    def compute(self) -> torch.Tensor:
        time.sleep(self.compute_s)  # @compute
        return self.total


class Metered(Net):
    def __init__(self, **slow: float) -> None:
        super().__init__()
        self.metric = SlowMetric(**slow)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metric.update(self.loss(batch))  # @metered
        self.log("metric", self.metric, on_step=False, on_epoch=True)


class LogsEachBatch(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), on_step=True)


class SlowLogger(Logger):
    name = "slow"  # type: ignore[assignment]
    version = 0  # type: ignore[assignment]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(name.startswith("val_loss") for name in metrics):
            time.sleep(SLOW_S)  # @logger

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class SlowCallback(Callback):
    def on_validation_batch_end(self, *args: Any) -> None:
        time.sleep(SLOW_S)


def slow_start(_: int) -> None:
    assert get_worker_info() is not None
    time.sleep(0.15)


def validation(data: Any = None, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(data or Numbers(5), batch_size=1, **arguments)


def fit(
    tmp_path: Path, module: Any = None, val: Any = None, *, own_loaders: bool = False, **arguments: Any
) -> Any:
    trainer = {"val_check_interval": 10, "num_sanity_val_steps": 0, **arguments.pop("trainer", {})}
    callback = run_fit(
        tmp_path,
        module=module or Net(),
        data=DataLoader(Numbers(40), batch_size=1),
        val=None if own_loaders else val or validation(),
        trainer=trainer,
        sampling=True,
        active=0,
        skip_first=2,
        **arguments,
    )
    assert load_run(tmp_path).ranks[0].validation == callback.run.ranks[0].validation
    return callback


def finding_of(callback: Any) -> Any:
    [finding] = [one for one in callback.report.findings if one.kind == "validation_share"]
    return finding


CASES = {
    "dataset": (
        lambda: {"val": validation(SlowNumbers(5))},
        *("dataloader", "Dataloader", "dataset", None, "(currently num_workers=0)"),
    ),
    "second dataset": (
        lambda: {"module": Two(), "val": [validation(Numbers(2)), validation(SlowNumbers(5))]},
        *("dataloader", "Dataloader", "dataset", None, "(currently num_workers=0)"),
    ),
    "transfer": (
        lambda: {"module": SlowTransfer()},
        *("transfer", "Transfer", "transfer", None, "Move work from SlowTransfer.on_after_batch_transfer"),
    ),
    "step": (
        lambda: {"module": SlowStep()},
        *("forward", "Forward", "step", None, "a batch_size above 1"),
    ),
    "update of a metric": (
        lambda: {"module": Metered(update_s=SLOW_S)},
        *("forward", "Forward", "metered", "update", "Update fewer or cheaper metrics per batch"),
    ),
    "hook": (
        lambda: {"module": SlowHook()},
        *("module_hooks", "Module hooks", "hook", None, "Do less in SlowHook.on_validation_batch_start"),
    ),
    "epoch end": (
        lambda: {"module": SlowEnd()},
        *("epoch_end", "Metrics and epoch end", "end", "summary", "in SlowEnd.on_validation_epoch_end"),
    ),
    "compute of a metric": (
        lambda: {"module": Metered(compute_s=6 * SLOW_S)},
        *("epoch_end", "Metrics and epoch end", "compute", None, "Compute fewer or cheaper metrics there"),
    ),
    "logger": (
        lambda: {"module": LogsEachBatch(), "trainer": {"logger": SlowLogger()}},
        *("logging", "Logging", "logger", None, "self.log(..., on_step=False)"),
    ),
}
"""Arguments, the part and its label, the marks of its line and of the line it calls, and the fix."""


class Two(Net):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.loss(batch)


@pytest.mark.parametrize("case", CASES)
def test_slow_part_gets_its_line_and_fix(tmp_path, monkeypatch, case):
    monkeypatch.setattr(training_setup, "usable_cpus", lambda: 8)  # with few CPUs, workers don't help
    make, part, label, mark, inner, fix = CASES[case]
    callback = fit(tmp_path, **make())
    times = callback.run.ranks[0].validation
    assert max(times.parts, key=lambda one: one.total_ns).key == part
    finding = finding_of(callback)
    assert finding.status is Status.FOUND
    assert finding.title.endswith(f"mostly {label}")
    assert fix in finding.action
    assert finding.action.index(fix) < finding.action.index(LESS_OFTEN)
    place = finding.locations[0]
    assert (place.file, place.line, place.is_exact) == (HERE, line_of(mark), True)
    assert (place.inner.line if place.inner else None) == (line_of(inner) if inner else None)
    # The table, the chart and the file agree.
    [table] = [one for one in callback.report.tables if one.id == "validation"]
    assert max(table.rows, key=lambda row: row[2])[0] == label
    assert sum(row[2] for row in table.rows) == times.total_ns
    [chart] = [one for one in callback.report.charts if one.id == "validation_shares"]
    assert sum(series.values[0] for series in chart.series) == pytest.approx(1)
    assert {one["key"] for one in report_of(tmp_path)["summary"]["validation"]["parts"]} >= {part}


def test_restarting_workers_are_found(tmp_path):
    """Each start takes 0.15 s in the workers, which shows as a longer wait for the first batch."""
    loader = validation(num_workers=1, worker_init_fn=slow_start)
    finding = finding_of(fit(tmp_path, val=loader))
    assert finding.title.endswith("mostly Dataloader init")
    assert finding.action.startswith(
        "Set persistent_workers=True for the validation dataloader (currently False)"
    )
    assert finding.locations[0].function == "slow_start"


class SlowLoaders(Net):
    def val_dataloader(self) -> Any:
        time.sleep(10 * SLOW_S)  # @loaders
        return validation()


def test_dataloader_made_again_each_epoch_is_found(tmp_path):
    trainer = {
        "val_check_interval": 1.0,
        "max_epochs": 4,
        "limit_train_batches": 10,
        "reload_dataloaders_every_n_epochs": 1,
    }
    finding = finding_of(fit(tmp_path, SlowLoaders(), own_loaders=True, trainer=trainer))
    assert finding.title.endswith("mostly Dataloader init")
    assert finding.action.startswith("Do less in SlowLoaders.val_dataloader")
    assert (finding.locations[0].line, finding.locations[0].is_exact) == (line_of("loaders"), True)


def test_slow_callback_is_not_part_of_validation(tmp_path):
    callback = fit(tmp_path, others=[SlowCallback()])
    [slow] = [one for one in callback.report.findings if one.kind == "slow_callback"]
    assert slow.status is Status.FOUND
    times = callback.run.ranks[0].validation
    assert times.total_ns < sum(one.total_ns for one in callback.run.ranks[0].callbacks)
    [table] = [one for one in callback.report.tables if one.id == "validation"]
    assert any(note.startswith("Callbacks took ") for note in table.notes)


# Hand-made times


VAL_LOADER = LoaderSetup(
    kind="DataLoader",
    num_workers=0,
    persistent_workers=False,
    pin_memory=False,
    batch_size=4,
    dataset=Place(function="V.__getitem__", file="v.py", line=3),
)
HOOKS = {
    "validation_step": Place(function="Net.validation_step", file="net.py", line=60),
    "on_validation_epoch_end": Place(function="Net.on_validation_epoch_end", file="net.py", line=70),
}


def times_of(num_runs: int = 2, device_ms: dict[str, int] | None = None, **parts_ms: int) -> ValidationTimes:
    """Validations of 4 batches each, with the total milliseconds of each part."""
    return ValidationTimes(
        num_runs=num_runs,
        parts=tuple(
            PartTime(
                key=part.key,
                calls=4 * num_runs,
                total_ns=parts_ms.get(part.key, 0) * MS,
                device_ns=None if device_ms is None else device_ms.get(part.key, 0) * MS,
            )
            for part in PARTS
        ),
    )


def found(times: ValidationTimes | None, *, setup: Any = SETUP, stacks: Any = None, **loader: Any) -> Any:
    """The finding on 20 steps of 10 ms with 400 ms of validation."""
    setup = replace(setup, val_loaders=(replace(VAL_LOADER, **loader),), module_hooks=HOOKS)
    steps = steps_of(forward=10, validation=[0] * 18 + [200, 200])
    return only(judge(validation_share, analysis_of(steps, setup=setup, validation=times, stacks=stacks)))


@pytest.mark.parametrize(("fetch_ms", "is_named"), [(160, True), (159, False)])
def test_part_is_named_from_two_fifths(fetch_ms, is_named):
    rest = {"forward": 110, "epoch_end": 80, "transfer": 50}
    rest["transfer"] += 400 - fetch_ms - sum(rest.values())
    finding = found(times_of(dataloader=fetch_ms, **rest))
    assert finding.title.endswith("mostly Dataloader") == is_named
    assert ("This applies to the validation dataloader." in finding.action) == is_named
    assert finding.locations[0].function == ("V.__getitem__" if is_named else "Net.validation_step")
    assert finding.saving_ns_per_step == 20 * MS


def test_evenly_spread_validation_only_gets_less_often():
    finding = found(times_of(dataloader=100, forward=100, epoch_end=100, logging=100))
    assert finding.title == validation_share.title
    assert finding.summary.endswith("No part of it stands out (see the table Validation).")
    assert finding.action.startswith("Validate less")


def test_run_without_parts_gets_general_advice():
    finding = found(None)
    assert finding.title == validation_share.title
    assert "table" not in finding.summary
    assert finding.locations[0].function == "Net.validation_step"


def test_evidence_includes_recommended_workers():
    finding = found(times_of(dataloader=300, forward=100))
    evidence = {one.label: one.value for one in finding.evidence}
    assert evidence["Dataloader share of validation"] == pytest.approx(0.75)
    assert evidence["Dataloader time per validation"] == 150 * MS
    assert evidence["validation runs"] == 2
    # Loading a batch takes 300 / 8 ms and the rest of a validation batch 100 / 8 ms: three workers hide it.
    assert evidence["recommended num_workers"] == 3
    assert "Set num_workers=3, persistent_workers=True" in finding.action
    assert "Workers only help if CPUs are free." in finding.summary


def test_missing_worker_advice_is_explained():
    finding = found(times_of(dataloader=300, forward=20), setup=replace(SETUP, usable_cpus=1))
    assert "num_workers=" not in finding.action
    assert "num_workers is 0. More workers than CPUs only help if they wait" in finding.summary


def test_longer_first_fetches_are_worker_startup():
    """8 fetches, 2 of which are first in a validation and take 100 ms each; the others take 10 ms."""
    times = replace(
        times_of(dataloader=260, forward=80, dataloader_init=60), num_first_fetches=2, first_fetch_ns=200 * MS
    )
    started = found(times, num_workers=2)
    assert started.title.endswith("mostly Dataloader init")
    assert {one.label: one.value for one in started.evidence}[
        "Dataloader init time per validation"
    ] == 120 * MS
    assert "persistent_workers=True for the validation dataloader (currently False)" in started.action
    kept = found(times, num_workers=2, persistent_workers=True)
    assert "persistent_workers=True," not in kept.action
    assert found(times, num_workers=0).title.endswith("mostly Dataloader")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_worker_startup_is_named_only_with_workers(num_workers):
    times = replace(times_of(dataloader=260, forward=80), num_first_fetches=2, first_fetch_ns=200 * MS)
    setup = replace(SETUP, val_loaders=(replace(VAL_LOADER, num_workers=num_workers),))
    [table] = tables_of(steps_of(forward=10, validation=[0] * 18 + [200, 200]), validation=times, setup=setup)
    [note] = [one for one in table.notes if "more waiting than others" in one]
    assert ("worker startup" in note) is (num_workers > 0)


def test_training_thread_startup_is_not_worker_startup():
    """Making the dataloader takes 200 ms; then training waits 50 or 250 ms for the workers to start."""
    stacks = stacks_of(("dataloader_init", "Net.val_dataloader", 20))
    for first_ms, is_own in ((50, True), (250, False)):
        parts = times_of(dataloader=first_ms, dataloader_init=200)
        times = replace(parts, num_first_fetches=2, first_fetch_ns=first_ms * MS)
        finding = found(times, stacks=stacks, num_workers=2)
        assert finding.title.endswith("mostly Dataloader init")
        assert finding.action.startswith("Do less in Net.val_dataloader") == is_own
        assert ("persistent_workers=True" in finding.action) != is_own


def test_device_time_decides_slow_part():
    """The CPU waits for the GPU where a metric is read, while the GPU still works on the step."""
    times = times_of(
        forward=40,
        epoch_end=300,
        dataloader=60,
        device_ms={"forward": 320, "epoch_end": 20, "dataloader": 60},
    )
    assert found(times).title.endswith("mostly Forward")
    # A fetch while the GPU is busy only costs the time that the GPU waits for it.
    hidden = times_of(dataloader=350, forward=50, device_ms={"dataloader": 10, "forward": 390})
    assert found(hidden).title.endswith("mostly Forward")


def test_pin_memory_is_advised_where_it_helps():
    times = times_of(transfer=300, forward=100)
    on_device = replace(SETUP, cuda=DeviceSetup(capability=(9, 0), total_bytes=100, reserved_bytes=50))
    assert (
        "pin_memory=True for the validation dataloader (currently False)"
        in found(times, setup=on_device).action
    )
    assert "pin_memory" not in found(times, setup=on_device, pin_memory=True).action


def stacks_of(*stacks: tuple[str, str, int]) -> StackSamples:
    """Stacks of one line each, from (part, function, samples of 1 ms)."""
    names = list(dict.fromkeys(name for _, name, _ in stacks))
    frame = {"file": "v.py", "function_line": 3, "python_module": "v", "is_users": True}
    return StackSamples(
        frames=tuple(
            StackFrame(line=10 + number, function=name, **frame) for number, name in enumerate(names)
        ),
        stacks=tuple(
            SampledStack(
                phase="validation", part=part, frames=(names.index(name),), samples=num, time_ns=num * MS
            )
            for part, name, num in stacks
        ),
    )


def test_line_belongs_to_slow_part():
    stacks = stacks_of(("forward", "step", 90), ("dataloader", "get", 10), ("dataloader", "collate", 4))
    finding = found(times_of(dataloader=300, forward=100), stacks=stacks)
    assert (finding.locations[0].function, finding.locations[0].is_exact) == ("get", True)
    few = stacks_of(("forward", "step", 90), ("dataloader", "get", 2))
    assert not found(times_of(dataloader=300, forward=100), stacks=few).locations[0].is_exact


def test_missing_device_times_or_runs_are_no_error():
    for times in (times_of(forward=400, device_ms={}), times_of(num_runs=0, forward=400)):
        assert found(times).action
        [table] = tables_of(steps_of(forward=10, validation=[0] * 18 + [200, 200]), validation=times)
        assert table.rows


def test_ranks_wait_for_each_other_at_metrics():
    steps = steps_of(forward=10, validation=20)
    for num_ranks in (1, 2):
        analysis = analysis_of(steps, validation=times_of(epoch_end=400), world_size=num_ranks)
        action = only(judge(validation_share, analysis)).action
        assert ("Ranks also wait for each other" in action) == (num_ranks > 1)


@pytest.mark.parametrize("part", [part.key for part in PARTS])
def test_every_part_but_loop_has_advice(part):
    finding = found(times_of(**{part: 400}))
    assert (finding.title == validation_share.title) == (part == "other")
    assert finding.action


def test_missing_validation_is_explained():
    steps = steps_of(forward=10)
    assert analysis_of(steps).why_not(Facts.validation) == "no validation ran in this fit"
    assert tables_of(steps) == []  # nothing is missing
    older = analysis_of(steps_of(forward=10, validation=3)).why_not(Facts.validation)
    assert "older version" in older
    assert "hooks" in analysis_of(steps_of(forward=10, validation=None)).why_not(Facts.validation)
    [table] = tables_of(steps_of(forward=10, validation=3))
    assert table.absent_reason == older


def tables_of(steps: Any, **info: Any) -> list[Any]:
    return [one for one in build_report(analysis_of(steps, **info)).tables if one.id == "validation"]


def test_times_per_batch_and_per_validation():
    """3 validations of 4 batches: 120 ms of fetches are 10 ms per batch, 40 per validation, 80% of 150 ms."""
    split = analysis_of(
        steps_of(forward=10), validation=times_of(num_runs=3, dataloader=120, forward=30)
    ).validation
    assert [part.key for part in split.parts] == ["dataloader", "forward"]
    fetch = split.parts[0]
    assert (fetch.per_batch_ns, fetch.per_run_ns, fetch.ratio) == (10 * MS, 40 * MS, pytest.approx(0.8))
    assert (split.num_runs, split.num_batches, split.total_ns) == (3, 12, 150 * MS)


@pytest.mark.parametrize(
    ("batches", "status"), [(8, Status.FOUND), (2, Status.CLEAN), (None, Status.NOT_EVALUATED)]
)
def test_long_sanity_check_is_found(batches, status):
    """A batch takes 400 / 8 ms, so 8 batches take 400 ms; the 20 steps take 600 ms."""
    steps = steps_of(forward=10, validation=[0] * 18 + [200, 200])
    setup = replace(SETUP, num_sanity_batches=batches)
    finding = only(
        judge(long_sanity_check, analysis_of(steps, setup=setup, validation=times_of(forward=400)))
    )
    assert finding.status is status
    if status is Status.FOUND:
        assert "about 400 ms (67% of the loop)" in finding.summary
        assert finding.saving_ns_per_step is None


@pytest.mark.parametrize("validation", [None, times_of(forward=400)])
def test_measured_sanity_check_is_found(validation):
    """90 of 600 ms, whatever a batch takes during fit."""
    check = ActionTime(action="sanity_check", calls=1, total_ns=90 * MS, after_ns=0)
    analysis = analysis_of(
        steps_of(forward=30),
        setup=replace(SETUP, num_sanity_batches=8),
        validation=validation,
        around=OutsideLoop(before=(check,)),
    )
    finding = only(judge(long_sanity_check, analysis))
    assert finding.status is Status.FOUND
    assert "take 90 ms (15% of the loop)." in finding.summary
