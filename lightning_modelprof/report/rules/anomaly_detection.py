"""Is autograd's anomaly detection on?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.source.hot_lines import FoundCalls, HotLines
from lightning_modelprof.report.model import Finding, Severity
from lightning_modelprof.report.rules.sampled_calls import SampledCallsRule
from lightning_modelprof.run.stacks import StackFrame

_IS_ON: Final = (
    "Anomaly detection is on: autograd keeps the Python stack of every operator, and looks for NaN in every"
    " gradient."
)


@dataclass(frozen=True, kw_only=True)
class AnomalyDetection(SampledCallsRule):
    """The mode is on, and samples are where the stacks of operators are written down.

    Caveats:
        More goes than is said: what looking for NaN takes is not told apart, and code that keeps the
        interpreter is sampled too seldom. In a model of 110 operators a step of 56 ms took 10 ms without it,
        where 27 were said.
    """

    kind: ClassVar[str] = "anomaly_detection"
    title: ClassVar[str] = "Anomaly detection is on"
    what: ClassVar[str] = "Keeping the stacks of operators takes"

    def calls(self, analysis: Analysis, hot: HotLines) -> FoundCalls | Absent:
        """Python's own formatting of stacks."""
        setup = analysis.setup
        if setup is None or setup.detects_anomaly is None:
            return Absent("whether anomaly detection is on was not looked at")
        found = hot.found_by(_traceback, ("forward",)) if setup.detects_anomaly else _NOTHING
        return found._replace(lines=())  # of Python's own, which nobody can change

    def summary(self, analysis: Analysis, calls: FoundCalls, took: str) -> str:  # noqa: ARG002
        """What the stacks take."""
        return f"{_IS_ON} The stacks alone take at least {took}."

    def action(self, analysis: Analysis, calls: FoundCalls | None = None) -> str:  # noqa: ARG002
        """Off."""
        return (
            "Remove detect_anomaly=True of the Trainer, or torch.autograd.set_detect_anomaly(True), unless"
            " you search for a NaN."
        )

    def too_few(self, analysis: Analysis, summary: str) -> tuple[Finding, ...]:  # noqa: ARG002
        """A hint where it is on, whatever it takes."""
        if analysis.setup is None or not analysis.setup.detects_anomaly:
            return self.clean("Anomaly detection is off.")
        return (self.found(_IS_ON, self.action(analysis), Severity.INFO),)


_NOTHING: Final = FoundCalls(lines=(), share=0.0, samples=0, functions=())


def _traceback(path: Sequence[StackFrame]) -> int | None:
    return next((at for at, frame in enumerate(path) if frame.module == "traceback"), None)
