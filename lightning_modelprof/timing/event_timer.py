"""EventTimer: time the stages of a pipeline while it runs."""

from __future__ import annotations

from array import array
from contextlib import AbstractContextManager
from types import TracebackType

import torch

from lightning_modelprof.errors import ConfigError, quoted
from lightning_modelprof.measure.clock import cpu_time, device_clock, host_clock
from lightning_modelprof.timing.spans import DeviceSpans, Spread, StageTimes, spread_of


class EventTimer:
    """Times the stages of a pipeline, on the device and the CPU, without blocking the CPU.

        timer = EventTimer("cuda")
        for batch in loader:
            with timer("model1"):
                features = model1(batch)
            with timer("cpu work"):
                boxes = look_up(names)
            with timer("model2"):
                scores = model2(features)
        print(timer.results()["model1"].device.avg_ns)

    Stages may be nested; the outer one's time includes the inner one's. Calls with the same name are pooled.
    A stage that ends with an exception counts, and the exception propagates. Device time is measured on the
    stream that is current at the stage's start and end; work on other streams counts only if that stream
    waits for it. Use one timer per thread.

    Args:
        device: Where the models run. CUDA, XPU and MPS are timed with device events, the CPU with its clock
            only.

    Raises:
        ConfigError: If there's no such device, or it has no events.
    """

    def __init__(self, device: torch.device | str) -> None:
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"EventTimer(device): expected a torch.device or a device name, got {quoted(device)}"
                f" ({error})."
            ) from None
        self._spans: DeviceSpans | None = None
        if self.device.type != "cpu" or device_clock(self.device) is not None:
            self._spans = DeviceSpans(self.device)
        self._stages: dict[str, _Record] = {}

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that times one call of the stage ``name``."""
        record = self._stages.get(name)
        if record is None:
            record = self._stages[name] = _Record()
        return _Stage(record, self._spans)

    def results(self) -> dict[str, StageTimes]:
        """Return the stages by name, ordered by their first start.

        Waits for the device once if it's still working, so call this when the pipeline is done. You can keep
        using the timer. Stages still open are left out.
        """
        if self._spans is not None:
            self._spans.finish()
        return {name: record.times(name) for name, record in self._stages.items() if record.real_ns}


class _Record:
    def __init__(self) -> None:
        self.real_ns = array("q")
        self.device_ns = array("q")
        self.user_ns = 0
        self.system_ns = 0

    def times(self, name: str) -> StageTimes:
        return StageTimes(
            name=name,
            calls=len(self.real_ns),
            real=Spread(**spread_of(self.real_ns)),
            device=Spread(**spread_of(self.device_ns)) if self.device_ns else None,
            device_calls=len(self.device_ns),
            user_ns=self.user_ns,
            system_ns=self.system_ns,
        )


class _Stage(AbstractContextManager[None]):
    """Time one call of a stage. Only the CPU clock is read inside the device's marks."""

    __slots__ = ("_begin_cpu", "_begin_mark", "_begin_ns", "_record", "_spans")

    def __init__(self, record: _Record, spans: DeviceSpans | None) -> None:
        self._record = record
        self._spans = spans

    def __enter__(self) -> None:
        self._begin_cpu = cpu_time()
        self._begin_mark = None if self._spans is None else self._spans.mark()
        self._begin_ns = host_clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        record = self._record
        record.real_ns.append(host_clock() - self._begin_ns)
        try:
            if self._spans is not None:
                self._spans.close(self._begin_mark, record.device_ns)
        except RuntimeError:
            if error is None:  # otherwise the device failed, and the stage's own error shows how
                raise
        finally:
            end_cpu = cpu_time()
            record.user_ns += end_cpu.user_ns - self._begin_cpu.user_ns
            record.system_ns += end_cpu.system_ns - self._begin_cpu.system_ns
