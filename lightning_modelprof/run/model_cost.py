"""Measured facts about a model: what a step of it computes, how large it is, where its modules' time goes.

Paths of modules are those of the LightningModule (or of the model that was given): ``""`` is the module
itself. Counts are plain integers; one multiply-add (MAC) is two FLOPs. ``None`` is *not measured*, and the
``..._note`` beside it says why.
"""

from __future__ import annotations

from typing import Final

from lightning_modelprof.place import Place
from lightning_modelprof.record import Count, Int, Real, Record
from lightning_modelprof.run.batches import BatchSizes, Shapes, SizeCount
from lightning_modelprof.run.sites import StepSites

FLOP_PHASES: Final = ("forward", "backward", "recompute", "optimizer")
"""What work is for: recompute is a part of the forward that runs again to save memory."""


FOURIER_OPERATORS: Final = ("aten::_fft_c2c", "aten::_fft_r2c", "aten::_fft_c2r")
"""Their FLOPs (5 N log2 N) are kept out of every total: they are no contractions."""


class OperatorCount(Record, frozen=True, kw_only=True):
    """The calls of one operator in one phase and module of the counted step.

    Attributes:
        phase: one of ``FLOP_PHASES``.
        module: path of the innermost module that ran it; ``""`` for what ran outside of all children.
        operator: name without overload, as in ``aten::mm``.
        dtype: of its floating-point operands, such as ``bfloat16``; ``""`` if it has none.
        flops: of all these calls; ``None`` when it may hold contractions and no formula knows it.
    """

    phase: str
    module: str
    operator: str
    dtype: str
    calls: Count
    flops: Int | None


class StepCount(Record, frozen=True, kw_only=True):
    """FLOPs of one step of one process.

    Attributes:
        step: number of the counted step in the fit; ``None`` outside of one.
        samples: in its batch; ``None`` if unknown.
        on_fake_tensors: whether a copy of the model on tensors without data was counted, not the step.
        operators: whatever has FLOPs or may have them.
        errors: what formulas raised, a sentence each.
        copy_reason: why a copy was counted; empty if the step was, or if nobody noted it.
    """

    step: Count | None
    samples: Count | None
    on_fake_tensors: bool
    operators: tuple[OperatorCount, ...]
    errors: tuple[str, ...] = ()
    copy_reason: str = ""


class ModuleRecord(Record, frozen=True, kw_only=True):
    """One module, in the order of ``named_modules``, parents before their children.

    Attributes:
        path: where it is, first name if it has several.
        parameters: elements of its own parameters, without its children's; a tied one counts at the first
            module that has it. ``None`` while one of them is lazy.
        forward: where its ``forward`` is written, if that is the user's code; ``None`` for a library's.
        arguments: of torch's own classes and hooks: those that are not as by default, such as
            ``n_power_iterations=50``.
    """

    path: str
    type_name: str
    parameters: Int | None
    trainable: Int | None
    forward: Place | None = None
    arguments: tuple[str, ...] = ()


class ModuleTime(Record, frozen=True, kw_only=True):
    """Time of one module in the timed steps, without the modules that it called.

    Attributes:
        calls: forward calls in all timed steps.
        forward_ns: self time of its calls in one step: the median of the timed steps (of an even number the
            lower of the two in the middle), which one step that was held up does not change.
        backward_ns: likewise, of the autograd nodes that its forward made; ``None`` when no backward was
            timed.
    """

    path: str
    calls: Count
    forward_ns: Int
    backward_ns: Int | None


class ModuleTimes(Record, frozen=True, kw_only=True):
    """Times of all modules.

    Attributes:
        clock: ``host``, or ``device`` when they lie between events on the device's stream.
        times: of the modules that ran.
        notes: what could not be timed and why (compiled regions, nodes of no module).
        step_numbers: of the timed steps in their loop; empty in runs of older versions.
        sizes: the shapes of their batches, each set of them once; empty in runs of older versions.
    """

    steps: Count
    clock: str
    times: tuple[ModuleTime, ...]
    notes: tuple[str, ...] = ()
    step_numbers: tuple[Count, ...] = ()
    sizes: tuple[Shapes, ...] = ()


class TensorSize(Record, frozen=True, kw_only=True):
    """Tensors of one kind and dtype in this process.

    Attributes:
        kind: ``trainable parameters``, ``frozen parameters``, ``packed weights``, ``gradients``,
            ``optimizer state`` or ``buffers``.
        dtype: such as ``float32`` or, for packed weights, what the tensor says of itself.
        tensors, elements: how many; a tensor that is reached by several names counts once.
        num_bytes: of their storage here.
    """

    kind: str
    dtype: str
    tensors: Count
    elements: Count
    num_bytes: Int


class ModelSize(Record, frozen=True, kw_only=True):
    """What a model and its optimizers hold in memory.

    Attributes:
        lazy: names of parameters and buffers without a size yet.
        tied: names that share a tensor with a name before them, and are not counted again.
        notes: what else a reader has to know (shards, quantised weights).
    """

    sizes: tuple[TensorSize, ...]
    lazy: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class ForwardCount(Record, frozen=True, kw_only=True):
    """fvcore's count of one operator in one module, without the modules inside of it.

    Attributes:
        operator: fvcore's name, such as ``linear`` or ``conv``.
    """

    module: str
    operator: str
    macs: Int


class ForwardTable(Record, frozen=True, kw_only=True):
    """What fvcore says of one forward pass on the same batch.

    Attributes:
        activations: path → elements of the outputs of its contractions, with the modules inside of it.
        parameters: path → elements, with the modules inside of it.
        unsupported: operator → calls, as fvcore lists those without a formula.
        uncalled: paths of modules, as fvcore lists those that it didn't see called.
    """

    counts: tuple[ForwardCount, ...]
    activations: dict[str, Int]
    parameters: dict[str, Int]
    unsupported: dict[str, Int]
    uncalled: tuple[str, ...] = ()


class PeakRate(Record, frozen=True, kw_only=True):
    """The most that one device can do in one dtype.

    Attributes:
        dtype: such as ``bfloat16``.
        flops_per_s: dense FLOP/s.
        source: the data sheet, or ``given by the user``.
        is_measured: only in runs of older versions, which measured a rate where no peak was known. It is no
            peak.
    """

    dtype: str
    flops_per_s: Real
    source: str
    is_measured: bool = False


class ModelCost(Record, frozen=True, kw_only=True):
    """All that is known of a model's cost in one process; each part may be missing for its own reason.

    Attributes:
        size_counts: of that step, of steps of other sizes and of some of the same, by phase and dtype; empty
            outside of a loop.
        batch_sizes: of all clean steps; ``None`` outside of a loop and in runs of older versions.
        waste: of the counted step; ``None`` where a copy was counted, and in runs of older versions.
    """

    count: StepCount | None = None
    count_note: str = ""
    size_counts: tuple[SizeCount, ...] = ()
    size_counts_note: str = ""
    batch_sizes: BatchSizes | None = None
    modules: tuple[ModuleRecord, ...] = ()
    times: ModuleTimes | None = None
    times_note: str = ""
    size: ModelSize | None = None
    size_note: str = ""
    forward_table: ForwardTable | None = None
    forward_table_note: str = ""
    peaks: tuple[PeakRate, ...] = ()
    peak_note: str = ""
    sites: StepSites | None = None
    sites_note: str = ""
    waste: StepWaste | None = None


class RepeatedCall(Record, frozen=True, kw_only=True):
    """A module that a step called with the same tensors more than once, none of them changed in between.

    Attributes:
        calls: in the step, with whatever.
        repeated: those of them that computed what an earlier call had computed.
        lines: of the user's that made these calls, the first one too.
        updates_statistics: whether each call updates running statistics of a BatchNorm.
    """

    path: str
    calls: Count
    repeated: Count
    lines: tuple[Place, ...] = ()
    updates_statistics: bool = False


class DenseTable(Record, frozen=True, kw_only=True):
    """An embedding whose gradient has a value for each of its rows, whichever rows the batch uses.

    Attributes:
        path: of the module that looked rows up.
        used: indices that were looked up in the step, each as often as it came: at least as many as rows.
    """

    path: str
    rows: Int
    columns: Int
    used: Int


class UnusedGradients(Record, frozen=True, kw_only=True):
    """Gradients of one module's parameters that no optimizer used before they were made anew, or at all.

    Attributes:
        passes: backward passes of the step that made gradients of these parameters.
        beyond: of them, those that nobody used and that went on into this module when all gradients that were
            used had been made: the whole pass through it was for nothing.
        within: of them, the others that nobody used: the pass had to go through it, its own gradients were
            for nothing.
        lines: of the user's that began the passes nobody used.
    """

    path: str
    passes: Count
    beyond: Count
    within: Count
    lines: tuple[Place, ...] = ()


MIXES_NOTHING: Final = ""
"""Each row that a module gives is made of the same row of what it is given, as by a linear layer."""


MIXES_PLACES: Final = "places"
"""A sample's places are mixed, as by a convolution, but samples are not."""


MIXES_ROWS: Final = "rows"
"""Any rows may be mixed, as by attention, a recurrent layer or BatchNorm in training mode."""


class UnusedOutput(Record, frozen=True, kw_only=True):
    """How much of what one module computed the loss does not depend on: its gradient was 0, or none came.

    Attributes:
        path: of the module, which has trainable parameters, be it in its children.
        rows: that it computed: vectors of features for a linear layer and others that compute one for each
            place, samples for a convolution; 0 for what is neither, of which only the lines are known.
        unused: of them, those whose gradient was 0 in each number.
        samples: slices along the first dimension.
        unused_samples: of them, those all of whose rows are unused.
        lines: of the user's that called it.
        places: slices along the second dimension of rows, 0 if there is none.
        unused_places: of them, those all of whose rows are unused.
        mixes: one of those above, for the module with those in it; ``None`` where that isn't known, as in
            runs of older versions.
        input_rows: vectors along the last dimension of what it was given; 0 where their gradients aren't
            known, as for layers that mix nothing.
        unused_inputs: of them, those whose gradient was 0 in each number: no row of any output that is used
            depends on them.
    """

    path: str
    rows: Count
    unused: Count
    samples: Count
    unused_samples: Count
    lines: tuple[Place, ...] = ()
    places: Count = 0
    unused_places: Count = 0
    mixes: str | None = None
    input_rows: Count = 0
    unused_inputs: Count = 0


class FrozenModule(Record, frozen=True, kw_only=True):
    """An outermost module with parameters, none of which is trained, that ran in the counted step.

    Attributes:
        changes: whether a parameter or buffer of it changed between the counted step and the loop's end, as a
            target network's do that follows a trained one, or BatchNorm normalizes by the batch.
        has_varying_input: whether it was given, or drew, random numbers, or was given what trained parameters
            computed, so that its output isn't the same for the same sample.
    """

    path: str
    changes: bool
    has_varying_input: bool


class StepWaste(Record, frozen=True, kw_only=True):
    """What the counted step did in vain.

    Attributes:
        repeated: modules that computed the same again; those inside of one are listed as well.
        follows_gradients: whether an optimizer was seen to use gradients; false in runs of older versions.
        outputs: of modules, by how much of them is in the loss; empty where no backward pass was seen, and in
            runs of older versions.
        notes: what could not be seen, a sentence each.
        frozen: modules without a trained parameter; empty where the loop has not ended, where operators
            could not be followed, and in runs of older versions.
    """

    repeated: tuple[RepeatedCall, ...] = ()
    tables: tuple[DenseTable, ...] = ()
    unused: tuple[UnusedGradients, ...] = ()
    follows_gradients: bool = False
    outputs: tuple[UnusedOutput, ...] = ()
    notes: tuple[str, ...] = ()
    frozen: tuple[FrozenModule, ...] = ()
