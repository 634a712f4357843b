"""The configuration: one frozen dataclass, checked before training starts, read from YAML strictly."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from lightning_modelprof.errors import ConfigError
from lightning_modelprof.measure.schedule import Schedule
from lightning_modelprof.report.options import (
    DEFAULT_OPTIONS,
    ReportOptions,
    parse_sort_key,
    parse_time_unit,
    parse_views,
)

Activity = Literal["cpu", "cuda", "xpu"]

ACTIVITIES: Final = ("cpu", "cuda", "xpu")
_ACTIVITY_NAMES: Final = ", ".join(ACTIVITIES)
_OTHER_NAMES: Final = {"gpu": "cuda"}
"""Activity by what people call it."""

DTYPES: Final = ("float64", "float32", "bfloat16", "float16", "float8", "int8", "complex64", "complex128")
"""What peaks can be given for, in torch's names; float8 stands for all formats of 8 bits."""

ALL_RANKS: Final = "all"

_MIN_PEAK: Final = 1e9
"""Whoever gives less has forgotten the exponent: a single core does more."""

WHERE: Final = "ModelProfCallback"


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Every behaviour of the callback; the meaning of each field is documented on ``ModelProfCallback``."""

    active: int = 10
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
    flops: bool = True
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
            active=self.active,
            repeat=self.repeat,
        )

    @property
    def report_options(self) -> ReportOptions:
        """How the tables are chosen, sorted and cut, by our names.

        Raises:
            ConfigError: when that cannot be meant.
        """
        return self._parse_options(WHERE)

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
        plain["dirpath"] = None if self.dirpath is None else str(self.dirpath)
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

    def check(self, where: str = WHERE) -> None:
        """Refuse what cannot be meant.

        Args:
            where: what the message begins with: where the values stand.

        Raises:
            ConfigError: with the argument, what was expected, what came and what to do.
        """
        for name, least in (("active", 0), ("wait", 0), ("warmup", 0), ("repeat", 0), ("skip_first", 0)):
            _check_int(where, name, getattr(self, name), least)
        if self.log_every_n_steps is not None:
            _check_int(where, "log_every_n_steps", self.log_every_n_steps, 0)
        for name in _BOOLEANS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise _refusal(where, name, "true or false", value)
        self._check_steps(where)
        self._check_activities(where)
        self._check_ranks(where)
        self._check_bounds(where)
        if self.samples_fn is not None and not callable(self.samples_fn):
            raise _refusal(
                where, "samples_fn", "a function that takes a batch and returns its size", self.samples_fn
            )
        if not isinstance(self.unit, str) or not self.unit:
            raise _refusal(where, "unit", "the name of what samples_fn counts, such as 'tokens'", self.unit)
        self._check_flops(where)
        self._check_dirpath(where)
        self._check_rules(where)
        _check_int(where, "row_limit", self.row_limit, 1)
        _check_int(where, "top_modules", self.top_modules, 1)
        if self.module_depth is not None:
            _check_int(where, "module_depth", self.module_depth, 0)
        self._parse_options(where)
        if self.stop_after_profile:
            self._check_stop(where)

    def _check_steps(self, where: str) -> None:
        if self.steps is None:
            return
        steps: Any = self.steps
        is_pair = isinstance(steps, list | tuple) and len(steps) == 2
        if not is_pair or not all(type(value) is int for value in steps):
            raise _refusal(
                where,
                "steps",
                "two integers (start, end)",
                steps,
                "Give the first step and the one after the last: (3, 14) records steps 3 to 13.",
            )
        start, end = steps
        if start < 0 or end <= start:
            raise _refusal(
                where,
                "steps",
                "0 <= start < end, recording steps start to end-1",
                steps,
                "Swap or raise them.",
            )
        for name in ("active", "wait", "warmup", "repeat"):
            default, value = getattr(DEFAULTS, name), getattr(self, name)
            if value != default:
                raise ConfigError(
                    f"{where}: steps={tuple(steps)} and {name}={value} both say which steps to record."
                    f" Expected one of them. Leave out {name}, or leave out steps."
                )

    def _check_activities(self, where: str) -> None:
        if self.activities is None:
            return
        if isinstance(self.activities, str) or not isinstance(self.activities, Collection):
            raise _refusal(
                where, "activities", f"a list out of {_ACTIVITY_NAMES}, or None for all", self.activities
            )
        for activity in self.activities:
            if activity not in ACTIVITIES:
                name = str(activity).lower()
                raise ConfigError(
                    f"{where}: activities: unknown activity {activity!r}."
                    f"{nearest(_OTHER_NAMES.get(name, name), ACTIVITIES)}"
                    f" Expected a list out of {_ACTIVITY_NAMES}, or None for all that the machine has."
                )
        if not list(self.activities) and self.schedule.active:
            raise ConfigError(
                f"{where}: activities=[] leaves the window of {self.schedule.active} active steps nothing to"
                " record. Expected at least one activity. Give activities=['cpu'] or None for all,"
                " or active=0 for timing only."
            )

    def _check_ranks(self, where: str) -> None:
        ranks: Any = self.ranks
        if ranks == ALL_RANKS:
            return
        is_list = isinstance(ranks, Collection) and not isinstance(ranks, str)
        if not is_list or not list(ranks) or not all(type(rank) is int and rank >= 0 for rank in ranks):
            raise _refusal(
                where,
                "ranks",
                f"a list of ranks, from 0, or {ALL_RANKS!r}",
                ranks,
                "Give [0] to profile the first rank alone, or active=0 for timing only.",
            )

    def _check_bounds(self, where: str) -> None:
        limit: Any = self.max_trace_mb
        if limit is not None:
            is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
            if not is_number or not 0 < limit < math.inf:
                raise _refusal(
                    where,
                    "max_trace_mb",
                    "a size above 0 in MB, or None",
                    limit,
                    f"The default is {DEFAULTS.max_trace_mb}; None sets no limit, active=0 records nothing.",
                )
        overhead: Any = self.max_overhead
        if overhead is not None:
            is_number = isinstance(overhead, int | float) and not isinstance(overhead, bool)
            if not is_number or not 0 < overhead < 1:
                raise _refusal(
                    where,
                    "max_overhead",
                    "a share of the time between 0 and 1, or None",
                    overhead,
                    "Give 0.01 for one percent; None sets no limit, active=0 records nothing.",
                )
        keep: Any = self.keep_windows
        if keep is not None and (type(keep) is not int or keep < 1):
            raise _refusal(
                where,
                "keep_windows",
                "an integer of at least 1, or None",
                keep,
                f"The default is {DEFAULTS.keep_windows}; None keeps all traces, files=False saves none.",
            )

    def _check_flops(self, where: str) -> None:
        formulas: Any = self.flop_formulas
        if formulas is not None and not (
            isinstance(formulas, Mapping) and all(callable(formula) for formula in formulas.values())
        ):
            raise _refusal(
                where,
                "flop_formulas",
                "a mapping of operators to functions",
                formulas,
                "For example {torch.ops.mylib.mm: lambda a, b, *, out_val: 2 * a.numel() * b.shape[-1]}.",
            )
        peak: Any = self.peak_flops_per_s
        for value in peak.values() if isinstance(peak, Mapping) else () if peak is None else (peak,):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not _MIN_PEAK <= value < math.inf:
                raise _refusal(
                    where,
                    "peak_flops_per_s",
                    "FLOP/s of at least 1e9, or such by dtype",
                    peak,
                    "For example 989.4e12 for 989.4 TFLOP/s, or {'bfloat16': 989.4e12}.",
                )
        for dtype in peak if isinstance(peak, Mapping) else ():
            if dtype not in DTYPES:
                raise ConfigError(
                    f"{where}: peak_flops_per_s: unknown dtype {dtype!r}.{nearest(str(dtype), DTYPES)}"
                    f" Expected FLOP/s by dtype, out of {', '.join(DTYPES)}."
                )
        ignored: Any = self.ignore_modules
        if ignored is not None and (
            isinstance(ignored, str)
            or not isinstance(ignored, Collection)
            or not all(isinstance(name, str) for name in ignored)
        ):
            raise _refusal(
                where,
                "ignore_modules",
                "a list of names of classes or paths of modules",
                ignored,
                "For example ['Dropout', 'model.head'].",
            )

    def _check_dirpath(self, where: str) -> None:
        path = self.dirpath
        if path is None or isinstance(path, Path) or (isinstance(path, str) and path.strip()):
            return
        raise _refusal(
            where,
            "dirpath",
            "a path or None",
            path,
            "Leave it out, or give None, for the folder modelprof beside the logger's files.",
        )

    def _check_rules(self, where: str) -> None:
        """The shape alone: which rules there are is known to the report, which checks their names."""
        rules: Any = self.rules
        if rules is None or (
            isinstance(rules, Mapping) and all(isinstance(value, Mapping | bool) for value in rules.values())
        ):
            return
        raise _refusal(
            where,
            "rules",
            "a mapping of rules to their thresholds, or to false",
            rules,
            "For example {'input_bound': {'warning': 0.1}, 'slow_logger': False}.",
        )

    def _parse_options(self, where: str) -> ReportOptions:
        return ReportOptions(
            views=_parse(where, "views", self.views, parse_views),
            sorted_by=_parse(where, "sorted_by", self.sorted_by, parse_sort_key),
            time_unit=_parse(where, "time_unit", self.time_unit, parse_time_unit),
            thread_sep=self.thread_sep,
            op_detail=self.op_detail,
            row_limit=self.row_limit,
            module_depth=self.module_depth,
            top_modules=self.top_modules,
        )

    def _check_stop(self, where: str) -> None:
        schedule = self.schedule
        if schedule.active == 0:
            raise ConfigError(
                f"{where}: stop_after_profile=True needs a window to stop after, got active=0."
                " Set active to the number of steps to record, or stop_after_profile=False."
            )
        if schedule.repeat == 0:
            raise ConfigError(
                f"{where}: stop_after_profile=True needs a last window, got repeat=0 (windows until training"
                " ends). Set repeat to the number of windows."
            )


DEFAULTS: Final = ProfileConfig()
FIELDS: Final = tuple(field.name for field in fields(ProfileConfig))
_BOOLEANS: Final = tuple(field.name for field in fields(ProfileConfig) if isinstance(field.default, bool))


def _check_int(where: str, name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        hint = ""
        if name == "active" and type(value) is int:
            hint = "active=0 means timing only."
        raise _refusal(where, name, f"an integer of at least {least}", value, hint)


def _parse(where: str, name: str, value: object, parse: Callable[[object], T]) -> T | None:
    try:
        return None if value is None else parse(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {name}: {error}") from None


def _refusal(where: str, name: str, expected: str, got: Any, hint: str = "") -> ConfigError:
    action = hint or f"The default is {getattr(DEFAULTS, name)!r}."
    return ConfigError(f"{where}: {name}: expected {expected}, got {got!r}. {action}")


def nearest(name: str, known: Iterable[str]) -> str:
    """A question that names the nearest of the known names, ``""`` if none is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def _name_of(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
