"""Would larger batches use the processor better?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.batches import BatchScaling, fixed_by_work
from lightning_modelprof.report.model import Evidence, Finding, Severity, Status
from lightning_modelprof.report.rules.base import (
    FLOOR_NS,
    NOT_A_FIT,
    Rule,
    RuleHelp,
    count,
    duration,
    lines_that_call,
    ratio,
)
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.units import milliseconds, percent


class SmallBatches(Rule, frozen=True, kw_only=True):
    """The part of a step that its batch does not change, from steps whose batches have other sizes.

    A line through the times of the steps by their number of samples (Theil-Sen); it is found where the lower
    end of its interval says so. Fetches, and what was not compared, count as if they grew with the batch.
    Where all batches are of one size, the part is what no CPU would need for the FLOPs and bytes of a batch.
    One size doesn't tell how the rest grows, so nothing is promised there.

    Caveats:
        Beyond the sizes that were seen a step may grow faster: memory and caches are finite. There is no
        saving per step, as steps of twice the batch are other steps. Where the sizes of batches were not
        recorded, samples may also differ in length.

    Attributes:
        least_share: of a step, that the fixed part is at least.
        least_accumulated: the same where gradients are accumulated over several batches, so that batches of
            twice the size are the same training.
        tiny: samples in a batch up to which it is always said then.
        floor_ns: a fixed part below which nothing is found.
    """

    kind: ClassVar[str] = "small_batches"
    title: ClassVar[str] = "Fixed per-step overhead dominates"
    healthy: ClassVar[str] = "Batches are large enough"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "CPU training in one process: the part of the step that doesn't depend on the batch size, by a"
            " line through step times and sizes, also at the lower bound of its interval. If all batches"
            " have one size, it is the time of forward, backward and optimizer above the counted step's"
            " FLOPs and bytes at 4 GFLOP/s and 2 GB/s, at most 30 µs per operator, without a promise. A"
            " hint, since larger batches change the training: learning rate, its schedule and max_steps need"
            " retuning"
        ),
        levels="50% of the median step",
        where="`DataLoader(...)` calls",
    )

    least_share: float = 0.5
    least_accumulated: float = 0.15
    tiny: int = 4
    floor_ns: float = FLOOR_NS

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        [finding] = self._judge(analysis)
        tiny = None if finding.action else self._tiny(analysis, is_costly=finding.status is Status.FOUND)
        return (tiny or finding,)

    def _judge(self, analysis: Analysis) -> tuple[Finding, ...]:
        if not loop_of(analysis.info.loop).is_fit:
            return self.not_evaluated(NOT_A_FIT)
        if analysis.info.device_type != "cpu":
            return self.not_evaluated("only checked for CPU training")
        if analysis.info.world_size > 1:
            return self.not_evaluated("only checked with one rank")
        found = analysis.batch_scaling
        if isinstance(found, Absent):
            found = _by_work(analysis) or found
        if isinstance(found, Absent):
            return self.not_evaluated(found.reason)
        if not found.num_other:
            return self._judge_work(found, analysis)
        share, least = found.fixed_ns / found.step_ns, found.least_fixed_ns / found.step_ns
        said = (
            f"About {percent(share)} of a step with {found.num_samples:,} {analysis.info.sample_unit}"
            f" ({milliseconds(found.fixed_ns)}) doesn't depend on the batch size"
        )
        evidence = _evidence(found)
        if least < self._least(analysis) or found.least_fixed_ns < self.floor_ns:
            return self.clean(f"{said} (at least {milliseconds(found.least_fixed_ns)}).", evidence)
        gains = found.most_with_twice < 1
        promise = (
            f" With twice the batch size, an epoch takes about {percent(found.with_twice(found.fixed_ns))} of"
            f" its time (at most {percent(found.most_with_twice)})."
        )
        return (
            self.found(
                f"{said}.{promise if gains else ''}",
                _action(found, analysis) if gains else "",
                Severity.INFO,
                places=lines_that_call(analysis.setup, "DataLoader"),
                evidence=evidence,
            ),
        )

    def _tiny(self, analysis: Analysis, *, is_costly: bool) -> Finding | None:
        """Gradients are accumulated over batches of so few samples that no processor is used well.

        Args:
            is_costly: whether a large part of the step is known to be the same for any batch.
        """
        every, samples = analysis.info.accumulate_grad_batches, analysis.steps.clean().samples
        usual = int(np.median(samples)) if len(samples) else 0
        if every == 1 or not 0 < usual <= self.tiny:
            return None
        unit = analysis.info.sample_unit
        return self.found(
            f"Each optimizer step accumulates {every} batches of {usual} {unit}.",
            f"Try batches of {2 * usual} {unit} or more, with accumulate_grad_batches={-(-every // 2)} or"
            " less. BatchNorm then sees larger batches (may change results).",
            Severity.WARNING if is_costly else Severity.INFO,
            title="Gradients are accumulated over tiny batches",
            places=lines_that_call(analysis.setup, "DataLoader"),
            evidence=[count(f"batch size ({unit})", usual), count("batches per optimizer step", every)],
        )

    def _least(self, analysis: Analysis) -> float:
        return self.least_accumulated if analysis.info.accumulate_grad_batches > 1 else self.least_share

    def _judge_work(self, found: BatchScaling, analysis: Analysis) -> tuple[Finding, ...]:
        """Where all batches are of one size: of calling operators, which does not depend on it."""
        share = found.fixed_ns / found.step_ns
        evidence = _evidence(found)
        overhead = f"{percent(share)} of each step ({milliseconds(found.fixed_ns)})"
        if share < self._least(analysis) or found.fixed_ns < self.floor_ns:
            return self.clean(f"Operator calls take at least {overhead}.", evidence)
        return (
            self.found(
                f"Operator calls take at least {overhead}; the FLOPs need at most"
                f" {milliseconds(found.compared_ns - found.fixed_ns)}.",
                "",
                Severity.INFO,
                title="Operator call overhead dominates",
                places=lines_that_call(analysis.setup, "DataLoader"),
                evidence=evidence,
            ),
        )


def _by_work(analysis: Analysis) -> BatchScaling | None:
    """From the FLOPs and bytes of the counted step; ``None`` where they are not all known."""
    cost = analysis.cost
    if cost is None or cost.count is None or cost.sites is None or cost.count.on_fake_tensors:
        return None
    flops = sum(one.flops or 0 for one in cost.count.operators if one.phase != "optimizer")
    lines = [one for one in cost.sites.lines if one.phase != "optimizer"]
    if any(one.unsized for one in lines) or cost.sites.dropped:
        return None
    found = fixed_by_work(
        analysis.steps,
        operators=sum(one.calls for one in cost.sites.lines),
        flops=flops,
        num_bytes=sum(one.num_bytes for one in lines),
    )
    return None if isinstance(found, Absent) else found


def _action(found: BatchScaling, analysis: Analysis) -> str:
    accumulated = analysis.info.accumulate_grad_batches
    try_it = f"Try batches of {2 * found.num_samples:,} {analysis.info.sample_unit}"
    if accumulated > 1 and accumulated % 2 == 0:
        return (
            f"{try_it} with accumulate_grad_batches={accumulated // 2}. BatchNorm then sees larger batches"
            " (may change results)."
        )
    return f"{try_it}. This changes training; learning rate, its schedule and max_steps need retuning."


def _evidence(found: BatchScaling) -> list[Evidence]:
    smallest, largest = found.sizes
    if not found.num_other:
        return [
            duration("minimum fixed time per step", found.fixed_ns),
            ratio("fixed share of the median step", found.fixed_ns / found.step_ns),
        ]
    return [
        duration("fixed time per step", found.fixed_ns),
        ratio("fixed share of the median step", found.fixed_ns / found.step_ns),
        duration("time per additional sample", found.per_sample_ns),
        ratio("epoch time with twice the batch size", found.with_twice(found.fixed_ns)),
        ratio("maximum epoch time with twice the batch size", found.most_with_twice),
        duration("lower bound of fixed time per step", found.least_fixed_ns),
        duration("upper bound of fixed time per step", found.most_fixed_ns),
        count("steps with other batch sizes", found.num_other),
        count("smallest batch", smallest),
        count("largest batch", largest),
    ]
