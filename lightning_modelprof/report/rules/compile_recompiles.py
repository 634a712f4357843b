"""Does torch.compile compile the same function again and again, or break it into pieces?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.model import Finding, Location, Severity
from lightning_modelprof.report.rules.base import (
    FLOOR_NS,
    NO_SETUP,
    ShareRule,
    count,
    duration,
    location_of,
    milliseconds,
    percent,
    ratio,
)
from lightning_modelprof.run.setup import Compilation, CompileSetup


@dataclass(frozen=True, kw_only=True)
class CompileRecompiles(ShareRule):
    """Functions that torch.compile compiled more than once, and where it broke a graph.

    The time at stake is that of the compilations after the first of each function, spread over all finished
    steps; graph breaks have no time of their own.

    Attributes:
        least: recompilations, or graph breaks, from which on it is found.
    """

    kind: ClassVar[str] = "compile_recompiles"
    title: ClassVar[str] = "torch.compile compiles again, or breaks graphs"
    takes_time_there: ClassVar[bool] = False

    least: int = 1
    floor_ns: float = FLOOR_NS

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated without torch.compile."""
        costs, setup = analysis.step_costs, analysis.setup
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if setup.compiled is None:
            return self.not_evaluated("torch.compile compiled nothing while the loop ran")
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        compiled = setup.compiled
        again = [one for one in compiled.compilations if one.attempt > 0]
        breaks = sum(compiled.graph_breaks.values())
        if len(again) < self.least and breaks < self.least:
            return self.clean(
                f"{len(compiled.compilations)} compilations, none of them again, no graph break."
            )
        known_s = [one.seconds for one in again if one.seconds is not None]
        cost_ns = 1e9 * sum(known_s) / analysis.num_steps if len(known_s) == len(again) else None
        share = None if cost_ns is None or not costs.loop.wall_ns else cost_ns / costs.loop.wall_ns
        is_slow = cost_ns is not None and self.is_found(share, cost_ns)
        places = dict.fromkeys(_place(one) for one in again)
        return (
            self.found(
                _summary(compiled, len(again), breaks)
                + (
                    f" That took {milliseconds(cost_ns)} a step ({percent(share)} of the loop)."
                    if again and cost_ns
                    else ""
                ),
                "torch.compile(..., dynamic=True) or batches of one shape (drop_last=True, padding) against"
                " recompilations; fullgraph=True shows where graphs break.",
                self.severity(share) if is_slow and share is not None else Severity.INFO,
                saving_ns=cost_ns if again else None,
                places=places,
                evidence=[
                    count("recompilations", len(again)),
                    count("graph breaks", breaks),
                    duration("recompiling per step", cost_ns),
                    ratio("share of the loop", share),
                ],
            ),
        )


def _place(one: Compilation) -> Location:
    """The function; of what torch has put around a module the user's statement that ran it."""
    if not one.function.is_library or one.caller is None:
        return location_of(one.function)
    return replace(location_of(one.caller), is_exact=True)


def _summary(compiled: CompileSetup, again: int, breaks: int) -> str:
    sentences = []
    if again:
        failed = next((reasons[0] for reasons in compiled.failed_guards.values() if reasons), None)
        reason = f", because a guard failed: {failed}" if failed else ""
        sentences.append(f"{again} of {len(compiled.compilations)} compilations were again{reason}.")
    if breaks:
        reason = max(compiled.graph_breaks, key=lambda key: compiled.graph_breaks[key])
        sentences.append(f"Graphs broke {breaks} times, most often: {reason}.")
    return " ".join(sentences)
