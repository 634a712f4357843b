"""All loops of this process: they share a folder, an archive of short loops and a list of the others."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.engine.outputs import NOWHERE, Outputs
from lightning_modelprof.engine.plan import save_interval_ns
from lightning_modelprof.engine.run_folder import RunFolder, claim_directory
from lightning_modelprof.errors import warn
from lightning_modelprof.measure.clock import host_clock
from lightning_modelprof.record import Record
from lightning_modelprof.report.build import with_loops
from lightning_modelprof.report.model import Report
from lightning_modelprof.run.loops import MAX_KEPT, MAX_LINES, LoopKind, LoopLine, ShortLoops, loop_of
from lightning_modelprof.run.records import RankRecord, Run, RunInfo
from lightning_modelprof.run.steps import StepTimings, is_kept
from lightning_modelprof.show.terminal.terminal import print_lines
from lightning_modelprof.units import milliseconds

SHORT_FIT: Final = 5
"""Fits with fewer steps get no report, as first steps aren't typical."""


SHORT_EVALUATION: Final = 20
"""The same for a validation, test or prediction loop on its own, in batches."""


_RAY_WORKER: Final = "RAY_RAYLET_PID"
"""Set by Ray in the processes that it starts."""


class ShortLoop(Record, frozen=True, kw_only=True):
    """A running loop that gets no report.

    Attributes:
        model: class of the LightningModule.
        wanted: where its files would have gone; ``None`` without files.
        uses_terminal: whether its report would have been printed.
    """

    kind: LoopKind
    model: str
    batches: int
    begin_ns: int
    wanted: Path | None
    uses_terminal: bool


def short_loop(
    config: ProfileConfig, loop: Loop, *, model: str, wanted: Path | None, now: int
) -> ShortLoop | None:
    """Return the loop that starts if it's too short for a report, else ``None``.

    It gets one if it has a step that ``steps``, ``active`` or ``flops`` explicitly requests. With several
    ranks, the first one decides for all.
    """
    batches = loop.num_steps
    limit = SHORT_FIT if loop.kind.is_fit else SHORT_EVALUATION
    if batches is None or batches >= limit or config.asks_for_steps(batches):
        return None
    return ShortLoop(
        kind=loop.kind,
        model=model,
        batches=batches,
        begin_ns=now,
        wanted=wanted,
        uses_terminal=bool(config.report.terminal) and not is_worker(loop),
    )


def is_worker(loop: Loop) -> bool:
    """Whether this process is one of several that run trainings for a program, such as joblib's and Ray's.

    The ranks of one training don't count.
    """
    if loop.world_size > 1 or loop.is_launched:
        return False
    return multiprocessing.parent_process() is not None or _RAY_WORKER in os.environ


@dataclass(slots=True)
class _ShortSoFar:
    calls: int = 0
    batches: int = 0
    total_ns: int = 0
    failed: int = 0
    num_halved: int = 0
    kept: dict[int, int] = field(default_factory=dict)  # durations by number of the loop

    def add(self, batches: int, duration_ns: int, *, failed: bool) -> None:
        if self._is_kept([self.calls]).all():
            self.kept[self.calls] = duration_ns
        self.calls += 1
        self.batches += batches
        self.total_ns += duration_ns
        self.failed += failed
        while len(self.kept) > MAX_KEPT:
            self.num_halved += 1
            mask = self._is_kept(list(self.kept))
            self.kept = {
                number: ns for (number, ns), is_one in zip(self.kept.items(), mask, strict=True) if is_one
            }

    def _is_kept(self, numbers: Sequence[int]) -> NDArray[np.bool_]:
        return is_kept(np.array(numbers, np.int64), self.num_halved)


class ProcessLoops:
    """Remembers the loops of this process, across callbacks.

    Later loops that want the folder of an earlier one put their files inside it. Short loops are listed at
    the program's end, or in the report of the first loop that has one.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start over, for example in a child process."""
        self._roots: dict[Path, Path] = {}
        self._claims: dict[Path, Counter[str]] = {}  # number of loops with a folder there, by kind
        self._short: dict[tuple[str, str], _ShortSoFar] = {}  # by the loop's kind and the model's class
        self._lines: list[LoopLine] = []
        self._first: tuple[Outputs, Run, Report] | None = None
        self._short_folder: Path | None = None  # wanted by the first short loop
        self._short_created = ""
        self._uses_terminal = False
        self._printed: set[tuple[str, object]] = set()
        self._is_unsaved = False
        self._clock = host_clock
        self._next_save_ns = 0

    def claim(self, wanted: Path, kind: LoopKind) -> Path:
        """Claim a loop's folder: ``wanted``, or one inside that of an earlier loop that wanted the same.

        Raises:
            OSError: when none can be claimed.
        """
        root = self._roots.get(wanted)
        if root is None or not root.is_dir():
            root = self._roots[wanted] = claim_directory(wanted)
            self._claims[root] = Counter([kind.key])
            return root
        self._claims[root][kind.key] += 1
        number = self._claims[root][kind.key]
        return claim_directory(root / (kind.key if number == 1 else f"{kind.key}_{number}"))

    def add_short(self, short: ShortLoop, end_ns: int, *, failed: bool) -> None:
        if not self._short:
            self._short_created = datetime.now().astimezone().isoformat(timespec="microseconds")
            self._short_folder = short.wanted
        self._uses_terminal |= short.uses_terminal
        so_far = self._short.setdefault((short.kind.key, short.model), _ShortSoFar())
        so_far.add(short.batches, end_ns - short.begin_ns, failed=failed)
        self._is_unsaved = True

    def has_printed(self, kind: LoopKind) -> bool:
        """Whether such a loop of this program, or of this notebook cell, printed its report before.

        Also records that it has now.
        """
        this = (kind.key, _notebook_cell())
        found = this in self._printed
        self._printed.add(this)
        return found

    def add(self, outputs: Outputs, run: Run, report: Report) -> None:
        """Add a finished loop that has a report; the first one is kept to add what comes after it.

        It's written from time to time, so that a kill loses little, and when the program ends.
        """
        if len(self._lines) < MAX_LINES:
            self._lines.append(_line(outputs, run, report))
        first = None if self._first is None else self._first[0].folder.path
        if first is None and outputs.folder.path in (None, *self._roots.values()):
            self._first = outputs.without_loggers(), run, report
        self._is_unsaved |= len(self._lines) > 1
        if self._clock() >= self._next_save_ns:
            begin_ns = self._clock()
            self.save()
            now = self._clock()
            self._next_save_ns = now + save_interval_ns(now - begin_ns)

    def renew(self, run: Run, report: Report) -> None:
        if self._first is not None and self._first[1].info is run.info:
            self._first = self._first[0], run, report

    def save(self) -> None:
        """Write what came after the first loop, together with its archive and report."""
        if not self._is_unsaved or not (self._lines or self._short):
            return
        self._is_unsaved = False
        short = tuple(self._short_loops())
        if self._first is not None:
            outputs, run, report = self._first
            run = replace(run, short_loops=short, loops=tuple(self._lines))
            outputs.save_run(run)
            outputs.save_report(with_loops(report, run))
        elif self._short_folder is not None and not self._lines:
            self._save_short_alone(self._short_folder, short)

    def _save_short_alone(self, wanted: Path, short: Sequence[ShortLoops]) -> None:
        root = self._roots.get(wanted)
        if root is None:
            with suppress(OSError):
                root = self.claim(wanted, loop_of(short[0].loop))
        if root is not None:
            info = RunInfo(
                created=self._short_created, loop=short[0].loop, status="finished", model=short[0].model
            )
            outputs = Outputs(RunFolder.claimed_now(root, created=info.created), [], NOWHERE, warn)
            outputs.save_run(
                Run(
                    info=info,
                    ranks=(RankRecord(rank=0, steps=StepTimings.empty()),),
                    short_loops=tuple(short),
                )
            )

    def _short_loops(self) -> list[ShortLoops]:
        return [
            ShortLoops(
                loop=loop,
                model=model,
                calls=found.calls,
                batches=found.batches,
                total_ns=found.total_ns,
                durations_ns=tuple(found.kept.values()),
                failed=found.failed,
            )
            for (loop, model), found in self._short.items()
        ]

    def end(self) -> None:
        """Save when the program ends, and print one line about the short loops."""
        with suppress(Exception):  # there's no way left to report an error
            self.save()
            if self._short and self._uses_terminal:
                print_lines([_last_line(self._short_loops())])


def _line(outputs: Outputs, run: Run, report: Report) -> LoopLine:
    figures = report.summary.benchmark
    rate = None if figures is None else figures.steps_per_s
    return LoopLine(
        loop=run.info.loop,
        model=run.info.model,
        created=run.info.created,
        status=run.info.status,
        steps=run.ranks[0].num_steps,
        steps_per_s=None if rate is None else rate.avg,
        standard_error=None if rate is None else rate.standard_error,
        verdict="" if report.verdict is None else report.verdict.kind,
        folder="" if outputs.folder.path is None else str(outputs.folder.path),
    )


def _last_line(short: Sequence[ShortLoops]) -> str:
    texts = [
        f"{one.calls:,} {loop_of(one.loop).name} loop{'' if one.calls == 1 else 's'} of {one.model}"
        f" took {milliseconds(one.total_ns)}"
        for one in short
    ]
    return f"lightning-modelprof: {', '.join(texts)}; too short for a report."


def _notebook_cell() -> object:
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)  # IPython may still be importing
    shell = None if get_shell is None else get_shell()
    return None if shell is None else shell.execution_count


PROCESS_LOOPS: Final = ProcessLoops()


def at_the_very_end(end: Callable[[], None], forget: Callable[[], None]) -> None:
    """Call ``end`` when the program ends, after all measuring has stopped, and ``forget`` in a child."""
    _LAST.append((end, forget))


_LAST: Final[list[tuple[Callable[[], None], Callable[[], None]]]] = []


at_the_very_end(PROCESS_LOOPS.end, PROCESS_LOOPS.forget)


class Measures(Protocol):
    def forget_session(self) -> None:
        """Stop measuring in a child process, without touching the parent's files."""

    def end_at_exit(self) -> None: ...


_MEASURING: Final[WeakSet[Measures]] = WeakSet()


def end_with_process(measuring: Measures) -> None:
    """Notify ``measuring`` of forks and of the program's end while it's alive."""
    _MEASURING.add(measuring)


def _forget_sessions() -> None:
    for measuring in tuple(_MEASURING):
        measuring.forget_session()
    for _, forget in _LAST:
        forget()


def _end_sessions() -> None:
    for measuring in tuple(_MEASURING):
        measuring.end_at_exit()
    for end, _ in _LAST:
        end()


atexit.register(_end_sessions)


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forget_sessions)
