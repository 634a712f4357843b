"""Is a bias computed that the next layer subtracts again?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.model import Finding, Location, Severity
from lightning_modelprof.report.rules.base import NO_SETUP, Rule, count


@dataclass(frozen=True, kw_only=True)
class ConvolutionBiasBeforeBatchNorm(Rule):
    """A convolution with a bias right before a BatchNorm of as many channels.

    What it costs is not measured: no time at stake, and never a warning.
    """

    kind: ClassVar[str] = "conv_bias_before_batchnorm"
    title: ClassVar[str] = "A convolution's bias is subtracted again by BatchNorm"
    takes_time_there: ClassVar[bool] = False

    least: int = 1
    """So many of them are worth a word."""

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found or clean."""
        if analysis.setup is None:
            return self.not_evaluated(NO_SETUP)
        pairs = analysis.setup.convolution_biases
        if len(pairs) < self.least:
            return self.clean(
                "No convolution with a bias stands right before a BatchNorm, as far as order is known."
            )
        first = pairs[0]
        certain = all(pair.is_sequential for pair in pairs)
        return (
            self.found(
                f"{first.convolution} adds a bias that {first.normalisation} subtracts with the mean"
                + (f", and so do {len(pairs) - 1} more convolutions" if len(pairs) > 1 else "")
                + ("." if certain else "; the order is told by their names."),
                "Conv(..., bias=False): the BatchNorm after it has a bias of its own.",
                Severity.INFO,
                places=[
                    Location(
                        file=None if pair.owner is None else pair.owner.file,
                        line=None if pair.owner is None else pair.owner.line,
                        function=None if pair.owner is None else pair.owner.name,
                        module=pair.convolution,
                    )
                    for pair in pairs
                ],
                evidence=[count("convolutions", len(pairs))],
            ),
        )
