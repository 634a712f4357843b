"""The events of a Chrome trace as torch.profiler writes them, decoded into typed objects.

Only the fields that are used are decoded. What a figure cannot do without (kind, time, duration) must have
its type; all else may have any, because exporters differ: ROCm writes streams as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from lightning_modelprof.trace.model import NOT_RECORDED, Category

_MTIA_WORK: Final = "mtia_ccp_events"
"""All that Meta's accelerator does; what it is stands in the name."""

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
    """What kind of event a ``cat`` of any torch version and backend stands for."""
    lower = (text or "").lower()
    # cuda_runtime, cuda_driver, xpu_runtime, mtia_runtime, privateuse1_driver, ...
    if lower.endswith(("_runtime", "_driver")) or lower.startswith("hip"):
        return Category.RUNTIME
    return _CATEGORIES.get(lower, Category.OTHER)


def is_named_apart(text: str | None) -> bool:
    """Whether the names of events with this ``cat`` say what kind they are."""
    return text is not None and text.lower() == _MTIA_WORK


def category_by_name(event: Event) -> Category:
    """What kind of event one is whose name says so, such as a copy of MTIA."""
    return _MTIA_NAMES.get(event.name, category_of(event.cat))


NAN: Final = float("nan")
NOTHING: Final = msgspec.Raw(b"")


class Args(msgspec.Struct, gc=False):
    """What an event says beyond its time; the order is about that of the files, which makes it faster."""

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
    reserved_bytes: Any = msgspec.field(name="Total Reserved", default=NOT_RECORDED)
    allocated_bytes: Any = msgspec.field(name="Total Allocated", default=NOT_RECORDED)
    allocation_bytes: Any = msgspec.field(name="Bytes", default=0)
    device_id: Any = msgspec.field(name="Device Id", default=NOT_RECORDED)
    device_type: Any = msgspec.field(name="Device Type", default=NOT_RECORDED)
    name: Any = None


class Event(msgspec.Struct, gc=False):
    """One entry of ``traceEvents``; times are microseconds."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float | None = None
    dur: float | None = None
    args: Args | None = None


class ExactEvent(Event, gc=False):
    """An event whose begin is the digits of the file."""

    ts: msgspec.Raw = NOTHING  # type: ignore[assignment]  # decoded, not used, by its type


class OddEvent(Event, gc=False):
    """An event of which only kind and times have their types."""

    cat: Any = None
    name: Any = ""
    pid: Any = None
    tid: Any = None
    args: Args | bool | int | float | str | list[Any] | None = None  # type: ignore[assignment]


class ExactOddEvent(OddEvent, gc=False):
    """One of those whose begin is the digits of the file."""

    ts: msgspec.Raw = NOTHING  # type: ignore[assignment]


class Outline(msgspec.Struct):
    """A file as far as it is known before its events are: nothing else of it is decoded."""

    traceEvents: msgspec.Raw = NOTHING  # noqa: N815  # its name in the file


NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What the decoders raise for a text that is no JSON, is nested too deeply or has values of wrong types."""

NO_ARGS: Final = Args()

_EVENTS: Final = (msgspec.json.Decoder(list[Event]), msgspec.json.Decoder(list[OddEvent]))
_EXACT_EVENTS: Final = (msgspec.json.Decoder(list[ExactEvent]), msgspec.json.Decoder(list[ExactOddEvent]))
ONE_EVENT: Final = msgspec.json.Decoder(OddEvent)
OUTLINE: Final = msgspec.json.Decoder(Outline)
RAW_VALUE: Final = msgspec.json.Decoder(msgspec.Raw)
RAW_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
RAW_ENTRIES: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
ANYTHING: Final = msgspec.json.Decoder()


def decode_events(text: bytes, *, with_digits: bool = False) -> Sequence[Event]:
    """Decode a JSON list of events.

    Args:
        text: the list.
        with_digits: whether the begin of each is to be its digits in the text (an :class:`ExactEvent`).

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: when it is something else.
    """
    usual, odd = _EXACT_EVENTS if with_digits else _EVENTS
    try:
        return usual.decode(text)
    except msgspec.ValidationError:
        events: Sequence[OddEvent] = odd.decode(text)
    for event in events:
        _make_usual(event)
    return events


def _make_usual(event: OddEvent) -> None:
    """What is no text, as text; arguments that are no object, as none."""
    event.cat = event.cat if isinstance(event.cat, str) else None
    event.name = "" if event.name is None else str(event.name)
    event.pid, event.tid = _process_or_thread(event.pid), _process_or_thread(event.tid)
    event.args = event.args if isinstance(event.args, Args) else None


def _process_or_thread(value: Any) -> int | str | None:
    if isinstance(value, float) and value.is_integer():
        return int(value)  # 7.0 is thread 7
    return value if value is None or type(value) is int else str(value)
