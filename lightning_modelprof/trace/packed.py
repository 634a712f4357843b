"""Read traces inside tar and zip archives in place, without unpacking anything to a path.

A member is named by a path below its archive, as in ``traces.zip/rank0_trace.json``, where no file can exist.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from lightning_modelprof.errors import TraceError, printable
from lightning_modelprof.run.opening import is_inside

_MOST_MEMBERS: Final = 100_000
_MOST_READ: Final = 2**22
"""Bytes per read, as a hostile archive's directory or header could fill the memory."""

_MOST_PACKED: Final = 200
"""Maximum expansion of a zip member larger than ``_LOOSE_BYTES``."""

_LOOSE_BYTES: Final = 2**28
_HEAD_BYTES: Final = 512
_TAR_MAGIC: Final = slice(257, 262)

_MAGIC: Final = {
    b"PK\x03\x04": "zip archive",
    b"PK\x05\x06": "zip archive",
    b"BZh": "bzip2 file",
    b"\xfd7zXZ\x00": "xz file",
    b"\x28\xb5\x2f\xfd": "zstd file",
    b"7z\xbc\xaf\x27\x1c": "7z archive",
    b"Rar!\x1a\x07": "rar archive",
    b"\x04\x22\x4d\x18": "lz4 file",
}

BROKEN: Final = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    RuntimeError,  # a password, or an unknown compression method
    UnicodeDecodeError,
    OverflowError,
)


class Forward(io.RawIOBase):
    """Blocks of bytes as a file that can only be read forward."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        super().__init__()
        self._blocks = blocks
        self._left = memoryview(b"")
        self._position = 0

    def peek(self, count: int) -> bytes:
        """The next bytes without consuming them; fewer at the end."""
        while len(self._left) < count:
            block = next(self._blocks, b"")
            if not block:
                break
            self._left = memoryview(bytes(self._left) + block)
        return bytes(self._left[:count])

    def read(self, count: int = -1) -> bytes:
        """Read up to ``count`` bytes; fewer only at the end.

        Raises:
            TarError: for more bytes than any valid archive needs at once.
        """
        if not 0 <= count <= _MOST_READ:
            raise tarfile.ReadError(f"{count:,} bytes in one read")
        found = self.peek(count)
        self._left = self._left[len(found) :]
        self._position += len(found)
        return found

    def blocks(self) -> Iterator[bytes]:
        """The rest, in blocks as they come."""
        while block := bytes(self._left) or next(self._blocks, b""):
            self._left = memoryview(b"")
            self._position += len(block)
            yield block

    def seek(self, position: int, whence: int = 0) -> int:
        if whence or position < self._position:
            raise tarfile.ReadError("an archive whose index points backwards")
        while self._position < position:
            if not self.read(min(position - self._position, _HEAD_BYTES * 128)):
                break
        return self._position

    def tell(self) -> int:
        return self._position


def format_of(head: bytes) -> str:
    """Format of a file with these first bytes, such as ``zip archive``; ``""`` for anything else."""
    if head[_TAR_MAGIC] == b"ustar":
        return "tar archive"
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")


def trace_members(path: Path, stream: Forward, file: IO[bytes]) -> list[Path]:
    """The traces in an archive: files with ``trace`` in their name, else all JSON files.

    Args:
        stream: its bytes, unpacked.

    Raises:
        TraceError: when it can't be read or holds no trace.
    """
    kind = format_of(stream.peek(_HEAD_BYTES))
    names: dict[str, None] = {}
    problem = ""
    try:
        for name, _ in _members(kind, stream, file):
            if len(names) >= _MOST_MEMBERS:
                raise TraceError(f"{path}: expected at most {_MOST_MEMBERS:,} files per archive, got more.")
            names[name] = None
    except BROKEN as error:  # files before the damage are kept; reading the last one reports it
        problem = f" It's cut off or damaged ({printable(str(error))})."
    found = [name for name in names if _is_json(name)]
    found = [name for name in found if "trace" in PurePosixPath(name).name] or found
    if not found:
        raise TraceError(
            f"no trace files (*.json or *.json.gz) among {len(names):,} files in the {kind} {path}.{problem}"
        )
    return [path / name for name in found]


def member_blocks(
    path: Path, name: str, stream: Forward, file: IO[bytes], block_bytes: int
) -> Iterator[bytes]:
    """The bytes of one file of an archive, in blocks.

    Raises:
        TraceError: when it's missing or can't be read.
    """
    is_found = False
    for found, opened in _members(format_of(stream.peek(_HEAD_BYTES)), stream, file):
        if found == name and not is_found:  # read the rest too, to notice a cut-off archive
            is_found = True
            with opened() as member:
                while block := member.read(block_bytes):
                    yield block
    if not is_found:
        raise TraceError(f"no such file in the archive: {path}")


def _is_json(name: str) -> bool:
    last = PurePosixPath(name).name
    return ".json" in last and not last.startswith("._") and "__MACOSX" not in name


def _members(kind: str, stream: Forward, file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    found = _members_of_zip(file) if kind == "zip archive" else _members_of_tar(stream)
    for name, opened in found:
        if is_inside(name):
            yield str(PurePosixPath(name)), opened


def _members_of_tar(stream: Forward) -> Iterator[tuple[str, Any]]:
    with tarfile.TarFile(fileobj=stream, mode="r") as archive:
        for number, member in enumerate(archive):
            if number > _MOST_MEMBERS:
                return
            if member.isreg() and not member.issparse():
                yield member.name, lambda member=member: archive.extractfile(member)


def _members_of_zip(file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    with zipfile.ZipFile(_SmallReads(file)) as archive:
        for member in archive.infolist():
            if member.file_size > max(_LOOSE_BYTES, _MOST_PACKED * member.compress_size):
                raise zipfile.BadZipFile(f"a file expands more than {_MOST_PACKED} times")
            if not member.is_dir():
                yield member.filename, lambda member=member: archive.open(member)


class _SmallReads:
    def __init__(self, file: IO[bytes]) -> None:
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable
        self._file = file

    def read(self, count: int = -1) -> bytes:
        if count > _MOST_READ:
            raise zipfile.BadZipFile("its directory is too large")
        return self._file.read(_MOST_READ if count < 0 else count)

    def close(self) -> None:
        """Keep the file open."""
