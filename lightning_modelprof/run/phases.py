"""The phases of a step: their keys, labels and the names of their ranges in a trace.

A phase index is the position in :data:`PHASES`; steps store one column per phase in this order.
Appending a phase is safe for saved runs (they store keys), reordering is not needed.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Phase(NamedTuple):
    """One kind of work a step consists of, a step being one batch of a loop.

    ``key`` is used in files and code, ``label`` is what a reader sees, ``is_core`` marks the four
    rows that Paddle's Model Summary shows by name; the rest are shown as parts of Others.
    """

    key: str
    label: str
    definition: str
    is_core: bool = False


PHASES: Final[tuple[Phase, ...]] = (
    Phase("dataloader", "Dataloader", "waiting for the next batch", is_core=True),
    Phase("transfer", "Transfer", "moving the batch to the device, with the batch-transfer hooks"),
    Phase("forward", "Forward", "training_step (validation_step, ...): the model and the loss", is_core=True),
    Phase("backward", "Backward", "autograd, with gradient communication", is_core=True),
    Phase(
        "optimizer",
        "Optimization",
        "the optimizer step without the closure's forward and backward",
        is_core=True,
    ),
    Phase("zero_grad", "Zero grad", "clearing the gradients"),
    Phase("clip", "Gradient clipping", "configure_gradient_clipping"),
    Phase("lr_scheduler", "LR scheduler", "stepping learning-rate schedulers"),
    Phase("callbacks", "Callbacks", "hooks of the other callbacks"),
    Phase("module_hooks", "Module hooks", "hooks of the LightningModule, DataModule and Strategy"),
    Phase("logging", "Logging", "metrics, loggers and progress counters after the batch"),
    Phase("predictions", "Predictions", "predict only: moving the predictions to the CPU and keeping them"),
    Phase("validation", "Validation", "the validation loop, without callbacks and checkpoints"),
    Phase("checkpoint", "Checkpoint", "saving checkpoints"),
    Phase("dataloader_init", "Dataloader init", "worker shut-down and start-up at an epoch's start"),
    Phase("profiler", "Profiler", "this profiler's own work"),
    Phase("other", "Loop", "Lightning's loop between the above"),
    Phase("rank_wait", "Rank wait", "several ranks: until Lightning has told all whether a signal came"),
    Phase("user_profiler", "Your profiler", "Trainer(profiler=...): what it does at each action"),
    Phase("epoch_turn", "Epoch turn", "Lightning's own work between two epochs, loggers at an epoch's end"),
)

PHASE_INDEX: Final[dict[str, int]] = {phase.key: index for index, phase in enumerate(PHASES)}

RANGE_PREFIX: Final = "modelprof: "
"""Start of the name of every host range that this package writes into a trace, followed by a phase key."""

STEP_RANGE_PREFIX: Final = "ProfilerStep#"
"""Start of the name of a step's host range, followed by the step's number (torch.profiler's convention)."""

TRACE_METADATA_KEY: Final = "modelprof"
"""Top-level key of a trace file under which this package stores which steps of the window are complete."""
