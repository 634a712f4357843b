"""The configuration: one frozen dataclass, checked before training starts, read from YAML strictly."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, ParamSpec, TypeVar

import yaml

from lightning_modelprof.errors import ConfigError
from lightning_modelprof.measure.schedule import Schedule

Activity = Literal["cpu", "cuda", "xpu"]

ACTIVITIES: Final = ("cpu", "cuda", "xpu")
_ACTIVITY_NAMES: Final = ", ".join(ACTIVITIES)
WHERE: Final = "ModelProfCallback"

P = ParamSpec("P")
R = TypeVar("R")


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
    stop_after_profile: bool = False
    device_timing: bool = True
    log_every_n_steps: int | None = None
    progress_bar: bool = True
    samples_fn: Callable[[Any], int] | None = None
    unit: str = "samples"
    terminal: bool = True
    tensorboard: bool = True
    files: bool = True
    dirpath: str | Path | None = None

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

    def as_plain(self) -> dict[str, Any]:
        """Field → plain JSON value, for the archive."""
        # Not asdict: it would copy what samples_fn is bound to, a model perhaps.
        plain = {name: getattr(self, name) for name in _FIELDS}
        plain["steps"] = None if self.steps is None else list(self.steps)
        plain["activities"] = None if self.activities is None else list(self.activities)
        plain["dirpath"] = None if self.dirpath is None else str(self.dirpath)
        plain["samples_fn"] = None if self.samples_fn is None else _name_of(self.samples_fn)
        return plain

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ConfigError: with the argument, what was expected, what came and what to do.
        """
        for name, least in (("active", 0), ("wait", 0), ("warmup", 0), ("repeat", 0), ("skip_first", 0)):
            _check_int(name, getattr(self, name), least)
        if self.log_every_n_steps is not None:
            _check_int("log_every_n_steps", self.log_every_n_steps, 1)
        for name in _BOOLEANS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise _refusal(name, "true or false", value)
        self._check_steps()
        self._check_activities()
        if self.samples_fn is not None and not callable(self.samples_fn):
            raise _refusal(
                "samples_fn", "a function that takes a batch and returns its size", self.samples_fn
            )
        if not isinstance(self.unit, str) or not self.unit:
            raise _refusal("unit", "the name of what samples_fn counts, such as 'tokens'", self.unit)
        if self.dirpath is not None and not isinstance(self.dirpath, str | Path):
            raise _refusal("dirpath", "a path or None", self.dirpath)
        if self.stop_after_profile:
            self._check_stop()

    def _check_steps(self) -> None:
        if self.steps is None:
            return
        steps: Any = self.steps
        is_pair = isinstance(steps, list | tuple) and len(steps) == 2
        if not is_pair or not all(type(value) is int for value in steps):
            raise _refusal("steps", "two integers (start, end)", steps)
        start, end = steps
        if start < 0 or end <= start:
            raise _refusal(
                "steps", "0 <= start < end, recording steps start to end-1", steps, "Swap or raise them."
            )
        for name in ("active", "wait", "warmup", "repeat"):
            default, value = getattr(DEFAULTS, name), getattr(self, name)
            if value != default:
                raise ConfigError(
                    f"{WHERE}: steps={tuple(steps)} and {name}={value} both say which steps to record."
                    f" Expected one of them. Leave out {name}, or leave out steps."
                )

    def _check_activities(self) -> None:
        if self.activities is None:
            return
        if isinstance(self.activities, str) or not isinstance(self.activities, Collection):
            raise _refusal("activities", f"a list out of {_ACTIVITY_NAMES}, or None for all", self.activities)
        for activity in self.activities:
            if activity not in ACTIVITIES:
                raise ConfigError(
                    f"{WHERE}: activities: unknown activity {activity!r}."
                    f"{_nearest(str(activity), ACTIVITIES)}"
                    f" Expected a list out of {_ACTIVITY_NAMES}, or None for all that the machine has."
                )
        if not list(self.activities) and self.schedule.active:
            raise ConfigError(
                f"{WHERE}: activities=[] leaves the window of {self.schedule.active} active steps nothing to"
                " record. Expected at least one activity. Give activities=['cpu'] or None for all,"
                " or active=0 for timing only."
            )

    def _check_stop(self) -> None:
        schedule = self.schedule
        if schedule.active == 0:
            raise ConfigError(
                f"{WHERE}: stop_after_profile=True needs a window to stop after, got active=0."
                " Set active to the number of steps to record, or stop_after_profile=False."
            )
        if schedule.repeat == 0:
            raise ConfigError(
                f"{WHERE}: stop_after_profile=True needs a last window, got repeat=0 (windows until training"
                " ends). Set repeat to the number of windows."
            )


DEFAULTS: Final = ProfileConfig()
_FIELDS: Final = tuple(field.name for field in fields(ProfileConfig))
_BOOLEANS: Final = tuple(field.name for field in fields(ProfileConfig) if isinstance(field.default, bool))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The callback's arguments in a YAML file.

    Args:
        path: a file with one mapping, argument → value.

    Raises:
        ConfigError: when the file cannot be read, is no mapping, or holds an unknown argument.
    """
    where = str(path)
    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{where}: expected a readable YAML file, got {error.strerror or error}. Check the path."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: expected YAML, got: {error}") from error
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f"{where}: expected one mapping of arguments such as 'active: 10', got {type(raw).__name__}."
        )
    check_names(raw, where)
    arguments = dict(raw)
    if isinstance(arguments.get("steps"), list):
        arguments["steps"] = tuple(arguments["steps"])
    return arguments


def check_names(names: Iterable[Any], where: str) -> None:
    """Refuse a name that is no argument, with the nearest one that is.

    Raises:
        ConfigError: on the first unknown name.
    """
    for name in names:
        if name not in _FIELDS:
            raise ConfigError(
                f"{where}: unknown argument {name!r}.{_nearest(str(name), _FIELDS)}"
                f" Known arguments: {', '.join(_FIELDS)}."
            )


def explain_unknown_arguments(init: Callable[P, R]) -> Callable[P, R]:
    """Make an ``__init__`` refuse an unknown argument with a ConfigError that names the nearest one."""
    known = set(inspect.signature(init).parameters)

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_names([name for name in kwargs if name not in known], f"{WHERE}(...)")
        return init(*args, **kwargs)

    return checked


def _check_int(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        hint = ""
        if name == "active" and type(value) is int:
            hint = "active=0 means timing only."
        raise _refusal(name, f"an integer of at least {least}", value, hint)


def _refusal(name: str, expected: str, got: Any, hint: str = "") -> ConfigError:
    action = hint or f"The default is {getattr(DEFAULTS, name)!r}."
    return ConfigError(f"{WHERE}: {name}: expected {expected}, got {got!r}. {action}")


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def _name_of(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
