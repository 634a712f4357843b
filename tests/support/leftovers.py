"""Everything that a fit could leave in its process, to compare before and after."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

PACKAGES = (
    *("torch.autograd", "torch.nn.modules.module", "torch.nn.functional", "torch.optim.optimizer"),
    *("torch.profiler", "torch.utils.data", "torch._tensor", "torch.overrides", "torch.random"),
    *("lightning.pytorch", "pytorch_lightning", "builtins", "threading", "warnings", "logging"),
    *("multiprocessing", "subprocess", "signal", "os", "time", "random"),
)
"""Packages whose functions might be replaced."""

Leftovers = dict[str, Any]


def things_of_process() -> Leftovers:
    """Comparable values of the process, by name."""
    gc.collect()
    return {
        "dispatch modes": [type(one).__name__ for one in _get_current_dispatch_mode_stack()],
        "function modes": [type(one).__name__ for one in _get_current_function_mode_stack()],
        "hooks of torch": _global_hooks(),
        "torch records": (torch.autograd._profiler_enabled(), torch.autograd.profiler._is_profiler_enabled),
        "torch's state": _torch_state(),
        "threads": sorted(one.name for one in threading.enumerate() if not _is_torchs(one.name)),
        "children": _children(),
        "open files": _open_files(),
        "temporary files": Counter(map(_without_random, Path(tempfile.gettempdir()).iterdir())),
        "shared memory": _shared_memory(),
        "tracing": (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
        "monitoring": _monitoring(),
        "signal handlers": {number: _name(signal.getsignal(number)) for number in signal.valid_signals()},
        "timers": [signal.getitimer(one) for one in (signal.ITIMER_REAL, signal.ITIMER_PROF)],
        "hooks of Python": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "garbage collector": (list(gc.callbacks), gc.isenabled(), gc.get_threshold()),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "loggers": _loggers(),
        "settings": (sys.getswitchinterval(), sys.getrecursionlimit(), str(Path.cwd()), _umask(), os.nice(0)),
        "environment": dict(os.environ),
        "functions": _functions(),
        "exit handlers": atexit._ncallbacks(),
    }


def things_of(trainer: Any, module: Any, *others: Any) -> Leftovers:
    """Attributes of the user's objects, and which of them are this package's code."""
    loops = {"fit loop": trainer.fit_loop, "epoch loop": trainer.fit_loop.epoch_loop}
    loops["validation loop"] = trainer.fit_loop.epoch_loop.val_loop
    objects = {"trainer": trainer, "strategy": trainer.strategy, "data": trainer._data_connector, **loops}
    theirs = [one for one in trainer.callbacks if not _is_ours(one)]
    objects |= {f"callback {number}": one for number, one in enumerate(theirs)}
    objects |= {f"optimizer {number}": one for number, one in enumerate(trainer.optimizers)}
    objects |= {f"module {name}": one for name, one in module.named_modules()}
    objects |= {f"other {number}": one for number, one in enumerate(others)}
    classes = {kind for one in objects.values() for kind in type(one).__mro__ if kind is not object}
    return {
        "callbacks": theirs,
        "profiler": type(trainer.profiler),
        "attributes": {name: _own(one) for name, one in objects.items()},
        "classes": {f"{kind.__module__}.{kind.__qualname__}": _code(vars(kind)) for kind in classes},
        "hooks": {
            (name, kind): len(value)
            for name, one in objects.items()
            for kind, value in vars(one).items()
            if "hook" in kind and isinstance(value, dict)
        },
        "tensor hooks": {
            name: (len(one._backward_hooks or ()), len(one._post_accumulate_grad_hooks or ()))
            for name, one in module.named_parameters()
        },
    }


def differences(before: Leftovers, after: Leftovers) -> dict[tuple[str, Any], Any]:
    """Changes: (kind, name) → before and after."""
    none = "not there"
    kinds = [kind for kind in {**before, **after} if before.get(kind, none) != after.get(kind, none)]
    one, other = _flat(before, kinds), _flat(after, kinds)
    return {
        key: (one.get(key, none), other.get(key, none))
        for key in {**one, **other}
        if one.get(key, none) != other.get(key, none)
    }


def _flat(things: Leftovers, kinds: list[str]) -> dict[tuple[str, Any], Any]:
    return {
        (kind, name): value
        for kind in kinds
        if kind in things
        for name, value in (things[kind].items() if isinstance(things[kind], dict) else [("", things[kind])])
    }


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("lightning_modelprof") or str(
        getattr(value, "__module__", "")
    ).startswith("lightning_modelprof")


def _own(one: Any) -> dict[str, str]:
    """Attributes that hold code, or anything of this package."""
    if _is_ours(one):
        return {}
    held = {name: value for name, value in vars(one).items() if callable(value) or _is_ours(value)}
    return {name: "ours" if _is_ours(value) else type(value).__name__ for name, value in held.items()}


_CODE = (FunctionType, MethodType, property, classmethod, staticmethod)
_BELOW_PACKAGES = tuple(f"{one}." for one in PACKAGES)


def _code(members: Any) -> dict[str, int]:
    return {name: id(value) for name, value in members.items() if isinstance(value, _CODE)}


def _functions() -> dict[tuple[str, str], Any]:
    """Functions and classes of other packages, and those classes' methods."""
    found: dict[tuple[str, str], Any] = {}
    for name, module in list(sys.modules.items()):
        if module is None or not (name in PACKAGES or name.startswith(_BELOW_PACKAGES)):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, FunctionType) or _is_ours(value):
                found[name, key] = id(value)
            elif isinstance(value, type) and value.__module__ == name:
                found[name, key] = _code(vars(value))
    return found


def _global_hooks() -> dict[str, int]:
    modules = (torch.nn.modules.module, sys.modules[torch.optim.Optimizer.__module__])
    return {
        name: len(value)
        for module in modules
        for name, value in vars(module).items()
        if name.startswith("_global") and isinstance(value, dict)
    }


def _torch_state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.is_autocast_enabled(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)(True),
    )


def _is_torchs(name: str) -> bool:
    return name.startswith(("QueueFeeder", "Thread-", "pin_memory"))


def _children() -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid():
                found.append((folder / "cmdline").read_text().replace("\0", " ") or f"ended: {state}")
    return sorted(found)


def _open_files() -> Counter[str]:
    """Open files, without numbers that differ each time."""
    found: Counter[str] = Counter()
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found[str(one.readlink()).partition(":[")[0]] += 1
    return found


def _shared_memory() -> list[str]:
    """Shared-memory files of this process, and its shared maps."""
    named = [one.name for one in Path("/dev/shm").iterdir() if f"_{os.getpid()}_" in one.name]
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return sorted(named + [one[5] for one in maps if one[1].endswith("s") and len(one) == 6])


def _monitoring() -> list[str | None]:
    tools = getattr(sys, "monitoring", None)
    return [] if tools is None else [tools.get_tool(number) for number in range(6)]


def _loggers() -> dict[str, Any]:
    known = {"": logging.getLogger()} | logging.Logger.manager.loggerDict
    return {
        name: (one.level, list(one.handlers), list(one.filters), one.disabled)
        for name, one in known.items()
        if isinstance(one, logging.Logger) and not name.startswith("lightning_modelprof")
    }


def _without_random(path: Path) -> str:
    """Name of a temporary file without its eight random characters."""
    return f"{path.name[:-8]}*"


def _name(handler: Any) -> str:
    """Name of a handler; Lightning leaves a new one each time."""
    return str(getattr(handler, "__qualname__", None) or getattr(handler, "name", type(handler).__qualname__))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
