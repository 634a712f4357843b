"""ModelProfCallback: a session per loop from ``setup`` to ``teardown``, copying and pickling.

A file with a callback, such as that of a model that keeps its Trainer's arguments, may be opened where this
package isn't installed, or by a loader that knows only Lightning's classes. So files get Lightning's bare
``Callback`` with our arguments as plain attributes, which does nothing. Copies, and pickles for another
process of the same program, do measure.
"""

from __future__ import annotations

import copy
import copyreg
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import torch
from lightning.pytorch.callbacks import Callback

from lightning_modelprof.config.checks import make_config
from lightning_modelprof.config.options import DEFAULTS, FIELDS, Bounds, InspectOptions, ReportOptions
from lightning_modelprof.config.sources import explain_unknown_arguments, is_switched_off, read_yaml
from lightning_modelprof.engine.loop import check_machine, print_switched_off
from lightning_modelprof.engine.run_folder import wanted_folder
from lightning_modelprof.engine.session import Session, end_status
from lightning_modelprof.errors import ConfigError, warn
from lightning_modelprof.lightning.checks import check_ignored, ignore_repeats, measuring_callback
from lightning_modelprof.lightning.phases import check_epoch
from lightning_modelprof.lightning.session_keeper import SessionKeeper
from lightning_modelprof.run.loops import FIT, LOOPS, LoopKind
from lightning_modelprof.run.records import IGNORED_CALLBACK
from lightning_modelprof.run.steps import StepTag
from lightning_modelprof.signals import children_later

_EMPTY_HOOKS: Final = ("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step")
_INSPECTION_HOOKS: Final = ("on_before_backward", "on_train_batch_end")
"""Hooks at every step of a fit: some never do anything, and some only in an inspected step."""

_PROCESSES: Final = "multiprocessing.reduction"
_CLOUD: Final = "cloudpickle"
"""Part of the module's name; joblib and Ray have copies of it inside their own packages."""

_PACKAGES: Final = ("pytorch_lightning", "lightning")


class ModelProfCallback(SessionKeeper, Callback):
    """Shows where training time goes, at tens of microseconds per step.

    ``trainer.validate``, ``test`` and ``predict`` get their own report, in which every batch is a step. Loops
    under 20 batches, and fits under 5 steps, get no report unless ``steps``, ``active`` or ``flops`` asks for
    one. Instead they share one saved run and one line of output when the program ends.

    Args:
        timer_only: Time phases and nothing else: no torch.profiler windows, FLOPs, module times or samples.
        active: Steps to record in each torch.profiler window; 0 records none. Default: 10, but no window
            opens until it would take less than 5% of the elapsed loop time.
        wait: Steps to wait before each window's warm-up.
        warmup: Warm-up steps before each window, in which torch.profiler runs but its results are discarded.
        repeat: Number of windows; 0 opens windows until training ends.
        skip_first: Initial steps to exclude from the benchmark, before the first wait. In a loop of known
            length, the default excludes at most a sixth of the steps.
        steps: Steps to record, as [start, end], end exclusive. Default: determined by active, wait, warmup
            and repeat. With steps, skip_first affects the benchmark only.
        stop_after_profile: Stop training after the first step following the last window. Like early stopping,
            this respects min_steps and min_epochs and runs a validation. It ends fits only, and with multiple
            ranks only if all have this callback with the same windows.
        activities: Activities for torch.profiler to record, as a list of cpu, cuda and xpu. Default: all
            available.
        record_shapes: Record operator input shapes in windows.
        with_stack: Record Python stacks; windows become much slower.
        profile_memory: Record allocations in windows.
        flops: Count FLOPs in one step and time modules in three more. Default: true, but not until it would
            take less than 5% of the elapsed loop time or less than 0.1 s in total. The benchmark excludes
            these steps. A compiled model is counted on a copy without data.
        inspect: What to record in addition to timing, as InspectOptions or a dict of its values: sampling,
            workers, device_timing, fvcore, flop_formulas, peak_flops_per_s, ignore_modules.
        samples_fn: Function that counts a batch's samples (or tokens, ...). It runs every step and must
            return an int without waiting for the device. By default, the count comes from the batch itself,
            usually from the first dimension of its tensors.
        unit: Name of the unit that throughput is counted in, such as tokens.
        log_every_n_steps: Log scalars every N steps; 0 disables logging. Default: the Trainer's value, or
            less often if logging would take more than 5% of the time. Only fits log.
        dirpath: Directory for the report, run data and traces. Default: a modelprof directory next to the
            logger's files, or in the Trainer's default_root_dir. Earlier runs are never overwritten: the
            directory's name gets _1, _2, ... appended.
        report: Where and how to show the report, as ReportOptions or a dict of its values: terminal, colours,
            progress_bar, tensorboard, files, views, sorted_by, time_unit, thread_sep, op_detail, row_limit,
            module_depth, top_modules.
        bounds: Limits on disk space, overhead and ranks, as Bounds or a dict of its values: max_trace_mb,
            keep_windows, max_overhead, ranks.
        rules: Thresholds for findings, as {rule: {threshold: value}}; {rule: False} turns a rule off.
            Default: those listed in docs/report.md.

    Attributes:
        report: The newest report; ``None`` before the first.
        run: The measurements behind it; ``None`` before the first.

    Raises:
        ConfigError: Immediately, on invalid arguments; in ``setup``, if the Trainer, the model or the machine
            doesn't support them.
    """

    # A plain attribute, as Lightning reads it at every hook and its own property is slower.
    state_key: str = "ModelProfCallback"

    _original: weakref.ref[ModelProfCallback] | None = None  # the callback that this one is a copy of
    _has_own_results = False  # rather than those of a copy
    _package = ""  # of the Trainer that ran it

    @explain_unknown_arguments
    def __init__(
        self,
        *,
        timer_only: bool = DEFAULTS.timer_only,
        active: int | None = DEFAULTS.active,
        wait: int = DEFAULTS.wait,
        warmup: int = DEFAULTS.warmup,
        repeat: int = DEFAULTS.repeat,
        skip_first: int = DEFAULTS.skip_first,
        steps: tuple[int, int] | None = DEFAULTS.steps,
        stop_after_profile: bool = DEFAULTS.stop_after_profile,
        activities: list[Literal["cpu", "cuda", "xpu"]] | None = None,
        record_shapes: bool = DEFAULTS.record_shapes,
        with_stack: bool = DEFAULTS.with_stack,
        profile_memory: bool = DEFAULTS.profile_memory,
        flops: bool | None = DEFAULTS.flops,
        inspect: InspectOptions | dict[str, Any] | None = None,
        samples_fn: Callable[[Any], int] | None = DEFAULTS.samples_fn,
        unit: str = DEFAULTS.unit,
        log_every_n_steps: int | None = DEFAULTS.log_every_n_steps,
        dirpath: str | Path | None = DEFAULTS.dirpath,
        report: ReportOptions | dict[str, Any] | None = None,
        bounds: Bounds | dict[str, Any] | None = None,
        rules: dict[str, Any] | None = None,
    ) -> None:
        config = make_config({name: value for name, value in locals().items() if name in FIELDS})
        super().__init__(config)
        with suppress(Exception):  # torch or pytorch_lightning may be another version
            register_safe_globals(ModelProfCallback, Callback)

    @classmethod
    def from_yaml(cls, path: str | Path) -> ModelProfCallback:
        """Make a callback from the arguments in a YAML file.

        Args:
            path: A file with one mapping, argument → value, such as ``configs/default.yaml``.

        Raises:
            ConfigError: If the file can't be read, or an argument is unknown, repeated or invalid.
        """
        return cls(**read_yaml(path))

    def step_info(self, unit: str | None = None) -> str:
        """Average over the steps since the last call, as one line in Paddle's format.

        Args:
            unit: Name of the samples; the callback's ``unit`` by default.

        Returns:
            For example `` reader_cost: 0.02830 s batch_cost: 0.24812 s ips: 128.968 images/s``. Empty if no
            step has ended since the last call or no loop is running.
        """
        return "" if self._session is None else self._session.live.step_info(unit)

    # All loops, in the order of the hooks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check arguments, paths and the machine, then take the place of the trainer's profiler."""
        self._enter(trainer, LOOPS.get(stage, FIT))
        if stage not in LOOPS:
            return
        if is_switched_off():
            if trainer.is_global_zero:
                print_switched_off()
            return
        measuring = measuring_callback(self, trainer, ModelProfCallback)
        if measuring is not self:
            self._twin = measuring
            return
        has_others = ignore_repeats(self, trainer, ModelProfCallback)
        check_machine(self.config)
        check_ignored(self.config, pl_module)
        # The first rank's folder counts for all.
        self._directory, self._why_there = wanted_folder(self.config, trainer)
        self._is_cut_off = False
        try:
            self._begin(trainer)
        except ConfigError:
            raise
        except Exception:  # intended errors are raised above, so this is our own fault
            self._step_aside()
        if has_others and self._session is not None:
            self._session.note(IGNORED_CALLBACK)
        self._join_ranks(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Report what was measured so far, without the other ranks: they may never get here."""
        if not self._is_running(trainer):
            return
        status, session = end_status(exception), self._session
        try:
            with children_later(is_failing=True):
                if session is not None:
                    self._guard(lambda: session.note_exception(exception))
                self._stop_session(status)
                self._finish(status, {}, {})
        finally:  # there's no teardown after an exception; Ctrl+C may come again
            self._leave()
            self._forget_module()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Remove everything that ``setup`` installed."""
        if not self._is_running(trainer):
            return
        session, loop_kind = self._session, self._loop_kind
        has_no_report = session is not None and not session.is_armed and not loop_kind.is_fit
        # Lightning skips a loop without batches, including its hooks; its tuners leave before a loop starts.
        if has_no_report and getattr(getattr(trainer, loop_kind.trainer_attribute, None), "skip", False):
            warn(f"{loop_kind.subject} had no batches, so it has no report")
        self._leave()
        self._forget_module()

    # Fit

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Propose to the other ranks the step after which ``stop_after_profile`` ends training."""
        self._guard(lambda: self._propose_stop(trainer))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start measuring; the trial fits of Lightning's tuners don't call this hook."""
        self._guard(lambda: self._agree_on_stop(trainer))
        self._ledger = self._arm(trainer, pl_module)
        # Other callers of our hooks, such as a callback that wraps this one, expect them to exist.
        self._is_called_by_lightning = any(one is self for one in trainer.callbacks)
        self._pass_over((*_EMPTY_HOOKS, *_INSPECTION_HOOKS))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count the batch's samples."""
        if self._stop_at is not None and trainer.fit_loop.total_batch_idx >= self._stop_at:
            trainer.should_stop = True
        ledger = self._ledger
        if ledger is None:
            return
        # Inlined ledger.needs_batch_start, as this runs at every step
        if (ledger.batch_ended or not ledger.batch_began) and self._session is not None:
            self._guard(ledger.begin_batch)
        self._meet_batch(ledger, batch)
        if ledger.repeated is not None:
            ledger.repeated.begin_batch(batch)
            if ledger.repeated.is_over:
                ledger.repeated = None
        inspection = ledger.inspection
        if inspection is not None:
            self._restore_hooks()
            self._guard(lambda: inspection.begin_batch(batch, batch_idx))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Follow the loss's graph in an inspected step."""
        inspection = None if self._ledger is None else self._ledger.inspection
        if inspection is not None:
            self._guard(lambda: inspection.before_backward(loss))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Remove the inspection's hooks from the model."""
        inspection = None if self._ledger is None else self._ledger.inspection
        if inspection is not None:
            self._guard(inspection.end_batch)
        self._pass_over((*_EMPTY_HOOKS, *_INSPECTION_HOOKS))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Check for an epoch without a step, in which Lightning reports no end of steps."""
        inspection = None if self._ledger is None else self._ledger.inspection
        if inspection is not None:  # on_train_batch_start returned -1, so that batch has no end
            self._guard(lambda: inspection.end_batch(failed=True))
        session = self._session
        if session is not None and session.is_armed:
            self._guard(lambda: check_epoch(session.phase_source, session.ledger))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Report; every rank gets here."""
        self._end(trainer)

    # Validate, test and predict

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Start measuring; the trial runs of Lightning's BatchSizeFinder are in ``on_validation_start``."""
        if not self._loop_kind.is_fit:
            self._dataloader_idx = 0
            self._evaluation = self._arm(trainer, pl_module)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Count the batch's samples."""
        ledger = self._evaluation
        if ledger is None:
            if self._ledger is not None:
                self._ledger.validation.begin_batch(dataloader_idx)
            return
        if ledger.needs_batch_start and self._session is not None:
            self._guard(ledger.begin_evaluation)
            self._guard(ledger.begin_batch)
        if dataloader_idx != self._dataloader_idx:
            self._dataloader_idx = dataloader_idx
            ledger.tags |= StepTag.FIRST_OF_EPOCH
            ledger.epoch_step = ledger.steps_ended
        self._meet_batch(ledger, batch)
        inspection = ledger.inspection
        if inspection is not None:
            self._guard(lambda: inspection.begin_batch(batch, batch_idx, dataloader_idx))

    def on_validation_batch_end(  # Lightning's own signature
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Remove the inspection's hooks from the model."""
        inspection = None if self._evaluation is None else self._evaluation.inspection
        if inspection is not None:
            self._guard(inspection.end_batch)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Report; every rank gets here."""
        if not self._loop_kind.is_fit:
            self._end(trainer)

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end

    # Copies and pickles

    def __copy__(self) -> Any:
        """Copy arguments and results; the copy measures, too."""
        made = self._blank()
        vars(made).update({**self.__getstate__(), "_original": made._original})
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Like :meth:`__copy__`; results don't change, so they're shared."""
        made = memo[id(self)] = self._blank()  # first, as samples_fn may be bound to something that holds us
        memo.update({id(one): one for one in (self.report, self.run)})
        vars(made).update({**copy.deepcopy(self.__getstate__(), memo), "_original": made._original})
        return made

    def _blank(self) -> ModelProfCallback:
        made = type(self).__new__(type(self))
        made._original = self._original or weakref.ref(self)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to a loop or to this process."""
        return {**super().__getstate__(), "_original": None, "_has_own_results": False}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the callback itself for other processes, and Lightning's bare one for files."""
        pickler = sys._getframe(1).f_globals.get("__name__", "")  # the only way to identify the pickler
        if pickler == _PROCESSES or _CLOUD in pickler:
            return copyreg.__newobj__, (type(self),), self.__getstate__()  # type: ignore[attr-defined]
        return self._bare_class(), (), self._plain_arguments()

    def _bare_class(self) -> type:
        """Lightning's own class, from the package whose Trainer ran this callback."""
        classes = [kind for kind in type(self).__mro__ if kind.__name__ == "Callback"]
        if self._package == "pytorch_lightning":
            classes.insert(0, sys.modules[self._package].Callback)
        return classes[0]

    def _plain_arguments(self) -> dict[str, Any]:
        try:
            return self.config.as_plain()
        except Exception:  # an invalid value was never used, and must not prevent saving a model
            return {}

    def _enter(self, trainer: Any, loop_kind: LoopKind) -> None:
        super()._enter(trainer, loop_kind)
        roots = [kind.__module__.partition(".")[0] for kind in type(trainer).__mro__]
        self._package = next((root for root in roots if root in _PACKAGES), "")

    def _take_results(self, of: Session | SessionKeeper) -> None:
        super()._take_results(of)
        self._has_own_results = self.report is not None or self.run is not None
        original = None if self._original is None else self._original()
        if original is not None and not original._has_own_results:
            original.report, original.run = self.report, self.run


def register_safe_globals(own: type, lightnings: type) -> None:
    """Let ``torch.load`` open files that contain a callback, and older Trainers accept ours.

    Args:
        own: class of our callback; ``pytorch_lightning`` before 2.6 accepts only its own ``Callback``, so
            that becomes another base.
        lightnings: class that represents it in files.
    """
    torch.serialization.add_safe_globals([lightnings])
    other = sys.modules.get("pytorch_lightning")
    if other is None or issubclass(own, other.Callback):
        return
    if tuple(map(int, other.__version__.split(".")[:2])) < (2, 6):
        own.__bases__ = (*own.__bases__, other.Callback)
