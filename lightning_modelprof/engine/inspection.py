"""Inspect a few steps: count one, count some for their batch size, and time modules in some.

No other step is instrumented. The counted step computes what it would anyway; a compiled model isn't run
eagerly for it, but counted afterwards on a copy without data.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_modelprof.config.options import InspectOptions
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.engine.memory import FollowedStep
from lightning_modelprof.engine.plan import InspectedSteps
from lightning_modelprof.engine.size_plan import SizePlan
from lightning_modelprof.errors import ModelProfError, describe_error
from lightning_modelprof.inspect.core.counter import FlopCounter
from lightning_modelprof.inspect.core.model_copies import (
    compiled_frames,
    fake_copy,
    fake_inputs,
    find_compiled,
    reaches_outside,
    refuse_closures,
    values_are_missing,
)
from lightning_modelprof.inspect.core.preserved import DeeperStack, modes_on, random_states_kept
from lightning_modelprof.inspect.flops.count import step_count
from lightning_modelprof.inspect.flops.formulas import Formula
from lightning_modelprof.inspect.flops.fvcore_table import forward_table
from lightning_modelprof.inspect.flops.peaks import peak_rates
from lightning_modelprof.inspect.lines.frozen import FrozenWatch, VaryingWatch
from lightning_modelprof.inspect.lines.sites import BatchSites, SiteWatch
from lightning_modelprof.inspect.lines.waste import WasteWatch
from lightning_modelprof.inspect.modules.model_size import model_size
from lightning_modelprof.inspect.modules.module_times import ModuleTimer
from lightning_modelprof.inspect.modules.modules import module_records
from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.measure.steps.batch_shapes import own_tensors, shapes_of
from lightning_modelprof.measure.steps.ledger import PhaseLedger
from lightning_modelprof.measure.stored import is_trained, parameters_of
from lightning_modelprof.measure.user_code import loop_codes
from lightning_modelprof.measure.window.schedule import Schedule
from lightning_modelprof.record import Record
from lightning_modelprof.run.batches import Shapes
from lightning_modelprof.run.model_cost import ForwardTable, ModelCost
from lightning_modelprof.run.sites import BATCH_END, BATCH_START
from lightning_modelprof.run.steps import NOT_MEASURED
from lightning_modelprof.signals import raised_by_signal

_WITHOUT_COMPILE: Final = "To count FLOPs, profile a short run without torch.compile"


T = TypeVar("T")


class Inspection:
    """Finds out what a step costs.

    Args:
        steps: steps to inspect.
        ledger: knows the running batch's size and samples.
        options: the user's formulas and peaks, and whether fvcore counts too.
    """

    def __init__(
        self,
        steps: InspectedSteps,
        loop: Loop,
        ledger: PhaseLedger,
        *,
        options: InspectOptions,
        follows_memory: bool,
        clock: HostClock,
    ) -> None:
        assert ledger.sizes is not None, "batches have no size where no FLOPs are wanted"
        self.steps = steps
        self._loop = loop
        self._module: nn.Module = loop.module
        self._options = options
        self._ledger = ledger
        self._clock = clock
        self._samples: int | None = None
        self._sizes = ledger.sizes
        self._size_plan = SizePlan(ledger.sizes, lambda: tuple(map(is_trained, parameters_of(self._module))))
        self._size: int | None = None  # of the running step, if it's counted for that
        self._counter: FlopCounter | None = None
        self._is_counting = False
        self._timer: ModuleTimer | None = None
        self._is_timing = False
        self._arguments: tuple[Any, ...] | None = None  # of the counted step
        self._step: int | None = None
        self._stack = DeeperStack()
        self._frames = compiled_frames()
        self._watch: SiteWatch | None = None
        self._batch_sites: BatchSites | None = None
        self._waste: WasteWatch | None = None
        self._frozen: FrozenWatch | None = None
        self._varying: VaryingWatch | None = None  # of the counted step, once it's over
        self.followed = FollowedStep(loop, steps.counted, is_wanted=follows_memory)
        self._timed: list[int] = []  # step numbers
        self._timed_sizes: dict[Shapes, None] = {}
        self._begin_note = ""  # why timing couldn't start
        self._copy_reason = ""  # why a copy is counted instead of the step itself
        self._instead = ""  # advice if a copy can't be counted
        self.cost = ModelCost(
            count_note=(
                f"profiler windows cover every {loop.kind.step} (set wait=10 to leave some out)"
                if steps.counted is None
                else f"{loop.kind.subject} ended before {loop.kind.step} {steps.counted}, the one to count"
            ),
            times_note=f"{loop.kind.subject} ended before modules were timed",
            size_note=f"{loop.kind.subject} ended before sizes were recorded",
            peak_note=f"{loop.kind.subject} ended before the device's peak was looked up",
            forward_table_note='not run; set inspect={"fvcore": True} to run fvcore on a copy of the model',
            sites_note=f"{loop.kind.subject} ended before the {loop.kind.step} whose lines are watched",
        )

    def postpone(self, by: int, why: str, *, schedule: Schedule | None, accumulate: int) -> None:
        """Postpone the remaining inspections, if the loop lasts.

        Args:
            by: least number of steps; for the rest see ``InspectedSteps``.
            why: reason as a clause, for the report of a loop that ends before.
        """
        has_begun = not self.steps.may_wait
        self.steps.postpone(by, schedule=schedule, accumulate=accumulate)
        if has_begun:
            self._note_left(why)
        else:
            self.cost = replace(self.cost, count_note=why, times_note=why, size_note=why, sites_note=why)

    def leave_rest(self, why: str) -> None:
        """Inspect no more steps; to be called after at least one.

        Args:
            why: reason as a clause.
        """
        self.steps.leave_rest()
        self._note_left(why)

    def _note_left(self, why: str) -> None:
        """Note why modules aren't timed yet, and take now what would be taken after that."""
        self.cost = replace(self.cost, times_note=why)
        if self.cost.size is None:
            with _disable_current_modes():
                self._take_rest()

    def begin_step(self, step: int) -> bool:
        """Start a step; return whether it's inspected."""
        if not self.steps.begin_step(step):
            return False
        self._step = step
        if step == self.steps.counted:
            _attempt(self._begin_watch)
        return True

    @property
    def again_at(self) -> int:
        """First step at which a counted size is counted again."""
        return self._size_plan.again_at

    def wants_size(self, step: int, size: int) -> bool:
        return self._size_plan.wants(step, size)

    def begin_size(self, step: int, size: int) -> None:
        """Count the running step, which isn't inspected yet, for its batch size."""
        self._step, self._size = step, size

    def _begin_watch(self) -> None:
        self._copy_reason = self._why_a_copy()
        if not self._copy_reason:
            self._watch = SiteWatch((type(self._module),), loop_codes(), self._module)
            self._watch.begin()
            self._watch_batch_sites(BATCH_START)
            with _disable_current_modes():
                self._frozen, _ = _attempt(lambda: FrozenWatch(self._module))

    def _watch_batch_sites(self, phase: str | None) -> None:
        """Watch what no counter sees before and after the batch; ``None`` ends that."""
        around, self._batch_sites = self._batch_sites, None
        if around is not None:
            around.__exit__(None, None, None)
        # A user's mode that ends there would mistake ours for its own.
        if phase is not None and self._watch is not None and not modes_on():
            around = BatchSites(
                self._watch, phase, lambda: self._loop.kind.is_fit and self._loop.is_validating
            )
            self._batch_sites = around.__enter__()

    def begin_batch(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Start the inspection with the batch on the device; does nothing the second time."""
        if self._step is None or self._is_counting or self._is_timing:
            return
        self._watch_batch_sites(None)
        if self._step == self.steps.counted:
            self._size = self._sizes(batch)
        is_counted = self._size is not None
        if is_counted:
            samples = self._ledger.samples
            self._samples = None if samples == NOT_MEASURED else samples
            self._arguments = self._step_arguments(batch, batch_idx, dataloader_idx)
        self._stack.deepen()
        _, note = _attempt(lambda: self._begin_count(batch) if is_counted else self._begin_times(batch))
        if is_counted and note:
            self._copy_reason = f"the {self._loop.kind.step} itself couldn't be counted ({note})"
        elif note:
            self._begin_note = note

    def _why_a_copy(self) -> str:
        compiled = find_compiled(self._module)
        if compiled is not None:
            reason = f"torch.compile wraps {compiled}"
        elif compiled_frames() != self._frames:  # a function that the model only calls, wherever it's defined
            reason = f"torch.compile compiled something while {self._loop.kind.subject} ran"
        else:
            return self._why_unwatched()
        self._instead = _WITHOUT_COMPILE
        return reason

    def _why_unwatched(self) -> str:
        """Why the step's operators can't be watched; ``""`` if they can.

        While they're watched, an operator's result is already a Python object, and
        ``Tensor.__new__(cls, tensor)`` refuses to make an instance of another class from it.
        """
        kind = self._sizes.odd_class or own_tensors(type(self._module))
        if kind is None:
            return ""
        name = f"{kind.__module__}.{kind.__qualname__}"
        return f"tensors of class {name} can't always be created while operators are watched"

    def _begin_count(self, batch: Any) -> None:
        self._copy_reason = self._why_a_copy()
        if not self._copy_reason:
            counter = FlopCounter(
                self._module,
                self._options.flop_formulas,
                force_eager=False,
                watches=self._watches(batch) if self._step == self.steps.counted else (),
            )
            counter.__enter__()
            self._counter, self._is_counting = counter, True

    def _watches(self, batch: Any) -> tuple[Callable[..., None] | None, ...]:
        self._waste = WasteWatch(
            self._module,
            follows_gradients=self._loop.world_size == 1,
            owners=(type(self._module),),
            outside=loop_codes(),
        )
        self._waste.begin()
        return self._watch, self.followed.begin(batch), self._waste

    def _begin_times(self, batch: Any) -> None:
        if self._timer is None:
            self._timer = ModuleTimer(self._module, self._clock, self._loop.device)
        self._timer.arm()
        self._is_timing = True
        if self._step is not None:
            self._timed.append(self._step)
            self._timed_sizes[shapes_of(batch)] = None

    def _step_arguments(self, *available: Any) -> tuple[Any, ...]:
        method = getattr(self._module, self._loop.kind.step_hook, None)
        if method is None:  # a plain loop
            return available[:1]
        parameters = inspect.signature(method).parameters.values()
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            return available
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return available[: sum(parameter.kind in positional for parameter in parameters)]

    def before_backward(self, loss: torch.Tensor | None) -> None:
        """Prepare for the backward pass; without the loss, modules get no backward time."""
        if self._is_counting and self._counter is not None:
            self._counter.before_backward()
            if self._waste is not None:
                self._waste.before_backward()
        if self._is_timing and self._timer is not None and loss is not None:
            self._timer.on_before_backward(loss)

    def end_batch(self, *, failed: bool = False) -> None:
        """Remove what the inspection installed, after the step's work or its failure."""
        # Each part is forgotten only once removed, so that close() tries again if something fails here.
        if self._waste is not None:
            self._waste.end()
        if self._is_counting and self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._is_counting = False
            if failed:
                self.followed.give_up()
            self.followed.end()
            self._watch_batch_sites(None if failed else BATCH_END)
        if self._is_timing and self._timer is not None:
            self._timer.disarm(failed=failed)
            self._is_timing = False
        self._stack.restore()

    def end_step(self) -> None:
        """Finish the inspected step; slow work is done here, outside the step."""
        step, self._step = self._step, None
        size, self._size = self._size, None
        self.end_batch()
        self._end_watch(step)
        if step is None:
            return
        with _disable_current_modes():  # a user's mode around the fit must not see our work
            if size is not None or step == self.steps.counted:
                self._take_count(step, size)
            if self.steps.is_done and (size is None or step == self.steps.counted):
                self._take_rest()

    def close(self) -> None:
        """Leave nothing of ours on the model after the loop, even if an exception ended it."""
        self.steps.leave_rest()
        self._step = self._size = self._arguments = None
        self.end_batch(failed=True)
        self._end_watch(None)
        self._take_frozen()

    def _take_frozen(self) -> None:
        """Find frozen modules that changed since the counted step; some are updated only now and then."""
        frozen, varying, waste = self._frozen, self._varying, self.cost.waste
        self._frozen = self._varying = None
        if frozen is not None and varying is not None and waste is not None:
            with _disable_current_modes():
                found, _ = _attempt(lambda: frozen.result(self._module, varying))
            self.cost = replace(self.cost, waste=replace(waste, frozen=found or ()))

    def _end_watch(self, step: int | None) -> None:
        self._watch_batch_sites(None)
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()
            self._varying = watch.varying
            if self._varying is not None:
                self._varying.end()
            if step is not None and self._counter is not None:
                device = self._loop.device.type
                sites, note = _attempt(lambda: watch.result(step=step, device=device))
                self.cost = replace(self.cost, sites=sites, sites_note=note)
                return
        if step is not None and step == self.steps.counted:
            why = f" because {self._copy_reason}" if self._copy_reason else ""
            note = f"the {self._loop.kind.step} was not watched{why}"
            self.cost = replace(self.cost, sites_note=note)

    def _take_count(self, step: int, size: int | None) -> None:
        counter, arguments, waste = self._counter, self._arguments, self._waste
        self._counter = self._arguments = self._waste = None
        if arguments is None or size is None:
            self.cost = replace(self.cost, count_note=f"{self._loop.kind.step} {step} was skipped")
            return
        copied = StepCopy(self._loop, arguments, self._instead)
        why = self._copy_reason
        count, note = _attempt(
            lambda: step_count(
                counter or copied.count(self._options.flop_formulas),
                step=step,
                samples=self._samples,
                on_fake_tensors=counter is None,
                copy_reason=why,
            )
        )
        if count is None and why:
            note = f"{why}, and a copy without data couldn't be counted either: {note}"
        if count is None:
            self._size_plan.stop(note)
        else:
            self._size_plan.add(size, step, count)
        self.cost = replace(
            self.cost, size_counts=self._size_plan.counts, size_counts_note=self._size_plan.note
        )
        if step != self.steps.counted:
            return
        seen = None if waste is None or counter is None else _attempt(waste.result)[0]
        self.cost = replace(self.cost, count=count, count_note=note, waste=seen)
        if self._options.fvcore:
            table, note = _attempt(lambda: self._forward_table(arguments))
            self.cost = replace(self.cost, forward_table=table, forward_table_note=note)

    def _forward_table(self, arguments: tuple[Any, ...]) -> ForwardTable:
        if self._loop.world_size > 1:
            raise ModelProfError("with multiple ranks, a forward on one could wait for the others forever")
        return forward_table(self._module, self._loop.run_step, arguments)

    def _take_peaks(self) -> None:
        count = self.cost.count
        dtypes = {entry.dtype for entry in count.operators if entry.flops} if count is not None else set()
        device = self._loop.device
        found, note = _attempt(lambda: peak_rates(device, dtypes, self._options.peak_flops_per_s))
        peaks, note = found if found is not None else ((), note)
        self.cost = replace(self.cost, peaks=peaks, peak_note=note)

    def _take_rest(self) -> None:
        """Take sizes and modules once gradients and optimizer state exist, and the device's peaks."""
        self._take_peaks()
        size, size_note = _attempt(lambda: model_size(self._module, self._loop.optimizers))
        modules, _ = _attempt(lambda: module_records(self._module))
        self.cost = replace(self.cost, size=size, size_note=size_note, modules=modules or ())

    def collect(self) -> ModelCost:
        """Return all current results; device times may arrive after their steps."""
        timer = self._timer
        if timer is not None and not self._is_timing:
            numbers, sizes = tuple(self._timed), tuple(self._timed_sizes)
            times, note = _attempt(lambda: replace(timer.times(), step_numbers=numbers, sizes=sizes))
            self.cost = replace(self.cost, times=times, times_note=note or self._begin_note)
        return replace(self.cost, batch_sizes=self._sizes.record())


def _attempt(work: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result, or the reason why there's none; a report goes on without it."""
    try:
        return work(), ""
    except (Exception, SystemExit) as error:
        # Whatever the user's model or a library does here, training isn't to blame.
        if raised_by_signal(error):
            raise
        reason = str(error) if isinstance(error, ModelProfError) else describe_error(error)
        return None, reason.partition("\n")[0]


class StepCopy(Record, frozen=True):
    """What's needed to run a step on a copy.

    ``arguments`` are those of the step's method; ``instead`` is a sentence with advice if a copy can't be
    counted.
    """

    loop: Loop
    arguments: tuple[Any, ...]
    instead: str = ""

    def count(self, formulas: Mapping[Any, Formula] | None) -> FlopCounter:
        """Count the step and its backward on tensors without data.

        Raises:
            ModelProfError: when the module can't be copied, needs values, communicates, or reaches outside
                the copy.
        """
        if self.loop.kind.is_fit and not getattr(self.loop.module, "automatic_optimization", True):
            raise ModelProfError(f"a copy has no optimizers for manual optimization. {self.instead}".rstrip())
        refuse_closures(self.loop.module)
        device = self.loop.device
        with random_states_kept((device,)):
            copied, mode = fake_copy(self.loop.module)
            counter = FlopCounter(copied, formulas, refuse_collectives=True)
            with values_are_missing("flops=True", self.instead), mode, counter:
                output = self.loop.run_step(copied, fake_inputs(mode, self.arguments))
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if self.loop.kind.is_fit and isinstance(loss, torch.Tensor) and loss.requires_grad:
                    if reaches_outside(loss):
                        raise ModelProfError(
                            "the loss depends on parameters outside the module, whose gradients a copy would"
                            " change"
                        )
                    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without types
        return counter
