"""The errors this package raises on purpose.

    ModelProfError
    ├── ConfigError        the configuration is invalid (raised before training starts)
    ├── TraceError         a trace can't be read
    ├── ArchiveError       a saved run can't be read or written
    └── MissingExtraError  a feature needs a package that isn't installed

Every message gives the place, what was expected, what was found and what to do. It's one printable line of
limited length, whatever names and values it contains: see :func:`printable` and :func:`quoted`.
"""

from __future__ import annotations

import contextlib
import os
import reprlib
import warnings
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

_MAX_MESSAGE: Final = 4_000


_LONGEST_MESSAGE: Final = 2_000
"""Limit for other libraries' error messages."""


_MAX_QUOTED: Final = 300


MAX_NAME: Final = 100
"""Longer than any plausible name; comparing names takes time quadratic in their length."""


class ModelProfError(Exception):
    """Base of every error this package raises on purpose."""

    def __init__(self, message: object = "") -> None:
        super().__init__(_cut(printable(_cut(str(message), 2 * _MAX_MESSAGE)), _MAX_MESSAGE))


class ConfigError(ModelProfError):
    """The configuration is invalid; the message names the key, the value and the choices."""


class TraceError(ModelProfError):
    """A trace can't be read; the message names the file, the problem and the remedy."""


class ArchiveError(ModelProfError):
    """A saved run can't be read or written; the message names the file and the problem."""


class MissingExtraError(ModelProfError):
    """A feature needs a package that isn't installed; the message shows the install command."""


def describe_error(error: BaseException) -> str:
    """Describe any error by its type and message, even if its ``__str__`` fails."""
    try:
        message = str(error).strip()
    except Exception:
        return f"{type(error).__name__} (message can't be shown)"
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[:_LONGEST_MESSAGE]}... ({len(message):,} characters)"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def printable(text: str) -> str:
    r"""Make a name safe to print: replace unprintable characters by escapes such as ``\n`` or ``\x1b``.

    Names come from user code. A newline would break a table, an escape sequence would reach the terminal, a
    right-to-left mark would reverse the line, and half a surrogate pair can't be written to a file.
    """
    if text.isprintable():
        return text
    return "".join(
        # Python calls no-break and other wide spaces unprintable, but they're harmless.
        char if char.isprintable() else " " if char.isspace() and ord(char) >= 0xA0 else _escape(char)
        for char in text
    )


def without_surrogates(value: Any) -> Any:
    """Escape surrogates in plain JSON values, as half a surrogate pair has no UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_surrogates(item) for item in value]
    return value


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _cut(text: str, limit: int) -> str:
    """Cut the middle of a text longer than ``limit``; its ends matter most."""
    tail = limit // 4
    return text if len(text) <= limit else f"{text[: limit - tail - 3]}...{text[-tail:]}"


class _ShortRepr(reprlib.Repr):
    """Shorten long or deep values: a few nested lists can hold millions of items."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = 8
        self.maxstring = self.maxlong = self.maxother = _MAX_QUOTED

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write thousands of digits.
        return super().repr_int(x, level) if x.bit_length() < 4_000 else f"a {x.bit_length():,}-bit integer"


_SHORT: Final = _ShortRepr()


def quoted(value: Any) -> str:
    """Write any value for a message: in Python's notation, on one line and short."""
    try:
        text = _SHORT.repr(value)
    except Exception:  # its __repr__ failed
        text = f"<{type(value).__name__}>"
    return printable(_cut(text, 2 * _MAX_QUOTED))


def did_you_mean(name: object, known: Iterable[str], meaning: Mapping[str, str] | None = None) -> str:
    """Ask about the nearest known name, or its meaning; ``""`` if none is near."""
    wanted = (name if isinstance(name, str) else quoted(name))[:MAX_NAME]
    import difflib  # noqa: PLC0415 -- TensorBoard imports this module at its start

    close = difflib.get_close_matches(wanted, list(known), n=1, cutoff=0.5)
    return f" Did you mean {(meaning or {}).get(close[0], close[0])!r}?" if close else ""


def as_path(value: Any, refuse: type[ModelProfError]) -> Path:
    """Convert a value to a path that the system can look up, whether or not it exists.

    Args:
        value: text, bytes or path-like object.
        refuse: error type to raise.

    Raises:
        ModelProfError: when it isn't a path or can't be looked up: zero byte, name too long, link loop.
    """
    given = value
    try:
        path = Path(os.fsdecode(value))
        given = str(path)
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except Exception as error:  # including those of a custom __fspath__
        raise refuse(
            f"can't read {quoted(given)}: {getattr(error, 'strerror', None) or describe_error(error)}."
            " Check the path and permissions."
        ) from None
    return path


def remedy(error: Exception) -> str:
    """Advise on a path that can't be read; permissions don't matter if it doesn't exist."""
    is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
    return "Check the path." if is_missing else "Check the path and permissions."


def require(*modules: str, extra: str, where: str) -> None:
    """Raise if modules from one of this package's extras aren't installed.

    Args:
        modules: import names of top-level modules.
        extra: the extra that installs them.
        where: what needs them, for the message.

    Raises:
        MissingExtraError: with the missing modules and the install command.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise MissingExtraError(
            f"{where} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not"
            " installed."
            f' Install from the clone: pip install -e ".[{extra}]"'
        )


def traceback_text() -> str:
    """Return the current exception's traceback."""
    try:
        import traceback  # noqa: PLC0415  # with logging it takes 5 ms, which analyze doesn't need

        return traceback.format_exc()
    except Exception:  # the exception's own __str__ failed
        return "(traceback can't be shown)"


def warn(message: str, who: str = "ModelProfCallback") -> None:
    """Warn, ending the message with a period; log instead where warnings are errors."""
    if "\n" not in message and not message.endswith("."):
        message += "."
    text = "\n".join(map(printable, f"{who}: {message}".split("\n")))  # a traceback has several lines
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except Exception:
        with contextlib.suppress(Exception):  # standard error is closed
            import logging  # noqa: PLC0415

            logging.getLogger(__name__).warning("%s", text)
