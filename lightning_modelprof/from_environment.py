"""The door for whoever does not build the Trainer: Lightning asks here for callbacks, by an entry point.

Nothing is imported unless the environment asks for a callback.
"""

from __future__ import annotations

import os
from typing import Any


def callbacks() -> list[Any]:
    """The callback that ``LIGHTNING_MODELPROF`` asks for; none where it is unset, empty or says no.

    Raises:
        ConfigError: when the variable asks for something that cannot be meant.
    """
    if not os.environ.get("LIGHTNING_MODELPROF"):
        return []
    from lightning_modelprof.config_sources import arguments_in_environment  # noqa: PLC0415  # when asked for

    arguments = arguments_in_environment()
    if arguments is None:
        return []
    from lightning_modelprof.callback import ModelProfCallback  # noqa: PLC0415

    callback = ModelProfCallback(**arguments)
    callback.is_from_environment = True
    return [callback]
