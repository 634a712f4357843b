"""Configuration in frozen dataclasses, which ``config/checks.py`` checks before training starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from lightning_modelprof.errors import ConfigError, printable
from lightning_modelprof.measure.window.schedule import Schedule
from lightning_modelprof.report.options import (
    DEFAULT_OPTIONS,
    TableOptions,
    parse_sort_key,
    parse_time_unit,
    parse_views,
)

ALL_RANKS: Final = "all"

DEFAULT_ACTIVE: Final = 10
"""Default number of steps that a window records."""

WHERE: Final = "ModelProfCallback"
"""Start of a message whose values have no better source."""

SWITCH: Final = "LIGHTNING_MODELPROF"
"""Environment variable that switches the callback off, or adds one."""

T = TypeVar("T")


def whole(default: int | None, *, least: int = 0, hint: str = "") -> Any:
    """Define an integer field with its own minimum or hint.

    Args:
        default: the field's default.
        least: smallest valid number.
        hint: what an error message adds after the default.
    """
    return field(default=default, metadata={"least": least, "hint": hint})


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """What to record in addition to timing.

    Attributes:
        sampling: Sample the training thread's current line and the process's memory usage from a
            separate thread. Samples every few milliseconds at first, and less often in long loops.
        workers: Time each transform in DataLoader workers and sample the lines they run.
        device_timing: Time each phase on CUDA, XPU and MPS devices.
        fvcore: Also count forward FLOPs with fvcore and show where the two counts differ. This calls
            training_step twice more, on a copy of the module.
        flop_formulas: FLOP formulas for operators that have none, or better ones. Maps an operator, or its
            name such as "mylib::mm", to formula(*args, **kwargs, out_val=result), which returns FLOPs.
        peak_flops_per_s: Device peak in FLOP/s, as a number or a {dtype: number} mapping. Default: the
            device's published dense peak, if known.
        ignore_modules: Class names or module paths to exclude from the module tables. Default: none.
    """

    sampling: bool = True
    workers: bool = True
    device_timing: bool = True
    fvcore: bool = False
    flop_formulas: Mapping[Any, Callable[..., int]] | None = None
    peak_flops_per_s: float | Mapping[str, float] | None = None
    ignore_modules: Sequence[str] | None = None


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where and how to show the report.

    Attributes:
        terminal: Print the report when the loop ends: True prints at most 20 lines, "full" all tables.
        colours: Print in color. Default: only if the terminal supports it and NO_COLOR is unset.
        progress_bar: Show ips and the share of time spent on data loading in the progress bar.
        tensorboard: Write the report tables to TensorBoard as text.
        files: Save the report, run data and traces to a directory. A fast_dev_run saves them only with
            dirpath.
        views: Trace tables to show: any of device, critical_path, overview, model, distributed, operator,
            kernel, memory_manipulation, userdefined, memory, step_breakdown, idle, launch and dataloader.
            Default: all. Paddle's names, such as KernelView, work here and in sorted_by.
        sorted_by: Sort key for operators, kernels and ranges: cpu_ or gpu_ followed by total, self, avg, max,
            min, memory or self_memory; or calls. Default: gpu_self if the trace has device events, otherwise
            cpu_self.
        time_unit: Time unit in text output: s, ms, us or ns. Default: one that fits each table.
        thread_sep: Group operators and ranges by CPU thread.
        op_detail: Show what each operator calls and launches.
        row_limit: Maximum rows per table, and child rows per row, in text output; report.json has all rows.
        module_depth: Levels of the module tree to show; 0 shows only the model. Default: all.
        top_modules: Number of classes to list at each level of the module tree.
    """

    terminal: bool | Literal["full"] = True
    colours: bool | None = None
    progress_bar: bool = True
    tensorboard: bool = True
    files: bool = True
    views: Sequence[str] | str | None = DEFAULT_OPTIONS.views
    sorted_by: str | None = DEFAULT_OPTIONS.sorted_by
    time_unit: str | None = DEFAULT_OPTIONS.time_unit
    thread_sep: bool = DEFAULT_OPTIONS.thread_sep
    op_detail: bool = DEFAULT_OPTIONS.op_detail
    row_limit: int = whole(DEFAULT_OPTIONS.row_limit, least=1)
    module_depth: int | None = DEFAULT_OPTIONS.module_depth
    top_modules: int = whole(DEFAULT_OPTIONS.top_modules, least=1)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits on disk space, overhead and ranks.

    Attributes:
        max_trace_mb: Maximum trace size, in MB of uncompressed JSON; a window that would exceed it ends
            early. The size is estimated from memory after each recorded step. None sets no limit.
        keep_windows: Number of most recent traces to keep on disk per rank, in addition to the first. None
            keeps all.
        max_overhead: Maximum profiler overhead, as a fraction of loop time, such as 0.01. Windows after the
            first are skipped if they would exceed it. Default: no limit.
        ranks: Ranks that record windows, such as [0]; all ranks measure time. Recording slows a rank down, so
            the others wait for a rank that records alone, and comparing ranks needs the trace of each. All
            ranks exclude a window's steps from the benchmark.
    """

    max_trace_mb: float | None = 500
    keep_windows: int | None = whole(
        20, least=1, hint="None keeps all traces; report={'files': False} saves none."
    )
    max_overhead: float | None = None
    ranks: Sequence[int] | Literal["all"] = ALL_RANKS


GROUPS: Final[Mapping[str, type[InspectOptions | ReportOptions | Bounds]]] = {
    "inspect": InspectOptions,
    "report": ReportOptions,
    "bounds": Bounds,
}
"""Types of the arguments that are groups of values."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """The callback's arguments, as documented on ``ModelProfCallback``.

    Fields of type ``bool`` or ``int``, optional or not, are checked by their type, here and in the groups.
    """

    timer_only: bool = False
    active: int | None = whole(None, hint="active=0 records no window.")
    wait: int = 1
    warmup: int = 1
    repeat: int = 1
    skip_first: int = 10
    steps: tuple[int, int] | None = None
    stop_after_profile: bool = False
    activities: Sequence[str] | None = None
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    flops: bool | None = None
    inspect: InspectOptions = field(default_factory=InspectOptions)
    samples_fn: Callable[[Any], int] | None = None
    unit: str = "samples"
    log_every_n_steps: int | None = None
    dirpath: str | Path | None = None
    report: ReportOptions = field(default_factory=ReportOptions)
    bounds: Bounds = field(default_factory=Bounds)
    rules: Mapping[str, Any] | None = None

    @property
    def schedule(self) -> Schedule:
        """Steps that windows record; ``steps`` replaces the other schedule arguments."""
        if self.steps is not None:
            return Schedule.from_range(*self.steps)
        return Schedule(
            skip_first=self.skip_first,
            wait=self.wait,
            warmup=self.warmup,
            active=DEFAULT_ACTIVE if self.active is None else self.active,
            repeat=self.repeat,
        )

    @property
    def wants_flops(self) -> bool:
        """Whether to count FLOPs, if there's time."""
        return self.flops is not False

    @property
    def asks_for_inspection(self) -> bool:
        """Whether arguments explicitly request inspecting steps."""
        return bool(self.flops or self.inspect.fvcore or self.profile_memory)

    @property
    def asks_for_window(self) -> bool:
        """Whether arguments explicitly request a window: its steps, its contents, or stopping after it."""
        return self.bounds.ranks != DEFAULTS.bounds.ranks or any(
            getattr(self, name) != getattr(DEFAULTS, name) for name in OF_WINDOWS
        )

    def with_clock_alone(self) -> ProfileConfig:
        """Apply ``timer_only``: no window, FLOPs, module times, samples or workers."""
        return replace(
            self, active=0, flops=False, inspect=replace(self.inspect, sampling=False, workers=False)
        )

    def asks_for_steps(self, num_steps: int) -> bool:
        """Whether a loop of ``num_steps`` reaches a step that arguments explicitly request."""
        if self.flops:
            return True
        window = self.schedule.window(0) if self.asks_for_window else None
        return window is not None and window.first < num_steps

    @property
    def table_options(self) -> TableOptions:
        """Choice, order and limits of the tables, in our names.

        Raises:
            ConfigError: when one is invalid.
        """
        return parse_options(self.report, WHERE)

    def as_plain(self) -> dict[str, Any]:
        """Return plain JSON values by name for the archive, with groups flattened.

        Raises:
            ConfigError: when a report option is invalid.
        """
        # Not asdict, which would copy the object samples_fn is bound to, such as a model.
        plain: dict[str, Any] = {}
        for name in FIELDS:
            value = getattr(self, name)
            members = [one.name for one in fields(GROUPS[name])] if name in GROUPS else None
            plain |= {name: value} if members is None else {one: getattr(value, one) for one in members}
        for name in ("steps", "activities", "ignore_modules"):
            plain[name] = None if plain[name] is None else list(plain[name])
        plain["ranks"] = plain["ranks"] if isinstance(plain["ranks"], str) else list(plain["ranks"])
        plain["dirpath"] = None if self.dirpath is None else printable(str(self.dirpath))
        formulas, peak = plain["flop_formulas"], plain["peak_flops_per_s"]
        plain["flop_formulas"] = (
            None if formulas is None else {str(k): _name_of(f) for k, f in formulas.items()}
        )
        plain["peak_flops_per_s"] = dict(peak) if isinstance(peak, Mapping) else peak
        plain["samples_fn"] = None if self.samples_fn is None else _name_of(self.samples_fn)
        plain["rules"] = (
            None
            if self.rules is None
            else {
                kind: dict(value) if isinstance(value, Mapping) else value
                for kind, value in self.rules.items()
            }
        )
        options = self.table_options  # Paddle's names may be enums
        plain["views"] = None if options.views is None else list(options.views)
        plain["sorted_by"], plain["time_unit"] = options.sorted_by, options.time_unit
        return plain


OF_WINDOWS: Final = (
    *("active", "wait", "warmup", "repeat", "steps", "activities", "record_shapes", "with_stack"),
    *("profile_memory", "stop_after_profile"),
)
"""Arguments that only concern windows."""

DEFAULTS: Final = ProfileConfig()
FIELDS: Final = tuple(one.name for one in fields(ProfileConfig))
GROUP_OF: Final[Mapping[str, str]] = {
    one.name: group for group, kind in GROUPS.items() for one in fields(kind)
}
"""Map each value in a group to its group."""


def parse_options(options: ReportOptions, where: str) -> TableOptions:
    """Parse the choice, order and limits of the tables into our names.

    Args:
        options: with the names that the user gave.
        where: source of the values, which starts a message.

    Raises:
        ConfigError: when one is invalid.
    """
    return TableOptions(
        views=_parse(where, "views", options.views, parse_views),
        sorted_by=_parse(where, "sorted_by", options.sorted_by, parse_sort_key),
        time_unit=_parse(where, "time_unit", options.time_unit, parse_time_unit),
        thread_sep=options.thread_sep,
        op_detail=options.op_detail,
        row_limit=options.row_limit,
        module_depth=options.module_depth,
        top_modules=options.top_modules,
    )


def _parse(where: str, name: str, value: object, parse: Callable[[object], T]) -> T | None:
    try:
        return None if value is None else parse(value)
    except ValueError as error:
        raise ConfigError(f"{where}: report: {name}: {error}") from None


def _name_of(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
