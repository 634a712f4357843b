"""Calls in a worker that are timed: samples of its data set, and transforms that it finds there.

The data set is not wrapped: it gets a class of its own, derived from the one that it has, whose
``__getitem__`` is timed; so do transforms. Functions have one of ours in their place.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from threading import get_ident
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType
from typing import Any, Final

import torch
from torch.utils.data import Dataset, IterableDataset, IterDataPipe

from lightning_modelprof.measure.steps.ledger import DATALOADER
from lightning_modelprof.measure.user_code import UserCode, place_of
from lightning_modelprof.measure.workers.ring import CALL_HEAD, NUM_KEPT, CallName, SlotWriter, Sum
from lightning_modelprof.measure.workers.stand_ins import (
    TimedCall,
    TimedIterator,
    can_be_derived,
    derived_class,
    drop_frame,
    is_plain_method,
    set_class,
)

_MOST_OBJECTS: Final = 1_000
_DEEPEST: Final = 6

OUTSIDE: Final = object()
"""In place of an inspection: a worker that waits is not looked at."""


class State:
    """The phase ledger of a worker: batches, and waiting between them."""

    current: int = DATALOADER
    inspection: Any = OUTSIDE
    sample_words: memoryview | None = None  # where the CPU time of samples goes
    ranges: Any = None
    in_validation: bool = False
    validation: Any = None


class TimedCalls:
    """What is timed in one worker, and the batch that is being made.

    Args:
        slot: where times are written.
        user_code: whose code is whose.

    Attributes:
        state: whether a batch is being made.
        batch: its begin, CPU time at its begin, samples, and calls that were timed. A list, as its items are
            read and written faster than attributes.
        inner: the time in timed calls inside the running one.
    """

    def __init__(self, slot: SlotWriter, user_code: UserCode) -> None:
        self._slot, self._user_code = slot, user_code
        self._thread = get_ident()
        self.state = State()
        self.batch = [0, 0, 0, 0]
        self.inner = [0]
        self._is_busy = [False]  # a sample is being made
        self._switches: list[Callable[[bool | None], None]] = []  # None: as it was before us
        self._seen: dict[int, Any] = {}  # id → object, which is held so that its id stays its own
        self._replaced: dict[int, TimedCall] = {}
        self._has_stages = False

    def switch(self, is_timing: bool | None) -> None:
        """Time calls or not; ``None`` leaves everything as it was, for good."""
        for switch in self._switches:
            switch(is_timing)
        if is_timing is None:
            self._switches = []

    def begin(self, dataset: Any) -> None:
        """Time samples of a data set, and what it has for making them."""
        self._has_stages = isinstance(dataset, IterableDataset)
        self._time_dataset(dataset, 0)

    def _time_dataset(self, dataset: Any, depth: int) -> None:
        """Time samples of a data set, and what it has for making them."""
        if not self._is_new(dataset):
            return
        kind = type(dataset)
        if isinstance(dataset, IterDataPipe | torch.Tensor):
            return  # its metaclass does not let __iter__ be derived; its items would be of that class, too
        names = ("__iter__",) if isinstance(dataset, IterableDataset) else ("__getitem__", "__getitems__")
        methods = {name: getattr(kind, name) for name in names if is_plain_method(kind, name)}
        timed, noted = {}, {}
        for name, method in methods.items():
            words = self._slot.call(self.name(f"{kind.__qualname__}.{name}", "sample", depth, method))
            if words is None:
                continue
            if depth:
                if name != "__iter__":
                    timed[name] = self._timed_inside(method, words, is_batch=name == "__getitems__")
            elif name == "__iter__":
                timed[name] = noted[name] = self._timed_iter(method, words)
            else:
                timed[name] = self._timed_sample(method, words, is_batch=name == "__getitems__")
                noted[name] = self._noted(method, is_batch=name == "__getitems__")
        if timed:
            self._derive(dataset, timed, noted)
        self._time_attributes(dataset, depth + 1)

    def _time_attributes(self, owner: Any, depth: int) -> None:
        """Time what an object has that can be called, and other data sets in it."""
        try:
            attributes = vars(owner)
        except TypeError:  # __slots__
            return
        for name, value in list(attributes.items()):
            if not name.startswith("__"):
                with suppress(Exception):  # somebody else's object may do anything
                    self._time_attribute(owner, attributes, name, value, depth)

    def _time_attribute(self, owner: Any, attributes: Any, name: str, value: Any, depth: int) -> None:
        if _is_dataset(value):
            self._time_dataset(value, depth)
        elif isinstance(value, list | tuple | dict):
            self._time_several(attributes, name, depth)
        elif self._can_be_timed(value, owner):
            replaced = self._time_one(value, depth)
            if replaced is not None:
                attributes[name] = replaced
        elif self._has_stages and _is_stage_of(value, owner) and self._is_new(value):
            self._time_attributes(value, depth)

    def _time_several(self, attributes: Any, name: Any, depth: int) -> None:
        """A list of transforms or of data sets that stands in ``attributes``."""
        several = attributes[name]
        if (
            not 0 < len(several) <= _MOST_OBJECTS
        ):  # before they are looked at: that copies pages of the parent
            return
        items = list(several.values() if isinstance(several, dict) else several)
        if all(_is_dataset(item) or self._can_be_timed(item, None) for item in items):
            replaced = self._time_each(items, depth)
            if any(one is not None for one in replaced):
                new = [item if one is None else one for item, one in zip(items, replaced, strict=True)]
                # Whatever methods of its own say to that.
                if isinstance(several, dict):
                    dict.update(several, zip(several, new, strict=True))
                elif isinstance(several, list):
                    list.__setitem__(several, slice(None), new)
                elif type(several) is tuple:
                    attributes[name] = tuple(new)

    def _time_each(self, items: Iterable[Any], depth: int) -> list[TimedCall | None]:
        """Time transforms and data sets in a row, and tell transforms of one name apart."""
        numbers: Counter[Any] = Counter()
        found: list[TimedCall | None] = []
        for item in items:
            one = None
            with suppress(Exception):  # somebody else's object may do anything
                if _is_dataset(item):
                    self._time_dataset(item, depth)
                else:
                    what = item if isinstance(item, _FUNCTIONS) else self._function_in(item) or type(item)
                    numbers[what] += 1
                    one = self._time_one(item, depth, numbers[what])
            found.append(one)
        return found

    def _can_be_timed(self, value: Any, owner: Any) -> bool:
        if not callable(value) or isinstance(value, type):
            return False
        if not isinstance(value, _FUNCTIONS) and not is_plain_method(type(value), "__call__"):
            return False
        return owner is None or getattr(value, "__self__", None) is not owner

    def _time_one(self, call: Any, depth: int, number: int = 1) -> TimedCall | None:
        """Time a transform and those inside; what is returned has to stand in its place."""
        if id(call) in self._replaced:
            return self._replaced[id(call)]
        if type(call) is TimedCall:
            return None
        if not self._is_new(call) or depth > _DEEPEST:
            return None
        kind = type(call)
        is_plain = isinstance(call, _FUNCTIONS)
        inside = () if is_plain else self._inside(call)
        what = "compose" if inside else "transform"
        code = call if is_plain else getattr(kind, "forward", None) or getattr(kind, "__call__", None)  # noqa: B004
        function = self._function_in(call)
        name = self.name("" if is_plain or function else kind.__qualname__, what, depth, function or code)
        words = self._slot.call(name if number == 1 else name.numbered(number))
        replaced = None if words is None else self._put_in(call, words)
        if inside is _MODULES:
            self._time_each(call.children(), depth + 1)
            return replaced
        for attribute in inside:
            value = getattr(call, attribute)
            if isinstance(value, list | tuple | dict):
                self._time_several(vars(call), attribute, depth + 1)
            elif isinstance(value, torch.nn.ModuleList):
                self._time_each(value, depth + 1)
            elif self._can_be_timed(value, call):
                one = self._time_one(value, depth + 1)
                if one is not None:
                    vars(call)[attribute] = one
        return replaced

    def _put_in(self, call: Any, words: memoryview) -> TimedCall | None:
        """Time a transform; what is returned has to stand in its place."""
        kind = type(call)
        if not isinstance(call, _FUNCTIONS):
            timed, noted = self._timed_pair(kind.__call__, words)
            self._derive(call, {"__call__": timed}, {} if noted is None else {"__call__": noted})
            return None
        replaced = self._replaced[id(call)] = TimedCall(call, *self._timed_pair(call, words))
        self._switches.append(replaced.switch)
        return replaced

    def _inside(self, call: Any) -> tuple[str, ...]:
        """Attributes of a transform that hold transforms: all of the user's own, some of a library's."""
        if isinstance(call, torch.nn.Sequential):
            return _MODULES
        try:
            own = {**vars(call), **vars(call).get("_modules", {})}
        except TypeError:  # __slots__
            return ()
        names: tuple[str, ...] = _INSIDE
        if self._is_users(type(call)):
            names = tuple(name for name in own if name != "_modules" and not name.startswith("__"))
        elif self._function_in(call) is not None:
            names = (*_INSIDE, "args")
        return tuple(name for name in names if self._has_calls(own.get(name), call))

    def _has_calls(self, value: Any, owner: Any) -> bool:
        if isinstance(value, list | tuple | dict):
            return 0 < len(value) <= _MOST_OBJECTS and all(
                _is_dataset(one) or self._can_be_timed(one, owner)
                for one in (value.values() if isinstance(value, dict) else value)
            )
        return self._can_be_timed(value, owner)

    def _is_users(self, kind: type) -> bool:
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if file is None:  # typed into a notebook or a console, or built in
            return kind.__module__ == "__main__"
        return self._user_code.is_users_file(file)

    def _function_in(self, call: Any) -> Any:
        """The function that an object of a library does no more than call; ``None`` without one."""
        if isinstance(call, _FUNCTIONS) or self._is_users(type(call)):
            return None
        with suppress(TypeError):  # __slots__
            found = [vars(call)[name] for name in _FUNCTION if name in vars(call)]
            return found[0] if len(found) == 1 and isinstance(found[0], _FUNCTIONS) else None
        return None

    def _is_new(self, one: Any) -> bool:
        if id(one) in self._seen or len(self._seen) >= _MOST_OBJECTS:
            return False
        self._seen[id(one)] = one
        return True

    def name(self, name: str, what: str, depth: int, code: Any) -> CallName:
        """What a call is called, and where its code is.

        Args:
            name: ``""`` takes that of the code.
            what: as of CallTimes.
            depth: as of CallTimes.
            code: function, or what has one.
        """
        place = place_of(code)
        if not name:
            name = type(code).__qualname__ if place is None else place.name
        name = name.rpartition("<locals>.")[2]
        if place is None or place.file is None:
            return CallName(name, what, depth)
        is_users = self._user_code.is_users_file(place.file)
        return CallName(
            name, what, depth, place.file, place.line or 0, is_users, "" if is_users else place.package
        )

    def _derive(self, one: Any, timed: dict[str, Any], noted: dict[str, Any]) -> bool:
        """Give an object a class of its own with these methods; returns whether that could be done.

        Args:
            one: the object.
            timed: name → method, while calls are timed.
            noted: the same while they are not; the object's own class where there are none.
        """
        own = type(one)
        try:
            if not can_be_derived(own):
                return False
            full = derived_class(own, timed)
            light = derived_class(own, noted) if noted else own
            set_class(one, full)
        except Exception:  # a metaclass that refuses, or a class that is not Python's
            return False

        def switch(is_timing: bool | None) -> None:
            if any(type(one) is kind for kind in (own, full, light)):  # and the user gave it no other
                set_class(one, own if is_timing is None else full if is_timing else light)

        self._switches.append(switch)
        return True

    # How it is timed

    def _timed(self, function: Callable[..., Any], words: memoryview) -> Callable[..., Any]:
        """A call with one pair of clock reads."""
        clock, ident, thread = time.perf_counter_ns, get_ident, self._thread
        inner, batch = self.inner, self.batch
        mask, first = NUM_KEPT - 1, CALL_HEAD

        def call(*args: Any, **kwargs: Any) -> Any:
            if ident() != thread:  # sums are of one thread
                try:
                    return function(*args, **kwargs)
                except BaseException as error:
                    drop_frame(error)
                    raise
            outer = inner[0]
            inner[0] = 0
            begin = clock()
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                drop_frame(error)
                raise
            finally:
                took = clock() - begin
                number = words[0]
                words[first + (number & mask)] = took
                words[0] = number + 1
                words[1] += took
                if inner[0]:
                    words[2] += inner[0]
                if took > words[3]:  # noqa: PLR1730  # which takes half as long
                    words[3] = took
                inner[0] = outer + took
                batch[3] += 1

        return call

    def _timed_inside(
        self, function: Callable[..., Any], words: memoryview, *, is_batch: bool
    ) -> Callable[..., Any]:
        """A sample of a data set inside of another; one that asks itself for another sample counts once."""
        timed, is_inside = self._timed(function, words), [False]

        def sample(owner: Any, *index: Any, **named: Any) -> Any:
            is_outer = not is_inside[0]
            is_inside[0] = True
            try:
                result = (timed if is_outer else function)(owner, *index, **named)
            except BaseException as error:
                drop_frame(error)
                raise
            finally:
                if is_outer:
                    is_inside[0] = False
            if is_outer:
                words[Sum.SAMPLES] += _number_of(index, result) if is_batch else 1
            return result

        return sample

    def _timed_pair(
        self, function: Callable[..., Any], words: memoryview
    ) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        """A call that is timed, and what it is while calls are not; ``None`` for itself."""
        timed = self._timed(function, words)
        if not self._has_stages:
            return timed, None
        # A stage takes an iterator and is a generator: what it yields is timed, each time.
        timed_next = self._timed(next, words)
        take: list[Callable[[Iterator[Any]], Any]] = [timed_next]
        self._switches.append(lambda is_timing: take.__setitem__(0, timed_next if is_timing else next))

        def stage(*args: Any, **kwargs: Any) -> Any:
            is_timing = take[0] is timed_next and get_ident() == self._thread
            try:
                result = (timed if is_timing else function)(*args, **kwargs)
            except BaseException as error:
                drop_frame(error)
                raise
            if type(result) is not GeneratorType:
                return result
            if is_timing:
                words[0] -= 1
            return TimedIterator(result, take)

        return stage, stage

    def _timed_sample(
        self, function: Callable[..., Any], words: memoryview, *, is_batch: bool = False
    ) -> Callable[..., Any]:
        """A sample, or several at once; a batch, and the CPU time of its samples, begin with the first."""
        clock, cpu_clock, ident, thread = time.perf_counter_ns, time.thread_time_ns, get_ident, self._thread
        inner, batch, is_busy, state = self.inner, self.batch, self._is_busy, self.state
        mask, first = NUM_KEPT - 1, CALL_HEAD
        calls_at, samples_at = Sum.CALLS, Sum.SAMPLES

        def sample(owner: Any, *index: Any, **named: Any) -> Any:
            if is_busy[0] or named or ident() != thread:
                try:
                    return function(owner, *index, **named)
                except BaseException as error:
                    drop_frame(error)
                    raise
            is_busy[0] = True
            inner[0] = 0
            begin = clock()
            if not batch[0]:
                batch[0], batch[1] = begin, cpu_clock()
                state.inspection, state.sample_words = None, words
            try:
                result = function(owner, *index)
            except BaseException as error:
                self._give_up(error)
                drop_frame(error)
                raise
            took = clock() - begin
            is_busy[0] = False
            number = words[calls_at]
            words[first + (number & mask)] = took
            words[calls_at] = number + 1
            words[1] += took
            words[2] += inner[0]
            if took > words[3]:  # noqa: PLR1730  # which takes half as long
                words[3] = took
            count = _number_of(index, result) if is_batch else 1
            words[samples_at] += count
            batch[2] += count
            return result

        return sample

    def _noted(self, function: Callable[..., Any], *, is_batch: bool = False) -> Callable[..., Any]:
        """A sample of a batch that is not timed: it is counted, and the batch begins with it."""
        clock, cpu_clock, ident, thread = time.perf_counter_ns, time.thread_time_ns, get_ident, self._thread
        batch, is_busy, state = self.batch, self._is_busy, self.state

        def sample(owner: Any, *index: Any, **named: Any) -> Any:
            is_outer = not (is_busy[0] or named or ident() != thread)
            if is_outer:
                is_busy[0] = True
                if not batch[0]:
                    batch[0], batch[1] = clock(), cpu_clock()
                    state.inspection = None
            try:
                result = function(owner, *index, **named)
            except BaseException as error:
                if is_outer:
                    self._give_up(error)
                drop_frame(error)
                raise
            if is_outer:
                is_busy[0] = False
                batch[2] += _number_of(index, result) if is_batch else 1
            return result

        return sample

    def _timed_iter(self, function: Callable[..., Any], words: memoryview) -> Callable[..., Any]:
        """``__iter__`` whose items are timed as samples."""
        timed, noted = self._timed_sample(next, words), self._noted(next)
        take: list[Callable[[Iterator[Any]], Any]] = [timed]

        def switch(is_timing: bool | None) -> None:  # iterators live on
            take[0] = next if is_timing is None else timed if is_timing else noted

        self._switches.append(switch)

        def iterate(owner: Any) -> Any:
            try:
                if self._is_busy[0] or get_ident() != self._thread:
                    return function(owner)
                self.batch[:] = [0, 0, 0, 0]  # what is left of an epoch whose last batch was dropped
                return TimedIterator(function(owner), take)
            except BaseException as error:
                drop_frame(error)
                raise

        return iterate

    def _give_up(self, error: BaseException) -> None:
        """The running batch will not be: an exception, or the end of an iterator."""
        self._is_busy[0] = False
        self.state.inspection = OUTSIDE
        if not (self.batch[2] and isinstance(error, StopIteration)):  # which makes a shorter batch, or none
            self.batch[:] = [0, 0, 0, 0]


_FUNCTIONS: Final = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)


def _number_of(index: tuple[Any, ...], samples: Any) -> int:
    """How many samples a call gave that was asked for several at once."""
    for one in (*index[:1], samples):
        with suppress(TypeError):
            return len(one)
    return 1


def _is_dataset(value: Any) -> bool:
    return isinstance(value, Dataset)


def _is_stage_of(value: Any, owner: Any) -> bool:
    """Whether something that is iterated is of the same library, and so one of its stages."""
    libraries = {type(one).__module__.partition(".")[0] for one in (value, owner)}
    return hasattr(type(value), "__iter__") and len(libraries) == 1 and not libraries & {"builtins", "torch"}


_MODULES: Final = ("children",)
"""Of a Sequential: its children are what is inside."""

_INSIDE: Final = ("transforms", "transform", "target_transform")
_FUNCTION: Final = ("f", "fn", "func", "function")
