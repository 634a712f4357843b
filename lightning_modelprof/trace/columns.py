"""Turn decoded events into columns, piece by piece, and the columns into one :class:`Trace`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.trace.json import (
    NO_ARGS,
    Args,
    Event,
    Events,
    InstantEvent,
    NamedEvent,
    begins_ns,
    begins_with_long_stamps,
    category_by_name,
    category_of,
    decode_events,
    durations_ns,
    integers,
    is_named_apart,
    loses_digits,
    needs_launch,
    positive_floats,
    unknown_work,
    unquoted,
)
from lightning_modelprof.trace.model import (
    DEVICE_WORK,
    NOT_RECORDED,
    Allocations,
    Category,
    Collective,
    DeviceWork,
    InputShapes,
    Trace,
)
from lightning_modelprof.trace.text import check_event_sizes

_MEMORY_EVENT: Final = "[memory]"


_MAX_KINDS: Final = 5


_MAX_KIND: Final = 40
"""Characters shown of each unknown kind."""


_IS_DEVICE_WORK: Final = np.isin(np.arange(256), DEVICE_WORK)
"""Indexed by category."""


_ON_HOST: Final = (Category.RUNTIME, Category.CPU_OP)


_K = TypeVar("_K")


class _Numbers(dict[_K, int]):
    """Number keys in order of appearance."""

    def __missing__(self, key: _K) -> int:
        number = self[key] = len(self)
        return number


class _Categories(dict[str | None, int]):
    def __missing__(self, key: str | None) -> int:
        category = self[key] = int(category_of(key))
        return category


class _Tracks(dict[tuple[int | str | None, int | str | None], int]):
    """Track number by process and thread; torch 1.9 wrote one thread as both 25738 and "25738"."""

    def __init__(self) -> None:
        self.texts: _Numbers[tuple[str, str]] = _Numbers()

    def __missing__(self, key: tuple[int | str | None, int | str | None]) -> int:
        number = self[key] = self.texts[str(key[0]), str(key[1])]
        return number


@dataclass(frozen=True, slots=True)
class _MayWork:
    """Events that are device work if the CPU launched them or they're in a queue.

    Attributes:
        events: columns of all events read with them.
        rows: their rows in these columns, shape (k,).
        kinds: k texts.
        categories: shape (k,).
        has_queue: shape (k,).
        device: their columns as device events.
    """

    events: Columns
    rows: NDArray[np.int64]
    kinds: Sequence[str]
    categories: NDArray[np.uint8]
    has_queue: NDArray[np.bool_]
    device: Columns


class TraceBuilder:
    """Build a trace from events.

    Attributes:
        num_events: events of any kind added so far.
        has_kinds: whether any of them has a kind, as events of a trace do.
        num_dropped: timed events without usable times.
    """

    def __init__(self) -> None:
        self.num_events = self.num_dropped = self._num_bytes = 0
        self.has_kinds = False
        self._num_rows = self._num_begin_end = 0
        self._needs_all_digits = False
        self._parts: list[Columns] = []
        self._device_parts: list[Columns] = []
        self._may_work: list[_MayWork] = []
        self._allocation_parts: list[Columns] = []
        self._names: _Numbers[str] = _Numbers()
        self._categories = _Categories()
        self._tracks = _Tracks()
        self._shapes: _Numbers[tuple[bytes, bytes]] = _Numbers()
        self._stacks: _Numbers[str] = _Numbers()
        self._collectives: _Numbers[Collective] = _Numbers()
        self._thread_names: dict[int, str] = {}
        self._unknown_kinds: Counter[str] = Counter()

    def add(self, text: bytes) -> None:
        """Add events.

        Args:
            text: JSON list of events, in any order.

        Raises:
            msgspec.DecodeError, UnicodeDecodeError, RecursionError: when it's anything else.
        """
        events = self._decode(text)
        self.num_events += events.number
        self._num_bytes += len(text)
        check_event_sizes(self.num_events, self._num_bytes)
        self.has_kinds = self.has_kinds or events.has_kinds
        self._num_begin_end += events.num_begin_end
        timed = events.timed
        begin_ns, has_begin = begins_ns(events.stamps_us, are_digits=self._needs_all_digits)
        duration_ns, has_duration = durations_ns([event.dur for event in timed])
        usable = has_begin & has_duration
        if not usable.all():
            self.num_dropped += int(np.count_nonzero(~usable))
            timed = [timed[row] for row in np.flatnonzero(usable)]
        if timed:
            self._add_timed(timed, begin_ns[usable], duration_ns[usable])
        self._add_names(events.named)
        self._add_memory([event for event in events.instants if event.name == _MEMORY_EVENT])

    def _decode(self, text: bytes) -> Events:
        """Decode with doubles for stamps, unless they would lose digits of the file's stamps."""
        self._needs_all_digits = self._needs_all_digits or begins_with_long_stamps(text)
        if not self._needs_all_digits:
            events = decode_events(text)
            if not loses_digits([*events.stamps_us, *(event.ts for event in events.instants)]):
                return events
            self._needs_all_digits = True
        return decode_events(text, with_digits=True)

    def remarks(self) -> list[str]:
        """Remarks about the added events, one sentence each."""
        self._settle_work()
        remarks = []
        if self._num_begin_end:
            remarks.append(
                f"{self._num_begin_end:,} begin/end events (ph B and E) were ignored; torch.profiler writes"
                " complete events (ph X)."
            )
        if self._unknown_kinds:
            kinds = ", ".join(kind[:_MAX_KIND] for kind, _ in self._unknown_kinds.most_common(_MAX_KINDS))
            more = len(self._unknown_kinds) - _MAX_KINDS
            remarks.append(
                f"{self._unknown_kinds.total():,} device events have kinds that this version doesn't know:"
                f" {kinds}{f' and {more} more' if more > 0 else ''}. They count as kernels, or as copies or"
                " memsets if so named."
            )
        if not self._num_rows:
            remarks.append("The file has no readable timed event.")
        return remarks

    def build(
        self,
        *,
        source: str,
        metadata: Mapping[str, Any],
        base_ns: int,
        damage: Sequence[str],
        is_cut: bool = False,
    ) -> Trace:
        """Build the trace; ``base_ns`` is what the recorder subtracted from every time stamp."""
        self._settle_work()
        columns = concatenate(self._parts, EMPTY_EVENTS)
        begin_ns = columns.pop("begin_ns")
        end_ns = columns.pop("duration_ns")
        end_ns += begin_ns
        first_ns = int(begin_ns.min()) if len(begin_ns) else 0
        # If two have the same interval, the outer one comes first: operators are numbered by their start, a
        # runtime call has its operator's number, and Python functions have none.
        order = np.lexsort((columns["category"], columns["external_id"], -end_ns, begin_ns))
        begin_ns, end_ns = (begin_ns - first_ns)[order], (end_ns - first_ns)[order]
        return Trace(
            source=source,
            base_ns=first_ns + base_ns,
            begin_ns=read_only(begin_ns),
            end_ns=read_only(end_ns),
            **{key: read_only(columns.pop(key)[order]) for key in _EVENT_KEYS},
            names=tuple(self._names),
            tracks=tuple(self._tracks.texts),
            thread_names=self._thread_names,
            shapes=tuple(InputShapes(_text(dims), _text(values)) for dims, values in self._shapes),
            stacks=tuple(self._stacks),
            collectives=tuple(self._collectives),
            device=self._build_device(order),
            allocations=self._build_allocations(first_ns),
            metadata=metadata,
            num_dropped=self.num_dropped,
            damage=tuple(damage),
            is_cut=is_cut,
        )

    # Pieces

    def _add_timed(
        self,
        events: list[Event],
        begin_ns: NDArray[np.int64],
        duration_ns: NDArray[np.int64],
    ) -> None:
        count = len(events)
        names, categories, tracks = self._names, self._categories, self._tracks
        all_args = [event.args or NO_ARGS for event in events]
        category = np.fromiter(map(categories.__getitem__, [event.cat for event in events]), np.uint8, count)
        name = np.fromiter(map(names.__getitem__, [event.name for event in events]), np.int32, count)
        if any(map(is_named_apart, categories)):
            for row, event in enumerate(events):
                if is_named_apart(event.cat):
                    category[row] = category_by_name(event)
        may_work: dict[int, tuple[str, Category]] = {}
        for row in np.flatnonzero(category == Category.OTHER).tolist():
            found = unknown_work(events[row])
            if found is not None and needs_launch(events[row]):
                may_work[row] = found
            elif found is not None:
                self._unknown_kinds[found[0]] += 1
                category[row] = found[1]
        places = [(event.pid, event.tid) for event in events]
        external_id = integers([args.external_id for args in all_args])
        if (external_id == NOT_RECORDED).any():
            older = integers([args.old_external_id for args in all_args])
            external_id = np.where(external_id == NOT_RECORDED, older, external_id)
        self._parts.append(
            {
                "begin_ns": begin_ns,
                "duration_ns": duration_ns,
                "category": category,
                "name": name,
                "track": np.fromiter(map(tracks.__getitem__, places), np.int32, count),
                "correlation": integers([args.correlation for args in all_args]),
                "external_id": external_id,
                "shape": self._shapes_of(all_args),
                "stack": self._stacks_of(all_args),
                "collective": self._collectives_of(all_args),
            }
        )
        work = np.flatnonzero(_IS_DEVICE_WORK[category])
        if len(work):
            self._device_parts.append(self._device_columns(events, work, category[work]))
        if may_work:
            rows = np.fromiter(may_work, np.int64, len(may_work))
            kinds, may_be_of = zip(*may_work.values(), strict=True)
            may_be = np.array(may_be_of, np.uint8)
            self._may_work.append(
                _MayWork(
                    events=self._parts[-1],
                    rows=rows,
                    kinds=kinds,
                    categories=may_be,
                    has_queue=np.array([all_args[row].queue is not None for row in may_work]),
                    device=self._device_columns(events, rows, may_be),
                )
            )
        self._num_rows += count

    def _settle_work(self) -> None:
        """Decide which events of unknown kinds are device work, now that all launches are known."""
        if not self._may_work:
            return
        launches = np.concatenate(
            [part["correlation"][part["category"] == Category.RUNTIME] for part in self._parts]
        )
        host = np.concatenate([part["track"][np.isin(part["category"], _ON_HOST)] for part in self._parts])
        while self._may_work:
            one = self._may_work.pop()
            correlation = one.events["correlation"][one.rows]
            is_launched = (correlation >= 0) & np.isin(correlation, launches)
            is_on_host = np.isin(one.events["track"][one.rows], host)
            works = (one.has_queue | is_launched) & ~is_on_host
            one.events["category"][one.rows[works]] = one.categories[works]
            self._unknown_kinds.update(one.kinds[index] for index in np.flatnonzero(works).tolist())
            self._device_parts.append({key: column[works] for key, column in one.device.items()})

    # Most files don't record these three; checking all events together is much faster.

    def _shapes_of(self, all_args: list[Args]) -> NDArray[np.int32]:
        all_dims = [args.input_dims for args in all_args]
        if not any(all_dims):
            return _none(len(all_args))
        column = _none(len(all_args))
        has_shapes = np.fromiter(map(bool, all_dims), np.bool_, len(all_args))
        keys = [(bytes(args.input_dims), bytes(args.concrete_inputs)) for args in all_args if args.input_dims]
        column[has_shapes] = np.fromiter(map(self._shapes.__getitem__, keys), np.int32, len(keys))
        return column

    def _stacks_of(self, all_args: list[Args]) -> NDArray[np.int32]:
        texts = [args.call_stack for args in all_args]
        if not any(texts):
            return _none(len(all_args))
        stacks = self._stacks
        return np.array(
            [stacks[text] if text and isinstance(text, str) else NOT_RECORDED for text in texts], np.int32
        )

    def _collectives_of(self, all_args: list[Args]) -> NDArray[np.int32]:
        column = _none(len(all_args))
        names = [args.collective for args in all_args]
        if any(names):
            for row, name in enumerate(names):
                if name:
                    column[row] = self._collectives[collective_of(all_args[row])]
        return column

    def _device_columns(
        self, events: list[Event], rows: NDArray[np.int64], category: NDArray[np.uint8]
    ) -> Columns:
        pairs = [(events[row], events[row].args or NO_ARGS) for row in rows.tolist()]
        all_args = [args for _, args in pairs]
        # The stream if given, as in "stream 7", else the queue, else the thread.
        streams = [
            args.stream if args.stream is not None else event.tid if args.queue is None else args.queue
            for event, args in pairs
        ]
        if str in set(map(type, streams)):
            streams = list(map(stream_number, streams))
        size_bytes = sizes([args.size_bytes for args in all_args])
        is_unsized = (category == Category.MEMCPY) & (size_bytes == NOT_RECORDED)
        if is_unsized.any():
            size_bytes = np.where(is_unsized, sizes([args.dma_bytes for args in all_args]), size_bytes)
        return {
            "event": rows + self._num_rows,
            # A device event's process is the device, and its thread the stream.
            "device": integers(
                [device_number(event) if args.device is None else args.device for event, args in pairs]
            ),
            "stream": integers(streams),
            "size_bytes": size_bytes,
            "blocks_per_sm": positive_floats([args.blocks_per_sm for args in all_args]),
            "occupancy": positive_floats([args.occupancy_percent for args in all_args]) / 100,
        }

    def _add_names(self, events: list[NamedEvent]) -> None:
        for event in events:
            if event.name == "thread_name" and event.args is not None:
                name = event.args.name
                if isinstance(name, str) and name:
                    self._thread_names[self._tracks[event.pid, event.tid]] = name

    def _add_memory(self, memory: list[InstantEvent]) -> None:
        if not memory:
            return
        time_ns, usable = begins_ns([event.ts for event in memory], are_digits=self._needs_all_digits)
        self.num_dropped += int(np.count_nonzero(~usable))
        kept = [memory[row] for row in np.flatnonzero(usable)]
        all_args = [event.args or NO_ARGS for event in kept]
        self._allocation_parts.append(
            {
                "time_ns": time_ns[usable],
                "track": np.array([self._tracks[event.pid, event.tid] for event in kept], np.int32),
                "size_bytes": sizes([args.allocation_bytes for args in all_args], missing=0),
                "device_type": integers([args.device_type for args in all_args]),
                "device": integers([args.device_id for args in all_args]),
                "allocated_bytes": sizes([args.allocated_bytes for args in all_args]),
                "reserved_bytes": sizes([args.reserved_bytes for args in all_args]),
                "address": integers([args.address for args in all_args]),
            }
        )

    # The end

    def _build_device(self, row_order: NDArray[np.int64]) -> DeviceWork:
        columns = concatenate(self._device_parts, EMPTY_DEVICE)
        new_row = np.empty(len(row_order), np.int64)
        new_row[row_order] = np.arange(len(row_order))
        event = new_row[columns["event"]]
        order = np.argsort(event)
        columns["event"] = event
        return DeviceWork(**{key: read_only(column[order]) for key, column in columns.items()})

    def _build_allocations(self, first_ns: int) -> Allocations:
        columns = concatenate(self._allocation_parts, EMPTY_ALLOCATIONS)
        order = np.argsort(columns["time_ns"], kind="stable")
        columns["time_ns"] = columns["time_ns"] - first_ns
        return Allocations(**{key: read_only(column[order]) for key, column in columns.items()})


_EVENT_KEYS: Final = (
    "category",
    "name",
    "track",
    "correlation",
    "external_id",
    "shape",
    "stack",
    "collective",
)


def _none(count: int) -> NDArray[np.int32]:
    return np.full(count, NOT_RECORDED, np.int32)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


_STREAM_TEXT: Final = re.compile(r"(?:stream )?([0-9]{1,18})")


_MAX_SIZE: Final = 2**48
"""Limit of plausible bytes, elements or ranks; larger values are garbage, and their sums would overflow."""


def sizes(values: list[Any], missing: int = NOT_RECORDED) -> NDArray[np.int64]:
    """Byte counts as a column; invalid ones become ``missing``."""
    column = integers(values, missing)
    return np.where((column < _MAX_SIZE) & (column > -_MAX_SIZE), column, missing)


def device_number(event: Event) -> Any:
    """The device, which is the process; unknown for a row without a category, as in Ascend's."""
    return NOT_RECORDED if event.cat is None else event.pid


def stream_number(value: Any) -> Any:
    """The number in ``stream 7``, as torch 1.9 wrote it."""
    if isinstance(value, str):
        found = _STREAM_TEXT.fullmatch(value)
        return None if found is None else int(found.group(1))
    return value


def collective_of(args: Args) -> Collective:
    """Details of a communication event, from the arguments of the expected types."""

    def text(value: Any) -> str | None:
        return value if isinstance(value, str) and value else None

    def number(value: Any) -> int | None:
        value = unquoted(value)
        return value if type(value) is int and 0 <= value < _MAX_SIZE else None

    return Collective(
        name=text(args.collective),
        group=text(args.group_description) or text(args.group_name),
        group_size=number(args.group_size),
        dtype=text(args.dtype),
        in_elements=number(args.in_elements),
        out_elements=number(args.out_elements),
    )


Columns = dict[str, NDArray[Any]]


_ColumnT = TypeVar("_ColumnT", bound=np.generic)


EMPTY_EVENTS: Final[Columns] = {
    "begin_ns": np.empty(0, np.int64),
    "duration_ns": np.empty(0, np.int64),
    "category": np.empty(0, np.uint8),
    "name": np.empty(0, np.int32),
    "track": np.empty(0, np.int32),
    "correlation": np.empty(0, np.int64),
    "external_id": np.empty(0, np.int64),
    "shape": np.empty(0, np.int32),
    "stack": np.empty(0, np.int32),
    "collective": np.empty(0, np.int32),
}


EMPTY_DEVICE: Final[Columns] = {
    "event": np.empty(0, np.int64),
    "device": np.empty(0, np.int64),
    "stream": np.empty(0, np.int64),
    "size_bytes": np.empty(0, np.int64),
    "blocks_per_sm": np.empty(0, np.float64),
    "occupancy": np.empty(0, np.float64),
}


EMPTY_ALLOCATIONS: Final[Columns] = {
    "time_ns": np.empty(0, np.int64),
    "track": np.empty(0, np.int32),
    "size_bytes": np.empty(0, np.int64),
    "device_type": np.empty(0, np.int64),
    "device": np.empty(0, np.int64),
    "allocated_bytes": np.empty(0, np.int64),
    "reserved_bytes": np.empty(0, np.int64),
    "address": np.empty(0, np.int64),
}


def concatenate(parts: list[Columns], empty: Columns) -> Columns:
    """Concatenate all parts, freeing them; ``empty`` defines the columns and their types."""
    columns = {
        key: np.concatenate([column, *(part.pop(key) for part in parts)]) for key, column in empty.items()
    }
    parts.clear()
    return columns


def read_only(column: NDArray[_ColumnT]) -> NDArray[_ColumnT]:
    column.flags.writeable = False
    return column
