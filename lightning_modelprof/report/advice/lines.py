"""What to change at the line that takes the time, by what it runs."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.source.source_lines import SourceLine, by_place

MANY_OPERATORS: Final = 64
"""From so many operators in one step on one line it is a loop, most likely over rows or samples."""

IN_GENERAL: Final = (
    "Look for loops over rows, tensors made on the host, values that are read (.item(), assert) and calls of"
    " self.log in {where}; write operations on whole tensors, read and log less often."
)


def advice_for(
    analysis: Analysis, file: str | None, line: int | None, where: str, *, outside_modules: bool = False
) -> str:
    """What to do about a function that takes long.

    Args:
        analysis: of the run.
        file: of the function.
        line: first line of the function.
        where: what the function is called in a sentence.
        outside_modules: whether time in the model's modules is not what it is about.
    """
    source = _line_of(analysis, file, line, outside_modules)
    if source is None or source.operators is None:
        return IN_GENERAL.format(where=where)
    place = f"Line {source.line} of {source.function}"
    if source.own_operators >= MANY_OPERATORS:
        return (
            f"{place} runs {source.own_operators} operators in a step, as a loop over rows does: write it as"
            " operations on whole tensors. If its result is the same in each step, make it once."
        )
    if source.own_tensors:
        return (
            f"{place} makes a tensor of Python numbers, or copies one, in every step. If they are always the"
            " same, make it once, in __init__ with register_buffer; if not, compute them with operations on"
            " tensors (also torch.arange, torch.full) and not number by number in Python."
        )
    if source.waits:
        return f"{place} reads values of tensors: check them where the data is loaded, or every some steps."
    hot = analysis.hot_lines
    if source.operators == 0 and not isinstance(hot, Absent) and hot.is_call(source.file, source.line):
        return IN_GENERAL.format(where=f"what line {source.line} of {source.function} calls")
    if source.operators == 0:
        return (
            f"{place} runs no operator of torch: the time is Python's own, or a library's. If the loss does"
            " not need it, do it every some steps or once an epoch; if it does, do it for the whole batch"
            " with operations on tensors, or in the Dataset, where workers do it."
        )
    return IN_GENERAL.format(where=where)


def _line_of(
    analysis: Analysis, file: str | None, line: int | None, outside_modules: bool
) -> SourceLine | None:
    """The innermost line of the user's that takes the time of a function."""
    hot, lines = analysis.hot_lines, analysis.source_lines
    if isinstance(lines, Absent) or file is None or line is None:
        return None
    found = None if isinstance(hot, Absent) else hot.inside(file, line, outside_modules=outside_modules)
    if found is not None:
        innermost = found.inner or found
        return by_place(lines).get((innermost.file, innermost.line))
    if not outside_modules:
        return None
    # No line has most of the samples: the one that runs by far the most operators is as good a guess.
    own = [one for one in lines if [path for path, _ in one.by_module] == [""] and "forward" in one.phases]
    most = max(own, key=lambda one: one.own_operators, default=None)
    return most if most is not None and most.own_operators >= MANY_OPERATORS else None
