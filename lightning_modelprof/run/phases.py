"""The phases of a step: their keys, labels and range names in a trace.

A phase index is the position in :data:`PHASES`; steps store one column per phase in this order. Appending a
phase is safe for saved runs, which store keys.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from lightning_modelprof.record import Count, Int, Record

AmongRanks = Literal["own", "may_wait", "meets", "not_counted"]
"""A rank's ``own`` work; work that ``may_wait`` for others; where all ``meets``; ``not_counted``."""


class Phase(NamedTuple):
    """One kind of work in a step; a step is one batch of a loop.

    Attributes:
        key: in files and code.
        label: as shown in reports.
        definition: as shown in reports, in Markdown.
        among_ranks: whether it's a rank's own work, may include waiting for other ranks, or always does.
        is_core: whether Paddle's Model Summary names it; the rest are parts of Others.
        on_device: whether it launches work on a device; others keep the mark of the phase before them.
        every_step: whether every step has it. Phases of few steps are given as a share of the loop, and no
            profiler or inspection slows them down.
    """

    key: str
    label: str
    definition: str
    among_ranks: AmongRanks
    is_core: bool = False
    on_device: bool = False
    every_step: bool = True


PHASES: Final[tuple[Phase, ...]] = (
    Phase(
        "dataloader",
        "Dataloader",
        "time waiting for the next batch; with workers, only the wait and not the work",
        "own",
        is_core=True,
    ),
    Phase(
        "transfer",
        "Transfer",
        "moving the batch to the device, including batch-transfer hooks",
        "own",
        on_device=True,
    ),
    Phase(
        "forward",
        "Forward",
        (
            "`training_step` (`validation_step`, `test_step`, `predict_step`), meaning the model and the"
            " loss, without the phases below"
        ),
        "may_wait",
        is_core=True,
        on_device=True,
    ),
    Phase(
        "backward",
        "Backward",
        (
            "`loss.backward()` as called by Lightning, including gradient communication; `manual_backward`"
            " with manual optimization"
        ),
        "meets",
        is_core=True,
        on_device=True,
    ),
    Phase(
        "optimizer",
        "Optimization",
        (
            "the optimizer's step without the forward and backward of its closure; with 16-bit precision it"
            " includes unscaling"
        ),
        "may_wait",
        is_core=True,
        on_device=True,
    ),
    Phase(
        "zero_grad",
        "Zero grad",
        "clearing gradients; part of Forward with manual optimization",
        "own",
        on_device=True,
    ),
    Phase(
        "clip",
        "Gradient clipping",
        "`configure_gradient_clipping`, which Lightning calls even if nothing is clipped",
        "may_wait",
        on_device=True,
    ),
    Phase("lr_scheduler", "LR scheduler", "stepping learning-rate schedulers", "own", every_step=False),
    Phase("callbacks", "Callbacks", "other callbacks' hooks", "own", every_step=False),
    Phase(
        "module_hooks",
        "Module hooks",
        "hooks of the LightningModule, DataModule and Strategy that you override",
        "own",
        every_step=False,
    ),
    Phase(
        "logging",
        "Logging",
        "from the end of the batch to the next fetch: metrics, loggers, progress counters",
        "own",
        every_step=False,
    ),
    Phase(
        "predictions",
        "Predictions",
        (
            "`predict` only, from the end of the batch to the next fetch. Lightning moves the predictions"
            " to the CPU, which waits for the device, and keeps them"
        ),
        "own",
    ),
    Phase(
        "validation",
        "Validation",
        (
            "validation loops inside the step, without callbacks and checkpoints; see the Validation table"
            " for its parts"
        ),
        "may_wait",
        every_step=False,
    ),
    Phase("checkpoint", "Checkpoint", "saving checkpoints", "own", on_device=True, every_step=False),
    Phase(
        "dataloader_init",
        "Dataloader init",
        "stopping old workers and starting new ones at the start of an epoch",
        "own",
        every_step=False,
    ),
    Phase("profiler", "Profiler", "overhead of this profiler at step boundaries", "not_counted"),
    Phase("other", "Loop", "Lightning's loop, between the other phases", "may_wait"),
    Phase(
        "rank_wait",
        "Rank wait",
        (
            "with multiple ranks, the time until Lightning (since 2.5.2) has told all of them about signals"
            " at the start of each step. It reads a value from the device, so on a GPU it includes waiting"
            " for the rank's own device"
        ),
        "meets",
    ),
    Phase(
        "user_profiler",
        "Your profiler",
        "all work of the profiler passed to the Trainer (`Trainer(profiler=...)`)",
        "own",
    ),
    Phase(
        "epoch_turn",
        "Epoch boundary",
        (
            "time between two epochs' batches outside the other phases, such as Lightning's own work, epoch"
            " metrics and loggers. It counts for the first step of the next epoch"
        ),
        "may_wait",
        every_step=False,
    ),
)


PHASE_INDEX: Final[dict[str, int]] = {phase.key: index for index, phase in enumerate(PHASES)}


RANGE_PREFIX: Final = "modelprof: "
"""Name prefix of this package's CPU ranges in a trace, followed by a phase key."""


STEP_RANGE_PREFIX: Final = "ProfilerStep#"
"""Name prefix of a step's CPU range, followed by the step's number (torch.profiler's convention)."""


TRACE_METADATA_KEY: Final = "modelprof"
"""Top-level key of a trace file with the window's complete steps."""


def _as_in_a_step(key: str, definition: str) -> Phase:
    return PHASES[PHASE_INDEX[key]]._replace(definition=definition, is_core=False)


PARTS: Final[tuple[Phase, ...]] = (
    _as_in_a_step(
        "dataloader",
        (
            "time waiting for the next validation batch. For a second dataloader, the first fetch includes"
            " worker startup"
        ),
    ),
    _as_in_a_step("transfer", "moving the batch to the device, including batch-transfer hooks"),
    _as_in_a_step("forward", "`validation_step`, including its `self.log` calls and metric updates"),
    _as_in_a_step(
        "module_hooks",
        (
            "`on_validation_...` hooks of the LightningModule and the Strategy that you override, except"
            " `on_validation_epoch_end`"
        ),
    ),
    Phase(
        "epoch_end",
        "Metrics and epoch end",
        (
            "computing logged metrics, after each dataloader's last batch, and the module's"
            " `on_validation_epoch_end`. With multiple ranks it includes waiting for the others there"
        ),
        "may_wait",
    ),
    _as_in_a_step(
        "logging",
        "after each batch until the next fetch, and logging at the end: metrics, loggers, progress counters",
    ),
    _as_in_a_step(
        "dataloader_init",
        (
            "before the first batch: `val_dataloader` if it's called again, the first dataloader's iterator"
            " and worker startup. For an iterable data set without a length it includes the first fetch."
            " While gradients accumulate, it includes the work after the training batch, because Lightning"
            " emits no event in between"
        ),
    ),
    _as_in_a_step("other", "Lightning's loop, between the other parts"),
)
"""Parts of the phase ``validation``; each nanosecond of it is in exactly one."""


PART_INDEX: Final[dict[str, int]] = {part.key: index for index, part in enumerate(PARTS)}


class PartTime(Record, frozen=True, kw_only=True):
    """One part of all validation loops of a fit.

    Attributes:
        key: as in ``PARTS``.
        calls: number of starts; ``None`` for parts without one, such as Lightning's loop.
        total_ns: self time, without callbacks and checkpoints.
        device_ns: elapsed time on the device's stream while it was the running part; ``None`` without a
            device or if it couldn't be read.
    """

    key: str
    calls: Count | None
    total_ns: Int
    device_ns: Int | None = None


class ValidationTimes(Record, frozen=True, kw_only=True):
    """Parts of a fit's validation loops, whether or not the step around them finished.

    Attributes:
        num_runs: validation loops started while the fit was measured, after the sanity check.
        parts: each part of ``PARTS``; they sum to the phase ``validation`` of the whole fit.
        num_first_fetches: fetches of a dataloader's first batch.
        first_fetch_ns: time of these, which is part of ``dataloader`` too.
    """

    num_runs: Int
    parts: tuple[PartTime, ...]
    num_first_fetches: Int = 0
    first_fetch_ns: Int = 0

    @property
    def num_batches(self) -> int:
        """Calls of ``validation_step``."""
        return next((part.calls or 0 for part in self.parts if part.key == "forward"), 0)

    @property
    def total_ns(self) -> int:
        return sum(part.total_ns for part in self.parts)
