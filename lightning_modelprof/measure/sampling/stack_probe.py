"""Samples the training thread's stack and counts what it sees."""

from __future__ import annotations

import gc
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, Protocol

from lightning_modelprof.measure.sampling.log_calls import log_call, logger_codes
from lightning_modelprof.measure.steps.ledger import PROFILER, VALIDATION
from lightning_modelprof.measure.user_code import UserCode, is_loop, library_of, working_folder
from lightning_modelprof.run.phases import PARTS, PHASES
from lightning_modelprof.run.stacks import (
    LogCall,
    OtherThread,
    SampledStack,
    StackFrame,
    StackSamples,
    logging_begins,
)

MOST_DEEP: Final = 80
"""Most sampled frames per stack: more would make the training thread wait."""


MOST_STACKS: Final = 5_000


MOST_FRAMES: Final = 20_000


MOST_LOG_CALLS: Final = 200


_USUAL_THREADS: Final = 2
"""The training thread and the sampling thread."""


_OTHERS_EVERY: Final = 4
"""Of this many samples, one covers all other threads too."""


_MOST_OTHERS: Final = 64


_MOST_STACKS_OF_OTHERS: Final = 500


_HOOK_CALLERS: Final = ("torch.nn.modules.module", "torch.utils.hooks")


_ENGINE: Final = "torch.autograd.graph"
"""torch's Python module from which the autograd engine calls hooks."""


_COLLECTS_ANYWHERE: Final = sys.version_info < (3, 12)
"""Whether creating any object may collect garbage immediately; newer Pythons wait for a line's end."""


class LedgerState(Protocol):
    """Current state of training: the part of the phase ledger that a sample needs."""

    current: int
    inspection: Any
    ranges: Any
    in_validation: bool
    validation: Any


class _Known(NamedTuple):
    code: CodeType  # held, so that its id stays unique
    module: str
    has_file: bool
    is_loop: bool


class StackProbe:
    """Records where the thread that created it is, whenever another thread calls it.

    A stack is followed from the innermost frame outwards to Lightning's loop, which is cut off with its
    callers. Skips inspected and traced steps, and our own work.
    """

    def __init__(self, ledger: LedgerState, user_code: UserCode) -> None:
        self._ledger = ledger
        self._user_code = user_code
        self._thread = threading.get_ident()
        self._folder = working_folder()  # the folder that file names are relative to
        self._known: dict[int, _Known] = {}
        self._lines: set[tuple[int, int]] = set()
        # (phase, or after all phases a part of validation; id of code, line, id of code, line, ...),
        # innermost first: [samples, nanoseconds]
        self._stacks: dict[tuple[int, ...], list[int]] = {}
        self._dropped = 0
        self._too_deep = 0
        self._num_looks = 0
        self._others: dict[int, dict[tuple[int, ...], list[int]]] = {}  # the same by thread
        self.clocks = ThreadClocks(self._thread)

    def look(self, elapsed_ns: int) -> None:
        ledger = self._ledger
        phase = ledger.current
        if ledger.inspection is not None or ledger.ranges is not None or phase == PROFILER:
            return
        if phase == VALIDATION and ledger.in_validation:
            phase = len(PHASES) + ledger.validation.part
        self._num_looks += 1
        with no_collection():
            frames = sys._current_frames()
            frame = frames.get(self._thread)
            if frame is None:
                return
            place, is_too_deep = self._follow(frame, phase)
            others = self._follow_others(frames, phase) if len(frames) > _USUAL_THREADS else {}
            del frames, frame
        if others:
            self.clocks.learn_names()
        for thread, its_place in others.items():
            self._note_other(thread, its_place, elapsed_ns)
        counts = self._stacks.get(place)
        if counts is None:
            counts = self._new_stack(place)
        if counts is None:
            self._dropped += 1
            return
        counts[0] += 1
        counts[1] += elapsed_ns
        self._too_deep += is_too_deep

    def _follow_others(self, frames: Mapping[int, FrameType], phase: int) -> dict[int, tuple[int, ...]]:
        if self._num_looks % _OTHERS_EVERY:
            return {}
        self.clocks.look(frames)
        skipped = (self._thread, threading.get_ident())
        return {
            thread: self._follow(its, phase)[0] for thread, its in frames.items() if thread not in skipped
        }

    def _note_other(self, thread: int, place: tuple[int, ...], elapsed_ns: int) -> None:
        known = self._others.setdefault(thread, {})
        if place not in known and (len(known) >= _MOST_STACKS_OF_OTHERS or len(self._others) > _MOST_OTHERS):
            return
        counts = known.setdefault(place, [0, 0])
        counts[0] += 1
        counts[1] += elapsed_ns

    def _follow(self, frame: FrameType | None, phase: int) -> tuple[tuple[int, ...], bool]:
        """Return the stack as plain numbers, and whether outer frames were left out.

        We hold the interpreter for the whole walk: it takes some 10 µs, another thread gets it after waiting
        0.1 ms at the earliest (see ``sampler.py``), and nothing here releases it: no lock, no input or
        output, no import. So no function on the stack can continue or end in the meantime. If the system does
        halt this thread that long, a frame may outlive its function until the walk ends, but no longer: none
        is kept.
        """
        known = self._known
        place = [phase]
        add = place.append
        while frame is not None:
            code = frame.f_code
            seen = known.get(id(code)) or self._learn(frame, code)
            if seen.is_loop:
                break
            if len(place) > 2 * MOST_DEEP:
                return tuple(place), True
            add(id(code))
            add(frame.f_lineno or code.co_firstlineno)  # some instructions have no line
            frame = frame.f_back
        return tuple(place), False

    def _learn(self, frame: FrameType, code: CodeType) -> _Known:
        """Remember a new function; whether it's the user's is found out later, in the file system."""
        names = frame.f_globals
        module = names.get("__name__")
        module = module if isinstance(module, str) else ""
        known = _Known(code, module, "__file__" in names, is_loop(module))
        self._known[id(code)] = known
        return known

    def _new_stack(self, place: tuple[int, ...]) -> list[int] | None:
        lines = set(zip(place[1::2], place[2::2], strict=True))
        if len(self._stacks) >= MOST_STACKS or len(self._lines | lines) > MOST_FRAMES:
            return None
        self._lines |= lines
        counts = self._stacks[place] = [0, 0]
        return counts

    def samples(
        self,
        *,
        first_interval_ns: int = 0,
        last_interval_ns: int = 0,
        cost_ns: int = 0,
        notes: tuple[str, ...] = (),
    ) -> StackSamples:
        """Return the samples so far; may be called while sampling continues."""
        numbers: dict[tuple[int, int], int] = {}
        stacks = _sampled(self._stacks.copy(), numbers)
        others, loop_ns = self.clocks.read()
        other_threads = tuple(
            OtherThread(
                name=name, cpu_ns=cpu_ns, stacks=tuple(_sampled(self._others[thread].copy(), numbers))
            )
            for thread, (name, cpu_ns) in others.items()
            if thread in self._others
        )
        is_users: dict[int, bool] = {}
        libraries: dict[int, str] = {}
        loggers = logger_codes()
        frames = tuple(
            self._frame(code, line, is_users, libraries, code in loggers) for code, line in numbers
        )
        return StackSamples(
            frames=frames,
            stacks=tuple(stacks),
            others=other_threads,
            loop_ns=loop_ns,
            samples=sum(stack.samples for stack in stacks) + self._dropped,
            first_interval_ns=first_interval_ns,
            last_interval_ns=last_interval_ns,
            dropped=self._dropped,
            cost_ns=cost_ns,
            log_calls=_log_calls(frames, stacks),
            hook_calls=tuple(number for number, frame in enumerate(frames) if _calls_hooks(frame)),
            notes=(*notes, *self._notes()),
        )

    def _frame(
        self, key: int, line: int, is_users: dict[int, bool], libraries: dict[int, str], is_loggers: bool
    ) -> StackFrame:
        code, module, has_file, _ = self._known[key]
        file = code.co_filename
        if not file.startswith("<"):
            file = os.path.normpath(os.path.join(self._folder, file))  # noqa: PTH118
        if key not in is_users:
            is_users[key] = self._user_code.owns(file, module=module, has_file=has_file)
            libraries[key] = library_of(module, file)
        return StackFrame(
            file=file,
            line=line,
            function=getattr(code, "co_qualname", code.co_name),
            function_line=code.co_firstlineno,
            python_module=module,
            is_users=is_users[key],
            is_loggers=is_loggers,
            package=libraries[key],
        )

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if self._too_deep:
            notes.append(f"{self._too_deep} samples keep only their innermost {MOST_DEEP} functions.")
        if self._dropped:
            notes.append(
                f"{self._dropped} samples are left out, because there were too many different stacks."
            )
        return tuple(notes)


def _sampled(
    stacks: Mapping[tuple[int, ...], list[int]], numbers: dict[tuple[int, int], int]
) -> list[SampledStack]:
    """Return stack records, most time first; adds the positions of their frames to ``numbers``."""
    found = []
    for place, (samples, time_ns) in stacks.items():
        lines = list(zip(place[1::2], place[2::2], strict=True))
        is_part = place[0] >= len(PHASES)
        found.append(
            SampledStack(
                phase=PHASES[VALIDATION if is_part else place[0]].key,
                part=PARTS[place[0] - len(PHASES)].key if is_part else "",
                frames=tuple(numbers.setdefault(line, len(numbers)) for line in reversed(lines)),
                samples=samples,
                time_ns=time_ns,
            )
        )
    return sorted(found, key=lambda stack: -stack.time_ns)


def _log_calls(frames: Sequence[StackFrame], stacks: Iterable[SampledStack]) -> tuple[LogCall, ...]:
    paths: dict[tuple[tuple[str, int], ...], None] = {}
    for stack in stacks:
        on_stack = [frames[number] for number in stack.frames]
        begins = logging_begins(on_stack)
        if begins is not None:
            users = (one for one in reversed(on_stack[: begins[0] + 1]) if one.is_users)
            paths[tuple((one.file, one.line) for one in users)] = None
    found: dict[tuple[str, int], LogCall] = {}
    for (file, line), *callers in islice(paths, MOST_LOG_CALLS):
        call = log_call(file, line, callers)
        if call is not None and ((file, line) not in found or call.is_kept):
            found[file, line] = call
    return tuple(found.values())


def _calls_hooks(frame: StackFrame) -> bool:
    """Whether it's torch's own code, at a line that calls a registered hook."""
    if frame.python_module == _ENGINE:  # hooks of tensors: the engine calls them without its own frame
        return frame.function.endswith("_engine_run_backward")
    return frame.python_module in _HOOK_CALLERS and "hook(" in linecache.getline(frame.file, frame.line)


@contextmanager
def no_collection() -> Iterator[None]:
    """Turn garbage collection off where it could crash the process.

    In Python 3.11 ``f_back`` creates the caller's frame object on demand. If that collects garbage, and a
    destructor releases the interpreter, the other thread returns from that caller, and the frame object
    points at whatever is there now. Python 3.10 and 3.11 before 3.11.5 can deadlock in
    ``sys._current_frames`` for the same reason (CPython issue 106883).

    Caveats:
        The switch is global. If another thread turns collection off during the few microseconds of a sample,
        it is turned on again.
    """
    if not (_COLLECTS_ANYWHERE and gc.isenabled()):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


LEAST_SHARE: Final = 0.02
"""Of the loop's time: threads that used less of a CPU aren't reported."""


_MUCH: Final = 0.05
"""Of the time since the last sample: a thread that uses this much needs the interpreter too."""


_clock_of: Callable[[int], int] | None = getattr(time, "pthread_getcpuclockid", None)  # not on Windows


class ThreadClocks:
    """Sums the CPU clocks of other threads, whenever it is given the current threads.

    A clock is read by the thread's identifier, which is valid as long as the thread has a frame and we hold
    the interpreter: so identifiers come from ``sys._current_frames`` and are used immediately.

    Args:
        thread: identifier of the loop's thread, which is excluded.

    Attributes:
        is_crowded: whether another thread had a CPU for much of the time between the last two samples.
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._began_ns = self._last_ns = time.perf_counter_ns()
        self._clocks: dict[int, int] = {}  # as last read
        self._took_ns: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self.is_crowded = False
        self.look(sys._current_frames(), is_first=True)

    def look(self, threads: Iterable[int], *, is_first: bool = False) -> None:
        """Read the clocks of these threads, which ``sys._current_frames`` must have just returned."""
        if _clock_of is None:
            return
        now_ns = time.perf_counter_ns()
        most_ns, own = 0, threading.get_ident()
        for thread in threads:
            if thread in (self._thread, own):
                continue
            try:
                clock_ns = time.clock_gettime_ns(_clock_of(thread))
            except OSError:  # it is ending
                continue
            before_ns = clock_ns if is_first else self._clocks.get(thread, 0)
            if clock_ns < before_ns:  # another thread has the identifier now
                before_ns = 0
            self._clocks[thread] = clock_ns
            self._took_ns[thread] = self._took_ns.get(thread, 0) + clock_ns - before_ns
            most_ns = max(most_ns, clock_ns - before_ns)
        if now_ns > self._last_ns:
            self.is_crowded = most_ns >= _MUCH * (now_ns - self._last_ns)
        self._last_ns = now_ns

    def learn_names(self) -> None:
        """Remember thread names, as threads may end; takes a lock."""
        if not self._took_ns.keys() <= self._names.keys():
            known = {one.ident: one.name for one in threading.enumerate() if one.ident is not None}
            self._names.update({thread: known.get(thread, "") for thread in self._took_ns})

    def read(self) -> tuple[dict[int, tuple[str, int]], int]:
        """Return the threads that used some CPU time, and the wall time it refers to.

        Returns:
            Name and CPU time in ns by identifier, without this package's threads; and wall time in ns.
        """
        self.look(sys._current_frames())
        self.learn_names()
        loop_ns = self._last_ns - self._began_ns
        return {
            thread: (name, took_ns)
            for thread, took_ns in self._took_ns.items()
            if took_ns >= LEAST_SHARE * loop_ns and not (name := self._names[thread]).startswith("modelprof")
        }, loop_ns
