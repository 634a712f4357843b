"""Profile a DataLoader without a model or a Trainer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from torch.utils.data import DataLoader

from lightning_modelprof.engine.profiler import LoopProfiler
from lightning_modelprof.errors import ModelProfError, quoted
from lightning_modelprof.report.model import Report
from lightning_modelprof.run.records import Run
from lightning_modelprof.show.notebook import show_in_notebook
from lightning_modelprof.show.terminal.terminal import print_report
from lightning_modelprof.units import milliseconds

_WHO: Final = "profile_loader"

_WARM_BATCHES: Final = 2
"""Batches at an epoch's start that count in no figure, as workers start during them."""


_UNTIL_A_STEP_IS_GIVEN: Final = (
    "A batch arrives every {}. To learn whether your training waits for data, give its step time without data"
    " loading, such as --step-ms 40 or step_s=0.04."
)


class LoaderProfile(NamedTuple):
    """The result of ``profile_loader``.

    Attributes:
        batches_per_s: Batches per second after the first ones; ``None`` if there were none.
        samples_per_s: Samples per second after the first batches; ``None`` if they couldn't be counted.
        report: The full report.
        run: The measurements behind it.
    """

    batches_per_s: float | None
    samples_per_s: float | None
    report: Report
    run: Run

    def __repr__(self) -> str:
        """Short, as notebooks show it below the report."""
        return f"<LoaderProfile: {self.report.title}>"


def profile_loader(
    loader: Iterable[Any],
    *,
    step_s: float = 0.0,
    max_batches: int | None = None,
    max_s: float | None = 20.0,
    print_profile: bool = True,
    full: bool = False,
) -> LoaderProfile:
    """Profile a DataLoader: how long a batch takes, its slowest code, and how many workers you need.

    Takes batches as training would, epoch after epoch, and discards them. Writes no files.

    Args:
        loader: A DataLoader. For any other iterable of batches, only the waiting time is measured.
        step_s: Seconds a training step takes without loading its batch; slept after each batch. 0 takes
            batches as fast as they come.
        max_batches: Number of batches to take at most; ``None`` sets no limit.
        max_s: Seconds after which to stop; ``None`` sets no limit. Without either limit, stops after one
            epoch.
        print_profile: Print the report; in a notebook, show a card.
        full: Print all tables.

    Raises:
        ModelProfError: If an argument is invalid or the loader yields no batch.
    """
    _check(loader, step_s, max_batches, max_s)
    profiler = LoopProfiler(
        active=0,
        flops=False,
        skip_first=_WARM_BATCHES,
        report={"files": False, "terminal": False, "tensorboard": False, "progress_bar": False},
    )
    num_batches, ends_s = 0, None if max_s is None else time.monotonic() + max_s
    with profiler:
        while True:
            before = num_batches
            for _ in profiler.fetch(loader):
                num_batches += 1
                if step_s:
                    with profiler.phase("forward"):
                        time.sleep(step_s)
                if num_batches == max_batches or (ends_s is not None and time.monotonic() >= ends_s):
                    break
            else:
                if num_batches > before and (max_batches is not None or ends_s is not None):
                    continue
            break
    if profiler.report is None or profiler.run is None or not num_batches:
        raise ModelProfError(
            f"{_WHO}(loader): expected batches, got none from {quoted(loader)}."
            " Check the dataset's length, the sampler and drop_last."
        )
    kind = type(loader).__name__
    report = replace(profiler.report, title=f"lightning-modelprof: {num_batches} batches of {kind}")
    figures = report.summary.benchmark
    batch_ns = None if figures is None else figures.batch_cost_ns.avg
    if not step_s and batch_ns is not None and report.verdict is not None:
        summary = _UNTIL_A_STEP_IS_GIVEN.format(milliseconds(batch_ns))
        report = replace(report, verdict=replace(report.verdict, summary=summary))
    if print_profile and (full or not show_in_notebook(report, value="profile.report")):
        print_report(report, full=full)
    rates = (None, None) if figures is None else (figures.steps_per_s, figures.samples_per_s)
    batches, samples = (None if rate is None else rate.avg for rate in rates)
    return LoaderProfile(batches, samples, report, profiler.run)


def _check(loader: Any, step_s: Any, max_batches: Any, max_s: Any) -> None:
    for name, value, is_right, expected in (
        ("step_s", step_s, _is_number(step_s) and 0 <= step_s < math.inf, "a number of at least 0"),
        (
            "max_batches",
            max_batches,
            max_batches is None or (_is_number(max_batches) and max_batches >= 1 and max_batches % 1 == 0),
            "a whole number of at least 1, or None",
        ),
        (
            "max_s",
            max_s,
            max_s is None or (_is_number(max_s) and max_s > 0),
            "a number greater than 0, or None",
        ),
    ):
        if not is_right:
            raise ModelProfError(f"{_WHO}({name}): expected {expected}, got {quoted(value)}.")
    if not hasattr(loader, "__iter__") or isinstance(loader, str | bytes):
        raise ModelProfError(
            f"{_WHO}(loader): expected a DataLoader or another iterable of batches, got {quoted(loader)}."
        )
    if isinstance(loader, Mapping) or (
        isinstance(loader, list | tuple) and any(isinstance(one, DataLoader) for one in loader)
    ):
        raise ModelProfError(
            f"{_WHO}(loader): expected one DataLoader, got a {type(loader).__name__} of {len(loader)}."
            " Pass one of them, or combine them with lightning.pytorch.utilities.CombinedLoader."
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
