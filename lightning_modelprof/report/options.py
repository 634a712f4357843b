"""Options of the tables: the arguments of Paddle's ``summary``, by our names or Paddle's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Final, Generic, Literal, TypeVar, get_args

from lightning_modelprof.errors import MAX_NAME, did_you_mean, quoted
from lightning_modelprof.units import TimeUnit

SHOWN_WINDOWS: Final = 3
"""Most windows of a run with their own tables; one window every hundred steps can make thousands."""

View = Literal[
    "device",
    "critical_path",
    "overview",
    "model",
    "distributed",
    "operator",
    "kernel",
    "memory_manipulation",
    "userdefined",
    "memory",
    "step_breakdown",
    "idle",
    "launch",
    "dataloader",
]
SortKey = Literal[
    "cpu_total",
    "cpu_self",
    "cpu_avg",
    "cpu_max",
    "cpu_min",
    "gpu_total",
    "gpu_self",
    "gpu_avg",
    "gpu_max",
    "gpu_min",
    "cpu_memory",
    "cpu_self_memory",
    "gpu_memory",
    "gpu_self_memory",
    "calls",
]

VIEWS: Final[tuple[View, ...]] = get_args(View)
"""The trace tables in reading order, Paddle's nine first."""

SORT_KEYS: Final[tuple[SortKey, ...]] = get_args(SortKey)
TIME_UNITS: Final[tuple[TimeUnit, ...]] = get_args(TimeUnit)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """How to choose, sort and cut the trace tables.

    Attributes:
        views: which tables, in reading order; ``None`` means all.
        sorted_by: row order of Operator, Kernel and UserDefined Summary: largest first, but smallest first
            for the two minima. ``None`` means GPU self time if the trace has device events, else CPU self
            time. Kernels have no CPU time, so a CPU key counts as the GPU's there. Only operators have
            memory: other tables, and traces without it, keep their order.
        time_unit: unit of displayed durations; ``None`` means one that fits each table.
        thread_sep: one section per CPU thread in Operator and UserDefined Summary.
        op_detail: operators with rows for what they call and launch.
        row_limit: most displayed rows, per table and below any one row; JSON always has all.
        module_depth: deepest modules in the module tree, 0 being the model; ``None`` means all.
        top_modules: number of classes named per depth of the module tree.
    """

    views: tuple[View, ...] | None = None
    sorted_by: SortKey | None = None
    time_unit: TimeUnit | None = None
    thread_sep: bool = False
    op_detail: bool = False
    row_limit: int = 20
    module_depth: int | None = None
    top_modules: int = 3


DEFAULT_OPTIONS: Final = TableOptions()


def parse_views(value: object) -> tuple[View, ...]:
    """Parse one view name or a list of them into views in reading order.

    Args:
        value: our names, or Paddle's as text or enum: ``kernel``, ``KernelView``, ``SummaryView.KernelView``.
            Case is ignored.

    Raises:
        ValueError: If it isn't a list of different views; the message says how to fix it.
    """
    names = [value] if isinstance(value, str | Enum) else value
    if not isinstance(names, list | tuple) or not names:
        raise ValueError(f"expected a list of {', '.join(VIEWS)}, got {quoted(value)}. {_VIEW.default}")
    asked: dict[View, object] = {}
    for name in names:
        view = _VIEW.find(name)
        if view in asked:
            raise ValueError(
                f"expected each view once, got {view!r} twice: {quoted(asked[view])} and {quoted(name)}."
                " Remove one."
            )
        asked[view] = name
    return tuple(view for view in VIEWS if view in asked)


def parse_sort_key(value: object) -> SortKey:
    """Parse a sort key by our name, Paddle's or torch's: ``gpu_total``, ``GPUTotal``, ``cuda_time_total``.

    Raises:
        ValueError: If it's unknown; the message suggests the nearest.
    """
    return _SORT_KEY.find(value)


def parse_time_unit(value: object) -> TimeUnit:
    """Parse a time unit: ``s``, ``ms``, ``us`` or ``ns``; ``µs`` is ``us``.

    Raises:
        ValueError: If it's unknown; the message suggests the nearest.
    """
    return _TIME_UNIT.find(value)


def parse_step_range(value: object) -> re.Pattern[str]:
    """Compile the regular expression for the names of ranges that are a trace's steps.

    Raises:
        ValueError: If it's invalid.
    """
    expected = "expected a regular expression for range names, such as execute_model"
    if not isinstance(value, str) or not value:
        raise ValueError(f"{expected}, got {quoted(value)}")
    try:
        return re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"{expected}, got {quoted(value)}: {error}. Escape characters such as [ and ( with a backslash."
        ) from None


def parse_row_limit(value: object) -> int:
    """Parse a number of rows, also from text.

    Raises:
        ValueError: If it isn't an integer of at least 1.
    """
    try:
        return parse_whole_number(value, 1)
    except ValueError as error:
        raise ValueError(f"{error} The default is {DEFAULT_OPTIONS.row_limit}.") from None


def parse_whole_number(value: object, at_least: int) -> int:
    """Parse an integer, also from text.

    Raises:
        ValueError: If it isn't one, or is too small.
    """
    text = str(value).strip()
    if not re.fullmatch("[0-9]+", text, re.ASCII) or int(text) < at_least:
        raise ValueError(f"expected an integer of at least {at_least}, got {quoted(value)}.")
    return int(text)


def saved_options(configuration: Mapping[str, object]) -> TableOptions:
    """Read the table options among a saved run's arguments; older versions saved none.

    Raises:
        ValueError: If a saved value is invalid.
    """
    parsers: dict[str, Callable[[object], Any]] = {
        "views": parse_views,
        "sorted_by": parse_sort_key,
        "time_unit": parse_time_unit,
        "thread_sep": bool,
        "op_detail": bool,
        "row_limit": parse_row_limit,
        "module_depth": partial(parse_whole_number, at_least=0),
        "top_modules": partial(parse_whole_number, at_least=1),
    }
    saved = {name: configuration.get(name) for name in parsers}
    return TableOptions(**{name: parsers[name](value) for name, value in saved.items() if value is not None})


T = TypeVar("T", bound=str)


@dataclass(frozen=True, slots=True)
class _Choice(Generic[T]):
    """The values that an argument takes.

    Attributes:
        kind: what to call a value.
        names: plain name → value.
        like: plain name → nearest value; refused, because it means something else or nothing exact.
        default: what to do instead.
    """

    kind: str
    names: Mapping[str, T]
    like: Mapping[str, T]
    default: str

    def find(self, value: object) -> T:
        name = value.name if isinstance(value, Enum) else value
        plain = _plain(name) if isinstance(name, str) and len(name) <= MAX_NAME else ""
        if plain in self.names:
            return self.names[plain]
        known = ", ".join(dict.fromkeys(self.names.values()))
        meant = {**self.names, **self.like}
        hint = did_you_mean(plain, meant, meant) or f" Expected one of {known}."
        raise ValueError(f"unknown {self.kind} {quoted(value)}.{hint} {self.default}")


def _plain(name: str) -> str:
    """Normalize a name: ``SortedKeys.CPUTotal`` and ``cpu_total`` are the same."""
    member = re.sub(r"^(.*\.)?(summaryview|sortedkeys)\.", "", name.strip().casefold())
    return re.sub(r"[\s_-]", "", member)


_VIEW: Final[_Choice[View]] = _Choice(
    "view",
    {
        **{_plain(view): view for view in VIEWS},
        **{_plain(view) + "view": view for view in VIEWS},
        "udf": "userdefined",
        "udfview": "userdefined",
    },
    {"op": "operator", "communication": "distributed", "memcpy": "memory_manipulation"},
    "Leave it out to show all.",
)


def _torch_keys() -> dict[str, SortKey]:
    """Map plain names of the keys of torch's ``key_averages().table(sort_by=...)``.

    A time without ``total`` is a mean per call in torch.
    """
    keys: dict[str, SortKey] = {
        "count": "calls",
        "cputime": "cpu_avg",
        "cputimetotal": "cpu_total",
        "selfcputimetotal": "cpu_self",
        "cpumemoryusage": "cpu_memory",
        "selfcpumemoryusage": "cpu_self_memory",
    }
    for device in ("cuda", "xpu", "device", "privateuse1"):
        keys |= {
            f"{device}time": "gpu_avg",
            f"{device}timetotal": "gpu_total",
            f"self{device}timetotal": "gpu_self",
            f"{device}memoryusage": "gpu_memory",
            f"self{device}memoryusage": "gpu_self_memory",
        }
    return keys


def _keys_of_other_devices() -> dict[str, SortKey]:
    """Map plain names with other device names: ``cuda_total``, ``npu_avg``, ``cuda``."""
    named: dict[str, SortKey] = {key.partition("_")[2]: key for key in SORT_KEYS if key.startswith("gpu_")}
    devices = ("cuda", "hip", "xpu", "npu", "hpu", "mps", "device")
    return {
        f"{device}{_plain(rest)}": key
        for device in devices
        for rest, key in [("", "gpu_total"), *named.items()]
    }


_SORT_KEY: Final[_Choice[SortKey]] = _Choice(
    "sort key",
    {**{_plain(key): key for key in SORT_KEYS}, **_torch_keys()},
    {"cpu": "cpu_total", "gpu": "gpu_total", **_keys_of_other_devices()},
    "Leave it out to sort by gpu_self if the trace has device events, else by cpu_self.",
)
_TIME_UNIT: Final[_Choice[TimeUnit]] = _Choice(
    "time unit",
    {**{unit: unit for unit in TIME_UNITS}, "μs": "us"},
    {"seconds": "s", "milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"},
    "Leave it out to use one that fits each table.",
)
