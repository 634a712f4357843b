"""The forward table: what fvcore says of one forward pass on a real batch."""

from __future__ import annotations

import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.autograd.function import Function, FunctionCtx, _SingleLevelFunction
from torch.nn.parameter import is_lazy

from lightning_modelprof.errors import ModelProfError
from lightning_modelprof.inspect.core.model_copies import COMPILED_FROM
from lightning_modelprof.inspect.core.untouched import untouched
from lightning_modelprof.run.model_cost import ForwardCount, ForwardTable

if TYPE_CHECKING:
    from lightning_modelprof.inspect.flops.fvcore_handles import ForwardAnalysis


_COMPILED_PART: Final = "_orig_mod"


_OWN_FUNCTION: Final = "prim::PythonOp."


_CAUSES: Final = (
    (
        "unordered_map::at",
        "An autograd function uses tensors that aren't its arguments, and its apply is stored under another"
        " name. Call apply on the function's own name",
    ),
    (
        "does not require grad",
        "The step needs gradients, which are off while fvcore runs. Steps with manual optimization or"
        " gradients of their own can't have this table",
    ),
    (
        "is not attached to a `Trainer`",
        "The step uses its Trainer or optimizers, which the copy lacks. Steps with manual optimization can't"
        " have this table",
    ),
    (
        "insert a Tensor that requires grad",
        "A tensor requires a gradient but isn't a parameter of the model. Detach or register it",
    ),
    (
        "dynamo-optimized",
        "torch.compile wraps a function outside the modules, which can't be traced",
    ),
    (
        "Unsupported value kind",
        "torch's tracer doesn't support one of the tensors, such as a nested tensor",
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
        raise ModelProfError(
            f"fvcore's table needs fvcore, which can't be imported ({error}). Install it with pip install"
            " fvcore"
        ) from error
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
    advice = causes[0] if causes else "The counted FLOPs don't depend on this table"
    return f"fvcore's table: torch's tracer can't follow the forward pass ({said}). {advice}"


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
        notes.append(f"fvcore can't see inside these autograd functions: {', '.join(sorted(unseen))}.")
    if failed:
        notes.append(f"fvcore doesn't know the tensor shapes of {', '.join(sorted(failed))}.")
    return tuple(notes)


"""What torch.compile puts on every function that it wraps."""


_MODULE_BLOCK: Final = "prim::TracedModuleForward"


_OWN_TRACED_FUNCTION: Final = "prim::PythonOp"


_INSIDE: Final = "Subgraph"


_MAKES_NO_VALUES: Final = re.compile(r"prim::Constant|aten::(new_)?(empty|zeros|ones|full)(_like|_strided)?")


_MOVES_VALUES: Final = re.compile(
    "aten::(view|view_as|reshape|flatten|unflatten|transpose|t|permute|contiguous|squeeze|unsqueeze|expand|slice|select|narrow|detach|alias|to)"
)


class TracedCall(nn.Module):
    """Runs a call as a module without arguments, with the model as its child ``MODEL``.

    Batches of any kind stay inside the call, and so does its result: every operator counts as needed, so
    that the tracer drops none of those that the result does not depend on.

    Args:
        model: whose modules have names in the graph.
        call: what to run.

    Attributes:
        called: the modules that ran, by id.
        seen_through: names of autograd functions that are in the graph beside the operators that run in them,
            as they are since torch 2.15 where a model has kept a function's ``apply``.
        unseen: their calls whose result no traced operator computed, by name.
    """

    MODEL: Final = "model"

    def __init__(self, model: nn.Module, call: Callable[[], Any]) -> None:
        super().__init__()
        self.model = model
        self.called: set[int] = set()
        self.seen_through: set[str] = set()
        self.unseen: Counter[str] = Counter()
        self._call = call

    def state_dict(self, *_args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Parameters and buffers: a module's extra state would stop the tracer."""
        destination = options.get("destination")
        found: dict[str, Any] = OrderedDict() if destination is None else destination
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            found[f"{options.get('prefix', '')}{name}"] = tensor
        return found

    def forward(self) -> torch.Tensor:
        """Run the call; the tensor only gives the tracer something to return."""
        note = nn.modules.module.register_module_forward_pre_hook(
            lambda module, _inputs: self.called.add(id(module))
        )
        try:
            self._call()
        finally:
            note.remove()
        graph = torch._C._get_tracing_state().graph()
        self._keep_all(graph, graph)
        return torch.zeros((), device="cpu")

    def _keep_all(self, graph: Any, block: Any) -> None:
        """Make every result a result of the graph."""
        for node in list(block.nodes()):
            kind = node.kind()
            if kind == _MODULE_BLOCK:
                for inner in node.blocks():
                    self._keep_all(graph, inner)
            elif kind == _OWN_TRACED_FUNCTION and node.hasAttribute(_INSIDE):
                self._look_inside(node)
            elif not kind.startswith("prim::") or kind in (_OWN_TRACED_FUNCTION, "prim::CallFunction"):
                for value in node.outputs():
                    graph.registerOutput(value)

    def _look_inside(self, node: Any) -> None:
        """Note a function whose operators are in the graph as well, and whether they are all that it does."""
        self.seen_through.add(node.pyname())
        if not all(_is_computed(value) for value in node.g(_INSIDE).outputs()):
            self.unseen[node.pyname()] += 1


# ---- Functions with a backward of their own


class _Context(FunctionCtx):
    """Stands in for the context that autograd would give to a function's forward."""

    def __init__(self, arguments: int) -> None:
        self.needs_input_grad = (False,) * arguments


@contextmanager
def functions_run_inline() -> Iterator[Counter[str]]:
    """Let the forward of every autograd.Function run as plain code in this thread, where the tracer sees it.

    Gradients have to be off. Yields calls by name of the functions whose result no traced operator computed,
    as that of a kernel of their own: what they cost is unknown. torch's re-entrant checkpoint is a function
    too, which the tracer cannot follow otherwise.
    """
    unseen: Counter[str] = Counter()
    thread = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or torch._C._get_tracing_state() is None:
            return super(_SingleLevelFunction, cls).apply(*args, **kwargs)
        if cls.setup_context is _SingleLevelFunction.setup_context:
            result = cls.forward(_Context(len(args)), *args, **kwargs)
        else:
            result = cls.forward(*args, **kwargs)
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        inputs = {id(value) for value in args}
        new = [value for value in outputs if isinstance(value, torch.Tensor) and id(value) not in inputs]
        trace = torch._C._get_value_trace  # type: ignore[attr-defined]
        # An empty tensor costs nothing: torch's own checkpoint makes one to save what it is given.
        if any(value.numel() and not _is_computed(trace(value)) for value in new):
            unseen[cls.__name__] += 1
        return result

    with ExitStack() as stack:
        for owner in (_SingleLevelFunction, Function):
            own = vars(owner).get("apply")
            if isinstance(own, classmethod):
                continue  # torch before 2.15: Python, which calls what stands in the class above
            undo = partial(delattr, owner, "apply") if own is None else partial(setattr, owner, "apply", own)
            stack.callback(undo)
            owner.apply = classmethod(apply)  # type: ignore[attr-defined]
        yield unseen


def _is_computed(value: Any) -> bool:
    """Whether a traced operator computed a value of the graph, rather than only made room for it."""
    node = value.node()
    while _MOVES_VALUES.fullmatch(node.kind()):
        node = next(iter(node.inputs())).node()
    return _MAKES_NO_VALUES.fullmatch(node.kind()) is None


# ---- How it runs, and what is undone


@contextmanager
def traceable(model: nn.Module) -> Iterator[None]:
    """No gradients, nothing compiled or fused, no weights cast for autocast that outlive the call.

    Needs ``untouched`` around it: the compiled functions that modules hold are replaced by what was compiled.
    """
    for module in model.modules():
        own = vars(module)
        for name, value in own.items():
            if isinstance(value, FunctionType) and COMPILED_FROM in vars(value):
                own[name] = vars(value)[COMPILED_FROM]
        own.pop("_compiled_call_impl", None)  # of module.compile()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        yield
