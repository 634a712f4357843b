"""benchmark_inference: time a model's inference on one batch many times."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lightning_modelprof.errors import ConfigError, describe_error, quoted
from lightning_modelprof.inspect.core.preserved import random_states_kept, tensors_in
from lightning_modelprof.measure.clock import cpu_time, device_clock, host_clock
from lightning_modelprof.measure.steps.batch_sizes import SampleCounter
from lightning_modelprof.run.steps import NOT_MEASURED
from lightning_modelprof.timing.spans import (
    METHODS,
    DeviceSpans,
    InferenceTimes,
    Method,
    per_second,
    spread_of,
    wait_for,
    whole_number,
)


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

    Runs in eval mode under ``torch.inference_mode()``. ``training`` flags and random states (Python, NumPy
    and torch) are restored. The device is waited for once before and once after the timed runs; only
    ``synchronize`` waits in between. Anything the model stores during a run, such as a cache, stays as
    inference tensors.

    Args:
        model: A module on its device, or any callable such as ``model.generate``.
        batch: Input on the model's device. A mapping is passed as keyword arguments, a tuple as positional
            arguments, anything else as the only argument. ``(batch,)`` passes a mapping or tuple unchanged.
        warm_up: Number of runs before the timed ones.
        runs: Number of timed runs.
        method: How to time a run. ``event`` uses device events around it, without blocking the CPU.
            ``synchronize`` waits for the device before and after it and uses the CPU clock. ``wall`` uses the
            CPU clock without waiting, so on a GPU it times the launches only. The default is ``event`` on one
            device with events, ``wall`` on the CPU, where it's exact, and ``synchronize`` otherwise.
        samples: Number of samples in the batch. By default it comes from the batch itself, usually from the
            first dimension of its tensors.
        tokens: Number of tokens per run, for tokens per second.

    Raises:
        ConfigError: If an argument is invalid, or can't be used with this model.
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
    with random_states_kept(devices), in_eval_mode(module), torch.inference_mode():
        run_first(call, args, kwargs, warm_up)
        wait()
        begin_cpu, begin_ns = cpu_time(), host_clock()
        times_ns = time_runs(call, runs, spans, wait if method == "synchronize" else None)
        if spans is None:
            wait()
        end_ns, end_cpu = host_clock(), cpu_time()

    if not times_ns:
        raise ConfigError(
            f"benchmark_inference(method='event'): {devices[0]} has no device events that measure time. Use"
            " method='synchronize'."
        )
    spread = spread_of(times_ns)
    samples = samples_in(batch) if samples is None else samples
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


def samples_in(batch: Any) -> int | None:
    """Sample count that fits all parts of the batch; ``None`` without one."""
    counted = SampleCounter()(batch)
    return None if counted == NOT_MEASURED else counted


def time_runs(
    call: Callable[[], Any], runs: int, spans: DeviceSpans | None, wait: Callable[[], None] | None
) -> array[int]:
    """Time each run in nanoseconds, by device events or by the CPU clock, with or without waiting."""
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
    """Choose the method for these devices; refuse device events that can't measure time."""
    names = ", ".join(map(str, devices))
    has_events = len(devices) == 1 and device_clock(devices[0]) is not None
    on_cpu = all(device.type == "cpu" for device in devices)
    if method is None:
        return "event" if has_events else "wall" if on_cpu else "synchronize"
    if method == "event" and not has_events:
        why = "one device with events (CUDA, XPU, MPS)"
        advice = "'wall', which is exact on the CPU" if on_cpu else "'synchronize'"
        found = "the CPU" if on_cpu else names
        raise ConfigError(
            f"benchmark_inference(method='event'): expected a model on {why}, got one on {found}."
            f" Leave method out, or use {advice}."
        )
    return method


def check_arguments(model: Any, method: Any, **numbers: Any) -> None:
    """Refuse arguments that ``benchmark_inference`` can't use."""
    if not callable(model):
        raise ConfigError(f"benchmark_inference(model): expected a callable, got {quoted(model)}.")
    if method is not None and method not in METHODS:
        raise ConfigError(
            f"benchmark_inference(method): expected one of {', '.join(METHODS)}, or None, got"
            f" {quoted(method)}."
        )
    for key, value in numbers.items():
        if value is not None or key not in {"samples", "tokens"}:
            whole_number("benchmark_inference", key, value, 0 if key == "warm_up" else 1)


def devices_of(module: torch.nn.Module | None, batch: Any) -> tuple[torch.device, ...]:
    """The devices of the model and the batch.

    The CPU counts only if there's no other device.
    """
    tensors = [] if module is None else [*module.parameters(), *module.buffers()]
    if any(is_lazy(tensor) for tensor in tensors):
        raise ConfigError(
            "benchmark_inference(model): expected initialised parameters, got lazy layers. Run the model on a"
            " batch first."
        )
    devices = dict.fromkeys(tensor.device for tensor in [*tensors, *tensors_in(batch)])
    for device in devices:
        if device.type == "meta":
            raise ConfigError(
                "benchmark_inference(model): expected tensors with values, got some on the meta device."
                " Move the model and the batch to the device you want to time."
            )
    others = tuple(device for device in devices if device.type != "cpu")
    return others or (torch.device("cpu"),)


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for the batch."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple) else ((batch,), {})


def run_first(call: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any], warm_up: int) -> None:
    """Run the warm-up; if the model can't take the batch, show how it was passed."""
    try:
        if warm_up:
            call()
    except TypeError as error:
        passed = (
            f"the keyword arguments {', '.join(map(str, kwargs))}" if kwargs else f"{len(args)} argument(s)"
        )
        raise ConfigError(
            f"benchmark_inference(batch): the model can't take this batch: {describe_error(error)}."
            f" It was passed as {passed}. A mapping is passed as keyword arguments, a tuple as positional"
            " ones and (batch,) unchanged."
        ) from error
    for _ in range(warm_up - 1):
        call()


@contextmanager
def in_eval_mode(module: torch.nn.Module | None) -> Iterator[None]:
    """Switch the module and its children to eval mode, then restore every ``training`` flag."""
    if module is None or not any(child.training for child in module.modules()):
        yield
        return
    flags = [(child, child.training) for child in module.modules()]
    try:
        module.eval()
        yield
    finally:
        # train() first: some modules override it to merge weights for eval and to split them again.
        module.train(flags[0][1])
        for child, training in flags:
            child.training = training
