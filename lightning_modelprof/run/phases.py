"""The phases of a step: their keys, labels and the names of their ranges in a trace.

A phase index is the position in :data:`PHASES`; steps store one column per phase in this order.
Appending a phase is safe for saved runs (they store keys), reordering is not needed.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from lightning_modelprof.record import Count, Record, Whole

AmongRanks = Literal["own", "may_wait", "meets", "not_counted"]
"""``own`` work of a rank; work in which it ``may_wait`` for others; where all ``meets``; ``not_counted``."""


class Phase(NamedTuple):
    """One kind of work a step consists of, a step being one batch of a loop.

    Attributes:
        key: in files and code.
        label: what a reader sees.
        definition: what it is, for a reader, in Markdown.
        among_ranks: whether a rank does it on its own, may wait for others in it, or does nothing else.
        is_core: whether Paddle's Model Summary shows it by name; the rest are parts of Others.
        on_device: whether it launches work on a device; others keep the mark of the phase before them.
        every_step: whether every step has it: what is in few steps is a share of the loop, and no profiler or
            inspection slows it down.
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
        "waiting for the next batch; with workers this is the wait, not the workers' time",
        "own",
        is_core=True,
    ),
    Phase(
        "transfer",
        "Transfer",
        "moving the batch to the device, with the batch-transfer hooks",
        "own",
        on_device=True,
    ),
    Phase(
        "forward",
        "Forward",
        (
            "the model and the loss in `training_step` (`validation_step`, `test_step`, `predict_step`),"
            " without the phases below"
        ),
        "may_wait",
        is_core=True,
        on_device=True,
    ),
    Phase(
        "backward",
        "Backward",
        (
            "`loss.backward()` as Lightning calls it, including gradient communication;"
            " `manual_backward` in manual optimization"
        ),
        "meets",
        is_core=True,
        on_device=True,
    ),
    Phase(
        "optimizer",
        "Optimization",
        (
            "the optimizer step, without the forward and backward in its closure; includes"
            " unscaling in 16-bit precision"
        ),
        "may_wait",
        is_core=True,
        on_device=True,
    ),
    Phase(
        "zero_grad",
        "Zero grad",
        "clearing the gradients; part of forward in manual optimization",
        "own",
        on_device=True,
    ),
    Phase(
        "clip",
        "Gradient clipping",
        ("`configure_gradient_clipping`, which Lightning calls even if nothing is clipped"),
        "may_wait",
        on_device=True,
    ),
    Phase("lr_scheduler", "LR scheduler", "stepping learning-rate schedulers", "own", every_step=False),
    Phase("callbacks", "Callbacks", "other callbacks' hooks", "own", every_step=False),
    Phase(
        "module_hooks",
        "Module hooks",
        "hooks that you override in the LightningModule, DataModule or Strategy",
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
            "`predict` only: from the end of the batch to the next fetch. Lightning waits for the"
            " device, moves the predictions to the CPU and keeps them"
        ),
        "own",
    ),
    Phase(
        "validation",
        "Validation",
        (
            "validation during the step, without callbacks and checkpoints; the Validation"
            " table shows its parts"
        ),
        "may_wait",
        every_step=False,
    ),
    Phase("checkpoint", "Checkpoint", "saving checkpoints", "own", on_device=True, every_step=False),
    Phase(
        "dataloader_init",
        "Dataloader init",
        "shutting down old workers and starting new ones at an epoch's start",
        "own",
        every_step=False,
    ),
    Phase("profiler", "Profiler", "this profiler's work between steps", "not_counted"),
    Phase("other", "Loop", "Lightning's loop between the phases above", "may_wait"),
    Phase(
        "rank_wait",
        "Rank wait",
        (
            "with several ranks, the wait at each step's start until Lightning (2.5.2 and later) has"
            " told all of them whether a signal arrived. It reads a value from the device, so on a GPU"
            " it also includes the wait for the rank's own device"
        ),
        "meets",
    ),
    Phase(
        "user_profiler",
        "Your profiler",
        "the Trainer's own profiler (`Trainer(profiler=...)`)",
        "own",
    ),
    Phase(
        "epoch_turn",
        "Epoch turn",
        (
            "work between two epochs' batches that belongs to no other phase: Lightning's own work,"
            " epoch metrics and loggers. It counts toward the next epoch's first step"
        ),
        "may_wait",
        every_step=False,
    ),
)


PHASE_INDEX: Final[dict[str, int]] = {phase.key: index for index, phase in enumerate(PHASES)}


RANGE_PREFIX: Final = "modelprof: "
"""Start of the name of every host range that this package writes into a trace, followed by a phase key."""


STEP_RANGE_PREFIX: Final = "ProfilerStep#"
"""Start of the name of a step's host range, followed by the step's number (torch.profiler's convention)."""


TRACE_METADATA_KEY: Final = "modelprof"
"""Top-level key of a trace file under which this package stores which steps of the window are complete."""


def _as_in_a_step(key: str, definition: str) -> Phase:
    """A part that is called what it is called in a training step."""
    return PHASES[PHASE_INDEX[key]]._replace(definition=definition, is_core=False)


PARTS: Final[tuple[Phase, ...]] = (
    _as_in_a_step(
        "dataloader",
        (
            "waiting for the next validation batch. A second dataloader's first fetch includes"
            " starting its workers"
        ),
    ),
    _as_in_a_step("transfer", "moving the batch to the device, with the batch-transfer hooks"),
    _as_in_a_step("forward", "`validation_step`, including its `self.log` calls and metric updates"),
    _as_in_a_step(
        "module_hooks",
        (
            "`on_validation_...` hooks that you override in the LightningModule or Strategy, except"
            " `on_validation_epoch_end`"
        ),
    ),
    Phase(
        "epoch_end",
        "Metrics and epoch end",
        (
            "computing the logged metrics after each dataloader's last batch, and the module's"
            " `on_validation_epoch_end`. With several ranks, includes the wait for each other"
        ),
        "may_wait",
    ),
    _as_in_a_step(
        "logging",
        (
            "from the end of each batch to the next fetch, and logging at the end: metrics, loggers,"
            " progress counters"
        ),
    ),
    _as_in_a_step(
        "dataloader_init",
        (
            "before the first batch: calling `val_dataloader` again, creating the first dataloader's"
            " iterator and starting its workers. For an iterable dataset without a length, includes the"
            " first fetch. During gradient accumulation, includes the end of the training batch, as"
            " Lightning calls no hook in between"
        ),
    ),
    _as_in_a_step("other", "Lightning's loop between the phases above"),
)
"""The parts of the phase ``validation``: they share its time, each nanosecond in one of them."""


PART_INDEX: Final[dict[str, int]] = {part.key: index for index, part in enumerate(PARTS)}


class PartTime(Record, frozen=True, kw_only=True):
    """One part of all validation loops of a fit.

    Attributes:
        key: as in ``PARTS``.
        calls: how often it began; ``None`` for what nothing begins, as Lightning's loop.
        total_ns: self time, without callbacks and checkpoints.
        device_ns: elapsed time on the device's stream while it was the running part; ``None`` without a
            device, or where that could not be read.
    """

    key: str
    calls: Count | None
    total_ns: Whole
    device_ns: Whole | None = None


class ValidationTimes(Record, frozen=True, kw_only=True):
    """What the validation loops of one fit consisted of, whether or not the step around them finished.

    Attributes:
        num_runs: validation loops that began while the fit was measured; the sanity check comes before.
        parts: each part of ``PARTS``; they sum to the phase ``validation`` of the whole fit.
        num_first_fetches: fetches of the first batch of a dataloader.
        first_fetch_ns: time of these, which is in ``dataloader`` too.
    """

    num_runs: Whole
    parts: tuple[PartTime, ...]
    num_first_fetches: Whole = 0
    first_fetch_ns: Whole = 0

    @property
    def num_batches(self) -> int:
        """Batches that ``validation_step`` was called with."""
        return next((part.calls or 0 for part in self.parts if part.key == "forward"), 0)

    @property
    def total_ns(self) -> int:
        """All parts together."""
        return sum(part.total_ns for part in self.parts)
