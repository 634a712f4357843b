"""What is looked at from a thread of its own while a loop runs: the stack, and memory."""

from __future__ import annotations

from typing import Any, Final, Protocol

from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.measure.sampling.sampler import MIN_INTERVAL_NS, Look, Sampler
from lightning_modelprof.measure.sampling.stack_look import StackLook
from lightning_modelprof.measure.steps.ledger import PhaseLedger
from lightning_modelprof.measure.user_code import UserCode
from lightning_modelprof.run.stacks import StackSamples

_MEMORY_INTERVAL_NS: Final = 100_000_000
"""Least time between two looks at memory, each of which asks the system."""


class MemoryLook(Protocol):
    """Notes how much memory is in use."""

    def look(self, step: int) -> None:
        """The step with this number is running."""


class Sampling:
    """The sampling thread of one loop. To be made on the thread that runs the loop.

    Args:
        ledger: says which phase and which step is running.
        pl_module: the LightningModule: its package is the user's.
        memory: looks at memory, at most every 100 ms; ``None`` if nobody does.
        clock: host clock.
    """

    def __init__(
        self, ledger: PhaseLedger, pl_module: Any, memory: MemoryLook | None, clock: HostClock
    ) -> None:
        self._stack = StackLook(ledger, UserCode((type(pl_module),)))
        looks: dict[str, Look] = {"the stack": self._stack.look}
        if memory is not None:
            looks["memory"] = _memory_look(memory, ledger)
        self._sampler = Sampler(looks, clock, lambda: self._stack.clocks.is_crowded)
        self.resume = self._sampler.resume
        self.pause = self._sampler.pause

    def stacks(self) -> StackSamples:
        """What was seen of the stack until now."""
        sampler = self._sampler
        return self._stack.samples(
            first_interval_ns=MIN_INTERVAL_NS,
            last_interval_ns=sampler.interval_ns,
            cost_ns=sampler.cost_ns,
            notes=tuple(sampler.notes),
        )


def _memory_look(memory: MemoryLook, ledger: PhaseLedger) -> Look:
    since_ns = _MEMORY_INTERVAL_NS  # the first look is at once

    def look(elapsed_ns: int) -> None:
        nonlocal since_ns
        since_ns += elapsed_ns
        if since_ns >= _MEMORY_INTERVAL_NS:
            since_ns = 0
            memory.look(ledger.steps_ended)

    return look
