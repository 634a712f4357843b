"""Check the configuration's values before training starts."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.config.options import (
    ALL_RANKS,
    DEFAULTS,
    FIELDS,
    GROUP_OF,
    GROUPS,
    OF_WINDOWS,
    WHERE,
    Bounds,
    InspectOptions,
    ProfileConfig,
    ReportOptions,
    parse_options,
)
from lightning_modelprof.errors import ConfigError, did_you_mean, quoted
from lightning_modelprof.report.rules.all_rules import configure_rules

ACTIVITIES: Final = ("cpu", "cuda", "xpu")
_ACTIVITY_NAMES: Final = ", ".join(ACTIVITIES)
_OTHER_NAMES: Final = {"gpu": "cuda"}
"""Map common names to activities."""

DTYPES: Final = ("float64", "float32", "bfloat16", "float16", "float8", "int8", "complex64", "complex128")
"""Dtypes that a peak can be given for, in torch's names; float8 stands for all 8-bit formats."""

_MIN_PEAK: Final = 1e9
"""A smaller peak lacks its exponent: even one core is faster."""

_MAX_INT: Final = 2**63 - 1
"""Larger integers don't fit into 64 bits."""

_MAX_UNIT: Final = 50
"""Characters of a unit, which follows every rate."""

ENVIRONMENT: Final = "environment variable"
"""Start of messages about arguments from the environment."""

RUN_COMMAND: Final = "run"
"""Start of messages about arguments of the ``run`` command."""

_IN_OTHER_PROFILERS: Final = {
    "profile_step": "Instead of DeepSpeed's profile_step=n, use steps=(n, n + 1).",
    "output_file": "Use dirpath to choose where files go.",
    "schedule": "Instead of torch.profiler's schedule, use wait, warmup, active, repeat and skip_first.",
    "scheduler": "Instead of Paddle's scheduler=(start, end), use steps=(start, end).",
    "on_trace_ready": "Use dirpath to choose where traces are saved.",
    "with_flops": "Use flops=True to count FLOPs on a real step.",
    "with_modules": "Use flops=True to time modules.",
    "targets": "Instead of Paddle's targets, use activities.",
    "filename": "Use dirpath to choose where files go.",
    "sort_by_key": "Instead of PyTorchProfiler's sort_by_key, use report={'sorted_by': ...}.",
    "group_by_input_shapes": "Use record_shapes=True to group operators by input shapes.",
}
"""Map other profilers' arguments to advice."""


def make_config(arguments: Mapping[str, Any], where: str = WHERE) -> ProfileConfig:
    """Build the configuration from arguments.

    Args:
        arguments: argument values; a group is one of ours, a mapping of its values, or ``None``.
        where: source of the values, which starts a message.

    Raises:
        ConfigError: when an argument is unknown or invalid.
    """
    check_names(arguments, where)
    values = dict(arguments)
    for name, kind in GROUPS.items():
        value = values.get(name)
        if isinstance(value, kind):
            continue
        if value is not None and not isinstance(value, Mapping):
            raise _refusal(
                where,
                name,
                f"{kind.__name__}(...) or a mapping of its values",
                value,
                f"Leave it out for the defaults, or see help(lightning_modelprof.{kind.__name__}).",
            )
        check_names(value or {}, where, name)
        values[name] = kind(**(value or {}))
    config = ProfileConfig(**values)
    check_config(config, where)
    return config.with_clock_alone() if config.timer_only else config


def check_names(names: Iterable[Any], where: str, group: str = "") -> None:
    """Refuse unknown argument names, suggesting the nearest one or the right group.

    Args:
        names: of arguments; if it's a mapping, messages quote the values.
        where: start of a message.
        group: the group they belong to; by default they're top-level arguments.

    Raises:
        ConfigError: on the first unknown name.
    """
    known = [name for name, its in GROUP_OF.items() if its == group] if group else FIELDS
    kind = GROUPS[group].__name__ if group else WHERE
    inside = f"{group}: " if group else ""
    for name in names:
        if name in known:
            continue
        place = GROUP_OF.get(name) if isinstance(name, str) else None
        if place is not None or name in FIELDS:
            value = names[name] if isinstance(names, Mapping) else ...
            belongs = "a top-level argument" if place is None else f"in the group {place}"
            raise ConfigError(
                f"{where}: {inside}{name} is {belongs}. Write {_written(where, place, name, value)}."
            )
        elsewhere = _IN_OTHER_PROFILERS.get(name) if isinstance(name, str) else None
        near = did_you_mean(name, known) or did_you_mean(name, (*FIELDS, *GROUP_OF))
        hint = near if elsewhere is None else f" {elsewhere}"
        raise ConfigError(
            f"{where}: {inside}unknown argument {quoted(name)}.{hint}"
            f" See help(lightning_modelprof.{kind}) for all arguments."
        )


def _written(where: str, group: str | None, name: str, value: Any) -> str:
    """Write an argument in its source's notation: Python, the run command, the environment or YAML."""
    if where == WHERE or where.endswith("(...)"):
        return f"{name}={quoted(value)}" if group is None else f"{group}={{{name!r}: {quoted(value)}}}"
    given = quoted(list(value) if isinstance(value, tuple) else value)
    given = {"True": "true", "False": "false", "None": "null"}.get(given, given)
    flat = name if group is None else f"{group}.{name}"
    if where == RUN_COMMAND:
        return f"--{flat} {given}"
    if where.startswith(ENVIRONMENT):
        return f"{flat}={given}"
    return f"{name}: {given}" if group is None else f"{group}: {{{name}: {given}}}"


def check_config(config: ProfileConfig, where: str = WHERE) -> None:
    """Refuse invalid values.

    Args:
        where: source of the values, which starts a message.

    Raises:
        ConfigError: with the argument, what was expected, what was found and what to do.
    """
    _check_types(config, where)
    for name in GROUPS:
        _check_types(getattr(config, name), where, f"{name}: ")
    _check_steps(config, where)
    _check_activities(config, where)
    if config.samples_fn is not None and not callable(config.samples_fn):
        raise _refusal(
            where, "samples_fn", "a function that takes a batch and returns its size", config.samples_fn
        )
    if not isinstance(config.unit, str) or not 0 < len(config.unit) <= _MAX_UNIT:
        raise _refusal(where, "unit", "the name of what samples_fn counts, such as 'tokens'", config.unit)
    _check_dirpath(config, where)
    _check_inspect(config.inspect, where)
    _check_report(config.report, where)
    _check_ranks(config.bounds, where)
    _check_bounds(config.bounds, where)
    _check_rules(config, where)
    if config.timer_only:
        _check_timer_only(config, where)
    if config.stop_after_profile:
        _check_stop(config, where)


def _check_types(values: Any, where: str, group: str = "") -> None:
    """Check the fields whose type fully describes the valid values."""
    for field in fields(values):
        value, (kind, _, is_optional) = getattr(values, field.name), str(field.type).partition(" | ")
        if is_optional not in {"", "None"} or (is_optional and value is None):
            continue
        name, or_none = f"{group}{field.name}", ", or None" if is_optional else ""
        if kind == "bool" and not isinstance(value, bool):
            raise _refusal(where, name, f"true, false{or_none}" if or_none else "true or false", value)
        least = field.metadata.get("least", 0)
        if kind == "int" and not _is_int(value, least):
            limit = f" and at most {_MAX_INT:,}" if type(value) is int and value > least else ""
            expected = f"an integer of at least {least}{limit}{or_none}"
            hint = field.metadata.get("hint", "")
            raise _refusal(where, name, expected, value, hint and f"The default is {field.default}; {hint}")


def _check_report(report: ReportOptions, where: str) -> None:
    terminal: Any = report.terminal
    if not isinstance(terminal, bool) and not (isinstance(terminal, str) and terminal == "full"):
        raise _refusal(
            where,
            "report: terminal",
            "true, false or 'full'",
            report.terminal,
            "true prints at most 20 lines, 'full' prints all tables, false prints nothing.",
        )
    parse_options(report, where)


def _check_steps(config: ProfileConfig, where: str) -> None:
    if config.steps is None:
        return
    steps: Any = config.steps
    is_pair = isinstance(steps, list | tuple) and len(steps) == 2
    if not is_pair or not all(type(value) is int and abs(value) <= _MAX_INT for value in steps):
        raise _refusal(
            where,
            "steps",
            "two integers (start, end)",
            steps,
            "The end is excluded: (3, 14) records steps 3 to 13.",
        )
    start, end = steps
    if start < 0 or end <= start:
        raise _refusal(
            where,
            "steps",
            "(start, end) with 0 <= start < end",
            steps,
            "The end is excluded: (3, 14) records steps 3 to 13.",
        )
    for name in ("active", "wait", "warmup", "repeat"):
        default, value = getattr(DEFAULTS, name), getattr(config, name)
        if value != default:
            raise ConfigError(
                f"{where}: expected steps or {name}, got both: steps={tuple(steps)} and {name}={value}."
                " Remove one of them."
            )


def _check_activities(config: ProfileConfig, where: str) -> None:
    if config.activities is None:
        return
    if isinstance(config.activities, str) or not isinstance(config.activities, Collection):
        raise _refusal(
            where, "activities", f"a list of {_ACTIVITY_NAMES}, or None for all", config.activities
        )
    for activity in config.activities:
        if activity not in ACTIVITIES:
            name = activity.lower() if isinstance(activity, str) else quoted(activity)
            raise ConfigError(
                f"{where}: activities: unknown activity {quoted(activity)}."
                f"{did_you_mean(_OTHER_NAMES.get(name, name), ACTIVITIES)}"
                f" Expected a list of {_ACTIVITY_NAMES}, or None for all the machine has."
            )
    if not list(config.activities) and config.schedule.active:
        raise ConfigError(
            f"{where}: activities: expected at least one activity for a window of {config.schedule.active}"
            " steps, got []. Set activities=['cpu'], None for all, or active=0 to record no window."
        )


def _check_ranks(bounds: Bounds, where: str) -> None:
    ranks: Any = bounds.ranks
    if isinstance(ranks, str) and ranks == ALL_RANKS:
        return
    is_list = isinstance(ranks, Collection) and not isinstance(ranks, str)
    if not is_list or not list(ranks) or not all(_is_int(rank, 0) for rank in ranks):
        raise _refusal(
            where,
            "bounds: ranks",
            f"a list of ranks, starting at 0, or {ALL_RANKS!r}",
            ranks,
            "Set [0] to record windows on the first rank only, or active=0 to record none.",
        )


def _check_bounds(bounds: Bounds, where: str) -> None:
    limit: Any = bounds.max_trace_mb
    if limit is not None and (not _is_finite_number(limit) or limit <= 0):
        raise _refusal(
            where,
            "bounds: max_trace_mb",
            "a size above 0 in MB, or None",
            limit,
            f"The default is {DEFAULTS.bounds.max_trace_mb}; None sets no limit, active=0 records no window.",
        )
    overhead: Any = bounds.max_overhead
    if overhead is not None and (not _is_finite_number(overhead) or not 0 < overhead < 1):
        raise _refusal(
            where,
            "bounds: max_overhead",
            "a share of time between 0 and 1, or None",
            overhead,
            "0.01 is 1%; None sets no limit, active=0 records no window.",
        )


def _check_inspect(options: InspectOptions, where: str) -> None:
    formulas: Any = options.flop_formulas
    if formulas is not None and not (
        isinstance(formulas, Mapping) and all(callable(formula) for formula in formulas.values())
    ):
        raise _refusal(
            where,
            "inspect: flop_formulas",
            "a mapping of operators to functions",
            formulas,
            "An example is {torch.ops.mylib.mm: lambda a, b, *, out_val: 2 * a.numel() * b.shape[-1]}.",
        )
    peak: Any = options.peak_flops_per_s
    for value in peak.values() if isinstance(peak, Mapping) else () if peak is None else (peak,):
        if not _is_finite_number(value) or value < _MIN_PEAK:
            raise _refusal(
                where,
                "inspect: peak_flops_per_s",
                "FLOP/s of at least 1e9, as a number or by dtype",
                peak,
                "989.4e12 is 989.4 TFLOP/s; {'bfloat16': 989.4e12} is for one dtype.",
            )
    for dtype in peak if isinstance(peak, Mapping) else ():
        if dtype not in DTYPES:
            raise ConfigError(
                f"{where}: inspect: peak_flops_per_s: unknown dtype {quoted(dtype)}."
                f"{did_you_mean(dtype, DTYPES)}"
                f" Expected one of {', '.join(DTYPES)}."
            )
    ignored: Any = options.ignore_modules
    if ignored is not None and (
        isinstance(ignored, str)
        or not isinstance(ignored, Collection)
        or not all(isinstance(name, str) for name in ignored)
    ):
        raise _refusal(
            where,
            "inspect: ignore_modules",
            "a list of class names or module paths",
            ignored,
            "An example is ['Dropout', 'model.head'].",
        )


def _check_dirpath(config: ProfileConfig, where: str) -> None:
    path = config.dirpath
    if path is None or (isinstance(path, str | Path) and str(path).strip() and _is_valid_path(path)):
        return
    raise _refusal(
        where,
        "dirpath",
        "a path or None",
        path,
        "By default, files go to a modelprof directory next to the logger's files.",
    )


def _is_valid_path(path: str | Path) -> bool:
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def _check_rules(config: ProfileConfig, where: str) -> None:
    rules: Any = config.rules
    if rules is None or (
        isinstance(rules, Mapping) and all(isinstance(value, Mapping | bool) for value in rules.values())
    ):
        configure_rules(rules, f"{where}: rules")
        return
    raise _refusal(
        where,
        "rules",
        "a mapping of rules to their thresholds, or to false",
        rules,
        "An example is {'input_bound': {'warning': 0.1}, 'slow_logger': False}.",
    )


def _check_timer_only(config: ProfileConfig, where: str) -> None:
    asked = [name for name in OF_WINDOWS if getattr(config, name) not in (getattr(DEFAULTS, name), 0)]
    asked += ["flops"] if config.flops else []
    others = [_written(where, None, name, getattr(config, name)) for name in asked]
    others += [_written(where, "inspect", "fvcore", True)] if config.inspect.fvcore else []
    if others:
        clock = _written(where, None, "timer_only", True)
        raise ConfigError(f"{where}: expected {clock} or {others[0]}, got both; remove one of them.")


def _check_stop(config: ProfileConfig, where: str) -> None:
    schedule = config.schedule
    if schedule.active == 0:
        raise ConfigError(
            f"{where}: stop_after_profile=True needs a window, got active=0."
            " Set active to the number of steps to record, or stop_after_profile=False."
        )
    if schedule.repeat == 0:
        raise ConfigError(
            f"{where}: stop_after_profile=True needs a last window, got repeat=0, which opens windows until"
            " training ends. Set repeat to the number of windows."
        )


def _is_int(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= _MAX_INT


def _is_finite_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_INT


def _refusal(where: str, name: str, expected: str, got: Any, hint: str = "") -> ConfigError:
    group, _, own = name.rpartition(": ")
    values = getattr(DEFAULTS, group) if group else DEFAULTS
    action = hint or f"The default is {getattr(values, own)!r}."
    return ConfigError(f"{where}: {name}: expected {expected}, got {quoted(got)}. {action}")
