"""The errors this package raises on purpose.

    ModelProfError
    ├── ConfigError        the configuration cannot be used (raised before training starts)
    ├── TraceError         a trace file cannot be read
    ├── ArchiveError       a saved run cannot be read
    └── MissingExtraError  a feature needs a package that is not installed

Every message says where, what was expected, what came and what to do.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

_LONGEST_MESSAGE: Final = 2_000


class ModelProfError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(ModelProfError):
    """The configuration cannot be used; the message names the key, the value and the choices."""


class TraceError(ModelProfError):
    """A trace file cannot be read; the message names the file, the place and the remedy."""


class ArchiveError(ModelProfError):
    """A saved run cannot be read; the message names the file and what was expected in it."""


class MissingExtraError(ModelProfError):
    """A feature needs a package that is not installed; the message holds the install command."""


def told(error: BaseException) -> str:
    """What is told of somebody's error: its type and its message, whatever its ``__str__`` does."""
    try:
        message = str(error)
    except Exception:
        return f"{type(error).__name__} (its message cannot be shown)"
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[:_LONGEST_MESSAGE]}... ({len(message):,} characters)"
    return f"{type(error).__name__}: {message}"


def require(*modules: str, extra: str, where: str) -> None:
    """Refuse to go on without modules that come with an extra of this package.

    Args:
        modules: top-level modules, by the names they are imported by.
        extra: the extra that installs them.
        where: what needs them, for the message.

    Raises:
        MissingExtraError: with the modules that are missing and the command that installs them.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise MissingExtraError(
            f"{where}: expected the Python modules {', '.join(modules)} to be installed, got no"
            f' {", no ".join(missing)}. Install them: pip install "lightning-modelprof[{extra}]"'
        )
