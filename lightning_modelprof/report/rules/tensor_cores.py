"""Products of matrices that tensor cores could do, as the kernels of traces tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.trace.job_facts import JobFacts
from lightning_modelprof.analysis.trace.kernels import TensorCoreUse
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.model import Evidence, Severity, Slices
from lightning_modelprof.report.rules.rule import (
    AMPERE,
    Found,
    Limits,
    Passed,
    ratio,
    rule,
    text,
)
from lightning_modelprof.units import percent

_MOST_NAMED: Final = 3


@rule(
    "tensor_cores_eligible",
    title="Some operators don't use tensor cores",
    healthy="Operators use tensor cores",
    levels="10% of kernel time",
    points_at=PointsAt.NO_TIME,
    is_of_device=True,
    on_traces=True,
    warning=0.10,  # our own; torch_tb_profiler has the share without a threshold
)
def tensor_cores_eligible(facts: JobFacts, limits: Limits) -> Iterator[Found | Passed]:
    """Kernels of convolutions, matmuls and attention whose names show that they don't use tensor cores; a
    hint. In a run, only checked if mixed precision or TF32 is on.
    """
    # Without a saving: a trace can't tell what a kernel would take on tensor cores.
    if isinstance(facts, Facts) and not _may_use_them(facts):
        raise NotMeasured("the run's precision rules out tensor cores; other checks cover that")
    use = facts.tensor_core_use
    if not use.eligible_ns:
        raise NotMeasured("no kernel is eligible for tensor cores")
    operators = list(use.unused_by_operator_ns)
    if use.unused_ns / use.kernels_ns < limits.warning:
        yield Passed(what=eligible_words(use), evidence=eligible_evidence(use))
        return
    named = ", ".join(operators[:_MOST_NAMED])
    yield Found(
        what=f"{eligible_words(use)} Slowest operators without tensor cores: {named}.",
        do=_advice(_capability(facts), use, any("conv" in name for name in operators)),
        severity=Severity.INFO,
        evidence=[
            *eligible_evidence(use),
            text("slowest operator without tensor cores", operators[0]),
        ],
        slices=[Slices(name=operators[0], kind="operator")],
    )


def _may_use_them(facts: Facts) -> bool:
    """Whether the run's settings let operators use tensor cores, as far as they are known."""
    setup = facts.get(Facts.setup)
    if setup is None or is_half(facts.info.precision):
        return True
    has_tf32 = setup.cuda is None or setup.cuda.capability >= AMPERE
    return has_tf32 and setup.matmul_precision != "highest"


def is_half(precision: str) -> bool:
    """Whether a Trainer's precision has products of 16 bits or fewer."""
    return "16" in precision or "8" in precision or "transformer-engine" in precision


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


def _capability(facts: JobFacts) -> tuple[int, int] | None:
    """The least of all devices; ``None`` where a file does not say it."""
    found = []
    for device in facts.devices:
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
