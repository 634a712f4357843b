"""Chrome trace JSON, as torch.profiler writes it, read into the columns of a :class:`Trace`.

Only the fields that are used are decoded, and time stamps become integer nanoseconds without loss. They
are written as microseconds with up to three decimals, and not every such number fits a double: since
torch 2.4 they count from ``baseTimeNanoseconds`` and are small, before that they were microseconds since
1970. Small ones are decoded as doubles, which is fast; large ones are decoded once more as decimals.

A file is decoded in pieces, so memory holds the columns and the objects of one piece. When anything in it is
not as it should be, it is read once more with care (``damaged.py``): event by event,
keeping what can be kept and counting what cannot.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_modelprof.errors import TraceError
from lightning_modelprof.run.opening import MAX_TRACE_BYTES
from lightning_modelprof.trace.columns import TraceBuilder
from lightning_modelprof.trace.damaged import CUT_OFF, read_with_care
from lightning_modelprof.trace.json import ANYTHING, NOT_JSON, RAW_ENTRIES
from lightning_modelprof.trace.model import Trace
from lightning_modelprof.trace.repair import repair
from lightning_modelprof.trace.text import (
    EventPieces,
    NotCutError,
    Progress,
    Text,
    TextFile,
    TextSource,
    TinyEventsError,
    is_list,
)


def read_trace(path: str | Path, max_bytes: int = MAX_TRACE_BYTES, progress: Progress | None = None) -> Trace:
    """Read a Chrome trace file, plain or gzip-compressed (told apart by content, not by name).

    Args:
        max_bytes: largest uncompressed JSON to read; a few kilobytes of gzip can hold gigabytes.
        progress: told now and then how many bytes of the file are read, and its size.

    Raises:
        TraceError: when the file cannot be opened, is empty or too large, is not a trace, or is so damaged
            that no figure of it could be believed. A file that is cut off is read as far as it goes, and
            ``Trace.damage`` says so.
    """
    text = TextFile(Path(path), max_bytes, progress)
    try:
        return _read(text, str(path))
    finally:
        text.close()


def parse_trace(raw: bytes, source: str) -> Trace:
    """Turn the JSON text of a trace into columns.

    Args:
        raw: the uncompressed JSON: an object with ``traceEvents``, or the list of events itself.

    Raises:
        TraceError: as :func:`read_trace`.
    """
    return _read(Text(raw), source)


def _read(text: TextSource, source: str) -> Trace:
    try:
        return _read_events(text, source)
    except TinyEventsError as error:
        raise TraceError(f"{source}: {error}") from None


def _read_events(text: TextSource, source: str) -> Trace:
    with _collector_paused():
        builder = TraceBuilder()
        damage: tuple[str, ...] = ()
        try:
            metadata = _read_pieces(text, builder)
            is_whole = not text.damage
        except (*NOT_JSON, NotCutError):
            is_whole = False
        if not is_whole:
            builder, metadata, damage = _read_damaged(text, source)
        if builder.num_events and not builder.has_kinds:
            raise TraceError(
                f"{source}: expected Chrome trace events, got {builder.num_events} objects without the key"
                " ph. Check that torch.profiler wrote it."
            )
        return builder.build(
            source=source,
            metadata=metadata,
            base_ns=_base_time_ns(metadata, source),
            damage=(*damage, *builder.remarks()),
            is_cut=any(sentence.startswith(CUT_OFF) for sentence in damage),
        )


def _read_damaged(text: TextSource, source: str) -> tuple[TraceBuilder, dict[str, Any], tuple[str, ...]]:
    """Event by event, and once more from a repaired text if something in it cannot be read."""
    builder, problem = TraceBuilder(), None
    try:
        metadata, damage, num_unreadable = read_with_care(text, builder, source)
        if not num_unreadable:
            return builder, metadata, damage
    except TraceError as error:
        problem = error
    whole = bytearray()
    for block in text.blocks():
        whole += block
    fixed, repairs = repair(whole)
    if repairs:
        builder = TraceBuilder()
        metadata, damage, _ = read_with_care(Text(fixed, text.damage), builder, source)
        return builder, metadata, (repairs, *damage)
    if problem is not None:
        raise problem
    return builder, metadata, damage


def _read_pieces(text: TextSource, builder: TraceBuilder) -> dict[str, Any]:
    """Decode a whole and healthy file; returns its entries other than its events."""
    cutter = EventPieces(text)
    for piece in cutter.pieces():
        builder.add(piece)
    rest = cutter.rest
    if is_list(rest):
        builder.add(rest)
        return {}
    entries = RAW_ENTRIES.decode(rest)
    builder.add(bytes(entries.pop("traceEvents", b"null")))
    return {key: ANYTHING.decode(value) for key, value in entries.items()}


def _base_time_ns(metadata: dict[str, Any], source: str) -> int:
    """What torch subtracted from all time stamps before it wrote them, 0 before torch 2.4."""
    base_ns = metadata.get("baseTimeNanoseconds", 0)
    if not isinstance(base_ns, int):
        raise TraceError(
            f"{source}: expected an integer in baseTimeNanoseconds, got {base_ns!r}. Record the trace again."
        )
    return base_ns


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector: it would walk the decoded events again and again and find nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
