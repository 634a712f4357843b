"""Does the optimizer change all rows of a large embedding, though a batch uses a few?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.report.model import Finding
from lightning_modelprof.report.rules.base import (
    NOT_A_FIT,
    ShareRule,
    Whole,
    count,
    duration,
    lines_that_call,
    milliseconds,
    percent,
    ratio,
    usual_step,
)
from lightning_modelprof.run.loops import loop_of


@dataclass(frozen=True, kw_only=True)
class DenseEmbeddings(ShareRule):
    """Embeddings with dense gradients, of which a step looks up few rows, and the time of the optimizer.

    At stake is the share of the phases Optimization and Zero grad that unused rows have of all trainable
    parameters. Making the gradient, which is mostly zeros, comes on top and is not counted.

    Attributes:
        most_used: share of a table's rows that a step looks up at most.
    """

    kind: ClassVar[str] = "dense_embeddings"
    title: ClassVar[str] = "Each step updates all rows of an embedding, and uses few"
    phases: ClassVar[tuple[str, ...]] = ("optimizer", "zero_grad")
    bound: ClassVar[str | None] = "optimizer_bound"
    takes_time_there: ClassVar[bool] = False

    warning: float = 0.05
    critical: float = 0.20
    most_used: float = 0.25

    def whole(self, analysis: Analysis, costs: StepCosts) -> Whole:  # noqa: ARG002
        """Of a usual clean step."""
        return usual_step(costs, costs.typical)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where no step was counted."""
        costs, modules = analysis.step_costs, analysis.modules
        if not loop_of(analysis.info.loop).is_fit:
            return self.not_evaluated(NOT_A_FIT)
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if analysis.info.device_type != "cpu":
            return self.not_evaluated("the device's time in the optimizer is not the host's")
        if analysis.cost is None or analysis.cost.waste is None:
            return self.not_evaluated("no step was counted as it ran (flops=True does)")
        if isinstance(modules, Absent) or not modules.root.trainable:
            return self.not_evaluated("the parameters of the model are not known")
        tables = [one for one in analysis.cost.waste.tables if one.used <= self.most_used * one.rows]
        unused = sum((one.rows - one.used) * one.columns for one in tables)
        phases = [costs.usual_ns(costs.typical, phase) or 0.0 for phase in self.phases]
        wall_ns, whole = self.whole(analysis, costs)
        part = min(1.0, unused / modules.root.trainable)
        cost_ns = part * sum(phases)
        share = cost_ns / wall_ns if wall_ns else None
        if share is None or not self.is_found(share, cost_ns):
            return self.clean("No embedding has many rows that its steps do not use.")
        first = max(tables, key=lambda one: one.rows * one.columns)
        return (
            self.found(
                f"A step looks up at most {first.used:,} of the {first.rows:,} rows of {first.path}, and the"
                f" optimizer changes all of them: {milliseconds(cost_ns)} a step ({percent(share)} of"
                f" {whole}) are for rows that it did not use.",
                "nn.Embedding(..., sparse=True) with torch.optim.SparseAdam (SGD and Adagrad take sparse"
                " gradients as they are) changes the rows of the batch alone. Adam's averages of all other"
                " rows stand still then, which changes the training a little: compare the validation loss.",
                self.severity(share),
                saving_ns=cost_ns,
                places=lines_that_call(analysis.setup, "Embedding", "EmbeddingBag"),
                evidence=[
                    duration("for unused rows per step", cost_ns),
                    ratio(f"share of {whole}", share),
                    ratio("share of the parameters in unused rows", part),
                    count("rows of the largest table", first.rows),
                    count("looked up in a step", first.used),
                ],
            ),
        )
