"""What measures a loop from its first step on beside the timing, and where its results go."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_modelprof import __version__
from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.fit.sampling import Sampling
from lightning_modelprof.loop.inspection import Inspection
from lightning_modelprof.loop.inspection_plan import NUM_TIMED, SHORT_LOOP, num_steps, plan_inspection
from lightning_modelprof.loop.memory import LoopMemory
from lightning_modelprof.loop.outputs import Outputs
from lightning_modelprof.loop.step_timing import StepTiming
from lightning_modelprof.loop.windows import WindowResults, make_capture
from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.measure.setup.environment import run_info
from lightning_modelprof.measure.setup.training_setup import read_setup
from lightning_modelprof.measure.window.capture import Capture
from lightning_modelprof.run.loops import Loop
from lightning_modelprof.run.records import RunInfo, Window
from lightning_modelprof.run.setup import TrainingSetup


@dataclass
class LoopParts:
    """The parts of one loop that begins.

    Attributes:
        outputs: where everything goes.
        results: the windows that closed.
        info: what the run is.
        setup: how training is set up; complete when the loop has ended.
        capture: the windows; ``None`` if none is wanted.
        inspection: FLOPs and module times; ``None`` if they are not wanted.
        memory: of process and device.
        has_bar: whether a progress bar shows figures of ours.
        sampling: looks from a thread of its own; ``None`` if it is not wanted, or has not begun.
    """

    outputs: Outputs
    results: WindowResults
    info: RunInfo
    setup: TrainingSetup
    capture: Capture | None
    inspection: Inspection | None
    memory: LoopMemory
    has_bar: bool
    sampling: Sampling | None = None


def make_parts(
    config: ProfileConfig,
    loop: Loop,
    trainer: Any,
    pl_module: Any,
    timing: StepTiming,
    *,
    directory: Path | None,
    is_first: bool,
    on_window: Callable[[Window, Path | None], None],
    why_no_window: Callable[[], str],
    clock: HostClock,
    warn: Callable[[str], None],
    cleanup: ExitStack,
) -> LoopParts:
    """Make them; none of them has begun.

    Args:
        config: the checked configuration.
        loop: which loop it is.
        trainer: that runs it.
        pl_module: the LightningModule.
        timing: of the loop's steps.
        directory: claimed for files; ``None`` writes none.
        is_first: whether this rank reports for all.
        on_window: as of Capture.
        why_no_window: why another window would be too much, ``""`` while it would not.
        clock: host clock.
        warn: called with one sentence.
        cleanup: is told what has to be undone.
    """
    setup = read_setup(trainer, pl_module, loop)
    info = run_info(
        trainer,
        pl_module,
        loop,
        config=config.as_plain(),
        sample_unit=config.unit,
        version=__version__,
        libraries=setup.libraries,
    )
    outputs = Outputs(
        directory,
        list(trainer.loggers) if trainer.is_global_zero else [],
        config.report,
        rank=trainer.global_rank,
        created=info.created,
        is_first=is_first,
        warn=warn,
    )
    results = WindowResults(
        outputs,
        trainer.global_rank,
        warn,
        loop,
        config.table_options,
        max_trace_mb=config.bounds.max_trace_mb,
        keep_windows=config.bounds.keep_windows,
    )
    capture = make_capture(
        config,
        results.raw_path,
        on_window,
        clock=clock,
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        accumulate=trainer.accumulate_grad_batches,
        why_not=why_no_window,
        theirs=timing.delegate.inner,
    )
    bar = trainer.progress_bar_callback if config.report.progress_bar and loop.is_fit else None
    if bar is not None:
        timing.live.join_progress_bar(bar, cleanup)
    return LoopParts(
        outputs=outputs,
        results=results,
        info=info,
        setup=setup,
        capture=capture,
        inspection=_make_inspection(config, loop, trainer, pl_module, timing, clock=clock),
        memory=LoopMemory(trainer, pl_module),
        has_bar=bar is not None,
    )


def _make_inspection(
    config: ProfileConfig,
    loop: Loop,
    trainer: Any,
    pl_module: Any,
    timing: StepTiming,
    *,
    clock: HostClock,
) -> Inspection | None:
    """The inspection of a loop that is about to begin; ``None`` if none is wanted."""
    if not config.wants_flops or timing.sizes is None:
        return None
    steps = num_steps(trainer, loop)
    is_short = steps is not None and steps < SHORT_LOOP and not config.flops
    plan = plan_inspection(
        config.schedule,
        skip_first=timing.skip_first,
        accumulate=trainer.accumulate_grad_batches if loop.is_fit else 1,
        num_steps=steps,
        num_timed=1 if is_short else NUM_TIMED,
    )
    return Inspection(
        plan,
        loop,
        trainer=trainer,
        pl_module=pl_module,
        formulas=config.inspect.flop_formulas,
        peak_flops_per_s=config.inspect.peak_flops_per_s,
        use_fvcore=config.inspect.fvcore,
        follows_memory=config.profile_memory,
        samples=lambda: timing.ledger.samples,
        sizes=timing.sizes,
        clock=clock,
    )
