"""What the tensor cores of a CUDA device would do faster: TF32, 16-bit numbers, sizes that fit."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.model import Finding, Location, Severity, Status
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
from lightning_modelprof.units import milliseconds, percent


class _TensorCoreHint(Rule, frozen=True, kw_only=True):
    """A hint about a CUDA device with tensor cores that can do what it is about."""

    takes_time_there: ClassVar[bool] = False
    least_capability: ClassVar[tuple[int, int]] = VOLTA
    too_old: ClassVar[str] = "the device has no tensor cores"
    is_of_all_products: ClassVar[bool] = True
    """Whether it is about all operators that tensor cores could do, so that windows say how much they are."""

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated without such a device."""
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
    def judge(self, precision: str, setup: TrainingSetup, cuda: DeviceSetup) -> tuple[Finding, ...]:
        """What is to be said of a training on this device."""


class TensorCoresUnused(_TensorCoreHint, frozen=True, kw_only=True):
    """Products of float32 matrices, on a device with TF32, at the precision ``highest``."""

    kind: ClassVar[str] = "tensor_cores_unused"
    title: ClassVar[str] = "Matrix products leave the tensor cores alone"
    help: ClassVar[RuleHelp] = RuleHelp("CUDA only; hints")
    least_capability: ClassVar[tuple[int, int]] = AMPERE
    too_old: ClassVar[str] = "the device has no TF32"

    def judge(self, precision: str, setup: TrainingSetup, cuda: DeviceSetup) -> tuple[Finding, ...]:  # noqa: ARG002
        """Found, or clean."""
        if is_half(precision) or setup.matmul_precision != "highest":
            return self.clean(f"Precision is {precision}, of matmul {setup.matmul_precision}.")
        return (
            self.found(
                f"Precision is {precision} and that of matrix products is 'highest', so they do"
                " not use the tensor cores.",
                "torch.set_float32_matmul_precision('high') uses TF32: 10 bits of mantissa in products.",
                Severity.INFO,
                evidence=[text("matmul precision", setup.matmul_precision or "unknown")],
            ),
        )


class AmpOff(_TensorCoreHint, frozen=True, kw_only=True):
    """32-bit training on a device whose tensor cores take 16-bit numbers."""

    kind: ClassVar[str] = "amp_off"
    title: ClassVar[str] = "Mixed precision is off"
    help: ClassVar[RuleHelp] = RuleHelp("CUDA only; hints")

    def judge(self, precision: str, setup: TrainingSetup, cuda: DeviceSetup) -> tuple[Finding, ...]:  # noqa: ARG002
        """Found, or clean."""
        if is_half(precision):
            return self.clean(f"Precision is {precision}.")
        wanted = "bf16-mixed" if cuda.capability >= AMPERE else "16-mixed"
        return (
            self.found(
                f"Precision is {precision}.",
                f"Trainer(precision='{wanted}'), if the model trains as well with it. Measure it.",
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
    title: ClassVar[str] = "Sizes of linear layers do not fit the tensor cores"
    help: ClassVar[RuleHelp] = RuleHelp("CUDA only; hints")

    is_of_all_products: ClassVar[bool] = False

    multiple: int = 8

    def judge(self, precision: str, setup: TrainingSetup, cuda: DeviceSetup) -> tuple[Finding, ...]:  # noqa: ARG002
        """Found, clean, or not evaluated without 16-bit numbers."""
        if not is_half(precision):
            return self.not_evaluated("the training is not in 16 bits")
        odd = [
            layer
            for layer in setup.layers
            if layer.in_features % self.multiple or layer.out_features % self.multiple
        ]
        if not odd:
            return self.clean(
                f"All {len(setup.layers)} linear layers have sizes that are multiples of {self.multiple}."
            )
        first = odd[0]
        return (
            self.found(
                f"{len(odd)} of {len(setup.layers)} linear layers have a size that is no multiple of"
                f" {self.multiple}: {first.path} is {first.in_features} x {first.out_features}.",
                f"Pad such sizes (a vocabulary, for example) to a multiple of {self.multiple}.",
                Severity.INFO,
                places=[Location(module=layer.path) for layer in odd],
                evidence=[count("layers", len(odd))],
            ),
        )


_HALF: Final = 0.5
"""float32 takes half the bytes, and twice as many fit into a CPU's vector. On most GPUs it saves far more."""


class DoublePrecision(ShareRule, frozen=True, kw_only=True):
    """Most trainable parameters are float64.

    At stake is half of forward, backward and optimizer: what half the bytes and twice as wide vectors save.
    Where the Trainer was told ``precision="64-true"``, it is a hint.
    """

    kind: ClassVar[str] = "double_precision"
    title: ClassVar[str] = "The model computes in float64"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "most trainable parameters are float64: half of Forward, Backward and Optimization; a"
            ' hint with `precision="64-true"`'
        ),
        where="lines that say `double()` or `float64`",
    )
    phases: ClassVar[tuple[str, ...]] = ("forward", "backward", "optimizer")
    takes_time_there: ClassVar[bool] = False

    warning: float = 0.10
    critical: float = 0.30

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where the parameters' types are not known."""
        costs, setup = analysis.step_costs, analysis.setup
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if analysis.cost is None or analysis.cost.size is None:
            note = "" if analysis.cost is None else analysis.cost.size_note
            return self.not_evaluated(note or "the parameters' types are not known (flops=True looks)")
        sizes = [one for one in analysis.cost.size.sizes if one.kind.endswith("parameters")]
        every = sum(one.elements for one in sizes)
        double = sum(one.elements for one in sizes if one.dtype == "float64")
        if not every or double <= every / 2:
            return self.clean("Parameters are not float64.")
        usual_ns = _HALF * sum(costs.usual_ns(costs.typical, phase) or 0.0 for phase in self.phases)
        wall_ns, cost_ns = costs.usual_wall_ns(costs.typical), _HALF * costs.in_step_ns(self.phases)
        share = usual_ns / wall_ns if wall_ns else None
        evidence = [ratio("share of the parameters", double / every), duration("about half of it", cost_ns)]
        if share is None or not self.is_found(share, usual_ns):
            return self.clean(f"float64 costs about {milliseconds(cost_ns)} a step.", evidence)
        is_meant = analysis.info.precision.startswith("64")
        return (
            self.found(
                f"{percent(double / every)} of the parameters are float64. float32 takes half the bytes and"
                f" fits twice as often into a vector. It saves about {COST}.",
                "Take out .double() and float64, and make the data float32 where they are loaded: .float() or"
                " astype('float32') of NumPy's arrays, which are float64 by default.",
                Severity.INFO if is_meant else self.severity(share),
                saving_ns=cost_ns,
                places=lines_that_call(setup, "double", "float64") or [setup.module],
                evidence=evidence,
            ),
        )
