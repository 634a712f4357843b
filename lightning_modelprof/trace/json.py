"""Decode the events of a Chrome trace, as torch.profiler writes them, into typed objects.

Only used fields are decoded. Essential ones (kind, time, duration) must have their type; the others may have
any, because exporters differ: ROCm writes streams as text.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Sequence
from decimal import Context, Decimal, localcontext
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.trace.model import NOT_RECORDED, Category

_MTIA_WORK: Final = "mtia_ccp_events"
"""All work of Meta's accelerator; the event's name has its kind."""


_MTIA_NAMES: Final = {
    "dma_request": Category.MEMCPY,
    "event_record": Category.DEVICE_SYNC,
    "event_wait": Category.DEVICE_SYNC,
}


_CATEGORIES: Final[dict[str, Category]] = {
    "cpu_op": Category.CPU_OP,
    "operator": Category.CPU_OP,
    "user_annotation": Category.USER_ANNOTATION,
    "gpu_user_annotation": Category.DEVICE_ANNOTATION,
    "runtime": Category.RUNTIME,
    "kernel": Category.KERNEL,
    "concurrent_kernel": Category.KERNEL,
    _MTIA_WORK: Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "memset": Category.MEMSET,
    "python_function": Category.PYTHON_FUNCTION,
    "cuda_sync": Category.DEVICE_SYNC,
    "overhead": Category.OVERHEAD,
}


def category_of(text: str | None) -> Category:
    """Category of a ``cat`` of any torch version and backend."""
    lower = (text or "").lower()
    # cuda_runtime, cuda_driver, xpu_runtime, mtia_runtime, privateuse1_driver, ...
    if lower.endswith(("_runtime", "_driver")) or lower.startswith("hip"):
        return Category.RUNTIME
    return _CATEGORIES.get(lower, Category.OTHER)


_NO_WORK: Final = re.compile(
    r"sync|event|counter|range|annotation|instant|overhead|correlation|insight|trace"
)
"""In kinds of device events without device work."""


_ASCEND_COLLECTIVE: Final = "hcom_"
"""Name prefix of Ascend's collectives; their parts in other rows of the file have other names."""


def unknown_work(event: Event) -> tuple[str, Category] | None:
    """Kind and category of a device event of an unknown kind; ``None`` for other events.

    Device work names its stream or its device; :func:`needs_launch` decides whether a device alone is enough.
    Ascend's profiler writes the task type instead, and no category.
    """
    args = event.args or NO_ARGS
    task = args.task_type if isinstance(args.task_type, str) else None
    is_collective = event.cat is None and event.name.startswith(_ASCEND_COLLECTIVE)
    if args.stream is None and args.device is None and task is None and not is_collective:
        return None
    kind = event.cat or task or (_ASCEND_COLLECTIVE if is_collective else "without a category")
    lower = f"{kind} {event.name}".lower()
    if _NO_WORK.search(kind.lower()) or (task is not None and ("WAIT" in task or "RECORD" in task)):
        return None
    if "memset" in lower:
        return kind, Category.MEMSET
    return kind, Category.MEMCPY if "memcpy" in lower else Category.KERNEL


def needs_launch(event: Event) -> bool:
    """Whether a possible device event has a device but neither a stream nor a task.

    Then it is one only in a row without CPU work, and with a queue or a launch's correlation.
    """
    args = event.args or NO_ARGS
    return args.device is not None and args.stream is None and not isinstance(args.task_type, str)


def is_named_apart(text: str | None) -> bool:
    """Whether the names of events with this ``cat`` have their kind."""
    return text is not None and text.lower() == _MTIA_WORK


def category_by_name(event: Event) -> Category:
    """Category of an event whose name has its kind, such as an MTIA copy."""
    return _MTIA_NAMES.get(event.name, category_of(event.cat))


NAN: Final = float("nan")


NOTHING: Final = msgspec.Raw(b"")


class NameArgs(msgspec.Struct, gc=False):
    name: Any = None


class MemoryArgs(msgspec.Struct, gc=False):
    reserved_bytes: Any = msgspec.field(name="Total Reserved", default=NOT_RECORDED)
    allocated_bytes: Any = msgspec.field(name="Total Allocated", default=NOT_RECORDED)
    allocation_bytes: Any = msgspec.field(name="Bytes", default=0)
    device_id: Any = msgspec.field(name="Device Id", default=NOT_RECORDED)
    device_type: Any = msgspec.field(name="Device Type", default=NOT_RECORDED)
    address: Any = msgspec.field(name="Addr", default=NOT_RECORDED)


class Args(msgspec.Struct, gc=False):
    """Arguments of a timed event, in about the order of the files, which is faster."""

    external_id: Any = msgspec.field(name="External id", default=NOT_RECORDED)
    device: Any = None
    stream: Any = None
    correlation: Any = NOT_RECORDED
    blocks_per_sm: Any = msgspec.field(name="blocks per SM", default=NAN)
    occupancy_percent: Any = msgspec.field(name="est. achieved occupancy %", default=NAN)
    size_bytes: Any = msgspec.field(name="bytes", default=NOT_RECORDED)
    dma_bytes: Any = msgspec.field(name="size", default=NOT_RECORDED)
    concrete_inputs: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=NOTHING)
    input_dims: msgspec.Raw = msgspec.field(name="Input Dims", default=NOTHING)
    call_stack: Any = msgspec.field(name="Call stack", default=None)
    old_external_id: Any = msgspec.field(name="external id", default=NOT_RECORDED)
    collective: Any = msgspec.field(name="Collective name", default=None)
    in_elements: Any = msgspec.field(name="In msg nelems", default=None)
    out_elements: Any = msgspec.field(name="Out msg nelems", default=None)
    group_size: Any = msgspec.field(name="Group size", default=None)
    dtype: Any = None
    group_name: Any = msgspec.field(name="Process Group Name", default=None)
    group_description: Any = msgspec.field(name="Process Group Description", default=None)
    task_type: Any = msgspec.field(name="Task Type", default=None)
    queue: Any = None


class UnusedEvent(msgspec.Struct, gc=False, tag_field="ph", tag="s"):
    """An unused event, such as the start of an arrow; its times must still be numbers.

    ``ph`` selects the class of an event, so most of an unused one is skipped.
    """

    ts: int | float | None = None
    dur: float | None = None


class FlowStepEvent(UnusedEvent, gc=False, tag="t"):
    """A point of an arrow."""


class FlowEndEvent(UnusedEvent, gc=False, tag="f"):
    """The end of an arrow."""


class CounterEvent(UnusedEvent, gc=False, tag="C"):
    """A counter's value."""


class BeginEvent(UnusedEvent, gc=False, tag="B"):
    """Start of a span whose end is a separate event; such spans are counted but not read."""


class EndEvent(UnusedEvent, gc=False, tag="E"):
    """End of such a span."""


class Event(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """A complete event: a span with its duration, the most common entry of ``traceEvents``.

    Times are in microseconds; whole numbers stay integers, which lose no digits.
    """

    cat: str | None = None
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: int | float | None = None
    dur: float | None = None
    args: Args | None = None


class InstantEvent(msgspec.Struct, gc=False, tag_field="ph", tag="i"):
    """A moment, such as an allocation."""

    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: int | float | None = None
    dur: float | None = None
    args: MemoryArgs | None = None


class NamedEvent(msgspec.Struct, gc=False, tag_field="ph", tag="M"):
    """The name of a thread or a process."""

    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: int | float | None = None
    dur: float | None = None
    args: NameArgs | None = None


class ExactEvent(Event, gc=False, tag="X"):
    """An event with its start as the file's digits."""

    ts: msgspec.Raw = NOTHING  # type: ignore[assignment]  # decoded, not used, by its type


class ExactInstantEvent(InstantEvent, gc=False, tag="i"):
    """A moment with its time as the file's digits."""

    ts: msgspec.Raw = NOTHING  # type: ignore[assignment]


class AllArgs(Args, gc=False):
    reserved_bytes: Any = msgspec.field(name="Total Reserved", default=NOT_RECORDED)
    allocated_bytes: Any = msgspec.field(name="Total Allocated", default=NOT_RECORDED)
    allocation_bytes: Any = msgspec.field(name="Bytes", default=0)
    device_id: Any = msgspec.field(name="Device Id", default=NOT_RECORDED)
    device_type: Any = msgspec.field(name="Device Type", default=NOT_RECORDED)
    address: Any = msgspec.field(name="Addr", default=NOT_RECORDED)
    name: Any = None


class OddEvent(msgspec.Struct, gc=False):
    """An event of any kind, with types only for its kind and times."""

    ph: str = ""
    cat: Any = None
    name: Any = ""
    pid: Any = None
    tid: Any = None
    ts: float | None = None
    dur: float | None = None
    args: AllArgs | bool | int | float | str | list[Any] | None = None


class ExactOddEvent(OddEvent, gc=False):
    """An odd event with its start as the file's digits."""

    ts: msgspec.Raw = NOTHING  # type: ignore[assignment]


class Outline(msgspec.Struct):
    """A file with its events undecoded and nothing else."""

    traceEvents: msgspec.Raw = NOTHING  # noqa: N815  # its name in the file


NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Decoders' errors for text that isn't JSON, is nested too deeply or has values of wrong types."""


NO_ARGS: Final = AllArgs()


_AnyUnused: TypeAlias = UnusedEvent | FlowStepEvent | FlowEndEvent | CounterEvent | BeginEvent | EndEvent


_EVENTS: Final[msgspec.json.Decoder[list[Any]]] = msgspec.json.Decoder(
    list[Event | InstantEvent | NamedEvent | _AnyUnused]
)


_EXACT_EVENTS: Final[msgspec.json.Decoder[list[Any]]] = msgspec.json.Decoder(
    list[ExactEvent | ExactInstantEvent | NamedEvent | _AnyUnused]
)


_ODD_EVENTS: Final = msgspec.json.Decoder(list[OddEvent])


_EXACT_ODD_EVENTS: Final = msgspec.json.Decoder(list[ExactOddEvent])


ONE_EVENT: Final = msgspec.json.Decoder(OddEvent)


OUTLINE: Final = msgspec.json.Decoder(Outline)


RAW_VALUE: Final = msgspec.json.Decoder(msgspec.Raw)


RAW_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])


RAW_ENTRIES: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


ANYTHING: Final = msgspec.json.Decoder()


class Events(NamedTuple):
    """The events of a text by how they are used.

    Attributes:
        has_kinds: whether any of them has a kind.
        timed: with a duration.
        stamps_us: start of each of those.
        num_begin_end: begin and end events, which aren't read.
    """

    number: int
    has_kinds: bool
    timed: list[Any]
    stamps_us: list[Any]
    instants: list[Any]
    named: list[Any]
    num_begin_end: int


def decode_events(text: bytes, *, with_digits: bool = False) -> Events:
    """Decode a JSON list of events.

    Args:
        with_digits: whether to keep each start as its digits in the text.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: when it's anything else.
    """
    try:
        events = (_EXACT_EVENTS if with_digits else _EVENTS).decode(text)
    except msgspec.ValidationError:
        return _odd_events((_EXACT_ODD_EVENTS if with_digits else _ODD_EVENTS).decode(text))
    kind = ExactEvent if with_digits else Event
    timed = [event for event in events if type(event) is kind]
    others: defaultdict[type, list[Any]] = defaultdict(list)
    for event in events if len(timed) < len(events) else ():
        if type(event) is not kind:
            others[type(event)].append(event)
    return Events(
        number=len(events),
        has_kinds=bool(events),
        timed=timed,
        stamps_us=[event.ts for event in timed],
        instants=others[ExactInstantEvent if with_digits else InstantEvent],
        named=others[NamedEvent],
        num_begin_end=len(others[BeginEvent]) + len(others[EndEvent]),
    )


def _odd_events(events: Sequence[OddEvent]) -> Events:
    by_kind: defaultdict[str, list[Any]] = defaultdict(list)
    for event in events:
        _make_usual(event)
        by_kind[event.ph].append(event)
    return Events(
        number=len(events),
        has_kinds=any(by_kind),
        timed=by_kind["X"],
        stamps_us=[event.ts for event in by_kind["X"]],
        instants=by_kind["i"],
        named=by_kind["M"],
        num_begin_end=len(by_kind["B"]) + len(by_kind["E"]),
    )


def _make_usual(event: OddEvent) -> None:
    """Convert names and ids to text, and drop arguments that aren't an object."""
    event.cat = event.cat if isinstance(event.cat, str) else None
    event.name = "" if event.name is None else str(event.name)
    event.pid, event.tid = _process_or_thread(event.pid), _process_or_thread(event.tid)
    event.args = event.args if isinstance(event.args, AllArgs) else None


def _process_or_thread(value: Any) -> int | str | None:
    if isinstance(value, float) and value.is_integer():
        return int(value)  # 7.0 is thread 7
    return value if value is None or type(value) is int else str(value)


_EXACT_IN_DOUBLE_US: Final = 2.0**43
"""Below this (101 days) doubles are less than a nanosecond apart, so no written digit is lost."""


_MAX_STAMP_US: Final = 4e15


_MAX_DURATION_US: Final = 1e11
"""With stamps up to the year 2096 and durations up to 27 hours, longer than any torch.profiler window.

Differences and ends stay within int64 nanoseconds, and so do sums of 90,000 events of this duration."""


_MAX_INT: Final = 2**63


_LONG_FRACTION: Final = re.compile(rb'"ts"\s*:\s*\d{14,}\.')


_NUMBER: Final = re.compile(rb"-?\d{1,40}(\.\d{1,40})?([eE][+-]?\d{1,3})?")


_SNIFFED_BYTES: Final = 4096


_MAX_REGULAR_DIGITS: Final = 16
"""Before the point: nanoseconds stay within uint64, and those beyond int64 become negative."""


def begins_with_long_stamps(text: bytes) -> bool:
    """Whether the first stamps in the text would lose digits in a double."""
    return _LONG_FRACTION.search(text, 0, _SNIFFED_BYTES) is not None


def loses_digits(stamps_us: Sequence[float | None]) -> bool:
    """Whether any decoded stamp has lost digits; whole microseconds lose none."""
    return float in set(map(type, stamps_us)) and bool(
        np.any(np.abs(_as_floats(stamps_us)) >= _EXACT_IN_DOUBLE_US)
    )


def begins_ns(stamps_us: list[Any], *, are_digits: bool) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Convert stamps to nanoseconds, and return which of them are usable; the others are 0.

    Args:
        stamps_us: microseconds; ``None`` if missing.
        are_digits: whether they are the file's digits rather than doubles.
    """
    if are_digits:
        return _from_digits([bytes(stamp) for stamp in stamps_us])
    stamps = _as_floats(stamps_us)
    usable = np.abs(stamps) <= _MAX_STAMP_US
    return _to_ns(np.where(usable, stamps, 0.0)), usable


def _as_floats(stamps: Sequence[float | None]) -> NDArray[np.float64]:
    """Convert to doubles; missing stamps and integers beyond their range become NaN."""
    try:
        return np.array(stamps, np.float64)
    except OverflowError:
        most = int(_MAX_STAMP_US)
        return np.array([one if one is None or abs(one) <= most else None for one in stamps], np.float64)


def _from_digits(texts: list[bytes]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Parse decimal microseconds to nanoseconds, and return which of the texts are valid.

    Nearly always, all have as many digits before the point as the first and at most three after it; then all
    are read together, digit by digit. Otherwise each goes through a decimal.
    """
    if not texts:
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    num_whole = len(texts[0].partition(b".")[0])
    if max(map(len, texts)) > _MAX_REGULAR_DIGITS + 4:  # one long text would make a wide array
        return _from_decimals(texts)
    letters = np.array(texts, np.bytes_)
    width = letters.dtype.itemsize
    # Shorter texts are padded with zero bytes.
    grid = letters.view(np.uint8).reshape(len(texts), width)
    digits = grid.astype(np.int64) - ord("0")
    is_digit = (digits >= 0) & (digits <= 9)
    fraction = slice(num_whole + 1, num_whole + 4)
    is_regular = (
        num_whole < width <= num_whole + 4
        and num_whole <= _MAX_REGULAR_DIGITS
        and bool(is_digit[:, :num_whole].all())
        and bool((grid[:, num_whole] == ord(".")).all())
        and bool((is_digit[:, fraction] | (grid[:, fraction] == 0)).all())
    )
    if not is_regular:
        return _from_decimals(texts)
    powers = 10 ** np.arange(num_whole + 2, 2, -1)
    ns = digits[:, :num_whole] @ powers
    for place, power in zip(range(num_whole + 1, width), (100, 10, 1), strict=False):
        ns += np.where(is_digit[:, place], digits[:, place], 0) * power
    return ns, (ns >= 0) & (ns <= _MAX_STAMP_US * 1000)


def _from_decimals(texts: list[bytes]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    limit = Decimal(_MAX_STAMP_US)
    begins: list[int | None] = []
    with localcontext(Context(prec=60)):  # the caller's context might round
        for text in texts:
            stamp = Decimal(text.decode()) if _NUMBER.fullmatch(text) else None
            begins.append(round(stamp * 1000) if stamp is not None and abs(stamp) <= limit else None)
    return (
        np.array([ns or 0 for ns in begins], np.int64),
        np.array([ns is not None for ns in begins], np.bool_),
    )


def durations_ns(durations_us: list[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Convert durations to nanoseconds, and return which of them are usable; the others are 0."""
    durations = np.array(durations_us, np.float64)
    usable = (durations >= 0) & (durations <= _MAX_DURATION_US)
    return _to_ns(np.where(usable, durations, 0.0)), usable


def integers(values: list[Any], missing: int = NOT_RECORDED) -> NDArray[np.int64]:
    """Whole numbers as a column, including quoted ones; anything else becomes ``missing``."""
    try:
        return np.asarray(array("q", values), np.int64)  # NumPy would truncate 7.9 to 7
    except (TypeError, OverflowError):  # null, a text, a fraction, a list, more than 64 bits
        return np.array(
            [
                value if isinstance(value, int) and -_MAX_INT <= value < _MAX_INT else missing
                for value in map(unquoted, values)
            ],
            np.int64,
        )


def positive_floats(values: list[Any]) -> NDArray[np.float64]:
    """Numbers as a column, including quoted ones; negative, invalid and huge ones become NaN."""
    try:
        column = np.asarray(array("d", values), np.float64)
    except (TypeError, OverflowError):
        column = np.array(
            [
                value if isinstance(value, int | float) and abs(value) < _MAX_INT else np.nan
                for value in map(unquoted, values)
            ],
            np.float64,
        )
    return np.where((column >= 0) & (column < _MAX_INT), column, np.nan)


def unquoted(value: Any) -> Any:
    """Convert a text that is a number, as torch_npu writes them; return anything else unchanged."""
    if not isinstance(value, str) or not _QUOTED.fullmatch(value):
        return value
    return int(value) if value.lstrip("-").isdecimal() else float(value)


_QUOTED: Final = re.compile(r"-?[0-9]{1,19}(?:\.[0-9]{1,19})?")


def _to_ns(microseconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Round to whole nanoseconds, splitting off whole microseconds to lose no digits."""
    whole = np.floor(microseconds)
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64)
