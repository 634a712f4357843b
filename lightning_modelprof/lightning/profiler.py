"""ModelProfCallback as a profiler: ``Trainer(profiler=ModelProfiler(active=10))``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lightning.pytorch.profilers import Profiler

from lightning_modelprof.config.sources import explain_unknown_arguments, is_switched_off
from lightning_modelprof.errors import traceback_text, warn
from lightning_modelprof.lightning.callback import ModelProfCallback
from lightning_modelprof.lightning.phases import OutsideLoopClock
from lightning_modelprof.report.model import Report
from lightning_modelprof.run.records import Run


class ModelProfiler(Profiler):
    """Adds a ModelProfCallback to the Trainer: ``Trainer(profiler=ModelProfiler(active=10))``.

    Unlike the callback alone, it also times Lightning's work before callbacks are set up and after the loop.

    Args:
        **arguments: Arguments of ModelProfCallback.

    Attributes:
        callback: The ModelProfCallback that measures.

    Raises:
        ConfigError: Immediately, on invalid arguments.
    """

    _stage = None  # Lightning reads it when a refused one is deleted

    @explain_unknown_arguments
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.callback = ModelProfCallback(**arguments)

    _outside_clock: OutsideLoopClock | None = None  # of the running loop

    @property
    def report(self) -> Report | None:
        """The newest report; ``None`` before the first."""
        return self.callback.report

    @property
    def run(self) -> Run | None:
        """The measurements behind the newest report; ``None`` before the first."""
        return self.callback.run

    def start(self, action_name: str) -> None:
        """Start timing an action outside the loop."""
        if action_name.endswith(".configure_callbacks"):  # the first action
            self._outside_clock = OutsideLoopClock(self.callback._clock)
        elif action_name == f"[Callback]{self.callback.state_key}.on_exception":
            self.describe()
        self._guard(OutsideLoopClock.begin, action_name)

    def stop(self, action_name: str) -> None:
        """Stop timing an action outside the loop."""
        self._guard(OutsideLoopClock.end, action_name)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Add the callback to the Trainer before callbacks are set up."""
        super().setup(stage, local_rank, log_dir)
        if is_switched_off():
            self._outside_clock = None
        self.callback.outside_clock = self._outside_clock
        module: Any = self._lightning_module  # type: ignore[attr-defined]  # the Trainer assigns it
        trainer = module.trainer
        if not any(one is self.callback for one in trainer.callbacks):
            trainer.callbacks.append(self.callback)

    def teardown(self, stage: str | None) -> None:
        """Do nothing: no files are open."""

    def summary(self) -> str:
        """Return the report as text; empty before the first."""
        return "" if self.report is None else str(self.report)

    def describe(self) -> None:
        """Finish timing and add what happened after the loop to the files."""
        self._guard(OutsideLoopClock.finish)
        self._outside_clock = None

    def _guard(self, work: Callable[..., None], *names: str) -> None:
        """Time an action; if that fails, warn once and stop."""
        if self._outside_clock is not None:
            try:
                work(self._outside_clock, *names)
            except Exception:  # the loop must not notice
                self._outside_clock = None
                warn(f"an internal error stopped ModelProfiler. Please report this:\n{traceback_text()}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_callback, (self.callback,)


def _with_callback(callback: ModelProfCallback) -> ModelProfiler:
    made = ModelProfiler.__new__(ModelProfiler)
    Profiler.__init__(made)
    made.callback = callback
    return made


for _package in ("pytorch_lightning",):  # whose LightningCLI requires its own profiler class
    _module = sys.modules.get(f"{_package}.profilers")
    if _module is not None:
        _module.Profiler.register(ModelProfiler)
