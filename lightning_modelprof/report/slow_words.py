"""What made a step slow, in words."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.steps.step_costs import COLLECTOR, MACHINE, SlowCause
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.steps import StepTag

_WORDS: Final = {
    COLLECTOR: "Python's garbage collector",
    MACHINE: "the machine: the training thread waited for a CPU",
    "": "unknown",
}


def cause_words(one: SlowCause) -> str:
    """The cause of one slow step."""
    words = _WORDS[one.cause] if one.cause in _WORDS else PHASES[PHASE_INDEX[one.cause]].label
    if one.cause == COLLECTOR:
        words = f"{words}, generation {one.slow.generation}"
    return f"{words}, at the start of an epoch" if one.slow.tags & StepTag.FIRST_OF_EPOCH else words
