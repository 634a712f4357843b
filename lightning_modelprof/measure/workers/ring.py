"""Memory shared by the training and one DataLoader's workers: an unnamed slot per worker.

A worker claims a slot and is the only one to write there: sums, a ring of batches, and texts. Nothing ever
waits. The memory is an unnamed file (``memfd``), which disappears with the last process that has it, however
that ends. The claim is a system lock, which ends in the same way.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.processes import OwnFile

try:
    import fcntl
    import resource
except ImportError:  # Windows, which has no such memory either
    fcntl = resource = None  # type: ignore[assignment]

NUM_BATCHES: Final = 4096
"""Most batches that a worker may be ahead of the reader. A power of two."""

BATCH_COLUMNS: Final = 8
"""Numbers per batch in the ring; see :class:`SlotWriter`."""

_SPARE_FILES: Final = 32
_SPARE_FILES_OF_SLOT: Final = 4
"""Files that the training must be able to open as well: pipes to workers, and incoming tensors."""

_SPARE_BYTES: Final = 256 * 2**20
"""The same for address space, where it is limited: each thread reserves some."""

_WORD: Final = 8
_HEAD_WORDS: Final = 64
_TEXT_BYTES: Final = 1 << 18
_PAGE: Final = mmap.ALLOCATIONGRANULARITY
_MAP_FIXED: Final = 0x10
"""Linux's value, which Python doesn't name; no other system has such memory."""

_NUM_TEXTS: Final = 2  # one is read while the other is written

_BATCHES_AT: Final = _HEAD_WORDS * _WORD
_TEXTS_AT: Final = _BATCHES_AT + NUM_BATCHES * BATCH_COLUMNS * _WORD
_SLOT_BYTES: Final = -(-(_TEXTS_AT + _NUM_TEXTS * _TEXT_BYTES) // _PAGE) * _PAGE


class Head:
    """Positions in the head of a slot; plain ints, for speed. ``SILENT`` is in the file's head instead."""

    SILENT: Final = 0
    """Nonzero once the training needs no more results."""
    WORKER: Final = 1
    """Number of the worker, counted from 1; 0 if the slot was never used."""
    STARTS: Final = 2
    """Processes that had the slot."""
    STARTS_NS: Final = 3
    """Total time from their start until they were ready."""
    STARTS_TIMED: Final = 4
    """Number of processes in ``STARTS_NS``."""
    BATCHES: Final = 5
    SAMPLES: Final = 6
    FETCH_NS: Final = 7
    COLLATE_NS: Final = 8
    WAIT_NS: Final = 9
    CPU_NS: Final = 10
    PROCESS_CPU_NS: Final = 11
    """CPU time of the whole process since it was ready."""
    SAMPLER_CPU_NS: Final = 12
    """The part of it that our own thread used."""
    READ_BYTES: Final = 13
    DISK_BYTES: Final = 14
    PAGE_FAULTS: Final = 15
    MEMORY_BYTES: Final = 16
    THREADS: Final = 17
    SYSTEM_KNOWN: Final = 18
    """Nonzero if the system's numbers above were read."""
    FETCH_CPU_NS: Final = 19
    """The thread's CPU time for making samples."""
    DROPPED: Final = 20
    WRITTEN: Final = 21
    """Batches ever written to the ring."""
    READ: Final = 22
    """Batches read so far; the only number that the training writes to a slot."""
    TEXT: Final = 24
    """The newest text: 0 for none yet, then alternately odd and even."""
    TEXT_BYTES_EVEN: Final = 25
    TEXT_BYTES_ODD: Final = 26
    CPU_WAIT_NS: Final = 28
    """Time that the main thread was ready to run without a CPU, since the worker was ready."""
    CPU_WAIT_KNOWN: Final = 29
    """Nonzero if the system reports that."""


@dataclass
class ReadSlot:
    """A copy of a slot.

    Attributes:
        head: int64, by :class:`Head`.
        text: the newest text; empty without one.
    """

    head: NDArray[np.int64]
    text: bytes = b""


def _check_room(num_slots: int, size: int) -> None:
    """Refuse to use memory that the training might need.

    Raises:
        OSError: names the scarce resource.
    """
    files, addresses = map(resource.getrlimit, (resource.RLIMIT_NOFILE, resource.RLIMIT_AS))
    left = files[0] - len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    spare = _SPARE_FILES + _SPARE_FILES_OF_SLOT * num_slots
    if files[0] != resource.RLIM_INFINITY and left < spare:
        raise OSError(f"only {left} more files can be opened, at least {spare} are needed; raise ulimit -n")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if addresses[0] != resource.RLIM_INFINITY and addresses[0] - used < size + _SPARE_BYTES:
        raise OSError("too little address space left; raise ulimit -v")


class Rings:
    """One loader's shared memory in the training process.

    Args:
        num_slots: processes that may write at the same time.

    Attributes:
        name: unique to this memory.

    Raises:
        OSError: when the system has no such memory, or the training might need it.
    """

    def __init__(self, num_slots: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no anonymous shared memory (memfd)")
        size = _PAGE + num_slots * _SLOT_BYTES
        _check_room(num_slots, size)
        self.num_slots = num_slots
        # A unique name: once this file is closed, another may get its number.
        self.name = f"modelprof-workers-{secrets.token_hex(8)}"
        self._file = OwnFile(os.memfd_create(self.name))
        try:
            os.ftruncate(self.fd, size)
            self._map = _mapped(self.fd, size)
        except BaseException:
            self._file.close()
            raise
        self._heads = [self._words(slot, 0, _HEAD_WORDS) for slot in range(num_slots)]

    def _words(self, slot: int, at: int, number: int) -> NDArray[np.int64]:
        return np.frombuffer(self._map, np.int64, number, _PAGE + slot * _SLOT_BYTES + at)

    @property
    def fd(self) -> int:
        """Return the memory's file descriptor.

        Raises:
            OSError: when the program has closed it.
        """
        return self._file.number

    @property
    def path(self) -> str:
        """Return the path through which the same user's other processes find it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @property
    def memory(self) -> SharedMemory:
        """Return the handle that workers get."""
        return SharedMemory(self.fd, self.path, self.name, self.num_slots)

    @property
    def num_unclaimed(self) -> int:
        """Count the processes that found no slot."""
        return int(np.frombuffer(self._map, np.int64, 2)[1])

    def silence(self) -> None:
        """Ask all workers to stop measuring."""
        self._map[:_WORD] = (1).to_bytes(_WORD, "little")

    def new_batches(self) -> list[tuple[int, NDArray[np.int64]]]:
        """Return the batches since the last call.

        Returns:
            For each slot with batches, the worker's number and int64 of shape (n, ``BATCH_COLUMNS``).
        """
        found = []
        for slot, head in enumerate(self._heads):
            read, written = int(head[Head.READ]), int(head[Head.WRITTEN])
            if written > read:
                ring = self._words(slot, _BATCHES_AT, NUM_BATCHES * BATCH_COLUMNS)
                rows = np.arange(read, written) & (NUM_BATCHES - 1)
                found.append((int(head[Head.WORKER]) - 1, ring.reshape(-1, BATCH_COLUMNS)[rows]))
                head[Head.READ] = written
        return found

    def slots(self) -> list[ReadSlot]:
        """Copy all slots that were ever used."""
        return [self._slot(slot) for slot, head in enumerate(self._heads) if head[Head.WORKER]]

    def _slot(self, slot: int) -> ReadSlot:
        head = self._heads[slot].copy()
        at = _PAGE + slot * _SLOT_BYTES
        return ReadSlot(head, _read_text(self._map, at, head))

    def close(self) -> None:
        """Free the memory; earlier results stay."""
        self._heads = []
        self._map.close()
        self._file.close()


def _mapped(fd: int, size: int) -> mmap.mmap:
    """Map a file descriptor's memory without a second descriptor.

    Python would keep one for a file's map and close it with the map, whatever file it is by then.

    Raises:
        OSError: when there is no room.
    """
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, size, trackfd=False)
    memory = mmap.mmap(-1, size)  # its addresses are taken over
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_ssize_t,
    )
    libc.mmap.restype = ctypes.c_void_p
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if libc.mmap(begin, size, *kind, fd, 0) != begin:
        raise OSError(ctypes.get_errno(), "the memory couldn't be mapped")
    return memory


def _read_text(memory: Any, at: int, head: Any) -> bytes:
    newest = int(head[Head.TEXT])
    if not newest:
        return b""
    begin = at + _TEXTS_AT + (newest % _NUM_TEXTS) * _TEXT_BYTES
    size = int(head[Head.TEXT_BYTES_ODD if newest % _NUM_TEXTS else Head.TEXT_BYTES_EVEN])
    return bytes(memory[begin : begin + size])


class SlotWriter:
    """A slot, from the side of its worker.

    Args:
        memory: memory of all slots.

    Attributes:
        head: int64, by :class:`Head`.
        silent: int64; the first is nonzero once the training needs no more results.
        batches: int64, ``BATCH_COLUMNS`` numbers per batch: its number in the epoch, start, samples fetched,
            ready, CPU time, sample count.
    """

    def __init__(self, memory: mmap.mmap, slot: int) -> None:
        self._map = memory
        self._at = _PAGE + slot * _SLOT_BYTES
        self.silent = memoryview(memory)[:_WORD].cast("q")
        self.head = self._words(0, _HEAD_WORDS)
        self.batches = self._words(_BATCHES_AT, NUM_BATCHES * BATCH_COLUMNS)

    def _words(self, at: int, number: int) -> memoryview:
        begin = self._at + at
        return memoryview(self._map)[begin : begin + number * _WORD].cast("q")

    def text(self) -> bytes:
        return _read_text(self._map, self._at, self.head)

    def write_text(self, text: bytes) -> bool:
        """Write a text next to the previous one; returns whether it was short enough."""
        if len(text) > _TEXT_BYTES:
            return False
        newest = self.head[Head.TEXT] + 1
        begin = self._at + _TEXTS_AT + (newest % _NUM_TEXTS) * _TEXT_BYTES
        self._map[begin : begin + len(text)] = text
        self.head[Head.TEXT_BYTES_ODD if newest % _NUM_TEXTS else Head.TEXT_BYTES_EVEN] = len(text)
        self.head[Head.TEXT] = newest
        return True


class SharedMemory(NamedTuple):
    """A loader's memory, as passed to its workers.

    Attributes:
        fd: descriptor in a child that inherits it; -1 in one that doesn't, which opens ``path``.
    """

    fd: int
    path: str
    name: str
    num_slots: int

    @property
    def is_inherited(self) -> bool:
        return self.fd >= 0

    def not_inherited(self) -> SharedMemory:
        return self._replace(fd=-1)

    def claim(self, worker: int) -> SlotWriter | None:
        """Claim a slot for this process, see :func:`claim_slot`."""
        fd = self.fd if self.is_inherited else open_memory(self.path, self.name)
        return None if fd is None else claim_slot(fd, self.name, self.num_slots, worker)


def open_memory(path: str, name: str) -> int | None:
    """Open the memory in a child that inherits nothing; ``None`` if the path is another file by now."""
    if not _is_memory(path, name):
        return None
    fd = os.open(path, os.O_RDWR)
    if _is_memory(f"/proc/self/fd/{fd}", name):
        return fd
    os.close(fd)
    return None


def _is_memory(path: str, name: str) -> bool:
    return str(Path(path).readlink()).startswith(f"/memfd:{name}")


def claim_slot(fd: int, name: str, num_slots: int, worker: int) -> SlotWriter | None:
    """Claim a slot without a living owner in a worker; preferably that of its own number.

    Args:
        fd: descriptor of the memory; must stay open to hold the claim.

    Returns:
        ``None`` if all are taken, or the descriptor is another file's by now.
    """
    if not _is_memory(f"/proc/self/fd/{fd}", name):
        return None
    order = [worker % num_slots, *(slot for slot in range(num_slots) if slot != worker % num_slots)]
    memory = _mapped(fd, _PAGE + num_slots * _SLOT_BYTES)
    for slot in order:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
        except OSError:
            continue
        writer = SlotWriter(memory, slot)
        if writer.head[Head.WORKER] in (0, worker + 1):
            writer.head[Head.WORKER] = worker + 1
            return writer
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, slot)
    with memoryview(memory)[: 2 * _WORD].cast("q") as words:
        words[1] += 1
    return None
