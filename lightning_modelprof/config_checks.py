"""What is refused before training starts because of the configuration's values alone."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.config import ALL_RANKS, DEFAULTS, WHERE, ProfileConfig, parse_options
from lightning_modelprof.errors import ConfigError, nearest, quoted

ACTIVITIES: Final = ("cpu", "cuda", "xpu")
_ACTIVITY_NAMES: Final = ", ".join(ACTIVITIES)
_OTHER_NAMES: Final = {"gpu": "cuda"}
"""Activity by what people call it."""

DTYPES: Final = ("float64", "float32", "bfloat16", "float16", "float8", "int8", "complex64", "complex128")
"""What peaks can be given for, in torch's names; float8 stands for all formats of 8 bits."""

_MIN_PEAK: Final = 1e9
"""Whoever gives less has forgotten the exponent: a single core does more."""

_MAX_INT: Final = 2**63 - 1
"""Larger integers do not fit into 64 bits."""

_MAX_UNIT: Final = 50
"""Characters of a unit; it stands behind every rate."""

_BOOLEANS: Final = tuple(field.name for field in fields(ProfileConfig) if isinstance(field.default, bool))


def check_config(config: ProfileConfig, where: str = WHERE) -> None:
    """Refuse what cannot be meant.

    Args:
        config: what is wanted.
        where: what the message begins with: where the values stand.

    Raises:
        ConfigError: with the argument, what was expected, what came and what to do.
    """
    if config.active is not None:
        _check_int(where, "active", config.active, 0)
    for name in ("wait", "warmup", "repeat", "skip_first"):
        _check_int(where, name, getattr(config, name), 0)
    if config.flops is not None and not isinstance(config.flops, bool):
        raise _refusal(where, "flops", "true or false", config.flops)
    if config.log_every_n_steps is not None:
        _check_int(where, "log_every_n_steps", config.log_every_n_steps, 0)
    for name in _BOOLEANS:
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise _refusal(where, name, "true or false", value)
    _check_steps(config, where)
    _check_activities(config, where)
    _check_ranks(config, where)
    _check_bounds(config, where)
    if config.samples_fn is not None and not callable(config.samples_fn):
        raise _refusal(
            where, "samples_fn", "a function that takes a batch and returns its size", config.samples_fn
        )
    if not isinstance(config.unit, str) or not 0 < len(config.unit) <= _MAX_UNIT:
        raise _refusal(where, "unit", "the name of what samples_fn counts, such as 'tokens'", config.unit)
    _check_flops(config, where)
    _check_dirpath(config, where)
    _check_rules(config, where)
    _check_int(where, "row_limit", config.row_limit, 1)
    _check_int(where, "top_modules", config.top_modules, 1)
    if config.module_depth is not None:
        _check_int(where, "module_depth", config.module_depth, 0)
    parse_options(config, where)
    if config.stop_after_profile:
        _check_stop(config, where)


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
        default, value = getattr(DEFAULTS, name), getattr(config, name)
        if value != default:
            raise ConfigError(
                f"{where}: steps={tuple(steps)} and {name}={value} both say which steps to record."
                f" Expected one of them. Leave out {name}, or leave out steps."
            )


def _check_activities(config: ProfileConfig, where: str) -> None:
    if config.activities is None:
        return
    if isinstance(config.activities, str) or not isinstance(config.activities, Collection):
        raise _refusal(
            where, "activities", f"a list out of {_ACTIVITY_NAMES}, or None for all", config.activities
        )
    for activity in config.activities:
        if activity not in ACTIVITIES:
            name = activity.lower() if isinstance(activity, str) else quoted(activity)
            raise ConfigError(
                f"{where}: activities: unknown activity {quoted(activity)}."
                f"{nearest(_OTHER_NAMES.get(name, name), ACTIVITIES)}"
                f" Expected a list out of {_ACTIVITY_NAMES}, or None for all that the machine has."
            )
    if not list(config.activities) and config.schedule.active:
        raise ConfigError(
            f"{where}: activities=[] leaves the window of {config.schedule.active} active steps nothing to"
            " record. Expected at least one activity. Give activities=['cpu'] or None for all,"
            " or active=0 for timing only."
        )


def _check_ranks(config: ProfileConfig, where: str) -> None:
    ranks: Any = config.ranks
    if isinstance(ranks, str) and ranks == ALL_RANKS:
        return
    is_list = isinstance(ranks, Collection) and not isinstance(ranks, str)
    if not is_list or not list(ranks) or not all(_is_int(rank, 0) for rank in ranks):
        raise _refusal(
            where,
            "ranks",
            f"a list of ranks, from 0, or {ALL_RANKS!r}",
            ranks,
            "Give [0] to profile the first rank alone, or active=0 for timing only.",
        )


def _check_bounds(config: ProfileConfig, where: str) -> None:
    limit: Any = config.max_trace_mb
    if limit is not None and (not _is_number(limit) or limit <= 0):
        raise _refusal(
            where,
            "max_trace_mb",
            "a size above 0 in MB, or None",
            limit,
            f"The default is {DEFAULTS.max_trace_mb}; None sets no limit, active=0 records nothing.",
        )
    overhead: Any = config.max_overhead
    if overhead is not None and (not _is_number(overhead) or not 0 < overhead < 1):
        raise _refusal(
            where,
            "max_overhead",
            "a share of the time between 0 and 1, or None",
            overhead,
            "Give 0.01 for one percent; None sets no limit, active=0 records nothing.",
        )
    keep: Any = config.keep_windows
    if keep is not None and not _is_int(keep, 1):
        raise _refusal(
            where,
            "keep_windows",
            "an integer of at least 1, or None",
            keep,
            f"The default is {DEFAULTS.keep_windows}; None keeps all traces, files=False saves none.",
        )


def _check_flops(config: ProfileConfig, where: str) -> None:
    formulas: Any = config.flop_formulas
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
    peak: Any = config.peak_flops_per_s
    for value in peak.values() if isinstance(peak, Mapping) else () if peak is None else (peak,):
        if not _is_number(value) or value < _MIN_PEAK:
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
                f"{where}: peak_flops_per_s: unknown dtype {quoted(dtype)}.{nearest(dtype, DTYPES)}"
                f" Expected FLOP/s by dtype, out of {', '.join(DTYPES)}."
            )
    ignored: Any = config.ignore_modules
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


def _check_dirpath(config: ProfileConfig, where: str) -> None:
    path = config.dirpath
    if path is None or (isinstance(path, str | Path) and str(path).strip() and _is_possible(path)):
        return
    raise _refusal(
        where,
        "dirpath",
        "a path or None",
        path,
        "Leave it out, or give None, for the folder modelprof beside the logger's files.",
    )


def _is_possible(path: str | Path) -> bool:
    """Whether a folder can be called that at all: not with a zero byte, nor with half a surrogate pair."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def _check_rules(config: ProfileConfig, where: str) -> None:
    """The shape alone: which rules there are is known to the report, which checks their names."""
    rules: Any = config.rules
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


def _check_stop(config: ProfileConfig, where: str) -> None:
    schedule = config.schedule
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


def _check_int(where: str, name: str, value: Any, least: int) -> None:
    if _is_int(value, least):
        return
    hint = "active=0 means timing only." if name == "active" and type(value) is int else ""
    limit = f" and at most {_MAX_INT:,}" if type(value) is int and value > least else ""
    raise _refusal(where, name, f"an integer of at least {least}{limit}", value, hint)


def _is_int(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= _MAX_INT


def _is_number(value: Any) -> bool:
    """Whether it is a number that can be saved; neither true and false nor infinity is one."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_INT


def _refusal(where: str, name: str, expected: str, got: Any, hint: str = "") -> ConfigError:
    action = hint or f"The default is {getattr(DEFAULTS, name)!r}."
    return ConfigError(f"{where}: {name}: expected {expected}, got {quoted(got)}. {action}")
