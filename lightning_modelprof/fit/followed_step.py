"""The step whose live tensors are followed: the one that is counted, if that was asked for."""

from __future__ import annotations

from typing import Any, Final

from lightning_modelprof.errors import told
from lightning_modelprof.inspect.modules.live_tensors import LiveTensors
from lightning_modelprof.run.loops import Loop
from lightning_modelprof.run.memory import StepMemory

_NOT_ASKED: Final = "Live tensors were not followed (profile_memory=True follows those of one step)."


class FollowedStep:
    """Follows the live tensors of one step.

    Args:
        trainer: with the optimizers and the device.
        pl_module: the LightningModule.
        loop: which loop it is.
        step: number of the step; ``None`` if no step will be counted.
        is_wanted: whether to follow them at all.

    Attributes:
        memory: what was seen; ``None`` without.
        note: why there is nothing, a sentence; ``""`` if there is.
    """

    def __init__(
        self, trainer: Any, pl_module: Any, loop: Loop, step: int | None, *, is_wanted: bool
    ) -> None:
        self._trainer = trainer
        self._module = pl_module
        self._step = step
        self._is_wanted = is_wanted and step is not None
        self._live: LiveTensors | None = None
        self.memory: StepMemory | None = None
        self.note = _NOT_ASKED
        if is_wanted:
            self.note = (
                f"Live tensors were not followed: no {loop.step} was counted."
                if step is None
                else f"Live tensors were not followed: {loop.subject} ended before {loop.step} {step} did,"
                " or a copy of the model was counted in its place."
            )

    def begin(self, batch: Any) -> LiveTensors | None:
        """The step has its batch: what is to see its operators; ``None`` if nothing is."""
        if not self._is_wanted:
            return None
        try:
            live = LiveTensors(self._trainer.strategy.root_device)
            live.begin(self._module, tuple(self._trainer.optimizers), batch)
        except Exception as error:  # anybody's tensors; the step is counted without
            self._fail(error)
            return None
        self._live = live
        return live

    def give_up(self) -> None:
        """The step goes on without being seen, or failed."""
        self._live = None

    def end(self) -> None:
        """The step has done its work; does nothing the second time."""
        live, self._live = self._live, None
        if live is None or self._step is None:
            return
        try:
            live.end()
            self.memory, self.note = live.result(self._step), ""
        except Exception as error:  # as above
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.note = f"Live tensors were not followed: {told(error)}."
