"""What measures a loop from its first step on beside the timing, and where its results go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from lightning_modelprof import __version__
from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine.inspection import Inspection
from lightning_modelprof.engine.inspection_plan import NUM_TIMED, SHORT_LOOP, plan_inspection
from lightning_modelprof.engine.instrument import Instrument
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.engine.memory import LoopMemory
from lightning_modelprof.engine.outputs import Outputs
from lightning_modelprof.engine.step_timing import StepTiming
from lightning_modelprof.engine.windows import WindowResults, make_capture, recording_ranks
from lightning_modelprof.engine.worker_profiling import worker_profiling
from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.measure.sampling.sampler import MIN_INTERVAL_NS, Probe, Sampler
from lightning_modelprof.measure.sampling.stack_probe import StackProbe
from lightning_modelprof.measure.setup.environment import run_info
from lightning_modelprof.measure.setup.training_setup import read_setup
from lightning_modelprof.measure.steps.ledger import PhaseLedger
from lightning_modelprof.measure.user_code import UserCode
from lightning_modelprof.measure.window.capture import Capture, WindowOwner
from lightning_modelprof.run.records import RunInfo
from lightning_modelprof.run.setup import TrainingSetup

_EARLY: Final = (worker_profiling,)
"""Make those instruments that have to be there before the loop's dataloaders."""


def early_instruments(config: ProfileConfig, loop: Loop, cleanup: ExitStack) -> list[Instrument]:
    """Those that are wanted, taken out by ``cleanup``."""
    made = (make(config, loop, cleanup) for make in _EARLY)
    return [one for one in made if one is not None]


@dataclass
class Instruments:
    """What measures one loop that begins, and where its results go.

    Attributes:
        setup: how training is set up; complete when the loop has ended.
        capture: the windows; ``None`` if none is wanted.
        inspection: FLOPs and module times; ``None`` if they are not wanted.
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


def make_instruments(
    config: ProfileConfig,
    loop: Loop,
    timing: StepTiming,
    *,
    directory: Path | None,
    is_first: bool,
    owner: WindowOwner,
    clock: HostClock,
    warn: Callable[[str], None],
    cleanup: ExitStack,
) -> Instruments:
    """Make them; none of them has begun.

    Args:
        directory: claimed for files; ``None`` writes none.
    """
    setup = read_setup(loop)
    info = run_info(
        loop,
        config=config.as_plain(),
        sample_unit=config.unit,
        version=__version__,
        libraries=setup.libraries,
    )
    outputs = Outputs(
        directory,
        list(loop.loggers) if loop.is_first else [],
        config.report,
        rank=loop.rank,
        created=info.created,
        is_first=is_first,
        warn=warn,
    )
    results = WindowResults(
        outputs,
        loop.rank,
        warn,
        loop.kind,
        config.table_options,
        max_trace_mb=config.bounds.max_trace_mb,
        keep_windows=config.bounds.keep_windows,
        all_ranks_command=(
            outputs.all_ranks_command if len(recording_ranks(config, loop.world_size)) > 1 else ""
        ),
    )
    capture = make_capture(config, loop, owner, clock, theirs=timing.phase_source.inner)
    has_bar = bool(config.report.progress_bar) and loop.kind.is_fit and loop.progress_bar is not None
    if has_bar:
        loop.join_progress_bar(timing.live, cleanup)
    return Instruments(
        outputs=outputs,
        results=results,
        info=info,
        setup=setup,
        capture=capture,
        inspection=_make_inspection(config, loop, timing, clock=clock),
        memory=LoopMemory(loop),
        has_bar=has_bar,
    )


def _make_inspection(
    config: ProfileConfig,
    loop: Loop,
    timing: StepTiming,
    *,
    clock: HostClock,
) -> Inspection | None:
    """The inspection of a loop that is about to begin; ``None`` if none is wanted."""
    if not config.wants_flops or timing.sizes is None or loop.module is None:
        return None
    steps = loop.num_steps
    is_short = steps is not None and steps < SHORT_LOOP and not config.flops
    plan = plan_inspection(
        config.schedule,
        skip_first=timing.skip_first,
        accumulate=loop.accumulate,
        num_steps=steps,
        num_timed=1 if is_short else NUM_TIMED,
    )
    return Inspection(
        plan,
        loop,
        options=config.inspect,
        follows_memory=config.profile_memory,
        samples=lambda: timing.ledger.samples,
        sizes=timing.sizes,
        clock=clock,
    )


_MEMORY_INTERVAL_NS: Final = 100_000_000
"""Least time between two looks at memory, each of which asks the system."""


class MemoryProbe(Protocol):
    """Notes how much memory is in use."""

    def look(self, step: int) -> None: ...


class Sampling(Instrument):
    """The sampling thread of one loop. To be made on the thread that runs the loop.

    Args:
        pl_module: the LightningModule: its package is the user's.
        memory: looks at memory, at most every 100 ms; ``None`` if nobody does.
    """

    def __init__(
        self, ledger: PhaseLedger, pl_module: Any, memory: MemoryProbe | None, clock: HostClock
    ) -> None:
        self._stack = StackProbe(ledger, UserCode((type(pl_module),)))
        looks: dict[str, Probe] = {"the stack": self._stack.look}
        if memory is not None:
            looks["memory"] = _memory_look(memory, ledger)
        self._sampler = Sampler(looks, clock, lambda: self._stack.clocks.is_crowded)
        self.resume = self._sampler.resume
        self.pause = self._sampler.pause

    def fields(self) -> Mapping[str, Any]:
        sampler = self._sampler
        stacks = self._stack.samples(
            first_interval_ns=MIN_INTERVAL_NS,
            last_interval_ns=sampler.interval_ns,
            cost_ns=sampler.cost_ns,
            notes=tuple(sampler.notes),
        )
        return {"stacks": stacks}


def _memory_look(memory: MemoryProbe, ledger: PhaseLedger) -> Probe:
    since_ns = _MEMORY_INTERVAL_NS  # the first look is at once

    def look(elapsed_ns: int) -> None:
        nonlocal since_ns
        since_ns += elapsed_ns
        if since_ns >= _MEMORY_INTERVAL_NS:
            since_ns = 0
            memory.look(ledger.steps_ended)

    return look
