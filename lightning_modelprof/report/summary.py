"""A report's figures as records with raw numbers: what scripts read first, and what the tables lack.

Measured and derived records appear unchanged; types defined here combine them. Everything has a default, so
figures that an older version wrote differently are left out.
"""

from __future__ import annotations

from lightning_modelprof.analysis.change import Comparison
from lightning_modelprof.analysis.modules.model_flops import UncountedOperator
from lightning_modelprof.analysis.ranks import RankSkew
from lightning_modelprof.analysis.steps.benchmark import Benchmark, Exclusion
from lightning_modelprof.analysis.steps.memory import Growth
from lightning_modelprof.analysis.steps.phase_times import OwnCost, PhaseTime
from lightning_modelprof.analysis.steps.validation import ValidationSplit
from lightning_modelprof.record import Record, field
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.memory import MemoryFigures
from lightning_modelprof.run.model_cost import PeakRate
from lightning_modelprof.run.records import AllRanks, CallbackTime, RunInfo, Window


class Verdict(Record, frozen=True, kw_only=True):
    """One line on what limits the speed.

    Attributes:
        kind: stable code: ``input_bound``, ``host_bound``, ``device_bound``, ``sync_bound``,
            ``communication_bound``, ``straggler_bound``, ``optimizer_bound``, ``overhead_bound``,
            ``balanced``, ``cannot_tell`` or ``out_of_memory``.
        summary: a sentence with the number behind it.
        accounted_ratio: share of the wall time that is in named phases, 0..1.
    """

    kind: str
    summary: str
    accounted_ratio: float | None

    @property
    def word(self) -> str:
        """The displayed kind: ``INPUT-BOUND``, ``CANNOT TELL``."""
        return self.kind.replace("_", "-" if self.kind.endswith("_bound") else " ").upper()


class RunSummary(RunInfo, frozen=True, kw_only=True):
    """What ran, and how many of its steps count.

    Attributes:
        rank: rank of these steps.
        num_steps: all finished steps.
        num_steps_without_optimizer_step: those that only accumulated gradients.
        unfinished_steps: steps that started but didn't finish.
        wall_ns: wall time of all finished steps.
        outside_steps_ns: time outside finished steps, by phase key.
        excluded_steps: steps excluded from the benchmark, by reason.
        all_ranks: benchmark over all known ranks; ``None`` with one rank.
    """

    rank: int = 0
    num_steps: int = 0
    num_steps_without_optimizer_step: int = 0
    unfinished_steps: int = 0
    wall_ns: int = 0
    outside_steps_ns: dict[str, int] = field(default_factory=dict)
    excluded_steps: tuple[Exclusion, ...] = ()
    all_ranks: AllRanks | None = None

    @property
    def steps_unit(self) -> str:
        """Unit of step rates: ``steps/s``, ``batches/s``."""
        return f"{loop_of(self.loop).steps}/s"

    @property
    def samples_unit(self) -> str:
        """Unit of sample rates: ``samples/s``."""
        return f"{self.sample_unit}/s"


class MeanStepFlops(Record, frozen=True, kw_only=True):
    """FLOPs of the mean clean step, if batches vary in size.

    Attributes:
        error: relative standard error.
        sizes: number of distinct batch sizes.
        counted, fitted: number of sizes with counted FLOPs, and with fitted ones.
        note: why it's unknown; everything else is ``None`` then.
    """

    model_flops: float | None = None
    hardware_flops: float | None = None
    error: float | None = None
    sizes: int | None = None
    counted: int | None = None
    fitted: int | None = None
    note: str = ""


class FlopsSummary(Record, frozen=True, kw_only=True):
    """FLOPs of the counted step, and FLOP/s of the clean ones.

    Attributes:
        step: number of the counted step; ``None`` outside a loop.
        samples: samples in its batch; ``None`` if unknown.
        on_fake_tensors: whether FLOPs were counted on a copy of the model with tensors without data.
        phases: phase → FLOPs, for phases that ran; multiply-adds are half as many.
        fourier_flops: phase → FLOPs of Fourier transforms, which no other figure includes.
        model_flops: FLOPs of forward and backward; ``None`` if no forward was counted.
        hardware_flops: FLOPs of all phases; ``None`` if no operator has a formula.
        optimizer_share: share of clean steps with an optimizer step.
        mean_step: if batches vary in size; ``None`` if all clean steps are like the counted one.
        flops_per_s: model FLOPs of the mean clean step over its time; ``None`` without clean steps.
        mfu, hfu: share of the device's peak; ``None`` if unknown.
        params, trainable_params: ``None`` if the modules weren't inspected.
        errors: errors raised by formulas.
    """

    step: int | None = None
    samples: int | None = None
    on_fake_tensors: bool = False
    phases: dict[str, int] = field(default_factory=dict)
    fourier_flops: dict[str, int] = field(default_factory=dict)
    model_flops: int | None = None
    hardware_flops: int | None = None
    optimizer_share: float = 1.0
    mean_step: MeanStepFlops | None = None
    flops_per_s: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    peaks: tuple[PeakRate, ...] = ()
    params: int | None = None
    trainable_params: int | None = None
    uncounted: tuple[UncountedOperator, ...] = ()
    errors: tuple[str, ...] = ()


class MemorySummary(MemoryFigures, frozen=True, kw_only=True):
    """Memory over the loop; the curve is in run.json.

    Attributes:
        num_points: number of points of the curve.
        growth: growth of each kind that was measured often enough.
        unused_bytes: peak reserved minus peak allocated; ``None`` if PyTorch doesn't count both.
        unused_share: ``unused_bytes`` over the peak reserved; ``None`` as above.
    """

    num_points: int = 0
    growth: tuple[Growth, ...] = ()
    unused_bytes: int | None = None
    unused_share: float | None = None


class TraceSummary(Record, frozen=True, kw_only=True):
    """One trace that was read.

    Attributes:
        source: its file.
        rank: ``None`` if neither the trace nor its name has one.
        steps: its step numbers.
        step_origin: where these come from, if not from the profiler.
        checks: problems that call its figures into question.
        is_damaged: whether the file is truncated or corrupt.
        tables_suffix: suffix of its table IDs; ``""`` for the first group of ranks.
    """

    source: str
    rank: int | None = None
    num_events: int = 0
    steps: tuple[int, ...] = ()
    step_origin: str = ""
    checks: tuple[str, ...] = ()
    is_damaged: bool = False
    tables_suffix: str = ""


class OtherTraces(Record, frozen=True, kw_only=True):
    """Traces of an older time or another job than the report's."""

    name: str
    ranks: tuple[int | None, ...]
    verdict: Verdict


class Difference(Record, frozen=True):
    """Something that should be the same on both sides of a comparison and isn't."""

    name: str
    before: str
    after: str

    @property
    def sentence(self) -> str:
        return f"{self.name} differs: {self.before} before, {self.after} after."


class SideRun(Record, frozen=True, kw_only=True):
    """A run on one side of a comparison.

    Attributes:
        source: the given path.
        created: start time, in ISO 8601.
        batch_cost_ns: mean clean step time; ``None`` without clean steps.
        settings: name → text of everything that may make it differ from another run.
    """

    source: str
    created: str
    clean_steps: int
    batch_cost_ns: float | None
    settings: dict[str, str]


class RunComparison(Comparison, frozen=True, kw_only=True):
    """The decision about two sides of runs, with the runs.

    Attributes:
        exit_code: exit code of ``lightning-modelprof compare``.
        differences: why a speedup would mean little; empty if the sides are alike.
    """

    exit_code: int
    differences: tuple[Difference, ...]
    runs_before: tuple[SideRun, ...]
    runs_after: tuple[SideRun, ...]


class PartTimes(Record, frozen=True, kw_only=True):
    """Mean time of one part of a step in two windows; ``None`` if a trace lacks it."""

    before_ns: float | None
    after_ns: float | None


class WindowComparison(Record, frozen=True, kw_only=True):
    """Two windows, or two sets of traces, side by side.

    Attributes:
        before, after: name of each side.
        parts: parts of the mean step, the step itself first; ``None`` if one side has no steps.
    """

    before: str
    after: str
    parts: dict[str, PartTimes] | None = None


class Summary(Record, frozen=True, kw_only=True):
    """A report's figures; those that don't apply or weren't measured are ``None`` or empty.

    Attributes:
        run: what ran; ``None`` if the report isn't of a run.
        settings: name → text of everything that may make one run differ from another.
        benchmark: throughput of the clean steps.
        phases: time by phase over all finished steps.
        validation: parts of a fit's validations.
        callbacks: time by callback and hook.
        windows: torch.profiler windows: the request and its outcome.
        ranks: all ranks side by side.
        own_cost: profiler overhead.
        flops: FLOPs and their rate.
        memory: peaks, growth, and what ran out.
        traces: traces that were read, if the report is of traces.
        others: verdicts of traces of other times or jobs.
        comparison: comparison of runs.
        window_comparison: comparison of windows or traces.
        all_ranks_command: command that adds all ranks' windows to TensorBoard; ``""`` if the report has them
            or isn't of a window.
    """

    run: RunSummary | None = None
    settings: dict[str, str] = field(default_factory=dict)
    benchmark: Benchmark | None = None
    phases: tuple[PhaseTime, ...] = ()
    validation: ValidationSplit | None = None
    callbacks: tuple[CallbackTime, ...] = ()
    windows: tuple[Window, ...] = ()
    ranks: RankSkew | None = None
    own_cost: OwnCost | None = None
    flops: FlopsSummary | None = None
    memory: MemorySummary | None = None
    traces: tuple[TraceSummary, ...] = ()
    others: tuple[OtherTraces, ...] = ()
    comparison: RunComparison | None = None
    window_comparison: WindowComparison | None = None
    all_ranks_command: str = ""
