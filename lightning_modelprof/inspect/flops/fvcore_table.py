"""The forward table: what fvcore says of one forward pass on a real batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_modelprof.errors import ModelProfError
from lightning_modelprof.flops.fvcore_trace import TracedCall, functions_run_inline, traceable
from lightning_modelprof.inspect.core.untouched import untouched
from lightning_modelprof.run.model_cost import ForwardCount, ForwardTable

if TYPE_CHECKING:
    from lightning_modelprof.inspect.flops.fvcore_handles import ForwardAnalysis

_COMPILED_PART: Final = "_orig_mod"
_OWN_FUNCTION: Final = "prim::PythonOp."

_CAUSES: Final = (
    (
        "unordered_map::at",
        "An autograd function whose apply was kept under another name uses tensors that it is not given: call"
        " its apply by the function's own name",
    ),
    (
        "does not require grad",
        "It asks for gradients, and fvcore's forward pass runs without: a step with manual optimization or"
        " gradients inside of it has no such table",
    ),
    (
        "is not attached to a `Trainer`",
        "The step asks for its Trainer or its optimizers, which the copy is without: a step with manual"
        " optimization has no such table",
    ),
    (
        "insert a Tensor that requires grad",
        "A tensor that wants a gradient is no parameter of the model: detach it, or register it",
    ),
    (
        "dynamo-optimized",
        "torch.compile has wrapped a function that no module holds, which cannot be traced",
    ),
    (
        "Unsupported value kind",
        "A tensor inside is none that torch's tracer knows, such as a nested tensor",
    ),
)
"""Part of an error's message → what it means for the user."""


def forward_table(model: nn.Module, call: Callable[[], Any]) -> ForwardTable:
    """Let fvcore count one forward pass.

    The call runs once, without gradients and under torch's tracer, in the mode that the model is in; compiled
    modules run eagerly, checkpoints and own autograd functions as plain code. One multiply-add counts 1, a
    complex one 4; only contractions count.

    Args:
        model: whose modules are told apart; paths are its own, without the wrappers of compiled modules.
        call: runs the forward pass, such as ``lambda: model.training_step(batch, 0)``. Whatever it returns is
            fine.

    Raises:
        ModelProfError: when fvcore is not there, the model has uninitialised parameters, or torch cannot
            trace the call.

    Caveats:
        Python side effects outside of the model's modules stay (logged values, files), and so do values of
        parameters that the call itself changes. What runs in other threads, and kernels that are called
        without torch's operators, are not seen.
    """
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ModelProfError(
            f"fvcore's table: expected initialised parameters, got lazy {', '.join(lazy)}."
            " Run the model on one batch first"
        )
    try:
        from lightning_modelprof.inspect.flops.fvcore_handles import ForwardAnalysis, parameter_count  # noqa: PLC0415
    except ImportError as error:
        raise ModelProfError(f"fvcore's table: expected fvcore to be installed, got {error}") from error
    root = TracedCall(model, call)
    try:
        with untouched(model), traceable(model), functions_run_inline() as unseen:
            analysis = ForwardAnalysis(root)
            analysis.total()
        unseen.update(root.unseen)
        return ForwardTable(
            counts=_own_counts(analysis),
            activations=_by_path(model, _activations(analysis)),
            parameters=_by_path(model, parameter_count(model)),
            unsupported=_unsupported(analysis, unseen, root.seen_through),
            uncalled=_uncalled(model, root.called),
            notes=_notes(unseen, analysis.failed),
        )
    except Exception as error:
        raise ModelProfError(_explain(error)) from error


def _explain(error: Exception) -> str:
    """The first line of what went wrong, and what it means where that is known."""
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0].removesuffix('.') if lines else 'no message'}"
    causes = [cause for part, cause in _CAUSES if part in str(error)]
    advice = causes[0] if causes else "The counted FLOPs do not need this table"
    return f"fvcore's table: expected a forward pass that torch's tracer can follow, got {said}. {advice}"


def path_of(name: str) -> str:
    """A name without what torch.compile put in between."""
    return ".".join(part for part in name.split(".") if part and part != _COMPILED_PART)


def _model_path(name: str) -> str:
    """A name in the traced call → the path in the model; the call's own work is the model's."""
    _, _, inner = name.partition(".")
    return path_of(inner)


def _own_counts(analysis: ForwardAnalysis) -> tuple[ForwardCount, ...]:
    """Multiply-adds by module and operator, less what the modules inside count."""
    from lightning_modelprof.inspect.flops.fvcore_handles import MACS  # noqa: PLC0415

    totals = analysis.by_module_and_operator()
    own: Counter[tuple[str, str]] = Counter()
    for name, counts in totals.items():
        above = name.rpartition(".")[0]
        for (quantity, operator), number in counts.items():
            if quantity == MACS:
                own[_model_path(name), operator] += number
                if name:
                    own[_model_path(above), operator] -= number
    order = {_model_path(name): None for name in totals}
    return tuple(
        ForwardCount(module=path, operator=operator, macs=macs)
        for path in order
        for (module, operator), macs in own.items()
        if module == path and macs
    )


def _activations(analysis: ForwardAnalysis) -> dict[str, int]:
    from lightning_modelprof.inspect.flops.fvcore_handles import OUTPUTS  # noqa: PLC0415

    found: dict[str, int] = {}
    for name, counts in analysis.by_module_and_operator().items():
        elements = sum(number for (quantity, _), number in counts.items() if quantity == OUTPUTS)
        found.setdefault(_model_path(name), elements)
    return found


def _by_path(model: nn.Module, numbers: Mapping[str, int]) -> dict[str, int]:
    """One number for every module, parents before their children; 0 where there is nothing to add up."""
    found: dict[str, int] = {}
    for name, _ in model.named_modules():
        path = path_of(name)
        found[path] = max(found.get(path, 0), numbers.get(name, 0), numbers.get(path, 0))
    return found


def _unsupported(analysis: ForwardAnalysis, unseen: Counter[str], seen_through: set[str]) -> dict[str, int]:
    from lightning_modelprof.inspect.flops.fvcore_handles import may_hold_contractions  # noqa: PLC0415

    listed = analysis.unsupported_ops()
    counted = {f"{_OWN_FUNCTION}{name}" for name in seen_through}
    found = Counter(
        {kind: calls for kind, calls in listed.items() if kind not in counted and may_hold_contractions(kind)}
    )
    found.update(analysis.failed)
    found.update({f"{_OWN_FUNCTION}{name}": calls for name, calls in unseen.items()})
    return dict(sorted(found.items()))


def _uncalled(model: nn.Module, called: set[int]) -> tuple[str, ...]:
    """Modules with a forward that did not run, but for the model itself, whose step may be what ran."""
    never = nn.Module.forward
    names = [
        name
        for name, module in model.named_modules()
        if name and type(module).forward is not never and id(module) not in called
    ]
    return tuple(dict.fromkeys(path_of(name) for name in names))


def _notes(unseen: Counter[str], failed: Counter[str]) -> tuple[str, ...]:
    notes = []
    if unseen:
        notes.append(f"{', '.join(sorted(unseen))}: autograd functions whose own kernels fvcore cannot see.")
    if failed:
        notes.append(f"{', '.join(sorted(failed))}: on tensors whose shapes fvcore does not know.")
    return tuple(notes)
