"""A call of a model that torch's tracer can follow, and that leaves the model as it was."""

from __future__ import annotations

import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.function import Function, FunctionCtx, _SingleLevelFunction

_COMPILED_FROM: Final = "_torchdynamo_orig_callable"
"""What torch.compile puts on every function that it wraps."""

_MODULE_BLOCK: Final = "prim::TracedModuleForward"
_OWN_FUNCTION: Final = "prim::PythonOp"
_INSIDE: Final = "Subgraph"
_MAKES_NO_VALUES: Final = re.compile(r"prim::Constant|aten::(new_)?(empty|zeros|ones|full)(_like|_strided)?")
_MOVES_VALUES: Final = re.compile(
    "aten::(view|view_as|reshape|flatten|unflatten|transpose|t|permute|contiguous|squeeze|unsqueeze|expand|slice"
    "|select|narrow|detach|alias|to)"
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
            elif kind == _OWN_FUNCTION and node.hasAttribute(_INSIDE):
                self._look_inside(node)
            elif not kind.startswith("prim::") or kind in (_OWN_FUNCTION, "prim::CallFunction"):
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
        if any(not _is_computed(trace(value)) for value in new):
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
            if isinstance(value, FunctionType) and _COMPILED_FROM in vars(value):
                own[name] = vars(value)[_COMPILED_FROM]
        own.pop("_compiled_call_impl", None)  # of module.compile()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        yield
