"""Parts of a model that must not get hooks inside: what is compiled, TorchScript, and fast paths."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FunctionType

import torch
from torch import nn

from lightning_modelprof.flops.compiled import find_compiled
from lightning_modelprof.inspect.modules.modules import plain_path

_WRAPPER = "_orig_mod"
_COMPILED_FUNCTION = "_torchdynamo_orig_callable"


@dataclass(slots=True)
class Regions:
    """Where hooks go and where they do not.

    Attributes:
        hooked: paths and modules that get hooks of their own, in the order of ``named_modules``; a wrapper,
            such as FSDP's, has the path of what it wraps.
        called: modules whose call is compiled (``module.compile()``): hooks would be compiled with it, so
            the call itself is wrapped.
        watched: modules that lose their fast path when they have hooks: seen by hooks for all modules.
        notes: what has no times of its own and why.
    """

    hooked: list[tuple[str, nn.Module]] = field(default_factory=list)
    called: list[tuple[str, nn.Module]] = field(default_factory=list)
    watched: list[tuple[str, nn.Module]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_regions(root: nn.Module) -> Regions:
    """Decide for every module of a model how it is timed, if it is.

    The outermost compiled module is timed as a whole: hooks inside would not be called, break its graph or
    compile it anew. A TorchScript module takes no hooks, and its time is its caller's.
    nn.TransformerEncoderLayer in eval mode keeps its fast path only without hooks.
    """
    regions = Regions()
    if getattr(root, "_compiler_ctx", None):  # how Lightning notes torch.compile(LightningModule)
        regions.notes.append("The whole model is compiled: its modules cannot be timed.")
        return regions
    heads: dict[int, str] = {}
    scripts: list[str] = []
    inside: set[int] = set()
    for path, module in root.named_modules():
        is_script = isinstance(module, torch.jit.ScriptModule)
        if id(module) in inside or not (is_script or _is_compiled(module)):
            continue
        inside.update(id(part) for part in module.modules())
        name = plain_path(path)
        if is_script:
            scripts.append(name or type(module).__name__)
        else:
            heads[id(module)] = name or type(module).__name__
    fast = _parts_with_a_fast_path(root)
    without_hooks = inside | fast
    # Hooks for all modules make compiled ones complain, and would be compiled with them.
    can_watch = not heads and find_compiled(root) is None
    for path, module in root.named_modules():
        name = plain_path(path)
        if id(module) in heads:
            (regions.called if _has_compiled_call(module) else regions.hooked).append((name, module))
        elif id(module) not in without_hooks:
            regions.hooked.append((name, module))
        elif id(module) not in inside and can_watch:
            regions.watched.append((name, module))
    unseen: list[str] = []
    if not can_watch:
        layers = [(p, m) for p, m in root.named_modules() if isinstance(m, nn.TransformerEncoderLayer)]
        unseen = [plain_path(path) for path, layer in layers if id(layer) in fast - inside]
    regions.notes += _notes(list(heads.values()), scripts, unseen)
    return regions


def _parts_with_a_fast_path(root: nn.Module) -> set[int]:
    return {
        id(part)
        for layer in root.modules()
        if isinstance(layer, nn.TransformerEncoderLayer) and not layer.training
        for part in layer.modules()
    }


def _has_compiled_call(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _is_compiled(module: nn.Module) -> bool:
    """Whether a call of the module, or all that its call does, is compiled."""
    if _WRAPPER in module._modules or _has_compiled_call(module):
        return True
    forward = vars(module).get("forward", getattr(type(module), "forward", None))
    return isinstance(forward, FunctionType) and _COMPILED_FUNCTION in vars(forward)


def _notes(wholes: list[str], scripts: list[str], unseen: list[str]) -> list[str]:
    notes = []
    if wholes:
        notes.append(f"Compiled, so timed as a whole without the modules inside: {', '.join(wholes)}.")
    if scripts:
        notes.append(
            f"TorchScript takes no hooks; its time is that of the module that calls it: {', '.join(scripts)}."
        )
    if unseen:
        notes.append(
            "Hooks would end the fast path of these layers; their time is that of the module that calls them:"
            f" {', '.join(unseen)}."
        )
    return notes
