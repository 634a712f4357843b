"""Inference timing: one model many times, or the stages of a pipeline while it runs.

A device works behind the host's back. A host clock around a model's call therefore sees how long the launches
took; a host clock with a wait on either side sees the device's time but stops the host; device events see the
device's time and stop nobody.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, NamedTuple

import torch

from lightning_modelprof.errors import ConfigError
from lightning_modelprof.measure.clock import DeviceClock, device_clock, host_clock
from lightning_modelprof.measure.inference_setup import (
    arguments_of,
    check_arguments,
    devices_of,
    in_eval_mode,
    random_states_restored,
    run_first,
)
from lightning_modelprof.measure.inference_times import (
    InferenceTimes,
    Method,
    Spread,
    StageTimes,
    per_second,
    spread_of,
)
from lightning_modelprof.measure.samples import SampleCounter
from lightning_modelprof.run.steps import NOT_MEASURED

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]


class CpuTime(NamedTuple):
    """CPU time that this process has used so far, all its threads together, in ns."""

    user_ns: int
    system_ns: int


def cpu_time() -> CpuTime:
    """User and system time, as ``time`` shows them; to the microsecond where the system has it."""
    if resource is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return CpuTime(round(usage.ru_utime * 1e9), round(usage.ru_stime * 1e9))
    times = os.times()
    return CpuTime(round(times.user * 1e9), round(times.system * 1e9))


def wait_for(device: torch.device) -> None:
    """Wait until ``device`` has done all its work; there is none to wait for on the CPU."""
    if device.type == "cpu":
        return
    synchronize = getattr(getattr(torch, device.type, None), "synchronize", None)
    if synchronize is None:
        raise ConfigError(
            f"{device}: expected a device that torch.{device.type} can wait for, got one it cannot."
        )
    if device.type == "mps":
        synchronize()
    else:
        synchronize(device)


def benchmark_inference(
    model: Callable[..., Any],
    batch: Any,
    *,
    warm_up: int = 50,
    runs: int = 200,
    method: Method | None = None,
    samples: int | None = None,
    tokens: int | None = None,
) -> InferenceTimes:
    """Time a model's inference on one batch.

    Runs under ``torch.inference_mode()`` with the model in eval mode; its ``training`` flags and the states
    of the random generators (Python, NumPy, torch) are as before afterwards. The device is waited for once
    before the timed runs and once after them; in between only ``synchronize`` waits. What the model itself
    keeps from a run, such as a cache, it keeps, as inference tensors.

    Args:
        model: a module on its device, or anything else that can be called, such as ``model.generate``.
        batch: on the model's device. A mapping is passed as keyword arguments, a tuple as positional ones,
            anything else as the only argument; ``(batch,)`` passes a mapping or a tuple as it is.
        warm_up: runs before the timed ones.
        runs: timed runs.
        method: ``event`` takes the time between two device events around each run, without stopping the host;
            ``synchronize`` waits for the device before and after each run and takes the host clock; ``wall``
            takes the host clock without waiting, which on a device is the time of the launches only. By
            default ``event``; ``wall`` on the CPU, where it is exact; ``synchronize`` on several devices or
            one without events.
        samples: in the batch; by default the first dimension of the first tensor in it.
        tokens: that one run takes or makes, whichever is to be counted.

    Raises:
        ConfigError: when an argument cannot be used, or not with this model.
    """
    check_arguments(model, method, warm_up=warm_up, runs=runs, samples=samples, tokens=tokens)
    module = model if isinstance(model, torch.nn.Module) else getattr(model, "__self__", None)
    module = module if isinstance(module, torch.nn.Module) else None
    devices = devices_of(module, batch)
    method = choose_method(method, devices)
    args, kwargs = arguments_of(batch)

    def call() -> Any:
        return model(*args, **kwargs)

    def wait() -> None:
        for device in devices:
            wait_for(device)

    spans = DeviceSpans(devices[0]) if method == "event" else None
    with random_states_restored(devices), in_eval_mode(module), torch.inference_mode():
        run_first(call, args, kwargs, warm_up)
        wait()
        begin_cpu, begin_ns = cpu_time(), host_clock()
        times_ns = time_runs(call, runs, spans, wait if method == "synchronize" else None)
        if spans is None:
            wait()
        end_ns, end_cpu = host_clock(), cpu_time()

    if not times_ns:
        raise ConfigError(
            "benchmark_inference(method='event'): expected device events that tell the time between them, got"
            f" none on {devices[0]}. Use method='synchronize'."
        )
    spread = spread_of(times_ns)
    if samples is None:
        counted = SampleCounter()(batch)
        samples = None if counted == NOT_MEASURED else counted
    sees_the_work = method != "wall" or devices == (torch.device("cpu"),)
    return InferenceTimes(
        **spread,
        method=method,
        device=", ".join(map(str, devices)),
        runs=len(times_ns),
        samples_per_s=per_second(samples, spread["avg_ns"]) if sees_the_work else None,
        tokens_per_s=per_second(tokens, spread["avg_ns"]) if sees_the_work else None,
        real_ns=end_ns - begin_ns,
        user_ns=end_cpu.user_ns - begin_cpu.user_ns,
        system_ns=end_cpu.system_ns - begin_cpu.system_ns,
    )


class EventTimer:
    """Times the stages of a pipeline, several models and CPU work, without ever stopping the host.

        timer = EventTimer("cuda")
        for batch in loader:
            with timer("model1"):
                features = model1(batch)
            with timer("cpu work"):
                boxes = look_up(names)
            with timer("model2"):
                scores = model2(features)
        print(timer.results()["model1"].device.avg_ns)

    A stage may be nested in another, whose time then includes it; calls of one name are pooled. A stage that
    is left by an exception counts, and the exception goes on. Device time is that of the stream which is
    current where the stage begins and ends: work that the stage puts on another stream counts only if the
    current one waits for it. Each thread needs a timer of its own.

    Args:
        device: where the models run. On CUDA, XPU and MPS stages are marked with device events; on the CPU
            there is only the host clock.

    Raises:
        ConfigError: when there is no such device, or it has no events.
    """

    def __init__(self, device: torch.device | str) -> None:
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"EventTimer(device): expected a torch.device or its name, got {device!r} ({error})."
            ) from None
        self._spans: DeviceSpans | None = None
        if self.device.type != "cpu" or device_clock(self.device) is not None:
            self._spans = DeviceSpans(self.device)
        self._stages: dict[str, _Record] = {}

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """A context manager that times one call of the stage ``name``."""
        record = self._stages.get(name)
        if record is None:
            record = self._stages[name] = _Record()
        return _Stage(record, self._spans)

    def results(self) -> dict[str, StageTimes]:
        """The stages by name, in the order in which they first began.

        Waits for the device once if it has not passed all marks yet: ask when the pipeline is done. The timer
        can be used further; a stage that is still open is not in the results.
        """
        if self._spans is not None:
            self._spans.finish()
        return {name: record.times(name) for name, record in self._stages.items() if record.real_ns}


class _Record:
    """What has been measured of one stage."""

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
    """One call of a stage. The device's marks are innermost but for the host clock."""

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
            if error is None:  # else the device failed, and the stage's own error says how
                raise
        finally:
            end_cpu = cpu_time()
            record.user_ns += end_cpu.user_ns - self._begin_cpu.user_ns
            record.system_ns += end_cpu.system_ns - self._begin_cpu.system_ns


class DeviceSpans:
    """Times between two marks on a device's stream, read when the device has passed them.

    Args:
        device: one that has events.

    Raises:
        ConfigError: when it is not there or has none.
    """

    def __init__(self, device: torch.device) -> None:
        clock = device_clock(device)
        if clock is None:
            raise ConfigError(
                f"{device}: expected a CUDA, XPU or MPS device, got one without device events."
                " Use EventTimer('cpu') or method='wall' for the host clock, or method='synchronize'."
            )
        if device.type != "cpu" and not getattr(torch, device.type).is_available():
            raise ConfigError(f"{device}: expected a device of this machine, got none of that kind.")
        self._device = device
        self._clock: DeviceClock = clock
        self._pending: deque[tuple[Any, Any, array[int]]] = deque()

    def mark(self) -> Any:
        """A mark on the device's current stream, whichever device is current."""
        with self._current_device():
            return self._clock.mark()

    def close(self, begin: Any, into: array[int]) -> None:
        """Ends at a mark of now; the time goes ``into`` the list once it is known."""
        self._pending.append((begin, self.mark(), into))
        self.collect()

    def collect(self) -> None:
        """Reads the spans that the device has passed; does not wait."""
        pending, clock = self._pending, self._clock
        while pending:
            begin, end, into = pending[0]
            if not clock.is_reached(end):
                return
            elapsed_ns = clock.elapsed_ns(begin, end)
            if elapsed_ns is None:  # the mark of another stream, which is behind
                return
            pending.popleft()
            clock.release(begin)
            clock.release(end)
            if elapsed_ns >= 0:  # marks of streams that overtook each other tell nothing
                into.append(elapsed_ns)

    def finish(self) -> None:
        """Reads all spans; waits for the device once if it is not there yet."""
        self.collect()
        if self._pending:
            wait_for(self._device)
        while self._pending:
            self.collect()
            if self._pending:  # marks that cannot be compared: not measured
                self._pending.popleft()

    def _current_device(self) -> AbstractContextManager[Any]:
        if self._device.index is None or self._device.type not in {"cuda", "xpu"}:
            return nullcontext()
        guard: AbstractContextManager[Any] = getattr(torch, self._device.type).device(self._device)
        return guard


def time_runs(
    call: Callable[[], Any], runs: int, spans: DeviceSpans | None, wait: Callable[[], None] | None
) -> array[int]:
    """Nanoseconds of each run, by device events, or by the host clock with or without waiting."""
    times_ns = array("q")
    for _ in range(runs):
        if spans is not None:
            mark = spans.mark()
            output = call()
            spans.close(mark, times_ns)
        else:
            if wait is not None:
                wait()
            begin_ns = host_clock()
            output = call()
            if wait is not None:
                wait()
            times_ns.append(host_clock() - begin_ns)
        del output  # freed between the runs, not in the next one
    if spans is not None:
        spans.finish()
    return times_ns


def choose_method(method: Method | None, devices: tuple[torch.device, ...]) -> Method:
    """The method for these devices; refuses device events where they cannot tell the time."""
    names = ", ".join(map(str, devices))
    has_events = len(devices) == 1 and device_clock(devices[0]) is not None
    on_cpu = all(device.type == "cpu" for device in devices)
    if method is None:
        return "event" if has_events else "wall" if on_cpu else "synchronize"
    if method == "event" and not has_events:
        why = "one device with events (CUDA, XPU, MPS)"
        advice = "'wall', which is exact on the CPU" if on_cpu else "'synchronize'"
        found = "the CPU, which has no device events" if on_cpu else names
        raise ConfigError(
            f"benchmark_inference(method='event'): expected a model on {why}, got one on {found}."
            f" Leave method out, or use {advice}."
        )
    return method
