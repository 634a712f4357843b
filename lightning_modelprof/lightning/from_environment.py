"""Lightning asks here for callbacks whenever it makes a Trainer, by an entry point.

Nothing is imported unless the environment asks for a callback, or the program has imported ours.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

SEEN = "LIGHTNING_MODELPROF_SEEN"
"""Environment variable with a file to make once a Trainer was made, for whoever runs a script to know it."""


def callbacks() -> list[Any]:
    """The callback that ``LIGHTNING_MODELPROF`` asks for; none where it is unset, empty or says no.

    Raises:
        ConfigError: when the variable has an invalid argument, or the Trainer has one of ours in the wrong
            place.
    """
    if seen := os.environ.get(SEEN):
        with suppress(OSError):
            Path(seen).touch()
    if "lightning_modelprof.lightning.callback" in sys.modules:
        from lightning_modelprof.lightning.trainer_arguments import check_trainer_arguments  # noqa: PLC0415

        check_trainer_arguments()
    if not os.environ.get("LIGHTNING_MODELPROF"):
        return []
    from lightning_modelprof.config.sources import arguments_in_environment  # noqa: PLC0415  # when asked for

    arguments = arguments_in_environment()
    if arguments is None:
        return []
    from lightning_modelprof.lightning.callback import ModelProfCallback  # noqa: PLC0415

    callback = ModelProfCallback(**arguments)
    callback.is_from_environment = True
    return [callback]
