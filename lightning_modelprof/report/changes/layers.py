"""Changes of statements that make layers."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.report.changes.edits import SourceEdit
from lightning_modelprof.report.changes.offers import offer, offer_arguments, only_statement, statements_about
from lightning_modelprof.report.model import CHANGES_NUMERICS, SAME_RESULTS, CodeChange, Finding

_CONVOLUTION: Final = "convolution"
_UNTRAINED: Final = "untrained"
_POSITIONS: Final = (
    *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias"),
    *("padding_mode", "device", "dtype"),
)


def without_bias(finding: Finding, facts: Facts) -> CodeChange | None:  # noqa: ARG001
    """A convolution without the bias that BatchNorm takes away."""
    statement = only_statement(facts.setup, _CONVOLUTION)
    return offer_arguments(
        statement, "Conv", {"bias": False}, CHANGES_NUMERICS, positions=_POSITIONS, defaults={}
    )


def frozen(finding: Finding, facts: Facts) -> CodeChange | None:
    """Without gradients where no optimizer trains it, at the start, in the counted step or at the end."""
    setup = facts.setup
    if len(finding.wants) != 1:
        return None
    path, _ = finding.wants[0]
    statement = next((one for one in statements_about(setup, _UNTRAINED) if one.module == path), None)
    if path not in setup.untrained or statement is None:
        return None
    new = f"self.{path.rpartition('.')[2]}.requires_grad_(False)"

    def edit(source: SourceEdit) -> None:
        source.add_after(statement.line, statement.end_line, new)

    return offer(statement, edit, new, SAME_RESULTS)
