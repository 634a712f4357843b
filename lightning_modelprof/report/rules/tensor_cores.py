"""Products of matrices that tensor cores could do, as the kernels of traces tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.trace.device_usage import OneDevice
from lightning_modelprof.analysis.trace.tensor_cores import TensorCoreUse, tensor_core_use
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.model import Evidence, Finding, Severity, Slices
from lightning_modelprof.report.rules.base import RuleHelp, ratio, text
from lightning_modelprof.report.rules.device import Circumstances, DeviceRule
from lightning_modelprof.units import percent

VOLTA: Final = (7, 0)
"""First compute capability with tensor cores (16-bit); NVIDIA Volta white paper, 2017."""

AMPERE: Final = (8, 0)
"""First with TF32 and bfloat16; NVIDIA A100 white paper, 2020."""

_MOST_NAMED: Final = 3
_OTHER_DEVICES: Final = (
    "only checked on NVIDIA GPUs with tensor cores (Volta and newer, except the GTX 16 series)"
)


class TensorCoresEligible(DeviceRule, frozen=True, kw_only=True):
    """Kernels of convolutions and products of matrices whose names say that they leave tensor cores alone.

    A hint without a saving: what a kernel takes on tensor cores, a trace cannot tell.

    Source: the share of the kernels' time that torch_tb_profiler advises from; 10% of it is this project's.
    """

    kind: ClassVar[str] = "tensor_cores_eligible"
    title: ClassVar[str] = "Some operators don't use tensor cores"
    healthy: ClassVar[str] = "Operators use tensor cores"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "kernels of convolutions, matmuls and attention whose names show that they don't use tensor"
            " cores; a hint. In a run, only checked if mixed precision or TF32 is on"
        ),
        levels="10% of kernel time",
    )
    points_at: ClassVar[PointsAt] = PointsAt.NO_TIME

    warning: float = 0.10

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """What the windows of a run say, where its settings let operators use tensor cores."""
        setup = analysis.setup
        if setup is not None and not is_half(analysis.info.precision):
            has_tf32 = setup.cuda is None or setup.cuda.capability >= AMPERE
            uses_them = has_tf32 and setup.matmul_precision != "highest"
        else:
            uses_them = True
        if not uses_them:
            return self.not_evaluated("the run's precision rules out tensor cores; other checks cover that")
        return super().evaluate(analysis)

    def judge(self, traces: Sequence[TraceFacts], circumstances: Circumstances) -> tuple[Finding, ...]:  # noqa: ARG002
        use = use_of(traces)
        if isinstance(use, Absent):
            return self.not_evaluated(use.reason)
        if not use.eligible_ns:
            return self.not_evaluated("no kernel is eligible for tensor cores")
        share = use.unused_ns / use.kernels_ns
        if share < self.warning:
            return self.clean(eligible_words(use), eligible_evidence(use))
        operators = list(use.unused_by_operator_ns)
        named = ", ".join(operators[:_MOST_NAMED])
        return (
            self.found(
                f"{eligible_words(use)} Slowest operators without tensor cores: {named}.",
                _advice(_capability(traces), use, any("conv" in name for name in operators)),
                Severity.INFO,
                evidence=[
                    *eligible_evidence(use),
                    text("slowest operator without tensor cores", operators[0]),
                ],
                slices=[Slices(name=operators[0], kind="operator")],
            ),
        )


def is_half(precision: str) -> bool:
    """Whether a Trainer's precision has products of 16 bits or fewer."""
    return "16" in precision or "8" in precision or "transformer-engine" in precision


def use_of(traces: Sequence[TraceFacts]) -> TensorCoreUse | Absent:
    """How the kernels of traces use tensor cores; else why that is not known."""
    known = [facts.kernels for facts in traces if not isinstance(facts.kernels, Absent)]
    if not known:
        return next(facts.kernels for facts in traces if isinstance(facts.kernels, Absent))
    # Kernels of a device without tensor cores are never classified.
    if not any(device.tensor_unknown is not None for device in _devices(traces)):
        return Absent(_OTHER_DEVICES)
    return tensor_core_use(known)


def eligible_words(use: TensorCoreUse) -> str:
    """The share of the kernels' time that is of operators that tensor cores could do, and how it is spent."""
    eligible = percent(use.eligible_ns / use.kernels_ns)
    used, unused = (percent(time_ns / use.eligible_ns) for time_ns in (use.used_ns, use.unused_ns))
    start = f"{eligible} of kernel time is eligible for tensor cores"
    if use.untold_ns:
        return f"{start}. {used} of that uses them and {unused} doesn't; the rest is unclassified."
    if not use.used_ns:
        return f"{start}, but none of that uses them."
    return f"{start}, and {used} of that uses them."


def eligible_evidence(use: TensorCoreUse) -> list[Evidence]:
    return [
        ratio("eligible share of kernel time", use.eligible_ns / use.kernels_ns),
        ratio("eligible time on tensor cores", use.used_ns / use.eligible_ns),
        ratio("eligible time not on tensor cores", use.unused_ns / use.eligible_ns),
    ]


def _devices(traces: Iterable[TraceFacts]) -> list[OneDevice]:
    return [
        device
        for facts in traces
        if not isinstance(facts.device_usage, Absent)
        for device in facts.device_usage.devices
    ]


def _capability(traces: Iterable[TraceFacts]) -> tuple[int, int] | None:
    """The least of all devices; ``None`` where a file does not say it."""
    found = []
    for device in _devices(traces):
        major, _, minor = (device.compute_capability or "").partition(".")
        if not (major.isdecimal() and minor.isdecimal()):
            return None
        found.append((int(major), int(minor)))
    return min(found, default=None)


def _advice(capability: tuple[int, int] | None, use: TensorCoreUse, has_convolutions: bool) -> str:
    half = (
        "fp16 autocast (Trainer(precision='16-mixed'), or torch.autocast('cuda', torch.float16) with a"
        " GradScaler)"
    )
    bfloat = "bf16 autocast (Trainer(precision='bf16-mixed') or torch.autocast('cuda', torch.bfloat16))"
    tf32 = "TF32 (torch.set_float32_matmul_precision('high'))"
    if capability is None:
        ways = f"{half}. On Ampere and newer, use {bfloat}, or {tf32}."
    elif capability >= AMPERE:
        ways = f"{bfloat}, or {tf32}."
    else:
        ways = f"{half}. This GPU's tensor cores support neither TF32 nor bfloat16."
    start = "For the operators without tensor cores, use" if use.used_ns else "Use"
    ways = (
        f"{start} {ways} Reduced precision may change results. Layer and batch sizes should be multiples"
        " of 8."
    )
    if not has_convolutions:
        return ways
    return (
        f"{ways} For convolutions, convert the model and the input images to channels_last:"
        " model.to(memory_format=torch.channels_last), and the same for the images."
    )
