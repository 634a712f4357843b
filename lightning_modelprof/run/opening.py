"""Opens files that come from elsewhere: only what a file of ours can be, and without ever waiting for it.

And writes ours, completely or not at all.
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
"""Of a saved run: that of a million steps on one rank has about one megabyte, on a thousand ranks twenty."""

MAX_TRACE_BYTES: Final = 4 * 2**30
"""Largest uncompressed trace that is read unless asked otherwise.

A trace of torch.profiler takes less memory than its JSON, a damaged one up to twice as much. Other files can
take more: nothing but tiny events five times, and 15 times if each of them is in a thread of its own.
"""


def open_regular(path: Path, *, or_pipe: bool = False) -> IO[bytes]:
    """Open a regular file for reading.

    Args:
        or_pipe: whether a pipe will do as well; reading from it waits for who writes.

    Raises:
        OSError: when it cannot be opened, or is a device, a pipe, a folder, ....
        ValueError: when the path holds a zero byte.
    """
    if or_pipe and stat.S_ISFIFO(path.stat().st_mode):
        return path.open("rb")  # waits for who writes to it
    # A pipe that nobody writes to keeps whoever opens it waiting, and so may a device.
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
    """The whole content of a file of ours.

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
    """Whether a path stays in the folder that it starts in, whichever system reads it."""
    return (
        bool(name)
        and "\0" not in name
        and all(
            not path.is_absolute() and not path.drive and ".." not in path.parts
            for path in (PurePosixPath(name), PureWindowsPath(name))
        )
    )


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file completely or not at all: a temporary file beside it, then a rename.

    Raises:
        OSError: when the directory is not writeable or the disk is full; an older file stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by tempfile, whose files are private to the user: a report is as readable as the umask says, which
    # cannot be read without changing it for all threads. The name takes no random number of Python's own.
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_unfinished(path: Path) -> None:
    """Remove what :func:`write_atomically` of a process that was killed has left beside a file."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * len(uuid4().hex)}"):
        with contextlib.suppress(OSError):
            left.unlink()
