"""What is refused before training starts because of the configuration's values alone."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.config import ALL_RANKS, DEFAULTS, WHERE, ProfileConfig, parse_options
from lightning_modelprof.errors import ConfigError

ACTIVITIES: Final = ("cpu", "cuda", "xpu")
_ACTIVITY_NAMES: Final = ", ".join(ACTIVITIES)
_OTHER_NAMES: Final = {"gpu": "cuda"}
"""Activity by what people call it."""

DTYPES: Final = ("float64", "float32", "bfloat16", "float16", "float8", "int8", "complex64", "complex128")
"""What peaks can be given for, in torch's names; float8 stands for all formats of 8 bits."""

_MIN_PEAK: Final = 1e9
"""Whoever gives less has forgotten the exponent: a single core does more."""

_BOOLEANS: Final = tuple(field.name for field in fields(ProfileConfig) if isinstance(field.default, bool))


def check_config(config: ProfileConfig, where: str = WHERE) -> None:
    """Refuse what cannot be meant.

    Args:
        config: what is wanted.
        where: what the message begins with: where the values stand.

    Raises:
        ConfigError: with the argument, what was expected, what came and what to do.
    """
    for name, least in (("active", 0), ("wait", 0), ("warmup", 0), ("repeat", 0), ("skip_first", 0)):
        _check_int(where, name, getattr(config, name), least)
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
    if not isinstance(config.unit, str) or not config.unit:
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
            name = str(activity).lower()
            raise ConfigError(
                f"{where}: activities: unknown activity {activity!r}."
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
    if not is_list or not list(ranks) or not all(type(rank) is int and rank >= 0 for rank in ranks):
        raise _refusal(
            where,
            "ranks",
            f"a list of ranks, from 0, or {ALL_RANKS!r}",
            ranks,
            "Give [0] to profile the first rank alone, or active=0 for timing only.",
        )


def _check_bounds(config: ProfileConfig, where: str) -> None:
    limit: Any = config.max_trace_mb
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
    overhead: Any = config.max_overhead
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
    keep: Any = config.keep_windows
    if keep is not None and (type(keep) is not int or keep < 1):
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
    if path is None or isinstance(path, Path) or (isinstance(path, str) and path.strip()):
        return
    raise _refusal(
        where,
        "dirpath",
        "a path or None",
        path,
        "Leave it out, or give None, for the folder modelprof beside the logger's files.",
    )


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


def nearest(name: str, known: Iterable[str]) -> str:
    """A question that names the nearest of the known names, ``""`` if none is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def _check_int(where: str, name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        hint = ""
        if name == "active" and type(value) is int:
            hint = "active=0 means timing only."
        raise _refusal(where, name, f"an integer of at least {least}", value, hint)


def _refusal(where: str, name: str, expected: str, got: Any, hint: str = "") -> ConfigError:
    action = hint or f"The default is {getattr(DEFAULTS, name)!r}."
    return ConfigError(f"{where}: {name}: expected {expected}, got {got!r}. {action}")
