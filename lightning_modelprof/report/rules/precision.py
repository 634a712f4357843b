"""What the tensor cores of a CUDA device would do faster: TF32, 16-bit numbers, sizes that fit."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.source.line_times import operator_time
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.model import Finding, Severity, Status
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.base import (
    NO_CUDA,
    NO_SETUP,
    Rule,
    RuleHelp,
    ShareRule,
    count,
    duration,
    lines_that_call,
    ratio,
    text,
)
from lightning_modelprof.report.rules.tensor_cores import (
    AMPERE,
    VOLTA,
    eligible_evidence,
    eligible_words,
    is_half,
    use_of,
)
from lightning_modelprof.run.setup import DeviceSetup, TrainingSetup
from lightning_modelprof.run.sites import LineCount
from lightning_modelprof.units import milliseconds, percent


class _TensorCoreHint(Rule, frozen=True, kw_only=True):
    """A hint about a CUDA device with tensor cores that can do what it is about."""

    points_at: ClassVar[PointsAt] = PointsAt.CHANGE
    least_capability: ClassVar[tuple[int, int]] = VOLTA
    too_old: ClassVar[str] = "the GPU has no tensor cores"
    is_of_all_products: ClassVar[bool] = True
    """Whether it is about all operators that tensor cores could do, so that windows say how much they are."""

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        setup = analysis.setup
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if setup.cuda is None:
            return self.not_evaluated(NO_CUDA)
        if setup.cuda.capability < self.least_capability:
            return self.not_evaluated(self.too_old)
        found = self.judge(analysis.info.precision, setup, setup.cuda)
        facts = [window.facts for window in analysis.windows if window.facts is not None]
        use = use_of(facts) if facts else Absent("no window")
        if isinstance(use, Absent) or not use.eligible_ns or not self.is_of_all_products:
            return found
        return tuple(
            replace(
                one,
                summary=f"{one.summary} {eligible_words(use)}",
                evidence=(*one.evidence, *eligible_evidence(use)),
            )
            if one.status is Status.FOUND
            else one
            for one in found
        )

    @abstractmethod
    def judge(self, precision: str, setup: TrainingSetup, cuda: DeviceSetup) -> tuple[Finding, ...]: ...


class TensorCoresUnused(_TensorCoreHint, frozen=True, kw_only=True):
    """Products of float32 matrices, on a device with TF32, at the precision ``highest``."""

    kind: ClassVar[str] = "tensor_cores_unused"
    title: ClassVar[str] = "Matmuls don't use tensor cores"
    healthy: ClassVar[str] = "Matmuls use tensor cores"
    help: ClassVar[RuleHelp] = RuleHelp(
        "float32 matmuls at precision `highest` on a CUDA GPU with TF32; a hint. TF32 has a 10-bit mantissa"
    )
    least_capability: ClassVar[tuple[int, int]] = AMPERE
    too_old: ClassVar[str] = "the GPU has no TF32"

    def judge(self, precision: str, setup: TrainingSetup, cuda: DeviceSetup) -> tuple[Finding, ...]:  # noqa: ARG002
        if is_half(precision) or setup.matmul_precision != "highest":
            return self.clean(f"Precision is {precision}, matmul precision is {setup.matmul_precision}.")
        return (
            self.found(
                f"Precision is {precision} and matmul precision is 'highest', so matmuls don't use tensor"
                " cores.",
                "Call torch.set_float32_matmul_precision('high') to use TF32 (may change results).",
                Severity.INFO,
                evidence=[text("matmul precision", setup.matmul_precision or "unknown")],
            ),
        )


class AmpOff(_TensorCoreHint, frozen=True, kw_only=True):
    """32-bit training on a device whose tensor cores take 16-bit numbers."""

    kind: ClassVar[str] = "amp_off"
    title: ClassVar[str] = "Mixed precision is off"
    healthy: ClassVar[str] = "Mixed precision is on"
    help: ClassVar[RuleHelp] = RuleHelp("32-bit training on a CUDA GPU with tensor cores; a hint")

    def judge(self, precision: str, setup: TrainingSetup, cuda: DeviceSetup) -> tuple[Finding, ...]:  # noqa: ARG002
        if is_half(precision):
            return self.clean(f"Precision is {precision}.")
        wanted = "bf16-mixed" if cuda.capability >= AMPERE else "16-mixed"
        return (
            self.found(
                f"Precision is {precision}.",
                f"Try Trainer(precision='{wanted}') (may change results).",
                Severity.INFO,
                evidence=[text("precision", precision)],
            ),
        )


class MatmulTile(_TensorCoreHint, frozen=True, kw_only=True):
    """Linear layers of 16-bit numbers whose sizes are no multiples of a number.

    Attributes:
        multiple: of which sizes should be multiples.

    Source: 8 for 16-bit numbers, NVIDIA, Deep Learning Performance: Matrix Multiplication, 2023, "Tensor Core
    Requirements".
    """

    kind: ClassVar[str] = "matmul_tile"
    title: ClassVar[str] = "Linear layer sizes don't fit tensor cores"
    healthy: ClassVar[str] = "Layer sizes fit tensor cores"
    help: ClassVar[RuleHelp] = RuleHelp(
        "16-bit training on a CUDA GPU where linear layer sizes aren't multiples of 8; a hint"
    )

    is_of_all_products: ClassVar[bool] = False

    multiple: int = 8

    def judge(self, precision: str, setup: TrainingSetup, cuda: DeviceSetup) -> tuple[Finding, ...]:  # noqa: ARG002
        if not is_half(precision):
            return self.not_evaluated("only checked with 16-bit precision")
        odd = [
            layer
            for layer in setup.layers
            if layer.in_features % self.multiple or layer.out_features % self.multiple
        ]
        if not odd:
            return self.clean(
                f"All {len(setup.layers)} linear layers have sizes divisible by {self.multiple}."
            )
        first = odd[0]
        return (
            self.found(
                f"{len(odd)} of {len(setup.layers)} linear layers have sizes that aren't multiples of"
                f" {self.multiple}, such as {first.path} ({first.in_features} × {first.out_features}).",
                f"Pad sizes, such as the vocabulary, to a multiple of {self.multiple}.",
                Severity.INFO,
                places=[Place(module=layer.path) for layer in odd],
                evidence=[count("layers", len(odd))],
            ),
        )


_HALF: Final = 0.5
"""float32 takes half the bytes, and twice as many fit into a CPU's vector. On most GPUs it saves far more."""


class DoublePrecision(ShareRule, frozen=True, kw_only=True):
    """Most trainable parameters are float64, or operators of a float32 model are.

    The saving is half of forward, backward and optimizer: what half the bytes and twice as wide vectors save.
    Where the Trainer was told ``precision="64-true"``, it is a hint.

    Of a float32 model the time of its operators with float64 tensors is the most that can be saved. It is
    that of the host, so it is only known in training on the CPU.
    """

    kind: ClassVar[str] = "double_precision"
    title: ClassVar[str] = "Model runs in float64"
    healthy: ClassVar[str] = "No float64 parameters"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "most trainable parameters are float64. float32 could save half of Forward, Backward and"
            ' Optimization; a hint with `precision="64-true"`. NumPy arrays are float64 by default.'
            " Otherwise, in CPU training, the time of float64 operators in Forward (samples of their lines,"
            " at least 10, minus two standard errors) and Backward (their part of the inspected step); the"
            " saving is an upper bound"
        ),
        where="lines with `double()` or `float64`",
    )
    phases: ClassVar[tuple[str, ...]] = ("forward", "backward", "optimizer")
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    warning: float = 0.10
    critical: float = 0.30
    least_samples: int = 10

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, setup = analysis.step_costs, analysis.setup
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if analysis.cost is None or analysis.cost.size is None:
            note = "" if analysis.cost is None else analysis.cost.size_note
            return self.not_evaluated(note or "parameter types are unknown (set flops=True)")
        sizes = [one for one in analysis.cost.size.sizes if one.kind.endswith("parameters")]
        every = sum(one.elements for one in sizes)
        double = sum(one.elements for one in sizes if one.dtype == "float64")
        if not every or double <= every / 2:
            return self._computed(analysis, costs)
        usual_ns = _HALF * sum(costs.usual_ns(costs.typical, phase) or 0.0 for phase in self.phases)
        wall_ns, cost_ns = costs.usual_wall_ns(costs.typical), _HALF * costs.in_step_ns(self.phases)
        share = usual_ns / wall_ns if wall_ns else None
        evidence = [
            ratio("float64 share of parameters", double / every),
            duration("could save per step", cost_ns),
        ]
        if share is None or not self.is_found(share, usual_ns):
            return self.clean(f"float64 costs about {milliseconds(cost_ns)} per step.", evidence)
        is_meant = analysis.info.precision.startswith("64")
        return (
            self.found(
                f"{percent(double / every)} of parameters are float64. float32 could save about {COST}.",
                "Remove .double() and float64, and load data as float32 (may change results).",
                Severity.INFO if is_meant else self.severity(share),
                saving_ns=cost_ns,
                places=lines_that_call(setup, "double", "float64") or [setup.module],
                evidence=evidence,
            ),
        )

    def _computed(self, analysis: Analysis, costs: StepCosts) -> tuple[Finding, ...]:
        """Of a model that isn't float64: by the operators that are, and where float64 begins."""
        clean = "Parameters aren't float64."
        lines, hot = analysis.source_lines, analysis.hot_lines
        sites = None if analysis.cost is None else analysis.cost.sites
        if isinstance(lines, Absent) or isinstance(hot, Absent) or sites is None or sites.device != "cpu":
            return self.clean(clean)
        time = operator_time(_in_double, sites=sites, lines=lines, hot=hot, costs=costs)
        share = time.whole_ns / costs.loop.wall_ns if costs.loop.wall_ns else None
        is_sure = time.samples >= self.least_samples
        if share is None or not is_sure or not self.is_found(share, time.whole_ns, time.least_ns):
            return self.clean(clean)
        makers = {(one.file, one.line) for one in sites.lines if one.phase == "forward" and one.to_double}
        first = [one for one in time.lines if (one.file, one.line) in makers]
        places = dict.fromkeys((*first[:_MOST_PLACES], *time.lines[:1]))
        return (
            self.found(
                f"Operators in float64 take up to {COST}, although most parameters aren't float64.",
                "Compute in float32 here (may change results). That saves up to"
                f" {milliseconds(time.whole_ns)} per step.",
                self.severity(share),
                title="Part of the step runs in float64",
                saving_ns=time.whole_ns,
                saving_is="up to",
                places=[one.exact() for one in places],
                evidence=[
                    duration("forward time per step", time.forward_ns),
                    duration("backward time per step", time.backward_ns),
                    count("float64 operators per step", sum(one.double for one in sites.lines)),
                    count("stack samples", time.samples),
                ],
            ),
        )


_MOST_PLACES: Final = 2


def _in_double(one: LineCount) -> float:
    return one.double_ns / one.took_ns if one.took_ns else 0.0
