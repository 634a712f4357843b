"""Loops as the engine sees them: all it needs from a Trainer or a plain loop."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from lightning_modelprof.config.options import SWITCH, ProfileConfig
from lightning_modelprof.errors import ConfigError, ModelProfError
from lightning_modelprof.inspect.flops.formulas import own_formulas
from lightning_modelprof.measure.setup.training_setup import Live
from lightning_modelprof.measure.steps.ledger import PhaseLedger
from lightning_modelprof.measure.stored import parameters_of
from lightning_modelprof.run.loops import FIT, LoopKind
from lightning_modelprof.run.records import CallbackTime, OutsideLoop


class PhaseSource(Protocol):
    """Tells the ledger when phases start and end.

    Attributes:
        inner: the user's own profiler, which gets the same calls; ``None`` without.
        on_error: called once when our code has failed, while its error is being handled.
    """

    inner: Any
    on_error: Callable[[], None]

    def arm(self) -> None: ...

    def disarm(self) -> None:
        """End with the loop; may be called more than once."""

    def choose_table(self) -> None:
        """Adapt to a profiler window that has opened or closed."""

    def callback_times(self) -> tuple[CallbackTime, ...]:
        """Return time by callback and hook so far, longest first."""


class Loop:
    """A loop run by user code alone, and the base class of a Trainer's.

    Attributes:
        module: the model; ``None`` if unknown.
        is_first: whether this rank reports for all.
        accumulate: batches per optimizer step.
        log_every_n_steps: steps between logged points.
        loggers: with the interface of Lightning's loggers.
        precision, strategy: their names.
        run_by: classes whose packages run the loop.
    """

    kind: LoopKind = FIT
    module: Any = None
    rank: int = 0
    world_size: int = 1
    is_first: bool = True
    accumulate: int = 1
    log_every_n_steps: int = 50
    loggers: Sequence[Any] = ()
    precision: str = ""
    strategy: str = ""
    run_by: tuple[type, ...] = ()

    @property
    def device(self) -> torch.device:
        """Device of the model's first parameter; the CPU without one."""
        parameter = next(iter(parameters_of(self.module)), None) if self.module is not None else None
        return torch.device("cpu") if parameter is None else parameter.device

    @property
    def holders(self) -> Sequence[Any]:
        """User objects that may hold something from step to step: the model, callbacks."""
        return () if self.module is None else (self.module,)

    @property
    def optimizers(self) -> Sequence[Any]:
        return ()

    @property
    def num_steps(self) -> int | None:
        """Number of batches in the loop; ``None`` if unknown."""
        return None

    @property
    def logger_step(self) -> int:
        """Step that loggers use for the last finished batch."""
        return 0

    @property
    def is_validating(self) -> bool:
        """Whether a validation runs inside the loop."""
        return False

    @property
    def is_launched(self) -> bool:
        """Whether a launcher started this process as one of the training's."""
        return False

    @property
    def progress_bar(self) -> Any:
        """Lightning's progress bar; ``None`` without."""
        return None

    def iterators(self) -> Sequence[Any]:
        """Return the iterators of the running dataloaders.

        Raises:
            Exception: of any type, before the first fetch.
        """
        return ()

    def loaders(self) -> Sequence[Any]:
        """Return the dataloaders; may raise like :meth:`iterators`."""
        return ()

    def prefetched(self) -> Sequence[Any]:
        """Return the batches fetched ahead of the running one."""
        return ()

    def live(self) -> Live:
        """Return the object from which the training's setup is read."""
        return Live(self)

    def make_phase_source(self, ledger: PhaseLedger) -> PhaseSource:
        """Make the phase source that feeds the ledger, and install it."""
        raise NotImplementedError

    def begin(self, phase_source: Any, ledger: PhaseLedger, cleanup: ExitStack) -> None: ...

    def take_out(self, phase_source: Any) -> None:
        """Remove our parts after the loop."""
        phase_source.disarm()

    def outside_times(self) -> OutsideLoop | None:
        """Return time before and after the loop so far; ``None`` if it isn't measured."""
        return None

    def join_progress_bar(self, live: Any, cleanup: ExitStack) -> None: ...

    def stop(self) -> None:
        """End the loop after the running step."""

    def run_step(self, module: Any, arguments: tuple[Any, ...]) -> Any:  # noqa: ARG002
        """Run the step's method on a copy of the module, as the loop would.

        Raises:
            ModelProfError: when there's no such method.
        """
        raise ModelProfError("a plain loop has no step method to call on a copy")


def num_prefetched(loop: Loop) -> int:
    """Return how many batches the workers of the loop's dataloader keep ready, at most over several.

    0 without workers, and for loaders that aren't made like torch's DataLoader.
    """
    try:
        loaders = loop.loaders()
    except Exception:  # no dataloader yet, or an unknown Lightning version
        return 0
    return max((_of_loader(loader) for loader in loaders), default=0)


def _of_loader(loader: Any) -> int:
    try:
        num_workers, prefetch_factor = loader.num_workers, loader.prefetch_factor
    except Exception:  # a custom loader may raise anything
        return 0
    if not isinstance(num_workers, int) or not isinstance(prefetch_factor, int):
        return 0  # prefetch_factor is None without workers
    return num_workers * prefetch_factor if num_workers > 0 and prefetch_factor > 0 else 0


def batches_made(loop: Loop) -> tuple[bool, int] | None:
    """Return whether the batch fetched next is ready, and how many batches are.

    Of several dataloaders with workers, all must have made it, and the smallest number counts. ``None``
    without workers, or if unknown. Takes about 10 µs and no batch.

    Caveats:
        A batch that came out of order counts as the next one while it's in the queue.
    """
    try:
        made = [_made(one) for one in loop.iterators() if hasattr(one, "_data_queue")]
    except Exception:  # before the first fetch, or an unknown torch or Lightning version
        return None
    return (all(is_ready for is_ready, _ in made), min(number for _, number in made)) if made else None


def _made(iterator: Any) -> tuple[bool, int]:
    """Whether the queue has a batch, or the next one was taken from it early; and the number of batches."""
    queue, tasks = iterator._data_queue, iterator._task_info
    early = sum(len(task) > 1 for task in tasks.values())
    is_empty = queue.empty()
    try:
        waiting = queue.qsize()
    except NotImplementedError:  # macOS
        waiting = 0
    is_ready = len(tasks.get(iterator._rcvd_idx, ())) > 1 or not is_empty
    return is_ready, early + max(waiting, not is_empty)


_HAS_PRINTED_OFF = False


def print_switched_off(who: str = "ModelProfCallback") -> None:
    """Print once per process that the environment switches the callback off."""
    global _HAS_PRINTED_OFF  # noqa: PLW0603  # per process, like the environment
    if not _HAS_PRINTED_OFF:
        _HAS_PRINTED_OFF = True
        with contextlib.suppress(Exception):
            print(f"{who} is off because {SWITCH}={os.environ.get(SWITCH)}", file=sys.stderr)


def check_machine(config: ProfileConfig, who: str = "ModelProfCallback") -> None:
    """Refuse settings that can't work on this machine.

    Raises:
        ConfigError: on an activity the machine lacks, or a formula for an operator unknown to torch.
    """
    for activity in config.activities or ():
        if activity != "cpu" and not getattr(torch, activity).is_available():
            raise ConfigError(
                f"{who}: activities: {activity!r} needs a device that torch can use, but there is none."
                " Remove it, or leave activities out to record all the machine has."
            )
    try:
        own_formulas(config.inspect.flop_formulas)
    except KeyError as error:
        raise ConfigError(
            f"{who}: inspect: flop_{error.args[0]}. Import the operator's library first."
        ) from None
