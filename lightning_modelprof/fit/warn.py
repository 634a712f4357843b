"""How the user is warned, without an error of its own."""

from __future__ import annotations

import logging
import warnings

_log = logging.getLogger(__name__)


def warn(message: str) -> None:
    """Warn of something; where the user has made warnings errors, the loop goes on all the same."""
    try:
        warnings.warn(f"ModelProfCallback: {message}", RuntimeWarning, stacklevel=3)
    except Exception:
        _log.warning("ModelProfCallback: %s", message)
