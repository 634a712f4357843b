"""Does a line in a module's forward take long for many small operators or tensors made on the host?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.analyze import Analysis
from lightning_modelprof.analysis.source_lines import SourceLine
from lightning_modelprof.analysis.step_costs import StepCosts
from lightning_modelprof.report.line_advice import MANY_OPERATORS
from lightning_modelprof.report.model import Finding, Location
from lightning_modelprof.report.rules.base import (
    THE_LOOP,
    ShareRule,
    Whole,
    count,
    duration,
    milliseconds,
    percent,
    ratio,
)
from lightning_modelprof.run.training_setup import CodePlace

_LEAST_OWN: Final = 0.25


@dataclass(frozen=True, kw_only=True)
class SlowLineInModule(ShareRule):
    """A line in the ``forward`` of a module with parameters, by its share of the samples.

    Only lines that make tensors on the host or copy them in every step, or that run at least 64 operators
    themselves, which are at least a quarter of all at the line: the others are of modules that it calls.
    What is in ``training_step``, and modules without parameters, other rules are about.

    Attributes:
        least_samples: on the line.

    Source: 10 % and 20 % are the bands of TraceML for what is in a step and in none of its parts.

    Caveats:
        The time at stake is that of the host at this line; what the line computes has to be computed still.
        The share less two standard errors must be worth a finding.
    """

    kind: ClassVar[str] = "slow_line_in_module"
    title: ClassVar[str] = "A line in a module's forward takes long"
    bound: ClassVar[str | None] = "host_bound"
    takes_time_there: ClassVar[bool] = False

    warning: float = 0.10
    critical: float = 0.20
    least_samples: int = 10

    def whole(self, analysis: Analysis, costs: StepCosts) -> Whole:  # noqa: ARG002
        """Of the whole loop, as samples are of all of it."""
        return Whole(costs.loop.wall_ns, THE_LOOP)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """One finding for each such line, clean, or not evaluated without samples or an inspected step."""
        costs, lines, hot = analysis.step_costs, analysis.source_lines, analysis.hot_lines
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if isinstance(hot, Absent):
            return self.not_evaluated(hot.reason)
        if isinstance(lines, Absent) or analysis.cost is None or analysis.cost.sites is None:
            note = "" if analysis.cost is None else analysis.cost.sites_note
            return self.not_evaluated(note or "no step was inspected (flops=True does)")
        written = _forwards(analysis)
        found = []
        for line in lines:
            module = _module_of(line, written)
            if not module or (line.samples or 0) - line.logging_samples < self.least_samples:
                continue
            share = (line.share or 0.0) - line.logging_share
            error = math.sqrt(share * (1 - share) / hot.num_samples)
            least = share - 2 * error
            if self.is_found(least, least * costs.loop.wall_ns):
                found.append(self._one(line, module, share, share * costs.loop.wall_ns))
        return tuple(found) or self.clean("No line of a module's forward stands out.")

    def _one(self, line: SourceLine, module: str, share: float, took_ns: float) -> Finding:
        makes = line.own_tensors
        does = (
            f"makes or copies {makes} tensors of Python numbers in a step"
            if makes
            else f"runs {line.own_operators} operators in a step"
        )
        return self.found(
            f"Line {line.line} of {line.function} in {module} {does}, and {percent(share)} of the"
            f" samples are there: {milliseconds(took_ns)} a step.",
            "Make them once, in __init__ with register_buffer, or on the device (torch.arange, torch.full)."
            if makes
            else "Write the loop as operations on whole tensors, or torch.compile it: so many small operators"
            " are mostly overhead.",
            self.severity(share),
            saving_ns=took_ns,
            places=[
                Location(
                    file=line.file,
                    line=line.line,
                    function=line.function,
                    module=module,
                    is_exact=True,
                )
            ],
            evidence=[
                duration("at the line per step", took_ns),
                ratio("share of the samples", share),
                count("samples", (line.samples or 0) - line.logging_samples),
                count("operators", line.own_operators),
            ],
        )


def _forwards(analysis: Analysis) -> dict[str, CodePlace | None]:
    """Path → where its forward is written, of the modules with a parameter in them."""
    if analysis.cost is None or isinstance(analysis.modules, Absent):
        return {}
    with_parameters = {module.path for module in analysis.modules.modules if module.parameters}
    return {one.path: one.forward for one in analysis.cost.modules if one.path in with_parameters}


def _module_of(line: SourceLine, written: dict[str, CodePlace | None]) -> str | None:
    """The module in whose forward the line is, if it does there what costs time on the host."""
    for path, operators in line.by_module:
        place = written.get(path)
        if place is None or (place.file, place.line) != (line.file, line.function_line):
            continue
        is_loop = operators >= MANY_OPERATORS and operators >= _LEAST_OWN * line.own_operators
        if is_loop or line.own_tensors:
            return path
    return None
