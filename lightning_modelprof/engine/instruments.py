"""Instruments that measure a loop in addition to its step times."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Final, Protocol

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine.instrument import Instrument
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.engine.worker_profiling import worker_profiling
from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.measure.sampling.sampler import MIN_INTERVAL_NS, Probe, Sampler
from lightning_modelprof.measure.sampling.stack_probe import StackProbe
from lightning_modelprof.measure.steps.ledger import PhaseLedger
from lightning_modelprof.measure.user_code import UserCode

_EARLY: Final = (worker_profiling,)
"""Factories of instruments that must exist before the loop's dataloaders."""


def early_instruments(config: ProfileConfig, loop: Loop, cleanup: ExitStack) -> list[Instrument]:
    """Make the wanted ones; ``cleanup`` removes them."""
    made = (make(config, loop, cleanup) for make in _EARLY)
    return [one for one in made if one is not None]


_MEMORY_INTERVAL_NS: Final = 100_000_000
"""Least time between two memory readings, each of which asks the system."""


class MemoryProbe(Protocol):
    def look(self, step: int) -> None: ...


class Sampling(Instrument):
    """One loop's sampling thread; to be made on the thread that runs the loop.

    Args:
        pl_module: the LightningModule, whose package is user code.
        memory: reads memory, at most every 100 ms; ``None`` without.
    """

    def __init__(
        self, ledger: PhaseLedger, pl_module: Any, memory: MemoryProbe | None, clock: HostClock
    ) -> None:
        self._stack = StackProbe(ledger, UserCode((type(pl_module),)))
        looks: dict[str, Probe] = {"the stack": self._stack.look}
        if memory is not None:
            looks["memory"] = _memory_look(memory, ledger)
        self._sampler = Sampler(looks, clock, lambda: self._stack.clocks.is_crowded)
        self.resume = self._sampler.resume
        self.pause = self._sampler.pause

    def fields(self) -> Mapping[str, Any]:
        sampler = self._sampler
        stacks = self._stack.samples(
            first_interval_ns=MIN_INTERVAL_NS,
            last_interval_ns=sampler.interval_ns,
            cost_ns=sampler.cost_ns,
            notes=tuple(sampler.notes),
        )
        return {"stacks": stacks}


def _memory_look(memory: MemoryProbe, ledger: PhaseLedger) -> Probe:
    since_ns = _MEMORY_INTERVAL_NS  # so that the first reading is immediate

    def look(elapsed_ns: int) -> None:
        nonlocal since_ns
        since_ns += elapsed_ns
        if since_ns >= _MEMORY_INTERVAL_NS:
            since_ns = 0
            memory.look(ledger.steps_ended)

    return look
