"""Labels of the step time breakdown's categories, and notes on which steps shares are of."""

from __future__ import annotations

import re
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
"""Labels by key of ``STEP_CATEGORIES``, as in the removed TensorBoard plugin."""


def other_shares(facts: Facts) -> tuple[str, ...]:
    """Note that shares of all finished steps differ from those of clean steps, if some are excluded."""
    if not facts.exclusions:
        return ()
    return (
        f"Ratios are computed over all {loop_of(facts.info.loop).steps}. The verdict, most findings and"
        f" Perf Summary use only clean {loop_of(facts.info.loop).steps}, which exclude warm-up, an"
        " epoch's start and"
        " profiling.",
    )


_NOT_BESIDE_TIMER_ONLY: Final = (
    r"(?:active|flops|inspect|profile_memory|record_shapes|repeat|steps|with_stack)=(?:\{[^{}]*\}|[\w.]+)"
)
_TO_SET: Final = re.compile(
    rf"\b([Ss])et {_NOT_BESIDE_TIMER_ONLY}(?:(?:,| and|, and) {_NOT_BESIDE_TIMER_ONLY})*"
)
_SWITCHED_OFF: Final = re.compile(r'inspect=\{"\w+": False\}')


def reason_in(facts: Facts, reason: str) -> str:
    """Adapt the advice in a reason to ``timer_only=True``, which rules out all other arguments."""
    if not facts.info.config.get("timer_only"):
        return reason
    left_out = _TO_SET.sub(lambda found: f"{'L' if found[1] == 'S' else 'l'}eave out timer_only=True", reason)
    return _SWITCHED_OFF.sub("timer_only=True", left_out)


def to_the_second(time: str) -> str:
    """Format an ISO 8601 time to the second; return anything else unchanged."""
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
