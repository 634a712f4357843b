"""Read a damaged trace file event by event.

Readable events are kept, the others are counted and reported. A file with too many of them is refused,
because its figures would be unreliable.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from lightning_modelprof.errors import TraceError
from lightning_modelprof.trace import text as trace_text
from lightning_modelprof.trace.columns import TraceBuilder
from lightning_modelprof.trace.json import (
    ANYTHING,
    NOT_JSON,
    ONE_EVENT,
    OUTLINE,
    RAW_ENTRIES,
    RAW_ITEMS,
    RAW_VALUE,
)
from lightning_modelprof.trace.text import (
    MAX_AROUND_BYTES,
    MAX_EVENT_BYTES,
    TextSource,
    check_event_sizes,
    event_spans,
    events_begin,
    is_list,
    list_items,
)

_MAX_BAD_SHARE: Final = 0.01
"""Maximum share of unreadable events; above it, the whole file is refused."""

_BATCH: Final = 50_000
OF_WHOLE_FILE: Final = "The file is "
"""Start of the sentence for a file that is cut off or damaged as a whole."""

CUT_OFF: Final = f"{OF_WHOLE_FILE}cut off"
"""Start of that sentence if the end of the event list is missing."""

_DEEP: Final = 200
"""Brackets; an event with fewer isn't nested too deeply for any sensible recursion limit."""

_FIRST_KEY: Final = re.compile(rb'\s*\{\s*"([^"\\]{1,80})"')
_HEAD: Final = b'{"traceEvents": ['
_LIST_ENDS: Final = re.compile(rb'\s*\]\s*,\s*"')
_BETWEEN_EVENTS: Final = b" \t\r\n,]}"
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

_Json = bytes | memoryview | msgspec.Raw


@dataclass(slots=True)
class _Contents:
    """Contents of a file other than its events.

    Attributes:
        metadata: the entries around them.
        problem: why the file as a whole isn't JSON; ``""`` if it is.
        is_cut: whether the end of the event list is missing.
        lost_bytes: text at the end that isn't a whole event.
        lost_keys: entries around the events that can't be decoded.
    """

    metadata: dict[str, Any]
    problem: str = ""
    is_cut: bool = False
    lost_bytes: int = 0
    lost_keys: tuple[str, ...] = ()


class _Events:
    """Take events one at a time and pass decodable ones to a builder.

    Attributes:
        num_bad: events that can't be decoded.
        first_bad: problem of the first of those.
    """

    def __init__(self, builder: TraceBuilder) -> None:
        self.num_events = self.num_bad = self._all_bytes = 0
        self.first_bad = ""
        self._builder = builder
        self._good: list[bytes] = []
        self._num_bytes = 0

    def add(self, text: _Json, problem: str | None = None) -> None:
        """Add one event; ``problem`` is why it can't be decoded, if the caller knows."""
        if problem is None:
            problem = _event_problem(text)
        if problem:
            self.num_bad += 1
            place = f"`$.traceEvents[{self.num_events}]"
            self.first_bad = self.first_bad or f"event {self.num_events}, {problem}".replace("`$", place)
        else:
            self._good.append(bytes(text))
            self._num_bytes += len(self._good[-1])
            if self._num_bytes > trace_text.BLOCK_BYTES or len(self._good) >= _BATCH:
                self.hand_on()
        self.num_events += 1
        self._all_bytes += memoryview(text).nbytes
        check_event_sizes(self.num_events, self._all_bytes)

    def hand_on(self) -> None:
        good, self._good, self._num_bytes = self._good, [], 0
        try:
            self._builder.add(b"[" + b",".join(good) + b"]")
        except RecursionError:  # an event at the depth limit exceeds it inside a list: leave out deep ones
            shallow = [text for text in good if text.count(b"[") + text.count(b"{") < _DEEP]
            self._builder.add(b"[" + b",".join(shallow) + b"]")
            self.num_bad += len(good) - len(shallow)
            self.first_bad = self.first_bad or "an event nested too deeply"


def read_with_care(
    text: TextSource, builder: TraceBuilder, source: str
) -> tuple[dict[str, Any], tuple[str, ...], int]:
    """Read whatever is readable.

    Returns:
        The file's entries other than its events; the unreadable parts, one sentence each; and the number of
        unreadable events and entries.

    Raises:
        TraceError: when it isn't a trace, or too much of it is unreadable.
    """
    whole = bytearray()
    for block in text.blocks():
        whole += block
    if whole.startswith(_BYTE_ORDER_MARK):
        del whole[: len(_BYTE_ORDER_MARK)]
    if not text.damage and (not whole or whole.isspace()):
        raise TraceError(
            f"{source}: expected a Chrome trace in JSON, got an empty file. Record the trace again."
        )
    events = _Events(builder)
    contents = _take_apart(whole, events, source)
    events.hand_on()
    num_bad, num_events = events.num_bad, events.num_events
    if num_bad and (num_bad == num_events or num_bad > _MAX_BAD_SHARE * num_events):
        raise TraceError(
            f"{source}: {num_bad} of {num_events} events can't be read. The first is {events.first_bad}."
            " Check that torch.profiler wrote the file and it hasn't changed since, or record the trace"
            " again."
        )
    problem = text.damage or contents.problem
    if problem and not builder.num_events:
        raise TraceError(
            f"{source}: expected a Chrome trace in JSON, got something else or a file that is cut off"
            f" ({problem}). Check that it's a trace and that writing it wasn't interrupted."
        )
    damage = []
    if problem:
        damage.append(_damage_of(contents, text.damage, builder.num_events))
    if contents.lost_keys:
        damage.append(f"Some entries around the events can't be read: {', '.join(contents.lost_keys[:5])}.")
    if num_bad:
        damage.append(
            f"{num_bad:,} of {num_events:,} events can't be read and are left out. The first is"
            f" {events.first_bad}."
        )
    return contents.metadata, tuple(damage), num_bad + len(contents.lost_keys)


def _damage_of(contents: _Contents, text_damage: str, num_events: int) -> str:
    if not contents.problem:
        return (
            f"{OF_WHOLE_FILE}damaged ({text_damage}). All {num_events:,} events were read, but they may have"
            " changed since they were written."
        )
    if not contents.is_cut:
        return f"{OF_WHOLE_FILE}damaged ({contents.problem}). {num_events:,} events were read."
    at_end = f" The last {contents.lost_bytes:,} bytes aren't a whole event." if contents.lost_bytes else ""
    return (
        f"{CUT_OFF} or damaged ({text_damage or contents.problem}). {num_events:,} events were"
        f" read; anything after them is lost.{at_end}"
    )


def _take_apart(whole: bytearray, events: _Events, source: str) -> _Contents:
    """Find the events by decoding the file's outline, or by pattern if it has none."""
    try:
        items = RAW_VALUE.decode(whole) if is_list(whole) else OUTLINE.decode(whole).traceEvents
    except msgspec.ValidationError as error:
        raise TraceError(
            f"{source}: expected a JSON object with the key traceEvents, got something else ({error})."
            " Check that torch.profiler wrote it."
        ) from None
    except NOT_JSON as error:
        return _take_apart_by_looks(whole, events, str(error))
    text = memoryview(items)
    if not text:
        first = _FIRST_KEY.match(whole)  # for a file too long to decode its keys
        of_long_file = f"{first[1].decode('utf-8', 'replace')} and more" if first else "none"
        keys = ", ".join(list(_entries_of(whole))[:5]) or of_long_file
        raise TraceError(
            f"{source}: expected a JSON object with the key traceEvents, got the keys {keys}. Check that"
            " torch.profiler wrote it."
        )
    if text[0] != ord("["):
        raise TraceError(
            f"{source}: expected a list of events in traceEvents, got something else"
            f" ({_problem(RAW_ITEMS, items)}). Check that torch.profiler wrote it."
        )
    for item in list_items(text):
        events.add(item)
    if is_list(whole):
        return _Contents({})
    if len(whole) - len(text) > MAX_AROUND_BYTES:
        return _Contents({}, lost_keys=("all",))
    try:
        entries = RAW_ENTRIES.decode(whole)
    except NOT_JSON:
        return _Contents({}, lost_keys=("all",))
    del entries["traceEvents"]
    metadata, lost_keys = _decode_entries(entries)
    return _Contents(metadata, lost_keys=lost_keys)


def _take_apart_by_looks(whole: bytearray, events: _Events, problem: str) -> _Contents:
    """Cut wherever an event may end; keep the entries around the events if they're whole."""
    begin = events_begin(whole)
    if begin is None:
        return _Contents({}, problem)
    last = bytes(memoryview(whole)[_add_until_end_of_list(whole, begin, events) :])
    has_list_alone = is_list(whole)
    entries = {} if has_list_alone else _entries_of(whole[:begin] + b"]}")
    has_head = has_list_alone or bool(entries)
    behind = _entries_of(_HEAD + last + (b"}" if has_list_alone else b""))
    is_cut = not behind or bool(_problem(RAW_ITEMS, behind["traceEvents"]))
    lost_bytes = 0
    if not is_cut:
        for item in RAW_ITEMS.decode(behind["traceEvents"]):
            events.add(item)
        entries |= behind
    else:
        end = _end_of_object(last)
        if end:
            events.add(last[:end])
        lost_bytes = len(last[end:].strip(_BETWEEN_EVENTS))
    entries.pop("traceEvents", None)
    metadata, lost_keys = _decode_entries(entries)
    if not has_head:
        lost_keys = ("everything before the events", *lost_keys)
    return _Contents(metadata, problem, is_cut, lost_bytes, lost_keys)


def _add_until_end_of_list(whole: bytearray, begin: int, events: _Events) -> int:
    """Add all events except the last, and return where that starts; objects may follow the list."""
    was_good = True
    for start, end in event_spans(whole, begin):
        if end == len(whole):
            return start
        piece = memoryview(whole)[start:end]
        problem = _event_problem(piece)
        # A piece after a bad one may be the end of a list inside an event.
        if was_good and problem and _LIST_ENDS.match(piece, _end_of_object(piece)):
            return start
        events.add(piece, problem)
        was_good = not problem
    return len(whole)


def _event_problem(text: _Json) -> str:
    num_bytes = memoryview(text).nbytes
    if num_bytes > MAX_EVENT_BYTES:
        return f"which has {num_bytes:,} bytes; at most {MAX_EVENT_BYTES:,} are expected"
    return _problem(ONE_EVENT, text)


def _end_of_object(text: bytes | memoryview) -> int:
    """Where the JSON object at the start of the text ends; 0 if it doesn't, or is too long for an event."""
    # In Latin-1 every byte is one character, and JSON's syntax is ASCII.
    letters = str(text[:MAX_EVENT_BYTES], "latin-1")
    try:
        return json.JSONDecoder().raw_decode(letters, len(letters) - len(letters.lstrip()))[1]
    except (ValueError, RecursionError):
        return 0


def _entries_of(text: bytes | bytearray) -> dict[str, msgspec.Raw]:
    if len(text) > MAX_AROUND_BYTES:
        return {}
    try:
        return RAW_ENTRIES.decode(text)
    except NOT_JSON:
        return {}


def _decode_entries(entries: dict[str, msgspec.Raw]) -> tuple[dict[str, Any], tuple[str, ...]]:
    problems = {key: _problem(ANYTHING, value) for key, value in entries.items()}
    decoded = {key: ANYTHING.decode(value) for key, value in entries.items() if not problems[key]}
    return decoded, tuple(key for key, problem in problems.items() if problem)


def _problem(decoder: msgspec.json.Decoder[Any], text: _Json) -> str:
    """Why the text can't be decoded, ``""`` if it can."""
    try:
        decoder.decode(text)
    except NOT_JSON as error:
        return str(error) or type(error).__name__
    return ""
