"""Do hooks that were registered on modules or tensors take long?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.source.hot_lines import FoundCalls, HotLines
from lightning_modelprof.report.rules.sampled_calls import SampledCallsRule

_MOST_NAMES: Final = 3


@dataclass(frozen=True, kw_only=True)
class SlowLayerHooks(SampledCallsRule):
    """Functions that torch calls as hooks of modules, tensors or their gradients.

    Such as are registered to look for NaN or to keep statistics of each layer, and forgotten.

    Caveats:
        A hook may change what the layer computes: then it is no surplus.
    """

    kind: ClassVar[str] = "slow_layer_hooks"
    title: ClassVar[str] = "Hooks on layers take long"
    phases: ClassVar[tuple[str, ...]] = ("forward", "backward")
    what: ClassVar[str] = "Hooks on layers take"

    def calls(self, analysis: Analysis, hot: HotLines) -> FoundCalls | Absent:  # noqa: ARG002
        """As the analysis has found them."""
        return analysis.layer_hooks

    def summary(self, analysis: Analysis, calls: FoundCalls, took: str) -> str:  # noqa: ARG002
        """Which functions."""
        names = ", ".join(calls.functions[:_MOST_NAMES])
        return f"Torch calls {names} for layers or tensors of the model: {took}."

    def action(self, analysis: Analysis, calls: FoundCalls) -> str:  # noqa: ARG002
        """Fewer of them."""
        return (
            "Remove the hook (the handle that registering it returned has remove()), register it on fewer"
            " layers, or let it work in every hundredth step only."
        )
