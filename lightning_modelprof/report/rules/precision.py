"""Would other number formats or sizes be faster: TF32, 16 bits, float32 instead of float64?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.source.line_times import operator_time
from lightning_modelprof.analysis.trace.job_facts import JobFacts
from lightning_modelprof.analysis.trace.kernels import TensorCoreUse
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.model import Evidence, Severity, Slices
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.rule import (
    AMPERE,
    NO_CUDA,
    VOLTA,
    Found,
    Limits,
    Passed,
    count,
    duration,
    lines_that_call,
    ratio,
    rule,
    text,
)
from lightning_modelprof.run.setup import DeviceSetup
from lightning_modelprof.run.sites import LineCount
from lightning_modelprof.units import milliseconds, percent


def _require_tensor_cores(
    facts: Facts, least: tuple[int, int] = VOLTA, too_old: str = "the GPU has no tensor cores"
) -> DeviceSetup:
    cuda = facts.setup.cuda
    if cuda is None:
        raise NotMeasured(NO_CUDA)
    if cuda.capability < least:
        raise NotMeasured(too_old)
    return cuda


def _eligible_note(facts: Facts) -> tuple[str, list[Evidence]]:
    use = facts.get(Facts.tensor_core_use)
    if use is None or not use.eligible_ns:
        return "", []
    return f" {eligible_words(use)}", eligible_evidence(use)


@rule(
    "tensor_cores_unused",
    title="Matmuls don't use tensor cores",
    healthy="Matmuls use tensor cores",
    points_at=PointsAt.CHANGE,
    has_thresholds=False,
)
def tensor_cores_unused(facts: Facts) -> Iterator[Found | Passed]:
    """Float32 matmuls at precision `highest` on a CUDA GPU with TF32; a hint. TF32 has a 10-bit mantissa."""
    _require_tensor_cores(facts, AMPERE, "the GPU has no TF32")
    precision, matmuls = facts.info.precision, facts.setup.matmul_precision
    if is_half(precision) or matmuls != "highest":
        yield Passed(what=f"Precision is {precision}, matmul precision is {matmuls}.")
        return
    words, evidence = _eligible_note(facts)
    yield Found(
        what=f"Precision is {precision} and matmul precision is 'highest', so matmuls don't use tensor cores."
        f"{words}",
        do="Call torch.set_float32_matmul_precision('high') to use TF32 (may change results).",
        severity=Severity.INFO,
        evidence=[text("matmul precision", matmuls), *evidence],
    )


@rule(
    "amp_off",
    title="Mixed precision is off",
    healthy="Mixed precision is on",
    points_at=PointsAt.CHANGE,
    has_thresholds=False,
)
def amp_off(facts: Facts) -> Iterator[Found | Passed]:
    """32-bit training on a CUDA GPU with tensor cores; a hint."""
    cuda, precision = _require_tensor_cores(facts), facts.info.precision
    if is_half(precision):
        yield Passed(what=f"Precision is {precision}.")
        return
    wanted = "bf16-mixed" if cuda.capability >= AMPERE else "16-mixed"
    words, evidence = _eligible_note(facts)
    yield Found(
        what=f"Precision is {precision}.{words}",
        do=f"Try Trainer(precision='{wanted}') (may change results).",
        severity=Severity.INFO,
        evidence=[text("precision", precision), *evidence],
    )


@rule(
    "matmul_tile",
    title="Linear layer sizes don't fit tensor cores",
    healthy="Layer sizes fit tensor cores",
    points_at=PointsAt.CHANGE,
    has_thresholds=False,
    multiple=8,
)
def matmul_tile(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """16-bit training on a CUDA GPU where linear layer sizes aren't multiples of 8; a hint."""
    # Source: NVIDIA, Deep Learning Performance: Matrix Multiplication, 2023, "Tensor Core Requirements".
    _require_tensor_cores(facts)
    if not is_half(facts.info.precision):
        raise NotMeasured("only checked with 16-bit precision")
    layers, multiple = facts.setup.layers, limits.multiple
    odd = [one for one in layers if one.in_features % multiple or one.out_features % multiple]
    if not odd:
        yield Passed(what=f"All {len(layers)} linear layers have sizes divisible by {multiple:g}.")
        return
    first = odd[0]
    yield Found(
        what=f"{len(odd)} of {len(layers)} linear layers have sizes that aren't multiples of {multiple:g},"
        f" such as {first.path} ({first.in_features} × {first.out_features}).",
        do=f"Pad sizes, such as the vocabulary, to a multiple of {multiple:g}.",
        severity=Severity.INFO,
        at=[Place(module=layer.path) for layer in odd],
        evidence=[count("layers", len(odd))],
    )


_PHASES: Final = ("forward", "backward", "optimizer")
_HALF: Final = 0.5
"""float32 takes half the bytes, and twice as many fit a CPU vector. On most GPUs it saves far more."""
_MOST_PLACES: Final = 2


@rule(
    "double_precision",
    title="Model runs in float64",
    healthy="No float64 parameters",
    where="lines with `double()` or `float64`",
    points_at=PointsAt.CHANGE,
    phases=_PHASES,
    warning=0.10,
    critical=0.30,
    least_samples=10,
)
def double_precision(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Most trainable parameters are float64. float32 could save half of Forward, Backward and Optimization; a
    hint with `precision="64-true"`. NumPy arrays are float64 by default. Otherwise, in CPU training, the time
    of float64 operators in Forward (samples of their lines, at least 10, minus two standard errors) and
    Backward (their part of the inspected step); the saving is an upper bound."""
    costs, setup, cost = facts.step_costs, facts.setup, facts.get(Facts.cost)
    if cost is None or cost.size is None:
        note = "" if cost is None else cost.size_note
        raise NotMeasured(note or "parameter types are unknown (set flops=True)")
    sizes = [one for one in cost.size.sizes if one.kind.endswith("parameters")]
    every = sum(one.elements for one in sizes)
    double = sum(one.elements for one in sizes if one.dtype == "float64")
    if not every or double <= every / 2:
        yield from _double_operators(facts, limits)
        yield Passed(what="Parameters aren't float64.")
        return
    usual_ns = _HALF * sum(costs.usual_ns(costs.typical, phase) or 0.0 for phase in _PHASES)
    wall_ns, cost_ns = costs.usual_wall_ns(costs.typical), _HALF * costs.in_step_ns(_PHASES)
    is_found = limits.is_found(usual_ns / wall_ns if wall_ns else None, usual_ns)
    is_meant = facts.info.precision.startswith("64")
    yield Found(
        what=f"{percent(double / every)} of parameters are float64. float32 could save about {COST}.",
        do="Remove .double() and float64, and load data as float32 (may change results).",
        saves_ns=cost_ns,
        judged_ns=usual_ns,
        whole_ns=wall_ns,
        severity=Severity.INFO if is_found and is_meant else None,
        at=lines_that_call(setup, "double", "float64") or [setup.module],
        evidence=[
            ratio("float64 share of parameters", double / every),
            duration("could save per step", cost_ns),
        ],
        passed=f"float64 costs about {milliseconds(cost_ns)} per step.",
    )


def _double_operators(facts: Facts, limits: Limits) -> Iterator[Found]:
    lines, hot, sites = facts.get(Facts.source_lines), facts.get(Facts.hot_lines), facts.get(Facts.sites)
    # Times are the CPU's, so they are only known in CPU training.
    if lines is None or hot is None or sites is None or sites.device != "cpu":
        return
    time = operator_time(_in_double, sites=sites, lines=lines, hot=hot, costs=facts.step_costs)
    if time.samples < limits.least_samples:
        return
    makers = {(one.file, one.line) for one in sites.lines if one.phase == "forward" and one.to_double}
    first = [one for one in time.lines if (one.file, one.line) in makers]
    places = dict.fromkeys((*first[:_MOST_PLACES], *time.lines[:1]))
    yield Found(
        title="Part of the step runs in float64",
        what=f"Operators in float64 take up to {COST}, although most parameters aren't float64.",
        do="Compute in float32 here (may change results). That saves up to"
        f" {milliseconds(time.whole_ns)} per step.",
        saves_ns=time.whole_ns,
        saving_is="up to",
        least_ns=time.least_ns,
        whole_ns=facts.step_costs.loop.wall_ns,
        at=[one.exact() for one in places],
        evidence=[
            duration("forward time per step", time.forward_ns),
            duration("backward time per step", time.backward_ns),
            count("float64 operators per step", sum(one.double for one in sites.lines)),
            count("stack samples", time.samples),
        ],
    )


def _in_double(one: LineCount) -> float:
    return one.double_ns / one.took_ns if one.took_ns else 0.0


_MOST_NAMED: Final = 3


@rule(
    "tensor_cores_eligible",
    title="Some operators don't use tensor cores",
    healthy="Operators use tensor cores",
    levels="10% of kernel time",
    points_at=PointsAt.NO_TIME,
    is_of_device=True,
    on_traces=True,
    warning=0.10,  # our own; torch_tb_profiler shows the share without a threshold
)
def tensor_cores_eligible(facts: JobFacts, limits: Limits) -> Iterator[Found | Passed]:
    """Kernels of convolutions, matmuls and attention whose names show that they don't use tensor cores; a
    hint. In a run, only checked if mixed precision or TF32 is on.
    """
    # No saving: a trace can't show a kernel's time on tensor cores.
    if isinstance(facts, Facts) and not _may_use_tensor_cores(facts):
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
        do=_advice(_lowest_capability(facts), use, any("conv" in name for name in operators)),
        severity=Severity.INFO,
        evidence=[
            *eligible_evidence(use),
            text("slowest operator without tensor cores", operators[0]),
        ],
        slices=[Slices(name=operators[0], kind="operator")],
    )


def _may_use_tensor_cores(facts: Facts) -> bool:
    setup = facts.get(Facts.setup)
    if setup is None or is_half(facts.info.precision):
        return True
    has_tf32 = setup.cuda is None or setup.cuda.capability >= AMPERE
    return has_tf32 and setup.matmul_precision != "highest"


def is_half(precision: str) -> bool:
    """Return whether a Trainer's precision has products of 16 bits or fewer."""
    return "16" in precision or "8" in precision or "transformer-engine" in precision


def eligible_words(use: TensorCoreUse) -> str:
    """Describe the share of kernel time eligible for tensor cores, and how much uses them."""
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


def _lowest_capability(facts: JobFacts) -> tuple[int, int] | None:
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
