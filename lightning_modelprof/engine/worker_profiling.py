"""Measure the workers of a loop's dataloaders."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any, Protocol, runtime_checkable

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine.instrument import Instrument
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.errors import describe_error
from lightning_modelprof.measure.user_code import UserCode
from lightning_modelprof.measure.workers.probes import WorkerProbes


@runtime_checkable
class WatchesLoaders(Protocol):
    """A loop that knows when the workers of its dataloaders are about to start."""

    def watch_loaders(self, watched: Any, cleanup: ExitStack) -> None:
        """Report dataloaders to ``watched`` before their workers start, until ``cleanup``."""


class WorkerProfiling(Instrument):
    """Profiles the workers until ``cleanup``."""

    def __init__(self, config: ProfileConfig, loop: Loop, cleanup: ExitStack) -> None:
        self._loop = loop
        own = UserCode((type(loop.module),)).roots
        probes = self._probes = WorkerProbes(own, sampling=config.inspect.sampling)
        cleanup.callback(probes.end)
        if isinstance(loop, WatchesLoaders):
            loop.watch_loaders(probes, cleanup)

    def begin(self) -> None:
        with suppress(Exception):  # the loop's loaders are unknown
            self._probes.begin(self._loop.loaders())

    def poll(self) -> None:
        self._probes.poll()

    def trace_metadata(self, begin_ns: int, end_ns: int) -> Mapping[str, Any]:
        try:
            made = self._probes.batches_between(begin_ns, end_ns)
        except Exception as error:
            return {"workers": f"the workers' batches couldn't be read: {describe_error(error)}"}
        return {"workers": made} if made else {}

    def fields(self) -> Mapping[str, Any]:
        return {"workers": self._probes.record()}


def worker_profiling(config: ProfileConfig, loop: Loop, cleanup: ExitStack) -> WorkerProfiling | None:
    """Make the instrument; ``None`` if it isn't wanted."""
    return WorkerProfiling(config, loop, cleanup) if config.inspect.workers else None
