"""A trace file in which something is not as it should be, read event by event.

What can be read is kept, what cannot is counted and said. A few bad events among thousands cost themselves; a
file with more of them than that is refused, because its figures could not be believed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from lightning_modelprof.errors import TraceError
from lightning_modelprof.run.trace_columns import TraceBuilder
from lightning_modelprof.run.trace_json import ANYTHING, NOT_JSON, ONE_EVENT, RAW_ENTRIES, RAW_ITEMS
from lightning_modelprof.run.trace_text import TextSource, events_begin, split_events

_MAX_BAD_SHARE: Final = 0.01
"""Share of the events that may be unreadable before the whole file is refused."""

_BATCH: Final = 50_000
_DEEP: Final = 200
"""Brackets; with fewer an event is not nested too deeply for any recursion limit that lets programs run."""

_HEAD: Final = b'{"traceEvents": ['
_LIST_ENDS: Final = re.compile(rb'\s*\]\s*,\s*"')
_BETWEEN_EVENTS: Final = b" \t\r\n,]}"
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


@dataclass(slots=True)
class _Contents:
    """A file in parts.

    Attributes:
        events: the text of each event.
        metadata: the entries around them.
        problem: why the file as a whole is no JSON; ``""`` if it is.
        is_cut: whether the end of the list of events is missing.
        lost_bytes: text at the end that is no whole event.
        lost_keys: entries around the events that cannot be decoded.
    """

    events: Sequence[bytes | msgspec.Raw]
    metadata: dict[str, Any]
    problem: str = ""
    is_cut: bool = False
    lost_bytes: int = 0
    lost_keys: tuple[str, ...] = ()


def read_with_care(
    text: TextSource, builder: TraceBuilder, source: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Read what can be read.

    Args:
        text: of the file, from its begin.
        builder: takes the events.
        source: the file's name, for messages.

    Returns:
        The file's entries other than its events, and what could not be read, one sentence each.

    Raises:
        TraceError: when it is no trace, or too much of it cannot be read.
    """
    whole = b"".join(text.blocks()).removeprefix(_BYTE_ORDER_MARK)
    if not text.damage and (not whole or whole.isspace()):
        raise TraceError(
            f"{source}: expected a Chrome trace in JSON, got an empty file. Record the trace again."
        )
    contents = _take_apart(whole, source)
    num_bad, first_bad = _add_events(contents.events, builder)
    num_events = len(contents.events)
    if num_bad and (num_bad == num_events or num_bad > _MAX_BAD_SHARE * num_events):
        raise TraceError(
            f"{source}: {num_bad} of {num_events} events cannot be read. The first: {first_bad}. Check that"
            " the file was written by torch.profiler and not changed since, or record the trace again."
        )
    problem = text.damage or contents.problem
    if problem and not builder.num_events:
        raise TraceError(
            f"{source}: expected a Chrome trace in JSON, got something else or a file that is cut off"
            f" ({problem}). Check that it is a trace and that writing it was not interrupted."
        )
    damage = []
    if problem:
        damage.append(_damage_of(contents, text.damage, builder.num_events))
    if contents.lost_keys:
        damage.append(f"Entries around the events cannot be read: {', '.join(contents.lost_keys[:5])}.")
    if num_bad:
        damage.append(
            f"{num_bad:,} of {num_events:,} events cannot be read and are in no figure. The first:"
            f" {first_bad}."
        )
    return contents.metadata, tuple(damage)


def _damage_of(contents: _Contents, text_damage: str, num_events: int) -> str:
    """What is wrong with the file as a whole, and how much of it that costs."""
    if not contents.problem:
        return (
            f"The file is damaged ({text_damage}): its {num_events:,} events are complete, but it cannot be"
            " checked whether they are as they were written."
        )
    if not contents.is_cut:
        return f"The file is damaged ({contents.problem}): {num_events:,} events were read."
    at_end = f" The last {contents.lost_bytes:,} bytes are no whole event." if contents.lost_bytes else ""
    return (
        f"The file is cut off or damaged ({text_damage or contents.problem}): {num_events:,} events were"
        f" read, and whatever came after them is lost.{at_end}"
    )


def _take_apart(whole: bytes, source: str) -> _Contents:
    """Find the events, by decoding the file's outline, or by their looks where it has none."""
    try:
        if whole.lstrip()[:1] == b"[":
            return _Contents(RAW_ITEMS.decode(whole), {})
        entries = RAW_ENTRIES.decode(whole)
    except msgspec.ValidationError as error:
        raise TraceError(
            f"{source}: expected a JSON object with the key traceEvents, got something else ({error})."
            " Check that it is a trace written by torch.profiler."
        ) from None
    except NOT_JSON as error:
        return _take_apart_by_looks(whole, str(error))
    events = entries.pop("traceEvents", None)
    if events is None:
        keys = ", ".join(list(entries)[:5]) or "none"
        raise TraceError(
            f"{source}: expected a JSON object with the key traceEvents, got the keys: {keys}. Check that"
            " it is a trace written by torch.profiler."
        )
    try:
        items = RAW_ITEMS.decode(events)
    except NOT_JSON as error:
        raise TraceError(
            f"{source}: expected a list of events in traceEvents, got something else ({error}). Check that it"
            " is a trace written by torch.profiler."
        ) from None
    metadata, lost_keys = _decode_entries(entries)
    return _Contents(items, metadata, lost_keys=lost_keys)


def _take_apart_by_looks(whole: bytes, problem: str) -> _Contents:
    """Cut wherever an event may end; the entries around the events are kept if they are whole."""
    begin = events_begin(whole)
    if begin is None:
        return _Contents([], {}, problem)
    events, last = _until_end_of_list(split_events(whole[begin:]))
    is_list = whole.lstrip()[:1] == b"["
    entries = {} if is_list else _entries_of(whole[:begin] + b"]}")
    has_head = is_list or bool(entries)
    behind = _entries_of(_HEAD + last + (b"}" if is_list else b""))
    is_cut = not behind or bool(_problem(RAW_ITEMS, behind["traceEvents"]))
    lost_bytes = 0
    if not is_cut:
        events += [bytes(item) for item in RAW_ITEMS.decode(behind["traceEvents"])]
        entries |= behind
    else:
        end = _end_of_object(last)
        events += [last[:end]] if end else []
        lost_bytes = len(last[end:].strip(_BETWEEN_EVENTS))
    entries.pop("traceEvents", None)
    metadata, lost_keys = _decode_entries(entries)
    if not has_head:
        lost_keys = ("all before the events", *lost_keys)
    return _Contents(events, metadata, problem, is_cut, lost_bytes, lost_keys)


def _until_end_of_list(pieces: list[bytes]) -> tuple[list[bytes], bytes]:
    """The events but the last, and the text from that on: behind the list objects may stand, too."""
    was_good = True
    for number, piece in enumerate(pieces):
        is_good = not _problem(ONE_EVENT, piece)
        # A piece behind a bad one may be the end of a list inside of an event.
        if was_good and not is_good and _LIST_ENDS.match(piece, _end_of_object(piece)):
            return pieces[:number], b", ".join(pieces[number:])
        was_good = is_good
    return pieces[:-1], pieces[-1]


def _end_of_object(text: bytes) -> int:
    """Where the JSON object at the begin of the text ends; 0 if it does not."""
    begin = len(text) - len(text.lstrip())
    try:
        # In Latin-1 every byte is one character, and what is JSON's own is ASCII.
        return json.JSONDecoder().raw_decode(text.decode("latin-1"), begin)[1]
    except (ValueError, RecursionError):
        return 0


def _entries_of(text: bytes) -> dict[str, msgspec.Raw]:
    """The entries of an object, none if it is no whole one."""
    try:
        return RAW_ENTRIES.decode(text)
    except NOT_JSON:
        return {}


def _decode_entries(entries: dict[str, msgspec.Raw]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The entries around the events, and the keys of those that cannot be decoded."""
    problems = {key: _problem(ANYTHING, value) for key, value in entries.items()}
    decoded = {key: ANYTHING.decode(value) for key, value in entries.items() if not problems[key]}
    return decoded, tuple(key for key, problem in problems.items() if problem)


def _add_events(texts: Sequence[bytes | msgspec.Raw], builder: TraceBuilder) -> tuple[int, str]:
    """Decode one event at a time; returns how many could not be, and what was wrong with the first."""
    num_bad = 0
    first_bad = ""
    for begin in range(0, len(texts), _BATCH):
        good: list[bytes] = []
        for number, text in enumerate(texts[begin : begin + _BATCH], begin):
            problem = _problem(ONE_EVENT, text)
            if not problem:
                good.append(bytes(text))
                continue
            num_bad += 1
            first_bad = first_bad or f"event {number}, {problem}".replace("`$", f"`$.traceEvents[{number}]")
        try:
            builder.add(b"[" + b",".join(good) + b"]")
        except RecursionError:  # one that is just not too deep alone is so in a list: without the deep ones
            shallow = [text for text in good if text.count(b"[") + text.count(b"{") < _DEEP]
            builder.add(b"[" + b",".join(shallow) + b"]")
            num_bad += len(good) - len(shallow)
            first_bad = first_bad or "an event that is nested too deeply"
    return num_bad, first_bad


def _problem(decoder: msgspec.json.Decoder[Any], text: bytes | msgspec.Raw) -> str:
    """Why the text cannot be decoded, ``""`` if it can be."""
    try:
        decoder.decode(text)
    except NOT_JSON as error:
        return str(error) or type(error).__name__
    return ""
