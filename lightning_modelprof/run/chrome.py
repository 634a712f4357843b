"""Chrome trace JSON, as torch.profiler writes it, read into the columns of a :class:`Trace`.

Only the fields that are used are decoded, and time stamps become integer nanoseconds without loss. They
are written as microseconds with up to three decimals, and not every such number fits a double: since
torch 2.4 they count from ``baseTimeNanoseconds`` and are small, before that they were microseconds since
1970. Small ones are decoded as doubles, which is fast; large ones are decoded once more as decimals.
"""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Context, Decimal, localcontext
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy as np
from isal import igzip, igzip_lib
from numpy.typing import NDArray

from lightning_modelprof.errors import TraceError
from lightning_modelprof.run.trace import Category, Trace

MAX_TRACE_BYTES: Final = 4 * 2**30
"""Largest uncompressed trace that is read unless asked otherwise."""

_CHUNK_BYTES: Final = 4 * 2**20
_GZIP_MAGIC: Final = b"\x1f\x8b"

_EXACT_IN_DOUBLE_US: Final = 2.0**43
"""Below this (101 days) doubles lie less than a nanosecond apart, so none of the written digits is lost."""

_MAX_STAMP_US: Final = 4e15
_MAX_DURATION_US: Final = 1e15
"""Stamps to the year 2096 and durations of 31 years: differences and ends stay inside int64 nanoseconds."""

_CATEGORIES: Final[dict[str, Category]] = {
    "cpu_op": Category.CPU_OP,
    "operator": Category.CPU_OP,
    "user_annotation": Category.USER_ANNOTATION,
    "gpu_user_annotation": Category.DEVICE_ANNOTATION,
    "runtime": Category.RUNTIME,
    "cuda_driver": Category.RUNTIME,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "memset": Category.MEMSET,
    "python_function": Category.PYTHON_FUNCTION,
}

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Args(msgspec.Struct, gc=False):
    correlation: _Int64 | None = None


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str = ""
    ts: float | None = None
    dur: float | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    args: _Args | None = None


class _ExactStamp(msgspec.Struct, gc=False):
    ts: Decimal | None = None


_FILE_DECODER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_EVENTS_DECODER: Final = msgspec.json.Decoder(list[_Event])
_STAMPS_DECODER: Final = msgspec.json.Decoder(list[_ExactStamp])
_ANY_DECODER: Final = msgspec.json.Decoder()

_T = TypeVar("_T")


def read_trace(path: str | Path, max_bytes: int = MAX_TRACE_BYTES) -> Trace:
    """Read a Chrome trace file, plain or gzip-compressed (told apart by content, not by name).

    Args:
        path: the file.
        max_bytes: largest uncompressed JSON to read; a few kilobytes of gzip can hold gigabytes.

    Raises:
        TraceError: when the file cannot be opened, is empty, cut off or too large, or is not a trace.
    """
    source = str(path)
    try:
        is_too_large = Path(path).stat().st_size > max_bytes
        raw = b"" if is_too_large else Path(path).read_bytes()
    except OSError as error:
        raise TraceError(
            f"{source}: expected a trace file, but it cannot be opened: {error.strerror}. Check the path"
            " and the permissions."
        ) from None
    packed = raw.startswith(_GZIP_MAGIC)
    text = _decompress(raw, source, max_bytes) if packed else raw
    if is_too_large or len(text) > max_bytes:
        raise TraceError(
            f"{source}: expected at most {max_bytes / 2**30:g} GiB of JSON, got more. If it is a trace, and"
            " memory for about three times its size is there, raise the limit (max_bytes, --max-gib)."
        )
    return parse_trace(text, source)


def parse_trace(raw: bytes, source: str) -> Trace:
    """Turn the JSON text of a trace into columns.

    Args:
        raw: the uncompressed JSON: an object with ``traceEvents``, or the list of events itself.
        source: the file's name, for messages.

    Raises:
        TraceError: when the text is not JSON, has no ``traceEvents``, or a value has a wrong type.
    """
    if not raw or raw.isspace():
        raise TraceError(
            f"{source}: expected a Chrome trace in JSON, got an empty file. Record the trace again."
        )
    with _collector_paused():
        events_json, metadata = _split_file(raw, source)
        all_events = _decode(_EVENTS_DECODER, events_json, source, "$.traceEvents")
        timed = [event for event in all_events if event.ph == "X"]
        stamp_us = _float_column([event.ts for event in timed])
        duration_us = _float_column([event.dur for event in timed])
        usable = (np.abs(stamp_us) <= _MAX_STAMP_US) & (duration_us >= 0) & (duration_us <= _MAX_DURATION_US)
        if np.any(np.abs(stamp_us[usable]) >= _EXACT_IN_DOUBLE_US):
            begin_ns = _exact_stamps_ns(events_json, all_events, usable, source)
        else:
            begin_ns = _to_ns(stamp_us[usable])
        first_ns = int(begin_ns.min()) if len(begin_ns) else 0
        return _build_trace(
            events=[timed[index] for index in np.flatnonzero(usable)],
            begin_ns=begin_ns - first_ns,
            duration_ns=_to_ns(duration_us[usable]),
            source=source,
            base_ns=first_ns + _base_time_ns(metadata, source),
            metadata=metadata,
            num_dropped=int(np.count_nonzero(~usable)),
        )


def _decompress(raw: bytes, source: str, max_bytes: int) -> bytes:
    """Inflate a gzip file; stops soon after ``max_bytes``."""
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        with igzip.IGzipFile(fileobj=io.BytesIO(raw)) as file:  # type: ignore[no-untyped-call]
            while num_bytes <= max_bytes and (chunk := file.read(_CHUNK_BYTES)):
                chunks.append(chunk)
                num_bytes += len(chunk)
    except (EOFError, OSError, igzip_lib.IsalError) as error:  # type: ignore[misc]  # wrong in its stubs
        raise TraceError(
            f"{source}: expected a complete gzip file, got one that is cut off or damaged ({error})."
            " Copy or record the trace again."
        ) from None
    return b"".join(chunks)


def _decode(decoder: msgspec.json.Decoder[_T], text: bytes | msgspec.Raw, source: str, place: str) -> _T:
    """Decode JSON; ``place`` says where in the file ``text`` stands, for messages."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        problem = str(error).replace("`$", f"`{place}")
        raise TraceError(
            f"{source}: a value has another type than in a Chrome trace: {problem}. Check that the file was"
            " written by torch.profiler and not changed since."
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(
            f"{source}: expected a Chrome trace in JSON, got something else or a file that is cut off"
            f" ({error}). Check that it is a trace and that writing it was not interrupted."
        ) from None


def _split_file(raw: bytes, source: str) -> tuple[bytes | msgspec.Raw, dict[str, Any]]:
    """The JSON of the event list, still undecoded, and the decoded rest of the file."""
    if raw.lstrip()[:1] == b"[":
        return raw, {}
    entries = _decode(_FILE_DECODER, raw, source, "$")
    events_json = entries.pop("traceEvents", None)
    if events_json is None:
        keys = ", ".join(list(entries)[:5]) or "none"
        raise TraceError(
            f"{source}: expected a JSON object with the key traceEvents, got the keys: {keys}. Check that"
            " it is a trace written by torch.profiler."
        )
    metadata = {key: _decode(_ANY_DECODER, text, source, f"$.{key}") for key, text in entries.items()}
    return events_json, metadata


def _base_time_ns(metadata: dict[str, Any], source: str) -> int:
    """What torch subtracted from all time stamps before it wrote them, 0 before torch 2.4."""
    base_ns = metadata.get("baseTimeNanoseconds", 0)
    if not isinstance(base_ns, int):
        raise TraceError(
            f"{source}: expected an integer in baseTimeNanoseconds, got {base_ns!r}. Record the trace again."
        )
    return base_ns


def _float_column(values: list[float | None]) -> NDArray[np.float64]:
    """Numbers as a column; a missing number becomes NaN."""
    return np.array(values, np.float64)


def _to_ns(microseconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Round to whole nanoseconds, splitting off whole microseconds so that nothing is lost on the way."""
    whole = np.floor(microseconds)
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64)


def _exact_stamps_ns(
    events_json: bytes | msgspec.Raw, all_events: list[_Event], usable: NDArray[np.bool_], source: str
) -> NDArray[np.int64]:
    """Begin of the usable events from the digits in the file, for stamps that a double would round."""
    all_stamps = _decode(_STAMPS_DECODER, events_json, source, "$.traceEvents")
    timed = [stamp.ts for stamp, event in zip(all_stamps, all_events, strict=True) if event.ph == "X"]
    stamps = (timed[index] for index in np.flatnonzero(usable))
    with localcontext(Context(prec=60)):  # the caller's context could round
        return np.fromiter((0 if us is None else round(us * 1000) for us in stamps), np.int64)


def _build_trace(
    *,
    events: list[_Event],
    begin_ns: NDArray[np.int64],
    duration_ns: NDArray[np.int64],
    source: str,
    base_ns: int,
    metadata: dict[str, Any],
    num_dropped: int,
) -> Trace:
    """Sort the usable events and intern their texts."""
    count = len(events)
    name_ids: dict[str, int] = {}
    track_ids: dict[tuple[int | str | None, int | str | None], int] = {}
    kind_ids: dict[str | None, int] = {}
    name = np.fromiter((name_ids.setdefault(e.name, len(name_ids)) for e in events), np.int32, count)
    track = np.fromiter(
        (track_ids.setdefault((e.pid, e.tid), len(track_ids)) for e in events), np.int32, count
    )
    kind = np.fromiter((kind_ids.setdefault(e.cat, len(kind_ids)) for e in events), np.int32, count)
    correlation = np.fromiter(
        (-1 if e.args is None or e.args.correlation is None else e.args.correlation for e in events),
        np.int64,
        count,
    )
    category_of_kind = np.array([_category(cat) for cat in kind_ids], np.uint8)
    track_of_id, tracks = _merge_tracks(list(track_ids))
    end_ns = begin_ns + duration_ns
    order = np.lexsort((-end_ns, begin_ns))
    return Trace(
        source=source,
        base_ns=base_ns,
        begin_ns=_read_only(begin_ns[order]),
        end_ns=_read_only(end_ns[order]),
        category=_read_only(category_of_kind[kind[order]]),
        name=_read_only(name[order]),
        track=_read_only(track_of_id[track[order]]),
        correlation=_read_only(correlation[order]),
        names=tuple(name_ids),
        tracks=tracks,
        metadata=metadata,
        num_dropped=num_dropped,
    )


def _merge_tracks(
    pairs: list[tuple[int | str | None, int | str | None]],
) -> tuple[NDArray[np.int32], tuple[tuple[str, str], ...]]:
    """Tracks as text, with the new number of each; torch 1.9 wrote one thread as 25738 and as "25738"."""
    tracks: dict[tuple[str, str], int] = {}
    numbers = [tracks.setdefault((str(pid), str(tid)), len(tracks)) for pid, tid in pairs]
    return np.array(numbers, np.int32), tuple(tracks)


def _category(text: str | None) -> Category:
    """What kind of event a ``cat`` of any torch version and backend stands for."""
    lower = (text or "").lower()
    if lower.endswith("_runtime") or lower.startswith("hip"):
        return Category.RUNTIME
    return _CATEGORIES.get(lower, Category.OTHER)


_Column = TypeVar("_Column", bound=np.generic)


def _read_only(column: NDArray[_Column]) -> NDArray[_Column]:
    column.flags.writeable = False
    return column


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
