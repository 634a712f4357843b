"""Time of some of a step's operators: forward from samples, backward from the inspected step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from lightning_modelprof.analysis.source.hot_lines import HotLines
from lightning_modelprof.analysis.source.source_lines import SourceLine
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.run.sites import LineCount, StepSites

LEAST_OPERATOR_NS: Final = 5_000
"""Host time that calling any operator takes."""

_MOST_BACKWARD: Final = 3
"""Backward of an operator takes at most this many times its forward.

A matrix product's backward is two products of the same size. The bound is needed because the inspected step
is only one, and a pause may have interrupted it."""


class OperatorTime(NamedTuple):
    """Operator time per step of the loop, by the host's clock.

    Attributes:
        forward_ns, error_ns: mean and its standard error.
        backward_ns: upper bound.
        samples: samples behind these times.
        lines: lines with such operators in forward, most time first.
    """

    forward_ns: float
    error_ns: float
    backward_ns: float
    samples: int
    lines: tuple[SourceLine, ...]

    @property
    def whole_ns(self) -> float:
        return self.forward_ns + self.backward_ns

    @property
    def least_ns(self) -> float:
        """``whole_ns`` at two standard errors below ``forward_ns``."""
        share = max(0.0, 1 - 2 * self.error_ns / self.forward_ns) if self.forward_ns else 0.0
        return share * self.whole_ns


def operator_time(
    part_of: Callable[[LineCount], float],
    *,
    sites: StepSites,
    lines: Sequence[SourceLine],
    hot: HotLines,
    costs: StepCosts,
) -> OperatorTime:
    """Time of some operators of the user's lines, without logging.

    Args:
        part_of: the operators' part of a line's time in one phase and module, 0..1.
        sites: of the inspected step.
    """
    own: Counter[tuple[str | None, int | None]] = Counter()
    every: Counter[tuple[str | None, int | None]] = Counter()
    backward = every_backward = 0.0
    for one in sites.lines:
        cost_ns = one.took_ns + LEAST_OPERATOR_NS * one.own_calls
        if one.phase == "forward":
            own[one.file, one.line] += round(part_of(one) * cost_ns)
            every[one.file, one.line] += cost_ns
        elif one.phase == "backward":
            backward += part_of(one) * cost_ns
            every_backward += cost_ns
    share, samples, found = 0.0, 0, []
    for line in lines:
        part = own[line.file, line.line] / (every[line.file, line.line] or 1)
        if part:
            own_share = part * ((line.share or 0.0) - line.logging_share)
            share += own_share
            samples += (line.samples or 0) - line.logging_samples
            found.append((own_share, line))
    found.sort(key=lambda pair: -pair[0])
    forward_ns = share * costs.loop.wall_ns
    backward_ns = costs.loop.phases_ns.get("backward") or 0.0
    taken_ns = backward_ns * backward / every_backward if every_backward else 0.0
    return OperatorTime(
        forward_ns=forward_ns,
        error_ns=math.sqrt(max(0.0, share * (1 - share)) / max(hot.num_samples, 1)) * costs.loop.wall_ns,
        backward_ns=min(taken_ns, _MOST_BACKWARD * forward_ns),
        samples=samples,
        lines=tuple(line for _, line in found),
    )
