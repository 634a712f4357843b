"""Finds rows of module outputs without gradient in the counted step: the loss doesn't depend on them.

A row is what a layer computes at one place: one feature vector for a linear layer, one sample for other
layers. Gradients are checked on the device, and the results copied to the CPU after the step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_modelprof.inspect.core.preserved import tensors_in
from lightning_modelprof.inspect.core.whereabouts import ModuleHook
from lightning_modelprof.inspect.lines.frames import Spot
from lightning_modelprof.inspect.modules.modules import plain_path
from lightning_modelprof.measure.stored import is_trained, named_modules, parameters_of
from lightning_modelprof.place import Place
from lightning_modelprof.run.model_cost import UnusedOutput

_MOST_CALLS: Final = 512
"""Most watched calls; a step's further calls aren't judged."""
_NO_TASK: Final = -1
"""Autograd's answer outside a backward pass."""
_PER_PLACE: Final = (nn.Linear, nn.LayerNorm, nn.MultiheadAttention)
"""Layers that compute a feature vector at each place: the last dimension is one row."""
_PER_SAMPLE: Final = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
"""Layers whose rows are whole samples. Recurrent layers are excluded: each place needs the previous place's
output."""

_MIX_NOTHING: Final = (nn.Linear, nn.LayerNorm)
"""Layers whose inputs aren't checked: each input row makes one output row."""


class _Output(NamedTuple):
    """The first output of one call.

    Attributes:
        shape: shape of the rows; the first dimension counts samples. ``None`` if the layer has no rows.
        spot: the user's line of the call.
        used: whether each row's gradient wasn't 0; empty until a gradient arrives.
    """

    path: str
    shape: tuple[int, ...] | None
    spot: Spot | None
    used: list[torch.Tensor]


class _Input(NamedTuple):
    """The inputs of one module call.

    Attributes:
        shape: shape of the rows; ``None`` if their gradients can't be seen.
        used: whether each row's gradient wasn't 0; empty until a gradient arrives.
    """

    shape: tuple[int, ...] | None
    used: list[torch.Tensor]


class OutputWatch:
    """Notes which outputs get gradients.

    Args:
        on_error: called with our errors; the step continues.
        spot: returns the user's running line.
    """

    def __init__(
        self, root: nn.Module, on_error: Callable[[Exception], None], spot: Callable[[], Spot | None]
    ) -> None:
        self._root = root
        self._on_error = on_error
        self._spot = spot
        self._outputs: list[_Output] = []
        self._inputs: dict[str, list[_Input]] = {}

    def begin(self) -> list[Callable[[], None]]:
        """Put the hooks on; returns functions that remove them."""
        removers = []
        for name, module in named_modules(self._root):
            if name and any(map(is_trained, parameters_of(module))):
                hook = ModuleHook(partial(self._leave, plain_path(name)), self._on_error)
                removers.append(nn.Module.register_forward_hook(module, hook).remove)
                if not isinstance(module, _MIX_NOTHING):
                    enter = ModuleHook(partial(self._enter, plain_path(name)), self._on_error)
                    removers.append(
                        nn.Module.register_forward_pre_hook(
                            module, enter, prepend=True, with_kwargs=True
                        ).remove
                    )
        return removers

    def _enter(self, path: str, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        calls = self._inputs.setdefault(path, [])
        if len(calls) >= _MOST_CALLS or torch._C._current_graph_task_id() != _NO_TASK:
            return
        given = {id(one): one for one in tensors_in((args, kwargs)) if _has_rows(one)}
        nodes = [(one, one.grad_fn) for one in given.values()]
        shape: tuple[int, ...] | None = None
        used: list[torch.Tensor] = []
        for one, node in nodes:
            if node is not None and shape in {None, tuple(one.shape[:-1])}:
                shape = tuple(one.shape[:-1])
                node.register_prehook(ModuleHook(partial(_take, used, shape, one.output_nr), self._on_error))
        calls.append(_Input(shape, used))

    def _leave(self, path: str, module: nn.Module, _args: Any, output: Any) -> None:
        if len(self._outputs) >= _MOST_CALLS or torch._C._current_graph_task_id() != _NO_TASK:
            return
        is_layer = isinstance(module, (*_PER_PLACE, *_PER_SAMPLE))
        first = next(tensors_in(output), None)
        if first is None or not _has_rows(first) or first.grad_fn is None:
            return
        used: list[torch.Tensor] = []
        shape = None
        if is_layer:
            shape = tuple(first.shape[:-1]) if isinstance(module, _PER_PLACE) else (first.shape[0],)
            take = ModuleHook(partial(_take, used, shape, first.output_nr), self._on_error)
            first.grad_fn.register_prehook(take)  # a tensor's own hooks would be saved with it
        self._outputs.append(_Output(path, shape, self._spot(), used))

    def result(
        self,
        places: Callable[[list[Spot | None]], tuple[Place, ...]],
        mixes: Callable[[str], str | None] = lambda _: None,
    ) -> tuple[UnusedOutput, ...]:
        """Return the record, by module.

        Args:
            mixes: returns what the module at a path mixes.
        """
        found: dict[str, list[_Output]] = {}
        for one in self._outputs:
            found.setdefault(one.path, []).append(one)
        records = []
        for path, outputs in found.items():
            rows = unused = samples = unused_samples = num_places = unused_places = 0
            for one in outputs:
                if one.shape is None:
                    continue
                num_rows = torch.Size(one.shape).numel()
                rows, samples = rows + num_rows, samples + one.shape[0]
                places_here = one.shape[1] if len(one.shape) > 1 else 0
                num_places += places_here
                if not one.used:
                    unused, unused_samples = unused + num_rows, unused_samples + one.shape[0]
                    unused_places += places_here
                    continue
                used = one.used[0].cpu()
                unused += num_rows - int(used.sum())
                unused_samples += one.shape[0] - int(used.reshape(one.shape[0], -1).any(dim=1).sum())
                if places_here:
                    by_place = used.reshape(one.shape[0], places_here, -1).any(dim=2).any(dim=0)
                    unused_places += places_here - int(by_place.sum())
            input_rows, unused_inputs = self._unused_inputs(path)
            records.append(
                UnusedOutput(
                    path=path,
                    rows=rows,
                    unused=unused,
                    samples=samples,
                    unused_samples=unused_samples,
                    lines=places([one.spot for one in outputs]),
                    places=num_places,
                    unused_places=unused_places,
                    mixes=mixes(path),
                    input_rows=input_rows,
                    unused_inputs=unused_inputs,
                )
            )
        return tuple(records)

    def _unused_inputs(self, path: str) -> tuple[int, int]:
        """Count rows of a module's inputs, and those without a gradient; 0 if any call's are unknown."""
        rows = unused = 0
        for one in self._inputs.get(path, []):
            if one.shape is None:
                return 0, 0
            num_rows = torch.Size(one.shape).numel()
            rows += num_rows
            unused += num_rows - (int(one.used[0].sum()) if one.used else 0)
        return rows, unused


def _has_rows(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.is_nested or tensor.layout is not torch.strided:
        return False
    return tensor.dim() > 1 and bool(tensor.numel())


def _take(used: list[torch.Tensor], shape: tuple[int, ...], number: int, gradients: tuple[Any, ...]) -> None:
    """Note a gradient that arrived for an output, or ``None``; an output may get several."""
    gradient = gradients[number]
    if gradient is None:
        return
    with torch.no_grad(), _disable_current_modes():
        size = torch.Size(shape).numel()
        flat = gradient.detach().reshape(size, -1)
        is_used = torch.linalg.vector_norm(flat, float("inf"), dim=1).reshape(shape) != 0
        used[:] = [used[0] | is_used] if used else [is_used]
