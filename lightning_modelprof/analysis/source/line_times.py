"""What some of a step's operators take: in forward by samples, in backward by the inspected step."""

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
"""What the host needs for calling any operator."""

_MOST_BACKWARD: Final = 3
"""Backward of an operator takes at most so many times its forward.

A product's is two products of the same size. The inspected step is only one, where a pause may have come
between."""


class OperatorTime(NamedTuple):
    """Per step of the loop, by the host's clock.

    Attributes:
        forward_ns, error_ns: with its standard error.
        backward_ns: at most.
        samples: that say so.
        lines: with such operators in forward, most time first.
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
        """The same for two standard errors less."""
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
    """The time of some operators of the user's lines, without those of logging.

    Args:
        part_of: of what a line ran in one phase and module, which part of its time is theirs, 0..1.
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
