"""A report's figures, as records with raw numbers: what scripts read first, and what the tables don't have.

Records of measured and derived facts stand here as they are. What is a type of this file's own puts several
of them together. Everything has a default: figures that an older version wrote otherwise are left out.
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
        summary: a sentence with the number that says so.
        accounted_ratio: share of the wall time that is in named phases, 0..1.
    """

    kind: str
    summary: str
    accounted_ratio: float | None

    @property
    def word(self) -> str:
        """The kind as a person reads it: ``INPUT-BOUND``, ``CANNOT TELL``."""
        return self.kind.replace("_", "-" if self.kind.endswith("_bound") else " ").upper()


class RunSummary(RunInfo, frozen=True, kw_only=True):
    """What ran, and how many of its steps count.

    Attributes:
        rank: whose steps these are.
        num_steps: finished steps, clean or not.
        num_steps_without_optimizer_step: those of them, as gradients accumulate.
        unfinished_steps: steps that began and did not end.
        wall_ns: of all finished steps.
        outside_steps_ns: time in no finished step by phase key.
        excluded_steps: what the benchmark left out, by reason.
        all_ranks: the benchmark over all known ranks; ``None`` with one rank.
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
        """What a rate of steps counts: ``steps/s``, ``batches/s``."""
        return f"{loop_of(self.loop).steps}/s"

    @property
    def samples_unit(self) -> str:
        """What a rate of samples counts: ``samples/s``."""
        return f"{self.sample_unit}/s"


class MeanStepFlops(Record, frozen=True, kw_only=True):
    """FLOPs of the mean clean step, where batches vary in size.

    Attributes:
        error: standard error, as a share.
        sizes: distinct batch sizes.
        counted, fitted: for how many of them FLOPs were counted, and for how many they come from a fit.
        note: why it isn't known; everything else is ``None`` then.
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
        step: number of the counted step; ``None`` outside of a loop.
        samples: in its batch; ``None`` if unknown.
        on_fake_tensors: whether a copy of the model on tensors without data was counted.
        phases: phase → FLOPs, of the phases that ran; multiply-adds are half as many.
        fourier_flops: phase → FLOPs of Fourier transforms, which are in no other figure.
        model_flops: of forward and backward; ``None`` when no forward was counted.
        hardware_flops: of all phases; ``None`` when no operator has a formula.
        optimizer_share: of the clean steps, those in which the optimizer stepped.
        mean_step: where batches vary in size; ``None`` where all clean steps are like the counted one.
        flops_per_s: model FLOPs of the mean clean step over its time; ``None`` without clean steps.
        mfu, hfu: share of the device's peak; ``None`` if that isn't known.
        params, trainable_params: ``None`` if the modules were not read.
        errors: what formulas raised.
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
        num_points: of the curve.
        growth: of each kind that was measured often enough.
        unused_bytes: by how much the most that was reserved exceeds the most that was allocated; ``None``
            where torch does not count both.
        unused_share: that over the most that was reserved; ``None`` likewise.
    """

    num_points: int = 0
    growth: tuple[Growth, ...] = ()
    unused_bytes: int | None = None
    unused_share: float | None = None


class TraceSummary(Record, frozen=True, kw_only=True):
    """One trace that was read.

    Attributes:
        source: its file.
        rank: ``None`` if neither the trace nor its name says it.
        steps: numbers of its steps.
        step_origin: where these come from, if not from the profiler.
        checks: what speaks against its figures.
        is_damaged: whether the file is cut off or corrupt.
        tables_suffix: what the ids of its tables end in; ``""`` for the first group of ranks.
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
    """Traces of another time or job than the newest, which has the report."""

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
        source: the path that was given.
        created: when it began, in ISO 8601.
        batch_cost_ns: mean time of the clean steps; ``None`` when there are none.
        settings: name → text of all that may make it differ from another run.
    """

    source: str
    created: str
    clean_steps: int
    batch_cost_ns: float | None
    settings: dict[str, str]


class RunComparison(Comparison, frozen=True, kw_only=True):
    """The decision about two sides of runs, and what they are.

    Attributes:
        exit_code: of ``lightning-modelprof compare``.
        differences: why a speedup would say little; empty if the sides are alike.
    """

    exit_code: int
    differences: tuple[Difference, ...]
    runs_before: tuple[SideRun, ...]
    runs_after: tuple[SideRun, ...]


class PartTimes(Record, frozen=True, kw_only=True):
    """Mean time of one part of a step in two windows; ``None`` where a trace can't tell."""

    before_ns: float | None
    after_ns: float | None


class WindowComparison(Record, frozen=True, kw_only=True):
    """Two windows, or two sets of traces, side by side.

    Attributes:
        before, after: what each is called.
        parts: of the mean step, the step itself first; ``None`` if one side has no steps.
    """

    before: str
    after: str
    parts: dict[str, PartTimes] | None = None


class Summary(Record, frozen=True, kw_only=True):
    """The figures of a report; what the report isn't of, or wasn't measured, is ``None`` or empty.

    Attributes:
        run: what ran; ``None`` if the report isn't of a run.
        settings: name → text of all that may make one run differ from another.
        benchmark: throughput of the clean steps.
        phases: time by phase over all finished steps.
        validation: what the validations of a fit consist of.
        callbacks: time by callback and hook.
        windows: torch.profiler windows: what was asked for and what became of it.
        ranks: all ranks side by side.
        own_cost: what this profiler took.
        flops: FLOPs and their rate.
        memory: peaks, growth, and what ran out.
        traces: those that were read, if the report is of traces.
        others: the verdicts of traces of other times or jobs.
        comparison: of runs.
        window_comparison: of windows or traces.
        all_ranks_command: the command that adds the windows of all ranks to TensorBoard; ``""`` if the
            report has them, or isn't of a window.
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
