"""The loops of this process that meet: one folder, one archive for the short ones, a list of the others."""

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
"""A fit of fewer steps gets no report: its first steps are no example of others."""


SHORT_EVALUATION: Final = 20
"""The same of a validation, test or prediction loop on its own, in batches."""


_RAY_WORKER: Final = "RAY_RAYLET_PID"
"""Ray sets it in the processes that it starts."""


class ShortLoop(Record, frozen=True, kw_only=True):
    """A loop that runs and gets no report.

    Attributes:
        model: class of the LightningModule.
        wanted: where its files would have gone; ``None`` if it wanted none.
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
    """The loop that begins, if it is too short for a report; ``None`` if it gets one.

    It gets one where a step is asked for by name: by ``steps``, ``active`` or ``flops``, if the loop has that
    step. With several ranks the first one decides for all.
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
    """Whether this process is one of many that run trainings for a program, as joblib's and Ray's are.

    The ranks of one training are none.
    """
    if loop.world_size > 1 or loop.is_launched:
        return False
    return multiprocessing.parent_process() is not None or _RAY_WORKER in os.environ


@dataclass(slots=True)
class _ShortSoFar:
    """Short loops of one kind and model so far."""

    calls: int = 0
    batches: int = 0
    total_ns: int = 0
    failed: int = 0
    num_halved: int = 0
    kept: dict[int, int] = field(default_factory=dict)  # number of the loop → its duration

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
    """Remembers which loops this process ran, whichever callback they had.

    The files of later loops go into the folder of the first one that wanted the same folder. Short loops are
    told of when the program ends, or in the report of the first loop, if it has one.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, as in a child of this process."""
        self._roots: dict[Path, Path] = {}
        self._claims: dict[Path, Counter[str]] = {}  # loops of each kind with a folder there
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
        """The folder of a loop: ``wanted``, or one in that of the loop of this process which wanted the same.

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
        """Whether such a loop of this program, or of this cell of a notebook, has printed its report before.

        From then on it has.
        """
        this = (kind.key, _cell())
        found = this in self._printed
        self._printed.add(this)
        return found

    def add(self, outputs: Outputs, run: Run, report: Report) -> None:
        """A loop has ended that has a report; the first one's is kept to add what comes after it.

        That is written now and then, so that not even a kill loses much, and when the program ends.
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
        """Write what came after the first loop with its archive and its report."""
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
        """No loop of this process was long enough for a report."""
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
        """The program ends: save, and say in one line what had no report."""
        with suppress(Exception):  # nobody is left to be told
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


def _cell() -> object:
    """The cell of a notebook that runs; ``None`` in a program."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)  # its import may still run
    shell = None if get_shell is None else get_shell()
    return None if shell is None else shell.execution_count


PROCESS_LOOPS: Final = ProcessLoops()


def at_the_very_end(end: Callable[[], None], forget: Callable[[], None]) -> None:
    """``end`` is called when the program ends, after all who measure were told, and ``forget`` in a child."""
    _LAST.append((end, forget))


_LAST: Final[list[tuple[Callable[[], None], Callable[[], None]]]] = []


at_the_very_end(PROCESS_LOOPS.end, PROCESS_LOOPS.forget)


class Measures(Protocol):
    def forget_session(self) -> None:
        """To be called in a child, which measures nothing and leaves the parent's files alone."""

    def end_at_exit(self) -> None: ...


_MEASURING: Final[WeakSet[Measures]] = WeakSet()


def end_with_process(measuring: Measures) -> None:
    """From now on, and as long as it lives, ``measuring`` is told of forks and of the program's end."""
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
