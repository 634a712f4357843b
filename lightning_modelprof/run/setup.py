"""A training's setup, as read from the live objects: loaders, optimizers, callbacks, CPUs, the device.

It has no times. ``None`` means *could not be read*; the rules that need it then say so.
"""

from __future__ import annotations

from typing import Final

from lightning_modelprof.place import Place
from lightning_modelprof.record import Count, Int, Ranks, Real, Record, field

WRAPPERS: Final = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}
"""Class of a model wrapper → its attribute that holds the model."""


class Library(Record, frozen=True, kw_only=True):
    """A library that trains with Lightning for its users, whose calls end in its code.

    Attributes:
        package: its import name.
        version: ``""`` if unknown.
    """

    package: str
    version: str = ""
    folders: tuple[str, ...] = ()


class LoaderSetup(Record, frozen=True, kw_only=True):
    """One dataloader of the measured loop, or of the validations inside a fit.

    Attributes:
        kind: class name.
        num_workers: processes that make batches; 0 makes them in the training process.
        prefetch_factor: batches that each worker keeps ready; ``None`` without workers.
        start_method: how workers are started: ``fork``, ``spawn`` or ``forkserver``.
        batch_size: ``None`` with a custom batch sampler.
        dataset: its ``__getitem__`` or ``__iter__``.
        made_by: the hook of a DataModule or module that returns it; ``None`` if it was passed to the Trainer.
    """

    kind: str
    num_workers: Int | None = None
    prefetch_factor: Int | None = None
    persistent_workers: bool | None = None
    pin_memory: bool | None = None
    start_method: str | None = None
    batch_size: Int | None = None
    dataset: Place | None = None
    collate: Place | None = None
    worker_init: Place | None = None
    made_by: Place | None = None


class OptimizerSetup(Record, frozen=True, kw_only=True):
    """One optimizer.

    Attributes:
        kind: class name.
        foreach, fused: as passed; ``None`` if torch chooses or the optimizer has no such argument.
        num_tensors: parameters it steps.
    """

    kind: str
    foreach: bool | None
    fused: bool | None
    has_foreach: bool
    has_fused: bool
    num_tensors: Int


class CheckpointSetup(Record, frozen=True, kw_only=True):
    """One ModelCheckpoint's settings that control how often it saves."""

    callback: str
    every_n_train_steps: Int | None = None
    every_n_epochs: Int | None = None
    save_top_k: Int | None = None
    save_last: bool | None = None
    save_weights_only: bool | None = None


class CallbackSetup(Record, frozen=True, kw_only=True):
    """One callback: its name as in the times by callback, and its hooks."""

    callback: str
    kind: str
    hooks: dict[str, Place] = field(default_factory=dict)


class DeviceSetup(Record, frozen=True, kw_only=True):
    """A CUDA device.

    Attributes:
        capability: compute capability, such as (9, 0).
        reserved_bytes: peak of torch's allocator in this process.
    """

    capability: tuple[Int, Int]
    total_bytes: Int
    reserved_bytes: Int


class LayerShape(Record, frozen=True, kw_only=True):
    """Matrix sizes of one linear layer; 16-bit matrix products are fastest with multiples of 8."""

    path: str
    in_features: Int
    out_features: Int


class ConvolutionBias(Record, frozen=True, kw_only=True):
    """A convolution whose bias is cancelled by the normalisation after it.

    Attributes:
        convolution, normalisation: paths.
        is_sequential: whether both are in one ``Sequential``, which defines their order; otherwise it's
            inferred from their names and sizes.
        owner: ``__init__`` of the nearest module around them that isn't torch's.
    """

    convolution: str
    normalisation: str
    is_sequential: bool
    owner: Place | None = None


class Compilation(Record, frozen=True, kw_only=True):
    """One compilation by torch.compile while the loop ran.

    Attributes:
        attempt: 0 for the function's first compilation, 1 for the second, ...
        seconds: ``None`` if torch doesn't report them.
        caller: the user's statement that ran it; ``None`` if torch doesn't report it.
    """

    function: Place
    attempt: Count
    seconds: Real | None = None
    caller: Place | None = None


class CompileSetup(Record, frozen=True, kw_only=True):
    """torch.compile's activity while the loop ran.

    Attributes:
        graph_breaks: reason → count.
        failed_guards: function → its failed guards, each a sentence from torch.
    """

    compilations: tuple[Compilation, ...] = ()
    graph_breaks: dict[str, Int] = field(default_factory=dict)
    failed_guards: dict[str, tuple[str, ...]] = field(default_factory=dict)


class Statement(Place, frozen=True, kw_only=True):
    """A statement in the user's code that a finding may want to change, as it was when the loop started.

    Attributes:
        about: the class or function that it calls, such as ``DataLoader``, or what it holds: one of the names
            in ``measure.setup.statements``.
        file: absolute path.
        digest: SHA-256 of the file, in hex.
        line, end_line: first and last line, from 1.
        text: its source, from its first character.
        calls: the calls in it that would change: first line, column, last line, end column, as in ``ast``.
        module: path of the module that it makes; ``""`` for other statements.
    """

    about: str
    file: str
    digest: str
    line: Count
    end_line: Count
    text: str
    calls: tuple[tuple[Count, Count, Count, Count], ...] = ()
    module: str = ""


class TrainingSetup(Record, frozen=True, kw_only=True):
    """A loop's setup, read from the live objects when it starts and when it ends.

    Attributes:
        val_loaders: of the validations inside a fit.
        usable_cpus: CPUs available to this process, by affinity and by its container's quota.
        num_threads: of torch's operators in this process.
        local_world_size: processes of this training on this machine.
        manual_optimization: whether the module steps its optimizers itself.
        module: the LightningModule's class.
        libraries: those that the LightningModule's or the DataModule's class comes or derives from, and those
            that called the Trainer, nearest first.
        package_call: the library's line that called the Trainer; ``None`` if the user's own code did.
        user_call: the user's line that led there, if there is one.
        module_hooks: the methods that it overrides: ``training_step``, ``on_...``, ....
        data_hooks: the same for the DataModule; empty without one, and in runs of older versions.
        keeps_gradients: whether an overridden ``optimizer_zero_grad`` fills gradients with zeros; ``None`` if
            it isn't overridden or its source doesn't show it.
        loggers: their ``log_metrics``.
        val_check_interval, check_every_n_epochs: when the Trainer validates.
        num_val_batches: of one validation, over all dataloaders; ``None`` if unknown.
        num_sanity_batches: of the sanity check before training; ``None`` if unknown, and in runs of older
            versions.
        gradient_clip_val: ``None`` if the Trainer doesn't clip.
        profiler: class of the Trainer's own profiler; ``""`` without, and in runs of older versions.
        detects_anomaly: whether autograd's anomaly detection was on when the loop started.
        matmul_precision: ``torch.get_float32_matmul_precision()``.
        cuda: ``None`` without a CUDA device.
        layers: linear layers; only read for CUDA.
        compiled: ``None`` if torch.compile wasn't used.
        calls: lines in the user's files that call a name that findings ask for, such as ``DataLoader``, by
            that name.
        statements: the user's that findings may want to change; empty in runs of older versions.
        configured_by: ``LightningCLI`` or ``Hydra`` if it calls the Trainer; ``""`` otherwise.
        untrained: outermost modules whose parameters aren't in any optimizer when the loop ends.
    """

    loaders: tuple[LoaderSetup, ...] = ()
    val_loaders: tuple[LoaderSetup, ...] = ()
    usable_cpus: Int | None = None
    num_threads: Int | None = None
    local_world_size: Ranks = 1
    optimizers: tuple[OptimizerSetup, ...] = ()
    manual_optimization: bool = False
    module: Place | None = None
    libraries: tuple[Library, ...] = ()
    package_call: Place | None = None
    user_call: Place | None = None
    module_hooks: dict[str, Place] = field(default_factory=dict)
    data_hooks: dict[str, Place] = field(default_factory=dict)
    keeps_gradients: bool | None = None
    num_trainable_tensors: Int | None = None
    callbacks: tuple[CallbackSetup, ...] = ()
    checkpoints: tuple[CheckpointSetup, ...] = ()
    checkpoint_io: Place | None = None
    log_every_n_steps: Int | None = None
    loggers: tuple[Place, ...] = ()
    val_check_interval: Real | None = None
    check_every_n_epochs: Int | None = None
    num_val_batches: Int | None = None
    num_sanity_batches: Int | None = None
    gradient_clip_val: Real | None = None
    detects_anomaly: bool | None = None
    profiler: str = ""
    matmul_precision: str | None = None
    cuda: DeviceSetup | None = None
    layers: tuple[LayerShape, ...] = ()
    convolution_biases: tuple[ConvolutionBias, ...] = ()
    compiled: CompileSetup | None = None
    calls: dict[str, tuple[Place, ...]] = field(default_factory=dict)
    statements: tuple[Statement, ...] = ()
    configured_by: str = ""
    untrained: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
