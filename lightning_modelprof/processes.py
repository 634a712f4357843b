"""Our own processes, which run a module of this package without torch or the user's program.

Also the files shared with them.
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
"""Protect them from Ctrl-C, which a terminal sends to a whole group."""

OWN_PROCESSES: Final[set[int]] = set()
"""IDs of the processes started here, whose usage isn't the training's."""


def start_module(name: str, *arguments: str, **how: Any) -> subprocess.Popen[bytes]:
    """Start ``python -m name``; multiprocessing would run the user's script again.

    Args:
        how: arguments of ``subprocess.Popen``; standard output and errors are discarded by default.

    Raises:
        OSError: when no process can start, or Python's path is unknown.
    """
    import subprocess  # noqa: PLC0415  # only when needed

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
    """File descriptor that notices when the program closes and reuses its number, as daemons do.

    Args:
        number: of an open file, owned by this object from now on.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._identity: tuple[int, int] | None = _identity(number)

    @classmethod
    def without_name(cls) -> OwnFile:
        """Open a temporary file that disappears once no process has it open.

        Raises:
            OSError: when it can't be created.
        """
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    @property
    def number(self) -> int:
        """Number of the open file.

        Raises:
            OSError: when the file is closed, or its number now belongs to another.
        """
        if self._identity is None or _identity(self._number) != self._identity:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._number

    def close(self) -> None:
        """Close the file, unless its number now belongs to another."""
        with contextlib.suppress(OSError):
            os.close(self.number)
        self._identity = None


def _identity(number: int) -> tuple[int, int]:
    found = os.fstat(number)
    return found.st_dev, found.st_ino
