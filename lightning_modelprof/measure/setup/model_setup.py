"""What torch.compile did during the loop, from torch's own counters."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

from torch import nn

from lightning_modelprof.measure.setup.environment import written_class
from lightning_modelprof.measure.stored import is_a, named_children, named_modules
from lightning_modelprof.measure.user_code import UserCode, absolute_file, is_library, place_of
from lightning_modelprof.place import Place
from lightning_modelprof.run.setup import Compilation, CompileSetup, ConvolutionBias

_FRAME: Final = re.compile(r"Line: (?P<line>\d+), Name: (?P<name>.*?), Filename: (?P<file>.+)")


_MAX_GUARDS: Final = 5
"""Most reasons kept per function."""


def compile_setup(began_s: float) -> CompileSetup | None:
    """Return compilations since a time, with all graph breaks and failed guards of this process.

    Args:
        began_s: ``time.time()`` from which on compilations count.

    Returns:
        ``None`` if nothing was compiled since then.

    Caveats:
        torch keeps the last 64 compilations. Its counts of graph breaks and failed guards cover the whole
        process.
    """
    utils: Any = sys.modules.get("torch._dynamo.utils")  # never imported for this, as that takes a second
    if utils is None:
        return None
    metrics = [one for one in utils.get_compilation_metrics() if (one.start_time or 0) >= began_s]
    if not metrics:
        return None
    return CompileSetup(
        compilations=tuple(_compilation(one) for one in metrics),
        graph_breaks={
            _first_line(reason): count for reason, count in utils.counters.get("graph_break", {}).items()
        },
        failed_guards={
            code.co_name: tuple(dict.fromkeys(map(_first_line, reasons)))[:_MAX_GUARDS]
            for code, reasons in getattr(utils, "guard_failures", {}).items()
            if reasons
        },
    )


def _compilation(metrics: Any) -> Compilation:
    # "3/1": the second compilation of the fourth function. Older versions have no such id.
    attempt = str(getattr(metrics, "compile_id", None) or "0/0").partition("/")[2].partition("_")[0]
    file, line = metrics.co_filename, metrics.co_firstlineno
    return Compilation(
        function=Place(function=str(metrics.co_name), file=file, line=line, is_library=is_library(file)),
        attempt=int(attempt) if attempt.isdecimal() else 0,
        seconds=metrics.entire_frame_compile_time_s,
        caller=_caller(getattr(metrics, "stack_trace", None) or ()),
    )


def _caller(stack: Sequence[str]) -> Place | None:
    """Return the user's innermost statement on torch's textual stack, whose last entry was compiled."""
    for text in reversed(stack[:-1]):
        match = _FRAME.fullmatch(text)
        if match is not None and not is_library(match["file"]):
            return Place(function=match["name"], file=absolute_file(match["file"]), line=int(match["line"]))
    return None


def _first_line(text: object) -> str:
    return str(text).strip().partition("\n")[0]


_CONVOLUTIONS: Final = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}


_NUMBER: Final = re.compile(r"\d*$")


def convolution_biases(module: nn.Module) -> tuple[ConvolutionBias, ...]:
    """Find convolutions with a bias right before a BatchNorm of as many channels that uses the batch mean.

    In a ``Sequential``, layers run in order. Elsewhere, only neighbours count whose names end in the same
    number, as in ``conv1`` and ``bn1``.

    Source: the mean that BatchNorm subtracts contains the bias (Ioffe and Szegedy, Batch Normalization, 2015,
    section 3.2).
    """
    return tuple(_found(module))


def _found(module: nn.Module) -> Iterator[ConvolutionBias]:
    for path, parent in named_modules(module):
        is_sequential = is_a(parent, nn.Sequential)
        for (name, layer), (next_name, next_layer) in pairwise(named_children(parent)):
            if not _undoes(layer, next_layer):
                continue
            if not is_sequential and _number(name) != _number(next_name):
                continue
            prefix = f"{path}." if path else ""
            yield ConvolutionBias(
                convolution=prefix + name,
                normalisation=prefix + next_name,
                is_sequential=is_sequential,
                owner=_owner(module, path),
            )


def _undoes(layer: nn.Module, after: nn.Module) -> bool:
    for convolution, normalisation in _CONVOLUTIONS.items():
        if is_a(layer, convolution) and is_a(after, normalisation):
            return layer.bias is not None and layer.out_channels == after.num_features
    return False


def _number(name: str) -> str:
    found = _NUMBER.search(name)
    return found.group() if found is not None else ""


def _owner(root: nn.Module, path: str) -> Place | None:
    """Return the constructor of the innermost module on the path that isn't a library's."""
    while True:
        kind: Any = type(root.get_submodule(path))
        place = place_of(kind.__init__)
        if place is not None and not is_library(place.file):
            return place
        if not path:
            return None
        path = path.rpartition(".")[0]


NAMES: Final = frozenset(
    ("DataLoader", "Trainer", "ModelCheckpoint", "Embedding", "EmbeddingBag", "double", "float64")
)
"""Names of functions, classes and attributes."""


_MOST_FILES: Final = 8


_MOST_CHARACTERS: Final = 500_000


_MOST_LINES: Final = 8


def class_files(*things: Any) -> frozenset[str]:
    """Return the user's files that define these objects' classes; ``None`` is skipped."""
    found = set()
    for one in things:
        if one is None:
            continue
        try:
            found.add(absolute_file(inspect.getfile(written_class(one))))
        except (OSError, TypeError):  # built in, or defined at a prompt
            continue
    user_code = UserCode(tuple(type(one) for one in things if one is not None))
    return frozenset(file for file in found if user_code.is_users_file(file))


def calls_by_name(files: Iterable[str]) -> dict[str, tuple[Place, ...]]:
    """Return the lines of these files that call or name one of ``NAMES``, in order."""
    found: dict[str, list[Place]] = {}
    for file in sorted(files)[:_MOST_FILES]:
        text = "".join(linecache.getlines(file))
        if not any(name in text for name in NAMES) or len(text) > _MOST_CHARACTERS:
            continue
        for name, line, function in _calls_in(text):
            places = found.setdefault(name, [])
            if len(places) < _MOST_LINES:
                places.append(Place(function=function, file=file, line=line))
    return {name: tuple(dict.fromkeys(places)) for name, places in found.items()}


@lru_cache(maxsize=_MOST_FILES)
def _calls_in(text: str) -> tuple[tuple[str, int, str], ...]:
    """Return a file's calls, cached for all loops of the process; none if it isn't Python."""
    try:
        return tuple(_calls(ast.parse(text), ""))
    except (SyntaxError, ValueError, RecursionError):
        return ()


def _calls(node: ast.AST, function: str) -> Iterator[tuple[str, int, str]]:
    """Yield name, line and enclosing function."""
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{function}.{child.name}" if function else child.name
        if isinstance(child, ast.Call) and (name := _last_name(child.func)) in NAMES:
            yield name, child.lineno, function
        if isinstance(child, ast.Attribute) and child.attr == "float64":
            yield child.attr, child.lineno, function
        yield from _calls(child, inner)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
