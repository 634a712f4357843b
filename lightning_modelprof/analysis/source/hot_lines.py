"""Hot lines: the user's lines in which the training thread spends most time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Final, NamedTuple, TypeVar

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.place import Place
from lightning_modelprof.record import Record
from lightning_modelprof.run.sites import LOG, LOGGER
from lightning_modelprof.run.stacks import SampledStack, StackFrame, StackSamples, logging_begins

T = TypeVar("T")


COLLECTIVES: Final = "torch.distributed"
"""Prefix of the Python modules through which ranks meet."""


_MIN_SAMPLES: Final = 3
"""Samples needed on a line to report it."""


_ENOUGH_SAMPLES: Final = 20
"""Samples needed in a phase to bound a line's share."""


_MOST_STATEMENTS: Final = 5
"""Lines reported per function or phase."""


MODULE_CALLS: Final = "torch.nn.modules.module"
"""Python module that every call of a ``torch.nn.Module`` passes through."""


_GRADIENTS: Final = frozenset(
    (
        ("torch.autograd", "grad"),
        ("torch.autograd", "backward"),
        ("torch.autograd.graph", "_engine_run_backward"),
    )
)
"""Python modules and functions that make autograd's engine compute gradients."""


_TRANSFORMS: Final = "torch._functorch"
"""Prefix of the Python modules behind ``torch.func``."""


class HotLine(Place, frozen=True, kw_only=True):
    """The line where a function spends most of its time, including calls.

    Attributes:
        share: of the function's time, 0..1.
        time_ns: of its samples, summed over the loop.
        inner: called line with most of this line's time; its ``share`` is of this line's time.
    """

    file: str
    line: int
    function_line: int
    share: float
    samples: int
    time_ns: int
    inner: HotLine | None = None


class TopLine(Place, frozen=True, kw_only=True):
    """A line that was the user's innermost one on the stack.

    Attributes:
        phase: key of the phase; ``None`` for all phases together.
        share: of all sampled time, 0..1.
        time_ns: of its samples, summed over the loop.
        logging_share, logging_samples: part of the two in which the line logged or used a metric.
    """

    file: str
    line: int
    phase: str | None
    share: float
    samples: int
    time_ns: int
    logging_share: float = 0.0
    logging_samples: int = 0


class _Count(NamedTuple):
    samples: int
    time_ns: int


class FoundCalls(NamedTuple):
    """Time of some calls: the fewest lines that hold half of it, and its share of all sampled time.

    ``functions`` are the called ones, most time first.
    """

    lines: tuple[HotLine, ...]
    share: float
    samples: int
    functions: tuple[str, ...]


class _At(NamedTuple):
    """One of a function's lines, and the calls from there, outermost first."""

    frame: StackFrame
    inner: Sequence[StackFrame]
    tally: _Count

    @property
    def is_in_module(self) -> bool:
        return any(frame.python_module == MODULE_CALLS for frame in self.inner)

    @property
    def is_in_gradients(self) -> bool:
        """Whether autograd computes gradients, or a ``torch.func`` transform runs its own code."""
        if any((frame.python_module, frame.function) in _GRADIENTS for frame in self.inner):
            return True
        library = takewhile(lambda frame: not frame.is_users, reversed(self.inner))
        return any(frame.python_module.startswith(_TRANSFORMS) for frame in library)


class HotLines(Record, frozen=True, kw_only=True):
    """Slow lines, from the sampled stacks of one loop.

    Caveats:
        Consecutive samples aren't quite independent: two may be from the same long call.
        Python code that runs for less than some tenths of a millisecond (a millisecond on a busy machine)
        before a line that releases the interpreter lock, as torch operators do, may count as that line.
    """

    samples: StackSamples

    @property
    def time_ns(self) -> int:
        return sum(stack.time_ns for stack in self.samples.stacks)

    @property
    def num_samples(self) -> int:
        """Samples with a known stack."""
        return sum(stack.samples for stack in self.samples.stacks)

    def least_of(self, share: float) -> float:
        """Lower bound of a share of all time: two standard errors below it."""
        return share - 2 * math.sqrt(max(0.0, share * (1 - share)) / max(self.num_samples, 1))

    def logging_begins(self, frames: Sequence[StackFrame]) -> tuple[int, int] | None:
        """Like ``run.stacks.logging_begins``, but ``None`` for a metric whose result is used, e.g. a loss."""
        begins = logging_begins(frames)
        if begins is None or frames[begins[1]].logging_kind in (LOG, LOGGER):
            return begins
        caller = frames[begins[0]]
        place = caller.file, caller.line
        kept = next((one.is_kept for one in self.samples.log_calls if (one.file, one.line) == place), None)
        meets_ranks = any(frame.python_module.startswith(COLLECTIVES) for frame in frames[begins[1] :])
        return None if kept or (kept is None and meets_ranks) else begins

    def _is_logging(self, at: _At) -> bool:
        return self.logging_begins((at.frame, *at.inner)) is not None

    def _is_own(self, at: _At) -> bool:
        return not (at.is_in_module or at.is_in_gradients or self._is_logging(at))

    def inside(
        self,
        file: str,
        function_line: int,
        *,
        phases: Collection[str] | None = None,
        outside_modules: bool = False,
    ) -> HotLine | None:
        """The line where a function spends most of its time.

        For a recursive function, the innermost call counts.

        Args:
            phases: only samples in these; ``None`` means all.
            outside_modules: leave out samples in which the function had called a ``torch.nn.Module``, was
                waiting for autograd to compute gradients, or was logging, which ``logging_calls`` covers.

        Returns:
            ``None`` if the line has fewer than 3 samples, or less than half the function's samples or time.
        """
        calls = [
            at
            for stack in self._stacks(phases)
            if (at := self._find(stack, file, function_line)) is not None
            and not (outside_modules and not self._is_own(at))
        ]
        function = _sum(at.tally for at in calls)
        return _hottest(_grouped((at.frame.line, at) for at in calls), function)

    def statements(
        self, file: str, function_line: int, *, outside_modules: bool = False
    ) -> tuple[HotLine, ...]:
        """The fewest lines that together hold half of a function's time, slowest first.

        Arguments as in :meth:`inside`. Unlike there, a single sample is enough.
        """
        calls = [
            at
            for stack in self._stacks(None)
            if (at := self._find(stack, file, function_line)) is not None
            and not (outside_modules and not self._is_own(at))
        ]
        return _fewest(calls, _sum(at.tally for at in calls))

    def statements_below(self, function: str) -> tuple[HotLine, ...]:
        """The fewest of the user's lines that hold half of a library function's time.

        Args:
            function: its qualified name.

        Returns:
            Empty if the library itself takes more than half.
        """
        paths = []
        for stack in self.samples.stacks:
            path = [self.samples.frames[number] for number in stack.frames]
            begin = next((n for n, one in enumerate(path) if one.function == function), None)
            if begin is not None and not path[begin].is_users:
                paths.append((path[begin + 1 :], _Count(stack.samples, stack.time_ns)))
        return _fewest(_outermost(paths), _sum(tally for _, tally in paths))

    def found_by(
        self, find: Callable[[Sequence[StackFrame]], int | None], phases: Collection[str]
    ) -> FoundCalls:
        """Time of the calls that ``find`` locates.

        Args:
            find: return the position of the call on a stack, outermost first, or ``None``.
            phases: only stacks in these are searched.
        """
        calls, functions = [], Counter[str]()
        for stack in self._stacks(phases):
            path = [self.samples.frames[number] for number in stack.frames]
            at = find(path)
            if at is not None:
                calls.append(_At(path[at], path[at + 1 :], _Count(stack.samples, stack.time_ns)))
                functions[path[at].function] += stack.time_ns
        whole = _sum(at.tally for at in calls)
        return FoundCalls(
            lines=_fewest(calls, whole),
            share=whole.time_ns / self.time_ns if self.time_ns else 0.0,
            samples=whole.samples,
            functions=tuple(name for name, _ in functions.most_common()),
        )

    def statements_in(self, phases: Collection[str], libraries: Collection[str] = ()) -> tuple[HotLine, ...]:
        """The fewest of the user's lines that hold half of the time of some phases, in any function.

        Each stack counts for the user's outermost line on it; ``inner`` is what that line calls.

        Args:
            libraries: packages whose lines count too if the user's don't hold half of the time.

        Returns:
            Empty if other libraries alone take more than half.
        """
        paths = [
            (
                [self.samples.frames[number] for number in stack.frames],
                _Count(stack.samples, stack.time_ns),
            )
            for stack in self._stacks(phases)
        ]
        whole = _sum(tally for _, tally in paths)
        return _fewest(_outermost(paths), whole) or _fewest(_outermost(paths, libraries), whole)

    def share_in(self, phase: str, module: str, function: str) -> float:
        """Share of a phase's time in a library function, calls included."""
        below_ns = whole_ns = 0
        for stack in self._stacks((phase,)):
            frames = (self.samples.frames[number] for number in stack.frames)
            whole_ns += stack.time_ns
            if any(
                one.python_module == module and one.function.rpartition(".")[2] == function for one in frames
            ):
                below_ns += stack.time_ns
        return below_ns / whole_ns if whole_ns else 0.0

    def share_of(self, phase: str, file: str, function_line: int) -> float:
        """Share of a phase's time in the function that starts at this line."""
        stacks = [*self._stacks((phase,))]
        whole_ns = sum(stack.time_ns for stack in stacks)
        inside_ns = sum(stack.time_ns for stack in stacks if self._find(stack, file, function_line))
        return inside_ns / whole_ns if whole_ns else 0.0

    def in_part(self, part: str) -> HotLine | None:
        """The user's line with most time in one part of a fit's validations.

        Each stack counts for the user's outermost line on it; ``inner`` is what that line calls.

        Returns:
            ``None`` if the line has fewer than 3 samples, or less than half of the part's samples or time.
        """
        frames, stacks = self.samples.frames, [one for one in self.samples.stacks if one.part == part]
        whole = _sum(_Count(one.samples, one.time_ns) for one in stacks)
        calls = []
        for stack in stacks:
            path = [frames[index] for index in stack.frames]
            first = next((number for number, frame in enumerate(path) if frame.is_users), None)
            if first is not None:
                calls.append(_At(path[first], path[first + 1 :], _Count(stack.samples, stack.time_ns)))
        lines = _grouped(((at.frame.file, at.frame.line), at) for at in calls)
        return _hottest(lines, whole)

    def share_below(self, package: str, part: str) -> float:
        """Share of one validation part's time in a package's functions."""
        below_ns = whole_ns = 0
        for stack in self.samples.stacks:
            if stack.part == part:
                modules = {
                    self.samples.frames[index].python_module.partition(".")[0] for index in stack.frames
                }
                whole_ns += stack.time_ns
                below_ns += stack.time_ns if package in modules else 0
        return below_ns / whole_ns if whole_ns else 0.0

    def caller_of_all(
        self, place: tuple[str, int], wanted: Collection[tuple[str, int]], others: Collection[tuple[str, int]]
    ) -> HotLine | None:
        """The user's outermost line on the way to ``place`` that calls only wanted lines.

        Args:
            place: file and number of the line.
            wanted: lines that may be called.
            others: lines that may not; a tenth of the time may be in lines that are in neither.

        Returns:
            The line and the line that it calls; ``None`` if no caller qualifies.
        """
        stacks = [
            ([frame for frame in map(self.samples.frames.__getitem__, one.frames) if frame.is_users], one)
            for one in self.samples.stacks
        ]
        ways = [
            (one.time_ns, path) for path, one in stacks if path and (path[-1].file, path[-1].line) == place
        ]
        way = max(ways, key=lambda one: one[0], default=(0, []))[1]
        for number, frame in enumerate(way[:-1]):
            through = [
                _At(path[at], path[at + 1 :], _Count(one.samples, one.time_ns))
                for path, one in stacks
                for at in [next((n for n, it in enumerate(path) if it == frame), None)]
                if at is not None
            ]
            ends = [(_line_of(_At((at.frame, *at.inner)[-1], (), at.tally)), at.tally) for at in through]
            whole = _sum(tally for _, tally in ends)
            known = _sum(tally for end, tally in ends if end in wanted)
            is_other = (frame.file, frame.line) in others or any(end in others for end, _ in ends)
            if not is_other and known.time_ns >= 0.9 * whole.time_ns:
                return _hot_line(frame, whole, whole, _hot_line(way[number + 1], whole, whole, None))
        return None

    def calls(self, caller: tuple[str, int], called: tuple[str, int]) -> bool:
        """Whether any sample shows one line calling another, given by file and number."""
        for stack in self.samples.stacks:
            frames = [self.samples.frames[number] for number in stack.frames]
            places = [(frame.file, frame.line) for frame in frames]
            if caller in places and called in places[places.index(caller) + 1 :]:
                return True
        return False

    def is_call(self, file: str, line: int) -> bool:
        """Whether at least half of a line's samples are in other lines of the user's that it calls."""
        whole = called = 0
        for stack in self.samples.stacks:
            frames = [self.samples.frames[number] for number in stack.frames]
            at = next((n for n, one in enumerate(frames) if (one.file, one.line) == (file, line)), None)
            if at is None:
                continue
            whole += stack.samples
            if any(one.is_users and (one.file, one.line) != (file, line) for one in frames[at + 1 :]):
                called += stack.samples
        return whole > 0 and 2 * called >= whole

    def share_outside_modules(
        self, file: str, function_line: int, *, phases: Collection[str] | None = None
    ) -> tuple[float, int] | None:
        """Share of a function's time in its own code (no module, no gradients, no logging), and its samples.

        Args:
            phases: only samples in these; ``None`` means all.

        Returns:
            ``None`` if the function has no sample.
        """
        calls = self._calls_of(file, function_line, phases)
        whole = _sum(at.tally for at in calls)
        if not whole.time_ns:
            return None
        own = _sum(at.tally for at in calls if self._is_own(at))
        return own.time_ns / whole.time_ns, whole.samples

    def logging_share(
        self,
        file: str,
        function_line: int,
        *,
        phases: Collection[str] | None = None,
        outside_modules: bool = False,
    ) -> tuple[float, float]:
        """Share of a function's time in which it logged or used a metric, and its standard error.

        Args:
            phases: only samples in these; ``None`` means all.
            outside_modules: leave out logging inside module calls.
        """
        return _share_and_error(
            self._calls_of(file, function_line, phases),
            lambda at: self._is_logging(at) and not (outside_modules and at.is_in_module),
        )

    def gradient_share(
        self, file: str, function_line: int, *, phases: Collection[str] | None = None
    ) -> tuple[float, float]:
        """Share of a function's time in autograd, outside modules, and its standard error.

        Arguments as in :meth:`logging_share`.
        """
        return _share_and_error(
            self._calls_of(file, function_line, phases),
            lambda at: at.is_in_gradients and not at.is_in_module and not self._is_logging(at),
        )

    def most_at_lines(self, phase: str) -> Callable[[str | None, int | None], float] | None:
        """Return a function from a line's place to the largest share of a phase that the samples allow it.

        A place of ``None`` is code that runs without a line of the user's. The bound is the upper end of
        Wilson's interval at two standard errors.

        Returns:
            ``None`` if the phase has fewer than 20 samples.
        """
        shares: Counter[tuple[str | None, int | None]] = Counter()
        samples = 0
        for stack in self._stacks((phase,)):
            frames = (self.samples.frames[number] for number in reversed(stack.frames))
            own = next((frame for frame in frames if frame.is_users), None)
            shares[(None, None) if own is None else (own.file, own.line)] += stack.time_ns
            samples += stack.samples
        whole_ns = sum(shares.values())
        if samples < _ENOUGH_SAMPLES or not whole_ns:
            return None

        def most(file: str | None, line: int | None) -> float:
            share = shares[file, line] / whole_ns
            spread = 2 * math.sqrt(share * (1 - share) / samples + 1 / samples**2)
            return (share + 2 / samples + spread) / (1 + 4 / samples)

        return most

    def top(self, limit: int) -> tuple[TopLine, ...]:
        """The slowest lines by phase, longest first.

        Each sample counts for the user's innermost line on its stack, if any.

        The standard error of a share p is sqrt(p (1 - p) / n) over all n samples, as if these were
        independent and stood for equal times. They aren't quite (see the class), so it's slightly too small.
        """
        return tuple(islice(self._ranked(by_phase=True), limit))

    @property
    def lines(self) -> tuple[TopLine, ...]:
        """All such lines over all phases, longest first."""
        return tuple(self._ranked(by_phase=False))

    def _ranked(self, *, by_phase: bool) -> Iterator[TopLine]:
        total = _Count(self.num_samples, self.time_ns)
        if not (total.samples and total.time_ns):
            return
        counts: dict[tuple[str | None, str, int], list[_Count]] = {}
        logging: dict[tuple[str | None, str, int], list[_Count]] = {}
        names: dict[tuple[str | None, str, int], str] = {}
        for stack in self.samples.stacks:
            frames = [self.samples.frames[index] for index in stack.frames]
            user = next((frame for frame in reversed(frames) if frame.is_users), None)
            if user is not None:
                place = (stack.phase if by_phase else None, user.file, user.line)
                names.setdefault(place, user.function)
                count = _Count(stack.samples, stack.time_ns)
                counts.setdefault(place, []).append(count)
                if self.logging_begins(frames) is not None:
                    logging.setdefault(place, []).append(count)
        sums = {place: _sum(found) for place, found in counts.items()}
        for place, count in sorted(sums.items(), key=lambda item: -item[1].time_ns):
            phase, file, line = place
            share = count.time_ns / total.time_ns
            logged = _sum(logging.get(place, ()))
            yield TopLine(
                file=file,
                line=line,
                function=names[place],
                phase=phase,
                share=share,
                samples=count.samples,
                time_ns=count.time_ns,
                logging_share=logged.time_ns / total.time_ns,
                logging_samples=logged.samples,
            )

    def _calls_of(self, file: str, function_line: int, phases: Collection[str] | None) -> list[_At]:
        return [
            at for stack in self._stacks(phases) if (at := self._find(stack, file, function_line)) is not None
        ]

    def _stacks(self, phases: Collection[str] | None) -> Iterator[SampledStack]:
        return (stack for stack in self.samples.stacks if phases is None or stack.phase in phases)

    def _find(self, stack: SampledStack, file: str, function_line: int) -> _At | None:
        frames = self.samples.frames
        for position in range(len(stack.frames) - 1, -1, -1):
            frame = frames[stack.frames[position]]
            if frame.function_line == function_line and frame.file == file:
                inner = [frames[index] for index in stack.frames[position + 1 :]]
                return _At(frame, inner, _Count(stack.samples, stack.time_ns))
        return None


def hot_lines(samples: StackSamples | None) -> HotLines:
    if samples is None:
        raise NotMeasured('not measured (set inspect={"sampling": True})')
    if not any(stack.time_ns for stack in samples.stacks):
        raise NotMeasured("the loop ended before the first sample")
    return HotLines(samples=samples)


def _hottest(lines: list[list[_At]], whole: _Count) -> HotLine | None:
    if not lines:
        return None
    hottest = max(lines, key=lambda ats: _sum(at.tally for at in ats).time_ns)
    count = _sum(at.tally for at in hottest)
    is_most = 2 * count.samples >= whole.samples and 2 * count.time_ns >= whole.time_ns
    if count.samples < _MIN_SAMPLES or not is_most:
        return None
    return _hot_line(hottest[0].frame, count, whole, _innermost(hottest, count))


def _outermost(
    paths: Iterable[tuple[Sequence[StackFrame], _Count]], libraries: Collection[str] = ()
) -> list[_At]:
    """The outermost line of the user's, or of these libraries, on each stack that has one."""
    found = []
    for path, tally in paths:
        own = (number for number, one in enumerate(path) if one.is_users or one.package in libraries)
        first = next(own, None)
        if first is not None:
            found.append(_At(path[first], path[first + 1 :], tally))
    return found


def _fewest(calls: Sequence[_At], whole: _Count) -> tuple[HotLine, ...]:
    """The slowest lines that reach half of the whole; empty if all of them don't."""
    lines = [(ats, _sum(at.tally for at in ats)) for ats in _grouped((_line_of(at), at) for at in calls)]
    lines.sort(key=lambda line: -line[1].time_ns)
    found: list[HotLine] = []
    left_ns = whole.time_ns / 2
    for ats, count in lines:
        if left_ns <= 0 or not count.time_ns:
            break
        found.append(_hot_line(ats[0].frame, count, whole, _innermost(ats, count)))
        left_ns -= count.time_ns
    return tuple(found[:_MOST_STATEMENTS]) if left_ns <= 0 else ()


def _line_of(at: _At) -> tuple[str, int]:
    return at.frame.file, at.frame.line


def _innermost(hottest: Sequence[_At], count: _Count) -> HotLine | None:
    """Innermost line of the user's below ``hottest`` that still holds at least half of its time."""
    found: HotLine | None = None
    begin = hottest[0].frame
    paths = [([frame for frame in at.inner if frame.is_users], at.tally) for at in hottest]
    while paths:
        children = _grouped(
            ((path[0].file, path[0].line, path[0].function), (path, one)) for path, one in paths if path
        )
        if not children:
            break
        paths = max(children, key=lambda group: _sum(one for _, one in group).time_ns)
        inner = _sum(one for _, one in paths)
        if 2 * inner.time_ns < count.time_ns:
            break
        frame = paths[0][0][0]
        # A comprehension is a function of its own before Python 3.12.
        is_same = (frame.file, frame.line) == (begin.file, begin.line)
        found = found if is_same else _hot_line(frame, inner, count, None)
        paths = [(path[1:], one) for path, one in paths]
    return found


def _hot_line(frame: StackFrame, count: _Count, whole: _Count, inner: HotLine | None) -> HotLine:
    return HotLine(
        file=frame.file,
        line=frame.line,
        function=frame.function,
        function_line=frame.function_line,
        share=count.time_ns / whole.time_ns if whole.time_ns else 0.0,
        samples=count.samples,
        time_ns=count.time_ns,
        inner=inner,
        package=frame.package,
    )


def _share_and_error(calls: Sequence[_At], is_wanted: Callable[[_At], bool]) -> tuple[float, float]:
    whole = _sum(at.tally for at in calls)
    wanted = _sum(at.tally for at in calls if is_wanted(at))
    share = wanted.time_ns / whole.time_ns if whole.time_ns else 0.0
    return share, math.sqrt(share * (1 - share) / whole.samples) if share else 0.0


def _sum(counts: Iterable[_Count]) -> _Count:
    samples = time_ns = 0
    for count in counts:
        samples += count.samples
        time_ns += count.time_ns
    return _Count(samples, time_ns)


def _grouped(pairs: Iterable[tuple[Hashable, T]]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return list(groups.values())


_PHASES: Final = ("forward", "backward")


_NOT_HOOKS_OF_ANYBODY: Final = ("torch", "lightning", "pytorch_lightning", "lightning_modelprof")
"""Packages whose hooks belong to the training or to this profiler."""


def layer_hooks(hot: HotLines) -> FoundCalls:
    """Time in module and tensor hooks in Forward and Backward, without the modules that they call.

    Caveats:
        On a device, backward hooks run in one of torch's own threads, which isn't sampled.
    """
    calls = {hot.samples.frames[number] for number in hot.samples.hook_calls}
    return hot.found_by(lambda path: _hook(path, calls), _PHASES)


def _hook(path: Sequence[StackFrame], calls: set[StackFrame]) -> int | None:
    """Position of the innermost hook on a stack; ``None`` without one, or if it has called a module."""
    for position in range(len(path) - 1, 0, -1):
        frame = path[position]
        if path[position - 1] in calls and frame.python_module.partition(".")[0] not in _NOT_HOOKS_OF_ANYBODY:
            return position
        if frame.python_module == MODULE_CALLS:
            return None
    return None
