"""Estimates transforms' shares of the time, with errors, from samples of a worker's thread."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from statistics import NormalDist
from types import FrameType
from typing import Any, Final

import msgspec

from lightning_modelprof.measure.sampling.sampler import Sampler
from lightning_modelprof.measure.sampling.stack_probe import no_collection
from lightning_modelprof.measure.workers.calls import CallName, Calls
from lightning_modelprof.run.stacks import SampledStack, StackFrame, StackSamples

LEAST_SHARE: Final = 0.05
"""Of the time spent making batches; transforms below it aren't measured."""

CONFIDENCE: Final = 0.95

_LEAST_LOOKS: Final = 50
_LEAST_BATCHES: Final = 5
"""With fewer samples, or batches in which they were taken, no transform is measured."""


class CallSums(msgspec.Struct):
    """Sums for one call. Times are the seconds that samples represent, summed by batch.

    Attributes:
        time: in the call and its callees.
        own: in the call alone.
        squares: of the time in each batch.
        products: of that time and the time of all samples in the batch.
        late: products of the samples' times and their delays.
    """

    call: CallName
    time: float = 0.0
    own: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    late: float = 0.0


class CallSamples(msgspec.Struct):
    """Samples of all calls while samples were made; sums of several workers add up.

    Attributes:
        calls: in the order in which a sample meets them.
        looks: number of samples of the thread.
        batches: number of batches in which they were taken.
        time: seconds that they represent.
        squares: of that time in each batch.
        weights: squares of the time that each sample represents.
    """

    calls: list[CallSums] = []
    looks: int = 0
    batches: int = 0
    time: float = 0.0
    squares: float = 0.0
    weights: float = 0.0

    @property
    def is_enough(self) -> bool:
        return self.looks >= _LEAST_LOOKS and self.batches >= _LEAST_BATCHES and self.time > 0

    def add(self, other: CallSamples) -> None:
        """Add the samples of another worker, or of an earlier process in its place."""
        for name in ("looks", "batches", "time", "squares", "weights"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        known = {one.call: one for one in self.calls}
        for one in other.calls:
            if one.call not in known:
                self.calls.append(CallSums(one.call))
            mine = known.get(one.call) or self.calls[-1]
            for name in ("time", "own", "squares", "products", "late"):
                setattr(mine, name, getattr(mine, name) + getattr(one, name))

    def error_ns(self, one: CallSums, number: int, *, fetch_ns: int, cpu_ns: int, samples: int) -> float:
        """Return half the possible error of a call's time; only valid if there is enough.

        All times of ``number`` calls are within twice their errors in 19 of 20 runs (Bonferroni).

        Samples of the thread inside one call aren't independent, but batches nearly are. So a share is a
        ratio of sums over batches, with the standard error of such a ratio. With few batches that error is
        itself uncertain, by as much as Student's t is wider than the normal distribution. Batches that happen
        to be alike would make it too small: it is never less than that of as many independent samples, one
        more of which would have been elsewhere.

        A sample that is due while the worker runs has to wait, and may find it in the next call. So each call
        may have gained as much as samples in it were late, but no more than the worker ran.

        Args:
            number: of calls with reported errors.
            fetch_ns: time spent making all samples of the data set.
            cpu_ns: CPU time of that.
            samples: of the data set.
        """
        share = min(1.0, one.time / self.time)
        apart = max(0.0, one.squares - 2 * share * one.products + share**2 * self.squares)
        as_batches = apart * self.batches / (self.batches - 3)
        sample = self.weights / self.time
        likely = (one.time + sample) / (self.time + 2 * sample)
        as_samples = likely * (1 - likely) * self.weights
        sure = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / number)
        drawn_ns = sure / 2 * math.sqrt(max(as_batches, as_samples)) / self.time * fetch_ns
        return math.hypot(drawn_ns, min(1e9 * one.late / one.time * samples, cpu_ns))


def merged(pieces: Iterable[CallSamples]) -> CallSamples:
    found = CallSamples()
    for piece in pieces:
        found.add(piece)
    return found


class State:
    """A worker's phase ledger, with its current state."""

    def __init__(self, phase: int, outside: Any) -> None:
        self.current, self.inspection = phase, outside
        self.ranges: Any = None
        self.in_validation, self.validation = False, None
        self.batch = 0  # number of batches started
        self.fetch_ns = 0  # start of the samples being made; 0 otherwise


class CallProbe:
    """Notes which calls the thread that created it is in, whenever another thread calls it.

    Args:
        before: samples of the previous worker in the same place.
    """

    sampler: Sampler

    def __init__(self, state: State, calls: Calls, before: CallSamples | None) -> None:
        self._state, self._calls, self._before = state, calls, before
        self._thread = threading.get_ident()
        self._rows = [CallSums(name) for name in calls.names]
        self._all = CallSamples(calls=self._rows)
        self._batch = 0
        self._times: dict[int, float] = {}  # of the newest batch, by row
        self._time = 0.0

    def look(self, elapsed_ns: int) -> None:
        """Take a sample that represents ``elapsed_ns``.

        A sample due before the worker started making samples is skipped: it belongs to earlier work, which
        delayed it.
        """
        state = self._state
        if not state.fetch_ns or self.sampler.due_ns < state.fetch_ns:
            return
        with no_collection():
            frame = sys._current_frames().get(self._thread)
            running = self._running(frame)
            del frame
        if self._batch != state.batch:
            self._close_batch()
            self._batch = state.batch
        seconds, times = elapsed_ns / 1e9, self._times
        self._all.looks += 1
        self._all.weights += seconds * seconds
        self._time += seconds
        late = seconds * self.sampler.late_ns / 1e9
        for row in running:
            times[row] = times.get(row, 0.0) + seconds
            self._rows[row].late += late
        if running:
            self._rows[running[0]].own += seconds

    def _running(self, frame: FrameType | None) -> list[int]:
        """Return the running calls, innermost first."""
        known, rows = self._calls.codes, []
        while frame is not None:
            by_first = known.get(id(frame.f_code))
            if by_first is not None:
                row = by_first.get(0)
                if row is None:
                    first = first_argument(frame, by_first)
                    row = next(iter(by_first.values())) if first is None else by_first.get(first)
                if row is not None and row not in rows:
                    rows.append(row)
            frame = frame.f_back
        return rows

    def _close_batch(self) -> None:
        time, times = self._time, self._times
        self._time, self._times = 0.0, {}
        if time:
            _add_batch(self._all, self._rows, time, times)

    def samples(self) -> CallSamples:
        """Return the samples so far; may be called while sampling continues."""
        found = merged([self._all])
        rows = {one.call: one for one in found.calls}
        if self._time:
            _add_batch(found, [rows[one.call] for one in self._rows], self._time, dict(self._times))
        if self._before is not None:
            found.add(self._before)
        return found


def _add_batch(samples: CallSamples, rows: list[CallSums], time: float, times: dict[int, float]) -> None:
    samples.batches += 1
    samples.time += time
    samples.squares += time * time
    for row, its in times.items():
        one = rows[row]
        one.time += its
        one.squares += its * its
        one.products += its * time


# First argument of a running function


def first_argument(frame: FrameType, known: Container[int]) -> int | None:
    """Return the id of a frame's first argument, usually ``self``; ``None`` if unknown.

    Avoids ``frame.f_locals``, which before Python 3.13 changes the function's ``locals()``.

    Args:
        frame: of a running function, while we hold the interpreter.
        known: ids of objects that it may be.
    """
    code = frame.f_code
    if not code.co_argcount:
        return None
    return _first_argument(frame, code.co_varnames[0], known)


def _by_name(frame: FrameType, name: str, _: Container[int]) -> int | None:
    """Read it with the function of Python 3.12 and later."""
    try:
        return id(_get_var(frame, name))
    except NameError:  # it was deleted
        return None


_HEAD: Final = 2 * ctypes.sizeof(ctypes.c_void_p)
"""Bytes of any object before its own data."""


def _in_memory(frame: FrameType, name: str, _: Container[int]) -> int | None:
    """Read it from the interpreter's memory in Python 3.11, once two addresses there match expectations.

    Source: Include/internal/pycore_frame.h and Include/cpython/pyframe.h of CPython 3.11.
    """
    word = ctypes.sizeof(ctypes.c_void_p)

    def at(address: int) -> int:
        return ctypes.c_void_p.from_address(address).value or 0

    inner = at(id(frame) + _HEAD + word)
    if not inner or at(inner + 4 * word) != id(frame.f_code) or at(inner + 5 * word) != id(frame):
        return None
    first = at(inner + 9 * word)
    if first and name in frame.f_code.co_cellvars:  # an inner function uses it too
        first = at(first + _HEAD)
    return first or None


def _among_referents(frame: FrameType, name: str, known: Container[int]) -> int | None:
    """Find it in Python 3.10 among the garbage collector's referents of the frame, first variable first."""
    if name in frame.f_code.co_cellvars:
        return None
    held = map(id, gc.get_referents(frame))
    return next((one for one in held if one in known), 0)


def _unknown(frame: FrameType, name: str, known: Container[int]) -> None:  # noqa: ARG001
    return None


def _way() -> Callable[[FrameType, str, Container[int]], int | None]:
    """Choose the method for this interpreter, if it works for a running method."""
    if sys.implementation.name != "cpython" or hasattr(sys, "gettotalrefcount"):
        return _unknown
    way = (
        _by_name if _get_var is not None else _in_memory if sys.version_info >= (3, 11) else _among_referents
    )

    class Tried:
        def itself(self) -> bool:
            return way(sys._getframe(), "self", {id(self)}) == id(self)

        def captured(self) -> bool:
            def itself() -> Tried:
                return self

            return way(sys._getframe(), "self", {id(self)}) in (id(itself()), None)

    return way if Tried().itself() and Tried().captured() else _unknown


def _c_function() -> Any:
    try:
        function = ctypes.pythonapi.PyFrame_GetVar
    except AttributeError:  # before Python 3.12
        return None
    function.argtypes, function.restype = [ctypes.py_object, ctypes.py_object], ctypes.py_object
    return function


_get_var: Final = _c_function()
_first_argument: Final = _way()


def merge_stacks(
    pieces: Sequence[StackSamples], *, most: int | None = None, without: str = ""
) -> StackSamples:
    """Merge the samples of several threads or processes.

    Args:
        pieces: at least one.
        most: most stacks to keep, by time; samples of others are dropped. ``None`` keeps all.
        without: prefix of modules whose frames are left out; ``""`` leaves out none.

    Caveats:
        Other threads' stacks are left out, as they belong to a single process.
    """
    numbers: dict[StackFrame, int] = {}
    stacks: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    hooks: set[int] = set()
    for piece in pieces:
        places = [
            -1
            if without and frame.python_module.startswith(without)
            else numbers.setdefault(frame, len(numbers))
            for frame in piece.frames
        ]
        hooks |= {places[number] for number in piece.hook_calls}
        for stack in piece.stacks:
            frames = tuple(places[number] for number in stack.frames if places[number] >= 0)
            counts = stacks.setdefault((stack.phase, stack.part, frames), [0, 0])
            counts[0] += stack.samples
            counts[1] += stack.time_ns
    merged = sorted(
        (
            SampledStack(phase=phase, part=part, frames=frames, samples=samples, time_ns=time_ns)
            for (phase, part, frames), (samples, time_ns) in stacks.items()
        ),
        key=lambda stack: -stack.time_ns,
    )
    kept, known = merged[:most], list(numbers)
    used = {old: new for new, old in enumerate(sorted({one for stack in kept for one in stack.frames}))}
    return StackSamples(
        frames=tuple(known[old] for old in used),
        stacks=tuple(replace(stack, frames=tuple(used[one] for one in stack.frames)) for stack in kept),
        samples=sum(piece.samples for piece in pieces),
        first_interval_ns=min(piece.first_interval_ns for piece in pieces),
        last_interval_ns=max(piece.last_interval_ns for piece in pieces),
        dropped=sum(piece.dropped for piece in pieces) + sum(stack.samples for stack in merged[len(kept) :]),
        cost_ns=sum(piece.cost_ns for piece in pieces),
        log_calls=tuple(dict.fromkeys(call for piece in pieces for call in piece.log_calls)),
        hook_calls=tuple(sorted(used[one] for one in hooks & used.keys())),
        loop_ns=sum(piece.loop_ns for piece in pieces),
        notes=tuple(dict.fromkeys(note for piece in pieces for note in piece.notes)),
    )
