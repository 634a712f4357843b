"""Open files of unknown origin without ever blocking, and only if they can be a file of this package.

Files are written completely or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import stat
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Final
from uuid import uuid4

MAX_ARCHIVE_BYTES: Final = 2**28
"""Of a saved run. A million steps take about one megabyte on one rank, twenty on a thousand ranks."""

MAX_TRACE_BYTES: Final = 4 * 2**30
"""Default limit of the uncompressed trace size.

A torch.profiler trace takes less memory than its JSON, a damaged one up to twice as much. Other files can
take more: five times with nothing but tiny events, 15 times if each of them is in its own thread.
"""


def open_regular(path: Path, *, or_pipe: bool = False) -> IO[bytes]:
    """Open a regular file for reading.

    Args:
        or_pipe: whether a pipe is accepted too; reading it waits for its writer.

    Raises:
        OSError: when it can't be opened, or is a device, a pipe, a directory, ....
        ValueError: when the path holds a zero byte.
    """
    if or_pipe and stat.S_ISFIFO(path.stat().st_mode):
        return path.open("rb")  # waits for its writer
    # Opening a pipe without a writer blocks, and so may a device.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_archive(path: Path) -> bytes:
    """Read a whole file of this package.

    Raises:
        OSError: as :func:`open_regular`, or when it has more than ``MAX_ARCHIVE_BYTES``.
        ValueError: when the path holds a zero byte.
    """
    with open_regular(path) as file:
        raw = file.read(MAX_ARCHIVE_BYTES + 1)
    if len(raw) > MAX_ARCHIVE_BYTES:
        raise OSError(errno.EFBIG, f"larger than {MAX_ARCHIVE_BYTES // 2**20} MiB", str(path))
    return raw


def is_inside(name: str) -> bool:
    """Whether a path stays in its starting directory, on any operating system."""
    return (
        bool(name)
        and "\0" not in name
        and all(
            not path.is_absolute() and not path.drive and ".." not in path.parts
            for path in (PurePosixPath(name), PureWindowsPath(name))
        )
    )


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file completely or not at all: a temporary file next to it, then a rename.

    Raises:
        OSError: when the directory isn't writable or the disk is full; an older file stays unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile, whose files are private to the user: a report follows the umask, which can't be read
    # without changing it for all threads. The name doesn't advance Python's random numbers.
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_unfinished(path: Path) -> None:
    """Remove temporary files that a killed :func:`write_atomically` left next to a file."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * len(uuid4().hex)}"):
        with contextlib.suppress(OSError):
            left.unlink()
