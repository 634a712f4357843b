"""fvcore's counts of one forward pass on a real batch, in its own numbers and words."""

from __future__ import annotations

import warnings
from abc import ABCMeta
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any, Final

import torch
from torch import nn

from lightning_modelprof.errors import ModelProfError, describe_error
from lightning_modelprof.inspect.core.model_copies import plain_copy, refuse_closures
from lightning_modelprof.inspect.core.preserved import preserved
from lightning_modelprof.run.model_cost import ForwardCount, ForwardTable

_NO_CONTRACTIONS: Final = (
    *("aten::batch_norm", "aten::group_norm", "aten::layer_norm", "aten::instance_norm"),
    *("aten::upsample_nearest2d", "aten::upsample_bilinear2d"),
    *("aten::adaptive_avg_pool2d", "aten::grid_sampler"),
)
"""Operators whose fvcore formulas count something other than contractions' multiply-adds.

Here they count as 0: fvcore can only ignore operators that it has no formula for.
"""


def _nothing(_inputs: Any, _outputs: Any) -> int:
    return 0


def forward_table(
    module: nn.Module, run_step: Callable[[nn.Module, tuple[Any, ...]], Any], arguments: tuple[Any, ...]
) -> ForwardTable:
    """Let fvcore count a step on a copy of a module.

    The numbers match fvcore's ``flop_count_table``: ``FlopCountAnalysis`` without formulas for norms, pooling
    and resampling, ``ActivationCountAnalysis`` and ``parameter_count``. Each analysis traces the step once,
    without gradients.

    Args:
        module: counted by submodule.
        run_step: runs a step of a copy on a copy of the arguments.
        arguments: the step's arguments, such as its batch.

    Returns:
        The count, including what fvcore couldn't count.

    Raises:
        ModelProfError: when fvcore can't be imported, or module or arguments can't be copied.
        Exception: errors of fvcore, torch's tracer or the step, unchanged.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it uses the deprecated torch.jit.script
            from fvcore.nn import ActivationCountAnalysis, FlopCountAnalysis, parameter_count  # noqa: PLC0415
    except ImportError as error:
        raise ModelProfError(
            f"fvcore's table needs fvcore, which can't be imported ({error}). Install it with pip install"
            " fvcore"
        ) from error
    refuse_closures(module)
    copied = plain_copy(module)
    _hash_by_identity(copied)
    step = _Step(copied, run_step)
    flops = FlopCountAnalysis(step, ()).set_op_handle(**dict.fromkeys(_NO_CONTRACTIONS, _nothing))
    activations = ActivationCountAnalysis(step, ())
    for analysis in (flops, activations):
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
        step.arguments = _copy_of(arguments)
        with preserved(copied), torch.no_grad():
            analysis.total()
    names = {path: f"{_Step.MODEL}.{path}" if path else "" for path, _ in copied.named_modules()}
    outputs, parameters, uncalled = activations.by_module(), parameter_count(step), flops.uncalled_modules()
    return ForwardTable(
        counts=_own_counts({path: flops.by_operator(name) for path, name in names.items()}),
        activations={path: int(outputs[name]) for path, name in names.items()},
        parameters={path: parameters[name] for path, name in names.items()},
        unsupported=dict(sorted(flops.unsupported_ops().items())),
        uncalled=tuple(path for path, name in names.items() if name in uncalled),
    )


def _own_counts(totals: dict[str, Counter[str]]) -> tuple[ForwardCount, ...]:
    own = {path: Counter(total) for path, total in totals.items()}
    for path, total in totals.items():
        if path:
            own[path.rpartition(".")[0]].subtract(total)
    return tuple(
        ForwardCount(module=path, operator=operator, macs=int(macs))
        for path, counts in own.items()
        for operator, macs in counts.items()
        if macs
    )


def _copy_of(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        return deepcopy(arguments)  # a step may change its batch, which a dataset may return again
    except Exception as error:
        raise ModelProfError(f"the batch can't be copied: {describe_error(error)}") from error


def _hash_by_identity(model: nn.Module) -> None:
    """Let fvcore recognize metrics, whose hash changes with their state.

    Skips classes that notice their subclasses, as registries do.
    """
    for module in model.modules():
        kind = type(module)
        own_hooks = [one for one in kind.mro()[:-1] if "__init_subclass__" in vars(one)]
        is_plain = type(kind) in (type, ABCMeta) and not own_hooks
        if is_plain and kind.__hash__ is not nn.Module.__hash__:
            module.__class__ = type(kind.__name__, (kind,), {"__hash__": nn.Module.__hash__})


class _Step(nn.Module):
    """A step in the form fvcore requires: a module without inputs."""

    MODEL: Final = "model"

    def __init__(self, model: nn.Module, run: Callable[[nn.Module, tuple[Any, ...]], Any]) -> None:
        super().__init__()
        self.model = model
        self.arguments: tuple[Any, ...] = ()
        self._run = run

    def forward(self) -> torch.Tensor:
        self._run(self.model, self.arguments)
        graph = torch._C._get_tracing_state().graph()
        _keep_results(graph, graph)
        return torch.zeros(())


def _keep_results(graph: Any, block: Any) -> None:
    """Make every tensor a result, as the tracer drops work that no result depends on."""
    for node in list(block.nodes()):
        kind = node.kind()
        if kind == "prim::TracedModuleForward":
            for inner in node.blocks():
                _keep_results(graph, inner)
        elif not kind.startswith("prim::") or kind in ("prim::PythonOp", "prim::CallFunction"):
            for value in node.outputs():
                graph.registerOutput(value)
