"""Which phases have a layer of their own: the same ones in every chart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightning_modelprof.analysis.steps.phase_times import PhaseTime

MAX_LAYERS: Final = 7
"""As many as there are colours that everybody can tell apart, besides gray for the rest."""


def split_layers(phases: Sequence[PhaseTime]) -> tuple[list[PhaseTime], list[PhaseTime]]:
    """The measured phases with the most time, and the other measured ones, each in the order of phases."""
    measured = [phase for phase in phases if phase.total_ns]
    largest = sorted(measured, key=lambda phase: -(phase.total_ns or 0))[:MAX_LAYERS]
    return [phase for phase in measured if phase in largest], [
        phase for phase in measured if phase not in largest
    ]


def layer_notes(phases: Sequence[PhaseTime], rest: Sequence[PhaseTime]) -> tuple[str, ...]:
    """What the rest is made of, and which phases are in no layer."""
    missing = [phase.label for phase in phases if phase.total_ns is None]
    notes = []
    if rest:
        notes.append(f"Other phases: {', '.join(phase.label for phase in rest)}.")
    if missing:
        notes.append(f"Not measured, and in no layer: {', '.join(missing)}.")
    return tuple(notes)
