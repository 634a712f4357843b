"""ModelProfCallback: the door through which Lightning enters."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.callbacks import Callback

from lightning_modelprof.config import (
    DEFAULTS,
    ProfileConfig,
    explain_unknown_arguments,
    is_switched_off,
    read_yaml,
)
from lightning_modelprof.fit.checks import check_trainer, check_writeable
from lightning_modelprof.fit.session import FitSession
from lightning_modelprof.measure.clock import host_clock
from lightning_modelprof.measure.ledger import PhaseLedger
from lightning_modelprof.measure.samples import SampleCounter, make_counter
from lightning_modelprof.report.model import Report
from lightning_modelprof.run.archive import DEFAULT_FOLDER
from lightning_modelprof.run.records import NOT_MEASURED, Run


class ModelProfCallback(Callback):
    """Shows where the time of a training run goes, at about the cost of an empty callback or less.

    Args:
        active: steps that each torch.profiler window records; 0 means timing only.
        wait: steps before each window's warm-up, in which nothing is recorded.
        warmup: steps before each window in which torch.profiler runs and its results are thrown away.
        repeat: number of windows; 0 means windows until training ends.
        skip_first: steps at the start that the benchmark leaves out, and after which the first wait begins.
        steps: record steps start to end-1 of a half-open (start, end), instead of active, wait, warmup and
            repeat; skip_first then is the benchmark's alone.
        activities: what torch.profiler records, out of cpu, cuda and xpu; None means all there are.
        record_shapes: record the shapes of operators' inputs.
        with_stack: record Python stacks; slows the window down much.
        profile_memory: record allocations.
        stop_after_profile: end training with the step in which the last window closes (the first one after
            it), as early stopping would: after the Trainer's min_steps and min_epochs, and with a validation.
        device_timing: on CUDA, XPU and MPS, record events at phase boundaries for device time by phase.
        log_every_n_steps: steps between two points of the logged scalars; None means the Trainer's own, 0
            logs none.
        progress_bar: show ips and the reader's share in the progress bar.
        samples_fn: counts the samples (or tokens, ...) of a batch; None means the batch's first dimension.
            It is called every step and must return an int without waiting for the device.
        unit: what samples_fn counts, for example tokens.
        terminal: print the report when training ends.
        tensorboard: write the report's tables to the run's TensorBoard as text.
        files: write the report, the archive and the traces to a folder; in a fast_dev_run only with dirpath.
        dirpath: that folder; None means the folder modelprof beside the logger's files, or in the
            Trainer's default_root_dir. A folder that holds an earlier run is not touched: _1, _2, ... is
            appended.
        views: which tables of the traces the report has, out of device, overview, model, distributed,
            operator, kernel, memory_manipulation, userdefined, memory, step_breakdown, idle, launch and
            dataloader; None means all. Here and in sorted_by, Paddle's names mean the same: KernelView.
        sorted_by: order of operators, kernels and ranges: cpu_ or gpu_ with total, avg, max or min, or
            calls; None means GPU total where there are device events, else CPU total.
        time_unit: unit of the durations in text: s, ms, us or ns; None means one that fits each table.
        thread_sep: show operators and ranges by host thread.
        op_detail: show below each operator what it calls and launches.
        row_limit: most rows of a table in text, and most below any one row; report.json has all.

    Attributes:
        report: the newest report; ``None`` before the first.
        run: the measured facts behind it; ``None`` before the first.

    Raises:
        ConfigError: in ``setup``, for anything that cannot be meant; an unknown argument at once.
    """

    # A plain attribute: Lightning reads it at every hook, and its own property is slower.
    state_key: str = "ModelProfCallback"

    @explain_unknown_arguments
    def __init__(
        self,
        *,
        active: int = DEFAULTS.active,
        wait: int = DEFAULTS.wait,
        warmup: int = DEFAULTS.warmup,
        repeat: int = DEFAULTS.repeat,
        skip_first: int = DEFAULTS.skip_first,
        steps: tuple[int, int] | None = DEFAULTS.steps,
        activities: list[Literal["cpu", "cuda", "xpu"]] | None = None,
        record_shapes: bool = DEFAULTS.record_shapes,
        with_stack: bool = DEFAULTS.with_stack,
        profile_memory: bool = DEFAULTS.profile_memory,
        stop_after_profile: bool = DEFAULTS.stop_after_profile,
        device_timing: bool = DEFAULTS.device_timing,
        log_every_n_steps: int | None = DEFAULTS.log_every_n_steps,
        progress_bar: bool = DEFAULTS.progress_bar,
        samples_fn: Callable[[Any], int] | None = DEFAULTS.samples_fn,
        unit: str = DEFAULTS.unit,
        terminal: bool = DEFAULTS.terminal,
        tensorboard: bool = DEFAULTS.tensorboard,
        files: bool = DEFAULTS.files,
        dirpath: str | Path | None = DEFAULTS.dirpath,
        views: list[str] | str | None = None,
        sorted_by: str | None = DEFAULTS.sorted_by,
        time_unit: str | None = DEFAULTS.time_unit,
        thread_sep: bool = DEFAULTS.thread_sep,
        op_detail: bool = DEFAULTS.op_detail,
        row_limit: int = DEFAULTS.row_limit,
    ) -> None:
        self.config = ProfileConfig(
            active=active,
            wait=wait,
            warmup=warmup,
            repeat=repeat,
            skip_first=skip_first,
            steps=steps,
            activities=activities,
            record_shapes=record_shapes,
            with_stack=with_stack,
            profile_memory=profile_memory,
            stop_after_profile=stop_after_profile,
            device_timing=device_timing,
            log_every_n_steps=log_every_n_steps,
            progress_bar=progress_bar,
            samples_fn=samples_fn,
            unit=unit,
            terminal=terminal,
            tensorboard=tensorboard,
            files=files,
            dirpath=dirpath,
            views=views,
            sorted_by=sorted_by,
            time_unit=time_unit,
            thread_sep=thread_sep,
            op_detail=op_detail,
            row_limit=row_limit,
        )
        self.report: Report | None = None
        self.run: Run | None = None
        self._clock = host_clock
        self._count: Callable[[Any], int] = SampleCounter()  # the user's own from setup on
        self._session: FitSession | None = None
        self._ledger: PhaseLedger | None = None  # the session's, while it measures
        self._is_awaited = False  # whether the other ranks count on us when training ends

    @classmethod
    def from_yaml(cls, path: str | Path) -> ModelProfCallback:
        """A callback with the arguments in a YAML file.

        Args:
            path: a file with one mapping, argument → value, such as ``configs/default.yaml``.

        Raises:
            ConfigError: when the file cannot be read, or holds an argument that is unknown, given twice, or
                cannot be meant.
        """
        return cls(**read_yaml(path))

    def step_info(self, unit: str | None = None) -> str:
        """Averages over the steps since the last call, as one line in Paddle's words.

        Args:
            unit: what the samples are called; by default the callback's ``unit``.

        Returns:
            Such as `` reader_cost: 0.02830 s batch_cost: 0.24812 s ips: 128.968 images/s``; ``""`` when no
            step ended since the last call, or outside of training.
        """
        return "" if self._session is None else self._session.live.step_info(unit)

    # Lightning's hooks, in the order in which they come

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check everything that can be checked, then stand in for the trainer's profiler."""
        self._leave()
        if stage != "fit" or is_switched_off():
            return
        self.config.check()
        self._count = make_counter(self.config.samples_fn)
        check_trainer(self.config, trainer, ModelProfCallback)
        log_dir = trainer.log_dir or trainer.default_root_dir  # on every rank: it is broadcast
        directory = Path(self.config.dirpath or Path(log_dir) / DEFAULT_FOLDER)
        # A fast_dev_run leaves no files of Lightning's behind, and none of ours unless they are asked for.
        has_files = self.config.files and not (trainer.fast_dev_run and self.config.dirpath is None)
        if has_files:
            check_writeable(directory)
        self._session = FitSession(
            self.config,
            trainer,
            directory if has_files else None,
            own_prefix=f"[Callback]{self.state_key}.",
            clock=self._clock,
            warn=_warn,
            guard=self._guard,
        )
        self._is_awaited = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to measure; the trial fits of Lightning's tuners do not come here."""
        session = self._session
        if session is not None:
            self._guard(lambda: session.arm(pl_module))
            self._ledger = session.ledger if self._session is session else None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A batch is there: count its samples."""
        ledger = self._ledger
        if ledger is None:
            return
        # Spelled out, as is done at every step: ledger.needs_batch_start
        if (ledger.batch_ended or not ledger.batch_began) and self._session is not None:
            self._guard(self._session.begin_batch)
        try:
            ledger.samples = self._count(batch)
        except Exception as error:  # the batch, or samples_fn, is not what it seemed to be
            self._stop_counting(error)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """After an epoch without a single step: Lightning does not tell us when steps end."""
        session = self._session
        if session is not None:
            self._guard(session.check_epoch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Report. Every rank comes here."""
        is_asked, self._is_awaited = self._is_awaited, False
        if not is_asked:
            return
        self._stop("finished")
        # A rank whose measurement has failed must say so, or the others would wait for its figures for ever.
        is_safe_point = trainer.world_size == 1 or trainer.strategy.reduce_boolean_decision(
            self._session is not None, all=True
        )
        self._finish("finished", is_safe_point=is_safe_point)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Report what was measured until now; other ranks may never come, so nothing is asked of them."""
        status = "interrupted" if isinstance(exception, KeyboardInterrupt) else "failed"
        self._stop(status)
        self._finish(status, is_safe_point=False)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave nothing behind."""
        self._leave()

    # Ours

    def _stop(self, status: str) -> None:
        session, self._ledger = self._session, None
        if session is not None:
            self._guard(lambda: session.stop(status))

    def _finish(self, status: str, *, is_safe_point: bool) -> None:
        session = self._session
        if session is not None:
            self._guard(lambda: session.finish(status, is_safe_point=is_safe_point))
            self._take_results(session)

    def _take_results(self, session: FitSession) -> None:
        self.report, self.run = session.report or self.report, session.run or self.run

    def _leave(self) -> None:
        session, self._session = self._session, None
        self._ledger, self._is_awaited = None, False
        if session is not None:
            self._guard(session.close)

    def _guard(self, work: Callable[[], None]) -> None:
        """Run a part of ours; if it fails, step aside for the rest of the fit and warn once."""
        try:
            work()
        except Exception:  # training must not notice
            session, self._session = self._session, None
            self._ledger = None
            _warn(
                "an internal error stopped the measurement; training goes on without it."
                f" Please report this:\n{traceback.format_exc()}"
            )
            if session is not None:
                try:
                    session.abort()
                except Exception:  # what could not be undone or saved must not hurt either
                    _warn(f"could not undo or save everything:\n{traceback.format_exc()}")
                self._take_results(session)

    def _stop_counting(self, error: Exception) -> None:
        counter = "samples_fn" if self.config.samples_fn is not None else "the batch's size"
        _warn(f"{counter} raised {type(error).__name__}: {error}; {self.config.unit}/s will not be known")
        self._count = lambda _: NOT_MEASURED


def _warn(message: str) -> None:
    warnings.warn(f"ModelProfCallback: {message}", RuntimeWarning, stacklevel=3)
