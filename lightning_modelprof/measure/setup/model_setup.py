"""What torch.compile did while the loop ran, from the counters that torch keeps anyway."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, Final

from lightning_modelprof.measure.user_code import absolute_file, is_library
from lightning_modelprof.run.setup import CodePlace, Compilation, CompileSetup

_FRAME: Final = re.compile(r"Line: (?P<line>\d+), Name: (?P<name>.*?), Filename: (?P<file>.+)")
_MAX_GUARDS: Final = 5
"""Reasons kept for each function."""


def compile_setup(began_s: float) -> CompileSetup | None:
    """Compilations since a time, with all graph breaks and failed guards of this process.

    Args:
        began_s: ``time.time()`` from which on compilations count.

    Returns:
        ``None`` if nothing was compiled since then.

    Caveats:
        torch keeps the last 64 compilations. Its counts of graph breaks and failed guards are those of the
        whole process.
    """
    utils: Any = sys.modules.get("torch._dynamo.utils")  # never imported for this: that takes a second
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
    # "3/1": the second compilation of the fourth function. Older ones have no such id.
    attempt = str(getattr(metrics, "compile_id", None) or "0/0").partition("/")[2].partition("_")[0]
    file, line = metrics.co_filename, metrics.co_firstlineno
    return Compilation(
        function=CodePlace(name=str(metrics.co_name), file=file, line=line, is_library=is_library(file)),
        attempt=int(attempt) if attempt.isdecimal() else 0,
        seconds=metrics.entire_frame_compile_time_s,
        caller=_caller(getattr(metrics, "stack_trace", None) or ()),
    )


def _caller(stack: Sequence[str]) -> CodePlace | None:
    """The user's innermost statement on a stack in torch's words, the last of which is what was compiled."""
    for text in reversed(stack[:-1]):
        match = _FRAME.fullmatch(text)
        if match is not None and not is_library(match["file"]):
            return CodePlace(name=match["name"], file=absolute_file(match["file"]), line=int(match["line"]))
    return None


def _first_line(text: object) -> str:
    return str(text).strip().partition("\n")[0]
