"""Processes of our own, which run a module of this package and neither torch nor the user's program.

And the files that are shared with them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import subprocess

_GROUP: Final[dict[str, Any]] = {"process_group": 0} if sys.version_info >= (3, 11) else {}
"""Ctrl-C in a terminal goes to a whole group, and is not meant for them."""

OWN_PROCESSES: Final[set[int]] = set()
"""Numbers of those that this process has started: what they use is not the training's."""


def start_module(name: str, *arguments: str, **how: Any) -> subprocess.Popen[bytes]:
    """Start ``python -m name``: never multiprocessing, which would run the user's script once more.

    Args:
        how: as of ``subprocess.Popen``; what is not said of standard output and errors goes nowhere.

    Raises:
        OSError: when there can be no other process, or nobody knows how to start a Python.
    """
    import subprocess  # noqa: PLC0415  # where one is needed

    if "python" not in Path(sys.executable or "").name.lower() or getattr(sys, "frozen", False):
        raise OSError(f"can't start Python: {sys.executable or 'its path is unknown'}")
    package = str(Path(__file__).resolve().parents[1])
    environment = {
        **os.environ,
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH")))),
        "PYTHONSAFEPATH": "1",
        "PYTHONWARNINGS": "ignore",
    }
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(
        [sys.executable, "-m", name, *arguments], **{"env": environment, **nowhere, **_GROUP, **how}
    )
    OWN_PROCESSES.add(process.pid)
    return process


class OwnFile:
    """An open file, by its number. The program may close all numbers, as daemons do, and then reuse them.

    Args:
        number: of the open file, which belongs to this object from now on.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._identity: tuple[int, int] | None = _identity(number)

    @classmethod
    def without_name(cls) -> OwnFile:
        """A temporary file that is gone with the last process that has it open.

        Raises:
            OSError: when there can be none.
        """
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    @property
    def number(self) -> int:
        """The number.

        Raises:
            OSError: when the file is closed, or the number belongs to another file by now.
        """
        if self._identity is None or _identity(self._number) != self._identity:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._number

    def close(self) -> None:
        """Close the file, unless the number belongs to another one by now."""
        with contextlib.suppress(OSError):
            os.close(self.number)
        self._identity = None


def _identity(number: int) -> tuple[int, int]:
    found = os.fstat(number)
    return found.st_dev, found.st_ino
