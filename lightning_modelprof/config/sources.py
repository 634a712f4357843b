"""Read the configuration from a YAML file, the environment or named arguments."""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import yaml

from lightning_modelprof.config.checks import ENVIRONMENT, check_names, make_config
from lightning_modelprof.config.options import FIELDS, GROUPS, SWITCH, WHERE
from lightning_modelprof.errors import ConfigError, as_path, quoted, remedy

_MAX_BYTES: Final = 2**16
_MAX_VALUES: Final = 10_000
"""Limit for a YAML file; there are some forty arguments in total."""

_SWITCHED_OFF: Final = ("0", "false", "off", "no")
_SWITCHED_ON: Final = ("1", "true", "on", "yes", "")

P = ParamSpec("P")
R = TypeVar("R")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read and check the callback's arguments in a YAML file.

    Args:
        path: file with a single mapping of arguments to values.

    Raises:
        ConfigError: when the file can't be read, isn't a mapping, or has an unknown, duplicate or invalid
            argument.
    """
    file = as_path(path, ConfigError)
    where = str(file)
    try:
        raw = _parse_yaml(_read_small_file(file), where)
    except OSError as error:
        raise ConfigError(f"can't read {where}: {error.strerror or error}. {remedy(error)}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: expected YAML, got: {' '.join(str(error).split())}") from error
    return _checked_arguments(raw, where)


def _checked_arguments(raw: Any, where: str) -> dict[str, Any]:
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f"{where}: expected a mapping of arguments, such as 'active: 10', got {type(raw).__name__}."
        )
    _check_no_program(raw, where)
    check_names(raw, where)
    arguments = {
        name: dict(value) if name in GROUPS and isinstance(value, Mapping) else value
        for name, value in raw.items()
    }
    given = arguments.get("inspect")
    inspected = given if isinstance(given, dict) else {}
    for name, values in (("samples_fn", arguments), ("flop_formulas", inspected)):
        if values.get(name) is not None:
            raise ConfigError(
                f"{where}: {name}: expected null, got {quoted(values[name])}. A function can only be set from"
                f" Python. Remove it here, or use {WHERE}(...) instead."
            )
    peak = inspected.get("peak_flops_per_s")
    if isinstance(peak, Mapping):
        inspected["peak_flops_per_s"] = {dtype: _number(value) for dtype, value in peak.items()}
    elif peak is not None:
        inspected["peak_flops_per_s"] = _number(peak)
    if isinstance(arguments.get("steps"), list):
        arguments["steps"] = tuple(arguments["steps"])
    make_config(arguments, where)
    return arguments


def _check_no_program(raw: Mapping[Any, Any], where: str) -> None:
    """Refuse a LightningCLI file, which configures a whole program, and arguments nested under another name.

    Raises:
        ConfigError: with what to do with the file.
    """
    if not {"trainer", "model", "data", "fit", "callbacks", "class_path", "init_args"}.intersection(raw):
        for name, value in raw.items():
            if name not in FIELDS and isinstance(value, Mapping) and not value.keys().isdisjoint(FIELDS):
                raise ConfigError(
                    f"{where}: expected arguments at the top level, such as 'active: 10', got them below"
                    f" {quoted(name)}. Remove that line and the indentation."
                )
        return
    raise ConfigError(
        f"{where}: expected only {WHERE} arguments, such as 'active: 10', got a LightningCLI file, which"
        " configures a whole program. Pass it to that program with --config, or copy the callback's init_args"
        " to a separate file."
    )


def _read_small_file(file: Path) -> str:
    if file.exists() and not file.is_file() and not file.is_dir():  # opening a directory gives a better error
        raise ConfigError(f"{file}: expected a YAML file, got a device, pipe or socket. Check the path.")
    with file.open("rb") as opened:
        data = opened.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ConfigError(
            f"{file}: expected {WHERE} arguments in YAML, got a file larger than {_MAX_BYTES:,} bytes. Check"
            " the path."
        )
    return data.decode()


def _parse_yaml(text: str, where: str) -> Any:
    """Parse YAML after checking that it's small, as aliases can expand to millions of values."""
    document = yaml.compose(text, Loader=yaml.SafeLoader)
    if document is not None and _num_values(document, {}) > _MAX_VALUES:
        raise ConfigError(
            f"{where}: aliases (*name) expand to more than {_MAX_VALUES:,} values, or refer to themselves."
            " Write the values out instead."
        )
    _check_given_once(document, where)
    return yaml.safe_load(text)


def _num_values(node: yaml.Node, known: dict[yaml.Node, float]) -> float:
    """Count the values in a node, with each alias expanded.

    Args:
        known: counts of visited nodes, extended here.
    """
    if node not in known:
        known[node] = math.inf  # for a node that contains itself
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        pairs = isinstance(node, yaml.MappingNode)
        known[node] = 1 + sum(
            _num_values(one, known) for part in parts for one in (part if pairs else [part])
        )
    return known[node]


def _number(value: Any) -> Any:
    """Convert text such as 989.4e12, which YAML doesn't read as a number without an exponent sign."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def arguments_in_environment() -> dict[str, Any] | None:
    """Return the callback arguments in the environment; ``None`` if it requests no callback.

    ``LIGHTNING_MODELPROF`` is a yes or no, arguments such as ``active=10,dirpath=out``, or the path of a YAML
    file.

    Raises:
        ConfigError: when it is none of these, or an argument is invalid.
    """
    return _asked_for(os.environ.get(SWITCH, "").strip())


def _asked_for(value: str) -> dict[str, Any] | None:
    where = f"{ENVIRONMENT} {SWITCH}"
    if value.lower() in _SWITCHED_OFF or not value:
        return None
    if value.lower() in _SWITCHED_ON:
        return {}
    if value.lower().endswith((".yaml", ".yml")):
        return read_yaml(value)
    if "=" not in value:
        off, on = ", ".join(_SWITCHED_OFF), ", ".join(filter(None, _SWITCHED_ON))
        raise ConfigError(
            f"{where}: expected on ({on}), off ({off}), arguments such as active=10,dirpath=out, or the path"
            f" of a YAML file, got {quoted(value)}. Correct or unset it."
        )
    return parse_asked_for(value, where)


def parse_asked_for(value: str, where: str) -> dict[str, Any]:
    """Parse and check arguments in a text such as ``active=10,report.terminal=full``.

    Args:
        value: comma-separated names with values in YAML's notation.
        where: start of a message.

    Raises:
        ConfigError: when they're invalid.
    """
    # Commas also separate list items, so an argument starts with a name and an equals sign.
    pairs = [part.split("=", 1) for part in re.split(r",\s*(?=[\w.]+\s*=)", value)]
    try:
        text = "\n".join(f"{name.strip()}: {given}" for name, given in pairs)
        return _checked_arguments(_nested(_parse_yaml(text, where)), where)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}: expected arguments such as active=10,dirpath=out, got {quoted(value)}. Correct them,"
            " or give the path of a YAML file."
        ) from error


def _nested(values: Any) -> Any:
    """Move group values such as ``report.terminal`` into mappings of their groups."""
    if not isinstance(values, Mapping):
        return values
    nested: dict[Any, Any] = {}
    for name, value in values.items():
        group, dot, own = name.partition(".") if isinstance(name, str) else (name, "", "")
        its = nested.setdefault(group, {}) if dot else None
        if isinstance(its, dict):
            its[own] = value
        else:
            nested[name] = value
    return nested


def is_switched_off() -> bool:
    """Whether the environment switches measuring off.

    Raises:
        ConfigError: like :func:`arguments_in_environment`.
    """
    value = os.environ.get(SWITCH, "").strip()
    return bool(value) and _says_no(value)


@functools.lru_cache(maxsize=1)
def _says_no(value: str) -> bool:
    """Cached, so that a file named by the variable isn't read before every loop."""
    return _asked_for(value) is None


def explain_unknown_arguments(init: Callable[P, R]) -> Callable[P, R]:
    """Make an ``__init__`` refuse an unknown argument with a ConfigError that names the nearest one.

    OmegaConf lists and dicts, which Hydra passes, become Python's own.
    """
    known = set(inspect.signature(init).parameters)

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > 1:  # the first is self
            raise ConfigError(
                f"{WHERE}(...): expected keyword arguments, such as active=10, got the positional argument"
                f" {quoted(args[1])}."
            )
        check_names({name: value for name, value in kwargs.items() if name not in known}, f"{WHERE}(...)")
        for name, value in kwargs.items():
            kwargs[name] = _plain(value)
        return init(*args, **kwargs)

    return checked


def _plain(value: Any) -> Any:
    """Convert OmegaConf's lists and dicts to Python's own."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is None or not omegaconf.OmegaConf.is_config(value):
        return value
    return omegaconf.OmegaConf.to_container(value, resolve=True)


def _check_given_once(document: yaml.Node | None, where: str) -> None:
    """Refuse duplicate keys at any depth; YAML silently takes the last one."""
    if isinstance(document, yaml.SequenceNode):
        for item in document.value:
            _check_given_once(item, where)
    if not isinstance(document, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in document.value:
        _check_given_once(value, where)
        if isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigError(
                    f"{where}: expected each argument once, got {quoted(key.value)} on line"
                    f" {lines[key.value]} and again on line {line}. Remove one of them."
                )
            lines[key.value] = line
