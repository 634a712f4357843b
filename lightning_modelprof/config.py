"""The configuration: one frozen dataclass, whose values ``config_checks`` checks before training starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from lightning_modelprof.errors import ConfigError, one_line
from lightning_modelprof.measure.schedule import Schedule
from lightning_modelprof.report.options import (
    DEFAULT_OPTIONS,
    ReportOptions,
    parse_sort_key,
    parse_time_unit,
    parse_views,
)

ALL_RANKS: Final = "all"

DEFAULT_ACTIVE: Final = 10
"""Steps that a window records where nobody asks for a number."""

WHERE: Final = "ModelProfCallback"
"""What a message begins with where nothing better is known."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Every behaviour of the callback; the meaning of each field is documented on ``ModelProfCallback``."""

    active: int | None = None
    wait: int = 1
    warmup: int = 1
    repeat: int = 1
    skip_first: int = 10
    steps: tuple[int, int] | None = None
    activities: Sequence[str] | None = None
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    ranks: Sequence[int] | str = ALL_RANKS
    max_trace_mb: float | None = 500
    keep_windows: int | None = 20
    max_overhead: float | None = None
    stop_after_profile: bool = False
    device_timing: bool = True
    log_every_n_steps: int | None = None
    progress_bar: bool = True
    samples_fn: Callable[[Any], int] | None = None
    unit: str = "samples"
    sampling: bool = True
    flops: bool | None = None
    flop_formulas: Mapping[Any, Callable[..., int]] | None = None
    peak_flops_per_s: float | Mapping[str, float] | None = None
    fvcore: bool = False
    ignore_modules: Sequence[str] | None = None
    module_depth: int | None = DEFAULT_OPTIONS.module_depth
    top_modules: int = DEFAULT_OPTIONS.top_modules
    terminal: bool = True
    tensorboard: bool = True
    files: bool = True
    dirpath: str | Path | None = None
    views: Sequence[str] | str | None = DEFAULT_OPTIONS.views
    sorted_by: str | None = DEFAULT_OPTIONS.sorted_by
    time_unit: str | None = DEFAULT_OPTIONS.time_unit
    thread_sep: bool = DEFAULT_OPTIONS.thread_sep
    op_detail: bool = DEFAULT_OPTIONS.op_detail
    row_limit: int = DEFAULT_OPTIONS.row_limit
    rules: Mapping[str, Any] | None = None

    @property
    def schedule(self) -> Schedule:
        """Which steps the windows record; ``steps`` replaces the other schedule arguments."""
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
        """Whether FLOPs are counted, be it that there is time for it."""
        return self.flops is not False

    @property
    def asks_for_window(self) -> bool:
        """Whether a window is asked for by name: which steps, what is recorded, or to end after it."""
        return any(getattr(self, name) != getattr(DEFAULTS, name) for name in _OF_WINDOWS)

    def asks_for_steps(self, num_steps: int) -> bool:
        """Whether a loop of so many steps has one that something is asked of by name."""
        if self.flops:
            return True
        window = self.schedule.window(0) if self.asks_for_window else None
        return window is not None and window.first < num_steps

    @property
    def report_options(self) -> ReportOptions:
        """How the tables are chosen, sorted and cut, by our names.

        Raises:
            ConfigError: when that cannot be meant.
        """
        return parse_options(self, WHERE)

    def as_plain(self) -> dict[str, Any]:
        """Field → plain JSON value, for the archive.

        Raises:
            ConfigError: when the arguments of the report cannot be meant.
        """
        # Not asdict: it would copy what samples_fn is bound to, a model perhaps.
        plain = {name: getattr(self, name) for name in FIELDS}
        plain["steps"] = None if self.steps is None else list(self.steps)
        plain["activities"] = None if self.activities is None else list(self.activities)
        plain["ranks"] = self.ranks if isinstance(self.ranks, str) else list(self.ranks)
        plain["dirpath"] = None if self.dirpath is None else one_line(str(self.dirpath))
        formulas = self.flop_formulas
        plain["flop_formulas"] = (
            None if formulas is None else {str(k): _name_of(f) for k, f in formulas.items()}
        )
        peak = self.peak_flops_per_s
        plain["peak_flops_per_s"] = dict(peak) if isinstance(peak, Mapping) else peak
        plain["ignore_modules"] = None if self.ignore_modules is None else list(self.ignore_modules)
        plain["samples_fn"] = None if self.samples_fn is None else _name_of(self.samples_fn)
        plain["rules"] = (
            None
            if self.rules is None
            else {
                kind: dict(value) if isinstance(value, Mapping) else value
                for kind, value in self.rules.items()
            }
        )
        options = self.report_options  # Paddle's names are enums, perhaps
        plain["views"] = None if options.views is None else list(options.views)
        plain["sorted_by"], plain["time_unit"] = options.sorted_by, options.time_unit
        return plain


_OF_WINDOWS: Final = (
    *("active", "wait", "warmup", "repeat", "steps", "activities", "record_shapes", "with_stack"),
    *("profile_memory", "ranks", "stop_after_profile"),
)

DEFAULTS: Final = ProfileConfig()
FIELDS: Final = tuple(field.name for field in fields(ProfileConfig))


def parse_options(config: ProfileConfig, where: str) -> ReportOptions:
    """How the tables are chosen, sorted and cut, by our names.

    Args:
        config: with the names that the user has given.
        where: what the message begins with: where the values stand.

    Raises:
        ConfigError: when that cannot be meant.
    """
    return ReportOptions(
        views=_parse(where, "views", config.views, parse_views),
        sorted_by=_parse(where, "sorted_by", config.sorted_by, parse_sort_key),
        time_unit=_parse(where, "time_unit", config.time_unit, parse_time_unit),
        thread_sep=config.thread_sep,
        op_detail=config.op_detail,
        row_limit=config.row_limit,
        module_depth=config.module_depth,
        top_modules=config.top_modules,
    )


def _parse(where: str, name: str, value: object, parse: Callable[[object], T]) -> T | None:
    try:
        return None if value is None else parse(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {name}: {error}") from None


def _name_of(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
