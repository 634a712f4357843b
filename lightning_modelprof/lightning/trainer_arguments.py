"""Refuse our objects in the wrong argument when a Trainer is made."""

from __future__ import annotations

import sys
from typing import Any, Final

from lightning_modelprof.engine.profiler import LoopProfiler
from lightning_modelprof.errors import ConfigError
from lightning_modelprof.lightning.callback import ModelProfCallback
from lightning_modelprof.lightning.profiler import ModelProfiler

_MOST_CALLS: Final = 12
"""Maximum calls between the Trainer's constructor and its request for callbacks; there are three."""

_TO_WRITE: Final = {
    ModelProfCallback: "Trainer(callbacks=[ModelProfCallback({})])",
    ModelProfiler: "Trainer(profiler=ModelProfiler({}))",
    LoopProfiler: "Trainer(callbacks=[ModelProfCallback({})]); LoopProfiler is for loops without a Trainer",
}
_EXPECTED: Final = {
    "callbacks": (ModelProfCallback, "a list of callbacks"),
    "profiler": (ModelProfiler, "a profiler"),
}


def check_trainer_arguments() -> None:
    """Refuse a class without its parentheses, a callback as a profiler, and a profiler as a callback.

    For callbacks without a list, Lightning itself reports that they aren't iterable before it gets here.

    Raises:
        ConfigError: with what to write.
    """
    arguments = _arguments_of_new_trainer()
    callbacks = arguments.get("callbacks")
    given = [("callbacks", one) for one in (callbacks if isinstance(callbacks, list | tuple) else ())]
    for argument, value in (*given, ("profiler", arguments.get("profiler"))):
        kind = value if isinstance(value, type) else type(value)
        ours = next((one for one in _TO_WRITE if issubclass(kind, one)), None)
        right, expected = _EXPECTED[argument]
        if ours is None or (ours is right and not isinstance(value, type)):
            continue
        got = f"the class {kind.__name__}" if isinstance(value, type) else f"a {kind.__name__}"
        text = _TO_WRITE[ours].format("" if isinstance(value, type) else "...")
        raise ConfigError(f"Trainer({argument}=...): expected {expected}, got {got}. Write {text}.")


def _arguments_of_new_trainer() -> dict[str, Any]:
    """Find the running constructor's arguments, as Lightning doesn't say for which Trainer it asks."""
    frame = sys._getframe(1)
    for _ in range(_MOST_CALLS):
        names = frame.f_code.co_varnames
        if frame.f_code.co_name == "__init__" and "callbacks" in names and "profiler" in names:
            return frame.f_locals
        if frame.f_back is None:
            break
        frame = frame.f_back
    return {}
