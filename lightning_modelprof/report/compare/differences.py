"""What makes two sides different things, so that a speedup between them means little."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from lightning_modelprof.analysis.compare import UNKNOWN, batch_size
from lightning_modelprof.report.compare.compared_run import ComparedRun
from lightning_modelprof.report.model import WARNING, Unit
from lightning_modelprof.report.summary import Difference
from lightning_modelprof.run.setup import WRAPPERS
from lightning_modelprof.units import format_cell

_NOT_KNOWN: Final = frozenset((UNKNOWN, *WRAPPERS))
"""Older versions stored a wrapper's class as the model."""


def find_differences(before: Sequence[ComparedRun], after: Sequence[ComparedRun]) -> tuple[Difference, ...]:
    """Find differences in model, device, batch size and precision; values unknown on one side don't count."""
    sides = (before, after)
    values = {
        name: [[run.settings.get(key, UNKNOWN) for run in side] for side in sides]
        for name, key in (("Model", "model"), ("Device", "device"))
    }
    if has_other_batches(before, after):
        is_one_rank = all(run.world_size == 1 for run in (*before, *after))
        values["Batch size" if is_one_rank else "Batch size per rank"] = [
            [format_cell(batch_size(run.steps), Unit.COUNT) for run in side] for side in sides
        ]
    values["Precision"] = [[run.settings.get("precision", UNKNOWN) for run in side] for side in sides]
    found = []
    for name, (old, new) in values.items():
        known = [dict.fromkeys(value for value in side if value not in _NOT_KNOWN) for side in (old, new)]
        if all(known) and set(known[0]) != set(known[1]):
            found.append(Difference(name, *map(" | ".join, known)))
    return tuple(found)


def has_other_batches(before: Sequence[ComparedRun], after: Sequence[ComparedRun]) -> bool:
    """Return whether the sides' batch sizes differ by more than a few odd batches explain."""
    sizes = [run.global_batch_size for run in (*before, *after)]
    units = {run.sample_unit for run in (*before, *after)}
    known = [size for size in sizes if size]
    return len(known) == len(sizes) and len(units) == 1 and max(known) > 1.01 * min(known)


def why_no_speedup(differences: Sequence[Difference]) -> str:
    """Return text such as ``no speedup shown because device and batch size differ``."""
    names = [one.name.lower() for one in differences]
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"no speedup shown because {listed} {'differs' if len(names) == 1 else 'differ'}"


def warnings(differences: Iterable[Difference]) -> list[tuple[str, str]]:
    return [(WARNING, one.sentence) for one in differences]


def side_warnings(before: Sequence[ComparedRun], after: Sequence[ComparedRun]) -> list[str]:
    """List caveats on the sides that don't rule out a speedup."""
    return [
        *world_size_warnings(before, after),
        *_repeat_warnings(before, after),
        *_unfinished_warnings((*before, *after)),
        *(
            ["All figures and phases are from the first rank."]
            if any(run.world_size > 1 for run in (*before, *after))
            else []
        ),
    ]


def world_size_warnings(before: Sequence[ComparedRun], after: Sequence[ComparedRun]) -> list[str]:
    worlds = [dict.fromkeys(str(run.world_size) for run in side) for side in (before, after)]
    if set(worlds[0]) == set(worlds[1]):
        return []
    old, new = map(" | ".join, worlds)
    return [f"Different world sizes: {old} before, {new} after. The result includes this difference."]


def _repeat_warnings(before: Sequence[ComparedRun], after: Sequence[ComparedRun]) -> Iterator[str]:
    for label, runs in (("before", before), ("after", after)):
        mixed = [
            name
            for name, value in runs[0].settings.items()
            if any(run.settings.get(name) != value for run in runs)
        ]
        if mixed:
            yield f"The runs {label} aren't repeats of the same run; they differ in {', '.join(mixed)}."


def _unfinished_warnings(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """Warn once per status, since a terminal has few lines."""
    sources: dict[str, list[str]] = {}
    for run in runs:
        if run.status != "finished":
            sources.setdefault(run.status, []).append(run.source)
    for status, names in sources.items():
        if len(names) == 1:
            yield f"{names[0]}: the run is {status}, not finished."
        else:
            yield f"{len(names)} runs are {status}, not finished: {', '.join(names)}."
