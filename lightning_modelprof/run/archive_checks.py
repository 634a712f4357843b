"""What must hold between the fields of a saved run, so that all that is derived from it may rely on it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.ranges import LARGEST
from lightning_modelprof.run.records import RankRecord, Run, Window
from lightning_modelprof.run.stacks import StackSamples
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag, StepTimings

MAX_WINDOWS: Final = 10_000
_MAX_DEPTH: Final = 8
_MAX_SETTINGS: Final = 10_000
_TAGS: Final = int(sum(StepTag)) | 0xFFFF
"""Those of today, and room for more."""


def check_run(run: Run) -> None:
    """Refuse what no run can have measured.

    Raises:
        ValueError: with the first thing that cannot be.
    """
    if not run.ranks:
        raise ValueError("a run without any rank")
    _check_distinct("rank", [record.rank for record in run.ranks])
    _check_distinct("rank", [steps.rank for steps in run.rank_steps])
    _check_configuration(run.info.config)
    for record in run.ranks:
        _check_record(record)
    for steps in run.rank_steps:
        _check_steps(steps.steps)
        _check_totals(steps.totals)


def _check_record(record: RankRecord) -> None:
    _check_steps(record.steps)
    if record.totals is not None:
        _check_totals(record.totals)
        if len(record.totals) < len(record.steps):
            raise ValueError(f"{len(record.steps)} steps of {len(record.totals)}")
    _check_phases("outside_ns", record.outside_ns)
    if len(record.windows) > MAX_WINDOWS:
        raise ValueError(f"{len(record.windows):,} profiler windows")
    _check_ascending("windows", [window.index for window in record.windows])
    for window in record.windows:
        _check_window(window)
    if record.model_cost is not None:
        _check_modules([module.path for module in record.model_cost.modules])
    if record.memory is not None:
        _check_ascending("steps of the memory curve", [point.step for point in record.memory.curve])
    if record.stacks is not None:
        _check_stacks(record.stacks)
    for slow in () if record.slow is None else record.slow.worst:
        _check_phases("phases_ns of a slow step", slow.phases_ns)
        if slow.first_watched > slow.last_watched:
            raise ValueError("a slow step that was watched backwards")


def _check_steps(steps: StepTimings) -> None:
    """Step numbers ascend, the phases of each step make up its duration, and all of it can be added up."""
    if len(steps) == 0:
        return
    if steps.step[0] < 0 or (np.diff(steps.step) <= 0).any():
        raise ValueError("numbers of steps that do not ascend")
    if steps.step[-1] > LARGEST:
        raise ValueError("a step beyond all numbers")
    _check_tags(steps.tags)
    for name, column in steps.columns().items():
        if name != "step":
            _check_sum(name, column)
    if (steps.samples < NOT_MEASURED).any():
        raise ValueError("a negative number of samples")
    sums = np.where(steps.phases_ns == NOT_MEASURED, 0, steps.phases_ns).sum(axis=1)
    if (sums != steps.duration_ns).any():
        raise ValueError("phases that do not sum to the duration of their step")


def _check_totals(totals: StepTotals) -> None:
    _check_tags(totals.tags)
    _check_ascending("sets of tags", totals.tags.tolist())
    for name, column in totals.columns().items():
        _check_sum(name, column)
    counts = totals.num_steps
    if (counts <= 0).any():
        raise ValueError("a sum over no steps")
    for name in ("num_counted", "num_in_phase", "num_measured", "num_on_device"):
        column = getattr(totals, name)
        most = counts if column.ndim == 1 else counts[:, None]
        if (column < 0).any() or (column > most).any():
            raise ValueError(f"{name} beyond the number of steps")


def _check_tags(tags: NDArray[np.int64]) -> None:
    if (tags < 0).any() or (tags > _TAGS).any():
        raise ValueError("tags that there are not")


def _check_sum(name: str, column: NDArray[np.int64]) -> None:
    """Floats, because whole numbers would go round."""
    if np.abs(column.astype(np.float64)).sum() > 1.5 * LARGEST:
        raise ValueError(f"values of {name} that are too large to be added up")


def _check_window(window: Window) -> None:
    steps = window.recorded_steps
    if window.first_step > window.last_step:
        raise ValueError(f"window {window.index}, which ends before it begins")
    _check_ascending("recorded steps", steps)
    if steps and not (window.first_step <= steps[0] and steps[-1] <= window.last_step):
        raise ValueError(f"window {window.index} with steps outside of it")
    if window.trace_file is not None and not _is_inside(window.trace_file):
        raise ValueError(f"window {window.index} with a trace outside of the run's folder")


def _is_inside(name: str) -> bool:
    """Whether a path stays in the folder that it begins in."""
    return "\0" not in name and all(
        not path.is_absolute() and not path.drive and ".." not in path.parts
        for path in (PurePosixPath(name), PureWindowsPath(name))
    )


def _check_stacks(stacks: StackSamples) -> None:
    num_frames = len(stacks.frames)
    if any(number >= num_frames for number in stacks.hook_calls):
        raise ValueError("stacks: a call of a hook is none of the frames")
    for stack in stacks.stacks:
        _check_phases("stacks", (stack.phase,))
        if any(frame >= num_frames for frame in stack.frames):
            raise ValueError("a sampled stack with a frame that there is not")


def _check_modules(paths: Sequence[str]) -> None:
    """Each is there once, before those inside of it; the first is the model, whose path is empty."""
    _check_distinct("module", paths)
    if paths and paths[0]:
        raise ValueError("modules without the model that they are in")
    places = {path: place for place, path in enumerate(paths)}
    for place, path in enumerate(paths):
        outer = path.rpartition(".")[0]
        if path and places.get(outer, -1) > place:
            raise ValueError(f"the module {path!r} before the one that it is in")


def _check_phases(name: str, keys: Iterable[str]) -> None:
    unknown = [key for key in keys if key not in PHASE_INDEX]
    if unknown:
        raise ValueError(f"the unknown phase {unknown[0]!r} in {name}")


def _check_configuration(config: dict[str, Any]) -> None:
    """Arguments of the callback: few of them, lists and mappings within each other a few deep."""
    for found, (depth, _) in enumerate(_values(config)):
        if depth > _MAX_DEPTH or found > _MAX_SETTINGS:
            raise ValueError("a configuration that is nested too deeply or too long")
    if not isinstance(config.get("rules"), dict | None):
        raise ValueError("a configuration whose rules are no mapping")
    ignored = config.get("ignore_modules")
    if not (ignored is None or (isinstance(ignored, list) and all(isinstance(one, str) for one in ignored))):
        raise ValueError("a configuration whose ignore_modules is no list of names")


def _values(config: Any) -> Iterator[tuple[int, Any]]:
    left = [(0, config)]
    while left:
        depth, value = left.pop()
        yield depth, value
        inner: Collection[Any] = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        )
        left += [(depth + 1, one) for one in inner]


def _check_ascending(name: str, numbers: Sequence[int]) -> None:
    if any(one >= other for one, other in pairwise(numbers)):
        raise ValueError(f"{name} that do not ascend")


def _check_distinct(name: str, numbers: Sequence[int | str]) -> None:
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"a {name} that is there twice")
