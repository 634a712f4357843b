"""Does the user's own code in the optimizer's step take long?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.source.hot_lines import FoundCalls, HotLines
from lightning_modelprof.report.rules.base import NOT_A_FIT
from lightning_modelprof.report.rules.sampled_calls import SampledCallsRule
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.stacks import StackFrame

_TORCHS: Final = "torch.optim"


@dataclass(frozen=True, kw_only=True)
class SlowOptimizer(SampledCallsRule):
    """Code of the user's in the phase Optimization, with all that it calls but torch's own optimizers.

    An optimizer of the user's own, a ``step`` around torch's, or ``optimizer_step`` of the module.

    Caveats:
        How much of it a better way leaves is not known: the time at stake is all of it.
    """

    kind: ClassVar[str] = "slow_optimizer"
    title: ClassVar[str] = "The optimizer's own code takes long"
    phases: ClassVar[tuple[str, ...]] = ("optimizer",)
    what: ClassVar[str] = "Code of yours in the optimizer's step takes"
    bound: ClassVar[str | None] = "optimizer_bound"

    def calls(self, analysis: Analysis, hot: HotLines) -> FoundCalls | Absent:
        """The user's, outside of torch's optimizers."""
        if not loop_of(analysis.info.loop).is_fit:
            return Absent(NOT_A_FIT)
        return hot.found_by(_own_code, ("optimizer",))

    def summary(self, analysis: Analysis, calls: FoundCalls, took: str) -> str:  # noqa: ARG002
        """Which function."""
        return f"{calls.functions[0]} takes {took} in the optimizer's step."

    def action(self, analysis: Analysis, calls: FoundCalls) -> str:  # noqa: ARG002
        """Whole tensors at once."""
        return (
            "Update whole tensors at once instead of rows or single parameters: torch._foreach_* functions"
            " take lists of tensors, and torch's own optimizers have foreach=True and fused=True."
        )


def _own_code(path: Sequence[StackFrame]) -> int | None:
    """The user's outermost call below which no optimizer of torch's runs."""
    begin = max((at for at, frame in enumerate(path) if frame.module.startswith(_TORCHS)), default=-1) + 1
    return next((at for at in range(begin, len(path)) if path[at].is_users), None)
