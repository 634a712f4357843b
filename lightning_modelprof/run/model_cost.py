"""Measured facts about a model: its FLOPs per step, its size and the time of its modules.

Module paths are relative to the LightningModule (or the given model): ``""`` is the module itself. Counts are
plain integers; one multiply-add (MAC) is two FLOPs. ``None`` means *not measured*, and the ``..._note`` next
to it says why.
"""

from __future__ import annotations

from typing import Final

from lightning_modelprof.place import Place
from lightning_modelprof.record import Count, Int, Real, Record
from lightning_modelprof.run.batches import BatchSizes, Shapes, SizeCount
from lightning_modelprof.run.sites import StepSites

FLOP_PHASES: Final = ("forward", "backward", "recompute", "optimizer")
"""Recompute is a part of the forward that runs again to save memory."""


FOURIER_OPERATORS: Final = ("aten::_fft_c2c", "aten::_fft_r2c", "aten::_fft_c2r")
"""Totals exclude their FLOPs (5 N log2 N), as they aren't contractions."""


class OperatorCount(Record, frozen=True, kw_only=True):
    """Calls of one operator in one phase and module of the counted step.

    Attributes:
        phase: one of ``FLOP_PHASES``.
        module: path of the innermost module that ran it; ``""`` outside all children.
        operator: name without overload, as in ``aten::mm``.
        dtype: of its floating-point operands, such as ``bfloat16``; ``""`` if it has none.
        flops: of all these calls; ``None`` if it may contain contractions and has no formula.
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
        step: number of the counted step in the fit; ``None`` outside a fit.
        samples: in its batch; ``None`` if unknown.
        on_fake_tensors: whether a copy of the model on tensors without data was counted instead of the step.
        operators: those with FLOPs, or possibly with FLOPs.
        errors: errors in formulas, a sentence each.
        copy_reason: why a copy was counted; empty if the step was, or if unknown.
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
        path: its first path if it has several.
        parameters: elements of its own parameters, without its children's; a tied one counts at the first
            module that has it. ``None`` while one of them is lazy.
        forward: where its ``forward`` is defined, if that is the user's code; ``None`` for a library's.
        arguments: non-default arguments of torch's own classes and hooks, such as ``n_power_iterations=50``.
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
        forward_ns: self time of its calls per step: the median of the timed steps (the lower one of an even
            number), which a single slow step doesn't change.
        backward_ns: the same of the autograd nodes that its forward made; ``None`` if no backward was timed.
    """

    path: str
    calls: Count
    forward_ns: Int
    backward_ns: Int | None


class ModuleTimes(Record, frozen=True, kw_only=True):
    """Times of all modules.

    Attributes:
        clock: ``host``, or ``device`` if measured between events on the device's stream.
        times: of the modules that ran.
        notes: what couldn't be timed and why (compiled regions, nodes of no module).
        step_numbers: of the timed steps in their loop; empty in runs of older versions.
        sizes: distinct shapes of their batches; empty in runs of older versions.
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
        dtype: such as ``float32`` or, for packed weights, the tensor's own type name.
        tensors, elements: how many; a tensor with several names counts once.
        num_bytes: of their storage in this process.
    """

    kind: str
    dtype: str
    tensors: Count
    elements: Count
    num_bytes: Int


class ModelSize(Record, frozen=True, kw_only=True):
    """Memory of a model and its optimizers.

    Attributes:
        lazy: names of parameters and buffers without a size yet.
        tied: names that share a tensor with an earlier name and aren't counted again.
        notes: further caveats (shards, quantised weights).
    """

    sizes: tuple[TensorSize, ...]
    lazy: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class ForwardCount(Record, frozen=True, kw_only=True):
    """fvcore's count of one operator in one module, without its children.

    Attributes:
        operator: fvcore's name, such as ``linear`` or ``conv``.
    """

    module: str
    operator: str
    macs: Int


class ForwardTable(Record, frozen=True, kw_only=True):
    """fvcore's figures for one forward pass on the same batch.

    Attributes:
        activations: path → elements in the outputs of its contractions, children included.
        parameters: path → elements, children included.
        unsupported: operator → calls, as fvcore lists those without a formula.
        uncalled: paths of modules that fvcore didn't see called.
    """

    counts: tuple[ForwardCount, ...]
    activations: dict[str, Int]
    parameters: dict[str, Int]
    unsupported: dict[str, Int]
    uncalled: tuple[str, ...] = ()


class PeakRate(Record, frozen=True, kw_only=True):
    """Peak rate of one device in one dtype.

    Attributes:
        dtype: such as ``bfloat16``.
        flops_per_s: dense FLOP/s.
        source: the data sheet, or ``given by the user``.
        is_measured: only in runs of older versions, which measured a rate if the peak was unknown. It's no
            peak.
    """

    dtype: str
    flops_per_s: Real
    source: str
    is_measured: bool = False


class ModelCost(Record, frozen=True, kw_only=True):
    """A model's cost in one process; each part may be missing for its own reason.

    Attributes:
        size_counts: of the counted step, of steps of other sizes and of some of the same size, by phase and
            dtype; empty outside a loop.
        batch_sizes: of all clean steps; ``None`` outside a loop and in runs of older versions.
        waste: of the counted step; ``None`` if a copy was counted, and in runs of older versions.
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
    """A module that a step called more than once with the same, unchanged tensors.

    Attributes:
        calls: all its calls in the step.
        repeated: those that computed the same as an earlier call.
        lines: the user's lines that made these calls, including the first.
        updates_statistics: whether each call updates running statistics of a BatchNorm.
    """

    path: str
    calls: Count
    repeated: Count
    lines: tuple[Place, ...] = ()
    updates_statistics: bool = False


class DenseTable(Record, frozen=True, kw_only=True):
    """An embedding with a dense gradient: a value for every row, used by the batch or not.

    Attributes:
        path: the embedding module.
        used: indices looked up in the step, repeated ones included, so never fewer than the rows used.
    """

    path: str
    rows: Int
    columns: Int
    used: Int


class UnusedGradients(Record, frozen=True, kw_only=True):
    """Gradients of one module's parameters that no optimizer used before they were replaced, or at all.

    Attributes:
        passes: the step's backward passes that made gradients of these parameters.
        beyond: unused passes that entered this module after all used gradients had been made, so that the
            whole pass through it was wasted.
        within: the other unused passes, which had to go through it; only its own gradients were wasted.
        lines: the user's lines that started the unused passes.
    """

    path: str
    passes: Count
    beyond: Count
    within: Count
    lines: tuple[Place, ...] = ()


MIXES_NOTHING: Final = ""
"""Each output row depends only on the same input row, as in a linear layer."""


MIXES_PLACES: Final = "places"
"""Places within a sample are mixed, as in a convolution, but not samples."""


MIXES_ROWS: Final = "rows"
"""Any rows may be mixed, as in attention, a recurrent layer or BatchNorm in training mode."""


class UnusedOutput(Record, frozen=True, kw_only=True):
    """Share of a module's output that the loss doesn't depend on: its gradient was 0 or missing.

    Attributes:
        path: of the module; it or its children have trainable parameters.
        rows: computed rows: feature vectors of a linear layer and others that compute one per place, samples
            of a convolution; 0 for other modules, for which only the lines are known.
        unused: of them, those with an all-zero gradient.
        samples: slices along the first dimension.
        unused_samples: of them, those with only unused rows.
        lines: the user's lines that called it.
        places: slices along the second dimension of rows, 0 if there is none.
        unused_places: of them, those with only unused rows.
        mixes: one of the constants above, for the module and its children; ``None`` if unknown, as in runs of
            older versions.
        input_rows: vectors along the last dimension of its input; 0 if their gradients are unknown, as for
            layers that mix nothing.
        unused_inputs: of them, those with an all-zero gradient: no used output row depends on them.
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
    """An outermost module with only untrained parameters that ran in the counted step.

    Attributes:
        changes: whether one of its parameters or buffers changed between the counted step and the loop's end,
            as in a target network that follows a trained one, or whether BatchNorm normalizes by the batch.
        has_varying_input: whether it got or drew random numbers, or got the output of trained parameters, so
            that its output differs for the same sample.
    """

    path: str
    changes: bool
    has_varying_input: bool


class StepWaste(Record, frozen=True, kw_only=True):
    """Wasted work of the counted step.

    Attributes:
        repeated: modules that computed the same again, with the modules inside them.
        follows_gradients: whether an optimizer was seen to use gradients; false in runs of older versions.
        outputs: modules by how much of their output is in the loss; empty if no backward pass was seen, and
            in runs of older versions.
        notes: what couldn't be seen, a sentence each.
        frozen: modules without a trained parameter; empty before the loop has ended, if operators couldn't be
            followed, and in runs of older versions.
    """

    repeated: tuple[RepeatedCall, ...] = ()
    tables: tuple[DenseTable, ...] = ()
    unused: tuple[UnusedGradients, ...] = ()
    follows_gradients: bool = False
    outputs: tuple[UnusedOutput, ...] = ()
    notes: tuple[str, ...] = ()
    frozen: tuple[FrozenModule, ...] = ()
