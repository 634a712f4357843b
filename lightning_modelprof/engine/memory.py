"""Memory of one loop: its curve, the counted step's tensors, and the state when memory ran out."""

from __future__ import annotations

from typing import Any, Final

from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.errors import describe_error
from lightning_modelprof.inspect.modules.live_tensors import (
    LiveTensors,
    held_buffers,
    held_parameters,
    storages_of,
)
from lightning_modelprof.measure.resources.growing import GrowthWatch
from lightning_modelprof.measure.resources.memory import (
    MemoryCurve,
    device_memory,
    process_memory,
    total_bytes,
)
from lightning_modelprof.measure.resources.out_of_memory import Named, describe, out_of_memory_error
from lightning_modelprof.run.memory import MemoryRecord, OutOfMemory, StepMemory

MEMORY_TAG: Final = "modelprof/memory_mib"
"""Prefix of the memory scalars' names."""


_NO_COUNT: Final = "No step was counted. Set flops=True to count one."


class LoopMemory:
    """Assembles the record of a loop's memory.

    Attributes:
        look: to be called regularly by one thread, with the running step's number.
        out_of_memory: state when memory ran out; ``None`` if it didn't.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._device = loop.device
        self._curve = MemoryCurve(self._device)
        self._note = ""
        self.growth = GrowthWatch(lambda: loop.holders)
        self.look = self._curve.look
        self.out_of_memory: OutOfMemory | None = None

    def scalars(self) -> dict[str, float]:
        """Return the current usage in MiB for loggers, by tag; only what is counted."""
        device = device_memory(self._device)
        counted = {
            "process": process_memory().rss,
            "allocated": device.allocated,
            "reserved": device.reserved,
        }
        return {f"{MEMORY_TAG}/{name}": value / 2**20 for name, value in counted.items() if value is not None}

    def on_exception(self, exception: BaseException, step: int) -> None:
        """Record what holds memory if the exception that ends the loop says it ran out. Never raises.

        Args:
            exception: the user's; nothing of it is kept.
        """
        try:
            error = out_of_memory_error(exception)
            if error is None or self.out_of_memory is not None:
                return
            self.out_of_memory = describe(
                exception,
                error,
                step=step,
                device=self._device,
                read_device=device_memory,
                total_bytes=lambda: total_bytes(self._device),
                named=Named(
                    parameters=held_parameters(self._loop.module),
                    buffers=held_buffers(self._loop.module),
                    optimizers=tuple(self._loop.optimizers),
                ),
                storages_of=storages_of,
            )
        except Exception as ours:  # must not replace the user's exception, which is propagating
            self._note = f"What held the memory when it ran out is unknown: {describe_error(ours)}."

    def record(self, followed: FollowedStep | None) -> MemoryRecord:
        """Return the current record; ``followed`` is ``None`` if no step is counted."""
        note = _NO_COUNT if followed is None else followed.note
        return self._curve.record(
            step_memory=None if followed is None else followed.memory,
            out_of_memory=self.out_of_memory,
            growing=self.growth.result(),
            notes=tuple(filter(None, (note, self._note))),
        )


_NOT_ASKED: Final = "Set profile_memory=True to track live tensors for one step."


class FollowedStep:
    """Tracks the live tensors of one step.

    Args:
        step: its number; ``None`` if no step will be counted.

    Attributes:
        memory: the result; ``None`` without.
        note: why there's no result, as a sentence; ``""`` if there is.
    """

    def __init__(self, loop: Loop, step: int | None, *, is_wanted: bool) -> None:
        self._loop = loop
        self._step = step
        self._is_wanted = is_wanted and step is not None
        self._live: LiveTensors | None = None
        self.memory: StepMemory | None = None
        self.note = _NOT_ASKED
        if is_wanted:
            self.note = (
                f"Live tensors weren't tracked because no {loop.kind.step} was counted."
                if step is None
                else f"Live tensors weren't tracked, because {loop.kind.subject} ended before"
                f" {loop.kind.step} {step} did or a copy of the model was counted instead."
            )

    def begin(self, batch: Any) -> LiveTensors | None:
        """Start with the step's batch; return what watches its operators, or ``None``."""
        if not self._is_wanted:
            return None
        try:
            live = LiveTensors(self._loop.device)
            live.begin(self._loop.module, tuple(self._loop.optimizers), batch)
        except Exception as error:  # for example of custom tensors; the step is counted without
            self._fail(error)
            return None
        self._live = live
        return live

    def give_up(self) -> None:
        """Stop tracking a step that failed or can't be watched."""
        self._live = None

    def end(self) -> None:
        """Take the result after the step's work; does nothing the second time."""
        live, self._live = self._live, None
        if live is None or self._step is None:
            return
        try:
            live.end()
            self.memory, self.note = live.result(self._step), ""
        except Exception as error:  # as above
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.note = f"Live tensors weren't tracked: {describe_error(error)}."
