"""Entry point that Lightning asks for callbacks whenever it makes a Trainer.

It imports nothing unless the environment requests a callback, or the program has imported ours.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

SEEN = "LIGHTNING_MODELPROF_SEEN"
"""Environment variable with a file to create once a Trainer is made, for the process that runs a script."""


def callbacks() -> list[Any]:
    """Return the callback that ``LIGHTNING_MODELPROF`` requests; none if it's unset, empty or a no.

    Raises:
        ConfigError: when the variable has an invalid argument, or the Trainer has one of our objects in the
            wrong place.
    """
    if seen := os.environ.get(SEEN):
        with suppress(OSError):
            Path(seen).touch()
    if "lightning_modelprof.lightning.callback" in sys.modules:
        from lightning_modelprof.lightning.trainer_arguments import check_trainer_arguments  # noqa: PLC0415

        check_trainer_arguments()
    if not os.environ.get("LIGHTNING_MODELPROF"):
        return []
    from lightning_modelprof.config.sources import arguments_in_environment  # noqa: PLC0415  # on request

    arguments = arguments_in_environment()
    if arguments is None:
        return []
    from lightning_modelprof.lightning.callback import ModelProfCallback  # noqa: PLC0415

    callback = ModelProfCallback(**arguments)
    callback.is_from_environment = True
    return [callback]
