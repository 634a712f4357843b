"""What makes the sides of a comparison different things, so that a speedup between them says little."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_modelprof.analysis.compare import UNKNOWN
from lightning_modelprof.report.compare.compared_run import ComparedRun
from lightning_modelprof.report.model import WARNING, Unit
from lightning_modelprof.units import format_cell


class Difference(NamedTuple):
    """Something that should be the same on both sides and isn't."""

    name: str
    before: str
    after: str

    @property
    def sentence(self) -> str:
        return f"{self.name} differs: {self.before} before, {self.after} after."


def find_differences(before: Sequence[ComparedRun], after: Sequence[ComparedRun]) -> tuple[Difference, ...]:
    """The differences in model, device, batch size and precision; what one side doesn't know isn't one."""
    found = [
        Difference(
            name, *(_distinct(run.settings.get(key, UNKNOWN) for run in side) for side in (before, after))
        )
        for name, key in (("Model", "model"), ("Device", "device"), ("Precision", "precision"))
    ]
    if has_other_batches(before, after):
        sizes = (
            _distinct(format_cell(run.global_batch_size, Unit.COUNT) for run in side)
            for side in (before, after)
        )
        found.insert(2, Difference("Batch size", *sizes))
    return tuple(one for one in found if one.before != one.after and UNKNOWN not in one)


def has_other_batches(before: Sequence[ComparedRun], after: Sequence[ComparedRun]) -> bool:
    """Whether the sides' steps hold different numbers of samples, by more than a few odd batches explain."""
    sizes = [run.global_batch_size for run in (*before, *after)]
    units = {run.sample_unit for run in (*before, *after)}
    known = [size for size in sizes if size]
    return len(known) == len(sizes) and len(units) == 1 and max(known) > 1.01 * min(known)


def why_no_speedup(differences: Sequence[Difference]) -> str:
    """Such as ``no speedup shown because device and batch size differ``."""
    names = [one.name.lower() for one in differences]
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"no speedup shown because {listed} {'differs' if len(names) == 1 else 'differ'}"


def warnings(differences: Iterable[Difference]) -> list[tuple[str, str]]:
    """The facts of a report that say what differs."""
    return [(WARNING, one.sentence) for one in differences]


def _distinct(values: Iterable[str]) -> str:
    return " | ".join(dict.fromkeys(values))
