"""profile_model: a model's parameters, FLOPs and latency by module from a few calls, without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.modules.module_tree import ModuleTree, module_tree
from lightning_modelprof.errors import ModelProfError, as_path, describe_error, did_you_mean, quoted
from lightning_modelprof.inspect.core.counter import FlopCounter
from lightning_modelprof.inspect.core.preserved import preserved, tensors_in
from lightning_modelprof.inspect.flops.count import step_count
from lightning_modelprof.inspect.flops.formulas import Formula
from lightning_modelprof.inspect.modules.module_times import ModuleTimer
from lightning_modelprof.inspect.modules.modules import module_records, plain_path
from lightning_modelprof.measure.clock import host_clock
from lightning_modelprof.report.model import Report, Unit
from lightning_modelprof.report.tables.run.all_tables import module_tables
from lightning_modelprof.run.model_cost import ModelCost, ModuleRecord, StepCount
from lightning_modelprof.run.opening import write_atomically
from lightning_modelprof.show.terminal.terminal import print_report
from lightning_modelprof.show.text import render_text
from lightning_modelprof.timing.spans import wait_for, whole_number
from lightning_modelprof.units import format_cell, format_duration

_MAX_NAMED: Final = 4
"""Maximum tensors of a batch described in the head of the report."""


class ModelProfile(NamedTuple):
    """The result of ``profile_model``: figures for one call, without ignored modules.

    Attributes:
        flops: FLOPs of the forward pass, contractions only; ``None`` if they couldn't be counted.
        macs: Multiply-adds of the forward pass, half its FLOPs.
        params: Number of elements in all parameters.
        report: The full report.
    """

    flops: int | str | None
    macs: int | str | None
    params: int | str | None
    report: Report


class _Latency(NamedTuple):
    """Mean time of one call, and of one loss and backward; ``None`` without."""

    forward_ns: float
    backward_ns: float | None


def profile_model(
    model: nn.Module,
    *args: Any,
    input_shape: Collection[int] | None = None,
    mode: Literal["forward", "generate"] = "forward",
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    warm_up: int = 1,
    steps: int = 3,
    module_depth: int | None = None,
    top_modules: int = 3,
    detailed: bool = True,
    ignore_modules: Collection[type[nn.Module] | str] | type[nn.Module] | str | None = None,
    as_string: bool = False,
    output_file: str | Path | None = None,
    print_profile: bool = True,
    formulas: Mapping[Any, Formula] | None = None,
    **kwargs: Any,
) -> ModelProfile:
    """Profile a model's parameters, FLOPs and latency on one batch.

    The model runs in its current mode, on its current device: once to count FLOPs, ``warm_up`` times to warm
    up, ``steps`` times to time the whole call and ``steps`` times to time its modules. Gradients, buffers,
    ``training`` flags and random states are always restored. Anything else the model's code stores, such as a
    cache, stays.

    Args:
        model: Any module. Compiled parts are timed as a whole.
        args: Positional arguments for the model.
        input_shape: Shape of a tensor of ones to pass instead of ``args``, with the dtype and device of the
            model's first parameter, as in DeepSpeed's ``get_model_profile``.
        mode: What to call: ``forward`` calls the model, ``generate`` its method of that name.
        loss_fn: Function from the output to a scalar loss; if given, backward is counted and timed too.
            Without it, gradients are off.
        warm_up: Number of calls before the timed ones.
        steps: Number of timed calls of the whole model, and again of its modules, where hooks add time.
        module_depth: Levels of the module tree to show, 0 being the model alone; ``None`` means all.
        top_modules: Number of classes to name at each level.
        detailed: Include every module in the report.
        ignore_modules: Classes, class names or module paths to leave out of all figures but the latency of
            the whole call. Modules inside them are left out too.
        as_string: Return ``flops``, ``macs`` and ``params`` as strings such as ``4.09 GMAC``.
        output_file: File to write the report to as text, instead of printing it.
        print_profile: Print the report, or write it to ``output_file``.
        formulas: FLOP formulas by operator, called as ``formula(*args, **kwargs, out_val=result)``.
        kwargs: Keyword arguments for the model.

    Raises:
        ModelProfError: If an argument is invalid or the model can't take the batch.
    """
    target = target_of(model, mode, loss_fn)
    check = partial(whole_number, "profile_model")
    warm_up, steps = check("warm_up", warm_up, 0), check("steps", steps, 1)
    top_modules = check("top_modules", top_modules, 1)
    module_depth = None if module_depth is None else check("module_depth", module_depth, 0)
    path = writeable_file(output_file)
    check_tensors(model)
    if input_shape is not None:
        args = (input_of(model, input_shape, args),)
    records = module_records(model)
    ignored = ignored_paths(model, records, ignore_modules)
    call = ProfiledCall(target, args, kwargs, loss_fn)
    device = _device_of(model, (args, kwargs))
    with preserved(model, (args, kwargs)), call.grad_mode():
        count = _count(model, call, formulas)
        for _ in range(warm_up):
            call.run(model)
        timer = ModuleTimer(model, device=device)
        latency = _time(model, call, timer, steps, device)
    tree = _tree_of(ModelCost(count=count, modules=records, times=timer.times()), ignored)
    head = (
        ("Call", f"{type(model).__name__ if mode == 'forward' else 'generate'}, {_mode_of(model)}"),
        ("Batch", _describe((*args, *kwargs.values()), (*[""] * len(args), *kwargs))),
        ("Device", _name_of(device)),
        *_facts(tree, latency, steps, mode.capitalize()),
    )
    report = Report(
        title=f"Profile of {tree.root.type_name}",
        facts=head,
        tables=module_tables(tree, module_depth=module_depth, top_modules=top_modules, detailed=detailed),
        notes=_notes(tree, records, count, mode),
    )
    if print_profile and path is not None:
        _write(path, report)
    elif print_profile:
        print_report(report)
    return _profile_of(tree, report, as_string=as_string)


def _tree_of(cost: ModelCost, ignored: Collection[str]) -> ModuleTree:
    try:
        return module_tree(cost, ignored)
    except NotMeasured as why:
        message = f"profile_model(ignore_modules): no modules are left: {why.reason}."
        raise ModelProfError(message) from None


def _profile_of(tree: ModuleTree, report: Report, *, as_string: bool) -> ModelProfile:
    root = tree.root
    figures = (
        (root.forward_flops, Unit.FLOPS),
        (root.forward_macs, Unit.MACS),
        (root.parameters, Unit.COUNT),
    )
    flops, macs, params = (format_cell(value, unit) if as_string else value for value, unit in figures)
    return ModelProfile(flops, macs, params, report)


def _count(model: nn.Module, call: ProfiledCall, formulas: Mapping[Any, Formula] | None) -> StepCount:
    try:
        counter = FlopCounter(model, formulas)
    except KeyError as error:
        raise ModelProfError(f"profile_model: {error.args[0]}.") from None
    with counter:
        call.run(model)
    return step_count(counter)


def _time(
    model: nn.Module, call: ProfiledCall, timer: ModuleTimer, steps: int, device: torch.device
) -> _Latency:
    """Time whole calls without hooks, which in a small model take as long as it does, then its modules."""
    calls = [_time_call(model, call, device) for _ in range(steps)]
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        with timer:
            output = call.forward()
            loss = call.loss(output)
            if loss is not None:
                timer.on_before_backward(loss)
                call.backward(loss)
            wait_for(device)
        del output
    backward_ns = [found.backward_ns for found in calls if found.backward_ns is not None]
    return _Latency(
        forward_ns=sum(found.forward_ns for found in calls) / steps,
        backward_ns=sum(backward_ns) / steps if backward_ns else None,
    )


def _time_call(model: nn.Module, call: ProfiledCall, device: torch.device) -> _Latency:
    """Time one call, waiting for the device around it but never inside."""
    model.zero_grad(set_to_none=True)
    wait_for(device)
    begin_ns = host_clock()
    output = call.forward()
    wait_for(device)
    forward_ns = host_clock() - begin_ns
    loss = call.loss(output)
    if loss is None:
        return _Latency(forward_ns, None)
    wait_for(device)
    begin_ns = host_clock()
    call.backward(loss)
    wait_for(device)
    return _Latency(forward_ns, host_clock() - begin_ns)


# ---- The head of the report


def _device_of(model: nn.Module, batch: Any) -> torch.device:
    tensors = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
    others = [tensor.device for tensor in tensors if tensor.device.type != "cpu"]
    return others[0] if others else torch.device("cpu")


def _name_of(device: torch.device) -> str:
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    get_name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return f"{device}, {get_name(device)}" if get_name is not None else str(device)


def _mode_of(model: nn.Module) -> str:
    flags = {module.training for module in model.modules()}
    return (
        "some modules in training mode"
        if len(flags) > 1
        else "training mode"
        if True in flags
        else "eval mode"
    )


def _describe(values: Iterable[Any], names: Iterable[str]) -> str:
    found = []
    for name, value in zip(names, values, strict=True):
        prefix = f"{name}: " if name else ""
        found += [prefix + kind_of(tensor) for tensor in tensors_in(value)]
    rest = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return (", ".join(found[:_MAX_NAMED]) or "no tensors") + rest


def _facts(tree: ModuleTree, latency: _Latency, steps: int, called: str) -> list[tuple[str, str]]:
    root = tree.root
    calls = f"mean of {steps} calls" if steps > 1 else "1 call"
    trainable = format_cell(root.trainable, Unit.COUNT)
    every = root.trainable == root.parameters != 0
    facts = [
        (
            "Parameters",
            f"{format_cell(root.parameters, Unit.COUNT)}, {'all' if every else trainable} trainable",
        ),
        (called, _work(root.forward_flops)),
        (f"{called} latency", f"{format_duration(latency.forward_ns)}, {calls}"),
        (f"{called} FLOP/s", _rate(root.forward_flops, latency.forward_ns)),
    ]
    if latency.backward_ns is not None:
        again = root.recompute_flops
        total = None if root.backward_flops is None else root.backward_flops + (again or 0)
        computed = f", and {format_cell(again, Unit.FLOPS)} recomputed" if again else ""
        facts += [
            ("Backward", _work(root.backward_flops) + computed),
            ("Backward latency", f"{format_duration(latency.backward_ns)}, {calls}"),
            ("Backward FLOP/s", _rate(total, latency.backward_ns)),
        ]
    return facts


def _work(flops: int | None) -> str:
    if flops is None:
        return format_cell(None, Unit.MACS)
    return f"{format_cell(flops // 2, Unit.MACS)} = {format_cell(flops, Unit.FLOPS)}"


def _rate(flops: int | None, ns: float) -> str:
    return format_cell(None if flops is None else flops * 1e9 / ns, Unit.FLOPS_PER_S)


def _notes(
    tree: ModuleTree, records: Collection[ModuleRecord], count: StepCount, mode: str
) -> tuple[str, ...]:
    notes = []
    if mode == "generate":
        notes.append("Figures are for one call of generate, which calls the modules once per token.")
    if len(tree.modules) < len(records):
        ignored = len(records) - len(tree.modules)
        notes.append(
            f"ignore_modules leaves out {ignored} of {len(records)} modules. Only the whole call's latency"
            " and FLOP/s include them."
        )
    notes += [f"A formula failed: {error}." for error in count.errors]
    return tuple(notes)


def _write(path: Path, report: Report) -> None:
    try:
        write_atomically(path, render_text(report).encode())
    except OSError as error:
        raise ModelProfError(f"profile_model(output_file): can't write {path}: {error.strerror}.") from error


MODES: Final = ("forward", "generate")


def target_of(model: Any, mode: str, loss_fn: Any) -> Callable[..., Any]:
    """The callable to profile."""
    if not isinstance(model, nn.Module):
        raise ModelProfError(f"profile_model(model): expected a torch.nn.Module, got {kind_of(model)}.")
    if mode not in MODES:
        raise ModelProfError(
            f"profile_model(mode): expected one of {', '.join(MODES)}, got {quoted(mode)}."
            f"{did_you_mean(mode, MODES)}"
        )
    if mode == "forward":
        return model
    if loss_fn is not None:
        raise ModelProfError("profile_model(loss_fn): mode='generate' has no backward. Leave loss_fn out.")
    target = getattr(model, "generate", None)
    if not callable(target):
        raise ModelProfError(
            f"profile_model(mode='generate'): {type(model).__name__} has no generate method. Use"
            " mode='forward'."
        )
    return target  # type: ignore[no-any-return]  # an attribute of the user's model


def writeable_file(output_file: str | Path | None) -> Path | None:
    """Path of the report; ``None`` without one."""
    if output_file is None:
        return None
    path = as_path(output_file, ModelProfError)
    if path.is_dir() or not path.parent.is_dir():
        raise ModelProfError(
            f"profile_model(output_file): can't write {path}: "
            + ("it's a directory." if path.is_dir() else f"no such directory: {path.parent}.")
        )
    return path


def check_tensors(model: nn.Module) -> None:
    """Refuse tensors without values: running the model would create them, or fail."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise ModelProfError(
            f"profile_model(model): expected initialised parameters, got lazy {', '.join(lazy)}."
            " Run the model on one batch first."
        )
    if any(tensor.is_meta for _, tensor in tensors):
        raise ModelProfError(
            "profile_model(model): expected tensors with values, got some on the meta device, which can't be"
            " timed. Use count_flops to count such a model's FLOPs."
        )


def input_of(model: nn.Module, shape: Any, args: tuple[Any, ...]) -> torch.Tensor:
    """A batch of ones with the given shape, like the model's first parameter."""
    is_shape = isinstance(shape, tuple | list) and all(type(size) is int and size >= 0 for size in shape)
    if not is_shape or not shape:
        raise ModelProfError(
            "profile_model(input_shape): expected a tensor shape, such as (1, 3, 224, 224), got"
            f" {quoted(shape)}."
        )
    if args:
        raise ModelProfError(
            f"profile_model(input_shape): expected a shape or a batch, got both ({kind_of(args[0])} was"
            " also passed). Remove one."
        )
    like = next(model.parameters(), torch.ones(()))
    return torch.ones(tuple(shape), dtype=like.dtype, device=like.device)


def ignored_paths(model: nn.Module, records: Iterable[ModuleRecord], wanted: Any) -> set[str]:
    """Paths of the modules to ignore; a class includes its subclasses."""
    by_path = {record.path: record.type_name for record in records}
    by_path_modules = [(plain_path(path), module) for path, module in model.named_modules()]
    paths: set[str] = set()
    for one in [wanted] if isinstance(wanted, str | type) else wanted or ():
        if not isinstance(one, str | type):
            raise ModelProfError(
                "profile_model(ignore_modules): expected classes, class names or module paths, got"
                f" {type(one).__name__}."
            )
        if isinstance(one, type):
            found = {path for path, module in by_path_modules if isinstance(module, one)}
            name = one.__name__
        else:
            name = one
            found = {path for path, type_name in by_path.items() if name and name in (path, type_name)}
        if not found:
            names = sorted({*by_path, *by_path.values()} - {""})
            types = ", ".join(sorted(set(by_path.values())))
            hint = did_you_mean(name, names) or f" Its classes are {types}."
            raise ModelProfError(
                f"profile_model(ignore_modules): {quoted(name)} is no class or module path in this"
                f" model.{hint}"
            )
        paths |= found
    return paths


def kind_of(value: Any) -> str:
    """Shape and dtype of a tensor, else the type, as shown to users."""
    if isinstance(value, torch.Tensor):
        return f"{' × '.join(map(str, value.shape)) or 'scalar'} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__


class ProfiledCall:
    """One call of the model with the batch, and of its loss."""

    def __init__(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss_fn: Callable[[Any], torch.Tensor] | None,
    ) -> None:
        self._target, self._args, self._kwargs, self._loss_fn = target, args, kwargs, loss_fn

    def grad_mode(self) -> AbstractContextManager[Any]:
        """Record gradients only for a loss."""
        return torch.no_grad() if self._loss_fn is None else torch.enable_grad()

    def forward(self) -> Any:
        """Call the model.

        Raises:
            ModelProfError: on any failure.
        """
        try:
            return self._target(*self._args, **self._kwargs)
        except Exception as error:
            passed = [*(kind_of(value) for value in self._args)]
            passed += [f"{name}={kind_of(value)}" for name, value in self._kwargs.items()]
            raise ModelProfError(
                f"profile_model: the model can't take this batch: {describe_error(error)}. It was called with"
                f" ({', '.join(passed)})."
            ) from error

    def loss(self, output: Any) -> torch.Tensor | None:
        """The loss of an output; ``None`` without a loss function.

        Raises:
            ModelProfError: without a loss that has a backward.
        """
        if self._loss_fn is None:
            return None
        try:
            loss = self._loss_fn(output)
        except Exception as error:
            raise ModelProfError(
                f"profile_model(loss_fn): failed on the model's output ({kind_of(output)}):"
                f" {describe_error(error)}."
            ) from error
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            lacking = (
                " without a gradient" if isinstance(loss, torch.Tensor) and not loss.requires_grad else ""
            )
            raise ModelProfError(
                "profile_model(loss_fn): expected a tensor with one element and a gradient,"
                f" got {kind_of(loss)}{lacking}."
            )
        return loss

    def backward(self, loss: torch.Tensor | None) -> None:
        """Run backward.

        Raises:
            ModelProfError: when it fails.
        """
        if loss is None:
            return
        try:
            loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        except Exception as error:
            raise ModelProfError(
                f"profile_model: the loss's backward pass failed: {describe_error(error)}."
            ) from error

    def run(self, model: nn.Module) -> None:
        """Run forward and backward with cleared gradients."""
        model.zero_grad(set_to_none=True)
        self.backward(self.loss(self.forward()))
