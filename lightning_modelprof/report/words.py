"""What the categories of the step time breakdown are called, and which steps shares are of."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.steps.step_costs import COLLECTOR, MACHINE, SlowCause
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.steps import StepTag

STEP_LABELS: Final = {
    "kernel": "Kernel",
    "memcpy": "Memcpy",
    "memset": "Memset",
    "communication": "Communication",
    "runtime": "Runtime",
    "dataloader": "DataLoader",
    "cpu_exec": "CPU Exec",
    "other": "Other",
}
"""By keys of ``STEP_CATEGORIES``; the removed TensorBoard plugin's own words."""


def other_shares(facts: Facts) -> tuple[str, ...]:
    """That shares of all finished steps are not those of clean ones, where some are not clean."""
    if not facts.exclusions:
        return ()
    return (
        f"Ratios are computed over all {loop_of(facts.info.loop).steps}. The verdict, most findings and"
        f" Perf Summary use only clean {loop_of(facts.info.loop).steps}, which exclude warm-up, an"
        " epoch's start and"
        " profiling.",
    )


def to_the_second(time: str) -> str:
    """A time of ISO 8601 as a person wants to read it; anything else as it is."""
    try:
        text = datetime.fromisoformat(time).isoformat(sep=" ", timespec="seconds")
    except ValueError:
        return time
    return f"{text.removesuffix('+00:00')} UTC" if text.endswith("+00:00") else text


_WORDS: Final = {
    COLLECTOR: "Python's garbage collector",
    MACHINE: "CPU contention",
    "": "unknown",
}


def cause_words(one: SlowCause) -> str:
    words = _WORDS[one.cause] if one.cause in _WORDS else PHASES[PHASE_INDEX[one.cause]].label
    if one.cause == COLLECTOR:
        words = f"{words}, generation {one.slow.generation}"
    return f"{words}, at the start of an epoch" if one.slow.tags & StepTag.FIRST_OF_EPOCH else words
