"""How the user is told of something while a loop runs, without an error of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
import warnings

from lightning_modelprof.config.options import SWITCH
from lightning_modelprof.errors import one_line

_log = logging.getLogger(__name__)
_HAS_SAID_OFF = False


def warn(message: str) -> None:
    """Warn of something; where that fails, as where the user has made warnings errors, it goes to the log."""
    text = "\n".join(map(one_line, f"ModelProfCallback: {message}".split("\n")))  # a traceback has several
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except Exception:
        with contextlib.suppress(Exception):  # a standard error that is closed: nobody can be told
            _log.warning("%s", text)


def say_off() -> None:
    """Say once in this process that the environment switches the callback off."""
    global _HAS_SAID_OFF  # noqa: PLW0603  # of the process, as the environment is
    if not _HAS_SAID_OFF:
        _HAS_SAID_OFF = True
        with contextlib.suppress(Exception):
            print(f"ModelProfCallback is off: {SWITCH}={os.environ.get(SWITCH)}", file=sys.stderr)


def traceback_text() -> str:
    """The traceback of the exception that is being handled."""
    try:
        return traceback.format_exc()
    except Exception:  # somebody's own exception
        return "(its traceback cannot be shown)"
