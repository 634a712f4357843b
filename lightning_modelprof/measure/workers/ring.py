"""Memory that the training and the workers of one DataLoader share: a slot for each worker, without a name.

A worker claims a slot and is the only one that writes there: sums, a ring of batches, and texts. Nobody waits
for anybody. The memory is a file without a name (``memfd``), which is gone with the last process that has it,
however that ends; the claim is a lock of the system's, which ends likewise.
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
except ImportError:  # Windows, where there is no such memory either
    fcntl = resource = None  # type: ignore[assignment]

NUM_BATCHES: Final = 4096
"""Batches that a worker may be ahead of who reads them. A power of two."""

BATCH_COLUMNS: Final = 8
"""Numbers that a batch takes in the ring; see :class:`SlotWriter`."""

_SPARE_FILES: Final = 32
_SPARE_FILES_OF_SLOT: Final = 4
"""Files that the training must be able to open beside the memory: pipes to workers, and tensors that come."""

_SPARE_BYTES: Final = 256 * 2**20
"""The same of address space, where it has a limit: each thread reserves some."""

_WORD: Final = 8
_HEAD_WORDS: Final = 64
_TEXT_BYTES: Final = 1 << 18
_PAGE: Final = mmap.ALLOCATIONGRANULARITY
_MAP_FIXED: Final = 0x10
"""Of Linux, which alone has such memory; Python does not name it."""

_NUM_TEXTS: Final = 2  # one is read while the other is written

_BATCHES_AT: Final = _HEAD_WORDS * _WORD
_TEXTS_AT: Final = _BATCHES_AT + NUM_BATCHES * BATCH_COLUMNS * _WORD
_SLOT_BYTES: Final = -(-(_TEXTS_AT + _NUM_TEXTS * _TEXT_BYTES) // _PAGE) * _PAGE


class Head:
    """Places of numbers at the begin of a slot; plain ones, as they are fast. The file has the first."""

    SILENT: Final = 0
    """Not 0 once the training wants to hear no more."""
    WORKER: Final = 1
    """Number of the worker, counted from 1; 0 where the slot was never used."""
    STARTS: Final = 2
    """Processes that had the slot."""
    STARTS_NS: Final = 3
    """From their start until they were ready, all together."""
    STARTS_TIMED: Final = 4
    """How many of them told."""
    BATCHES: Final = 5
    SAMPLES: Final = 6
    FETCH_NS: Final = 7
    COLLATE_NS: Final = 8
    WAIT_NS: Final = 9
    CPU_NS: Final = 10
    PROCESS_CPU_NS: Final = 11
    """CPU time of the whole process since it was ready."""
    SAMPLER_CPU_NS: Final = 12
    """Of that, our own thread's."""
    READ_BYTES: Final = 13
    DISK_BYTES: Final = 14
    PAGE_FAULTS: Final = 15
    MEMORY_BYTES: Final = 16
    THREADS: Final = 17
    SYSTEM_KNOWN: Final = 18
    """Not 0 where the numbers of the system above were read."""
    FETCH_CPU_NS: Final = 19
    """CPU time of the thread in making samples."""
    DROPPED: Final = 20
    WRITTEN: Final = 21
    """Batches that were ever written to the ring."""
    READ: Final = 22
    """Of those, the ones that were read; the only number that the training writes to a slot."""
    TEXT: Final = 24
    """Which text is the newest: 0 for none yet, then odd and even in turns."""
    TEXT_BYTES_EVEN: Final = 25
    TEXT_BYTES_ODD: Final = 26
    CPU_WAIT_NS: Final = 28
    """For which the main thread was ready to run and had no CPU, since the worker was ready."""
    CPU_WAIT_KNOWN: Final = 29
    """Not 0 where the system tells that."""


@dataclass
class ReadSlot:
    """A copy of a slot.

    Attributes:
        head: int64, by :class:`Head`.
        text: the newest one; empty without.
    """

    head: NDArray[np.int64]
    text: bytes = b""


def _check_room(num_slots: int, size: int) -> None:
    """Refuse where the training could need what this memory would take.

    Raises:
        OSError: with what is short.
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
    """The shared memory of one loader, as the training has it.

    Args:
        num_slots: processes that may write at the same time.

    Attributes:
        name: that no other memory has.

    Raises:
        OSError: where the system has no such memory, or the training needs what it would take.
    """

    def __init__(self, num_slots: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no anonymous shared memory (memfd)")
        size = _PAGE + num_slots * _SLOT_BYTES
        _check_room(num_slots, size)
        self.num_slots = num_slots
        # A name that nobody else's file has: its number may be another file's once this one is closed.
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
        """Number of the memory.

        Raises:
            OSError: when the program has closed it.
        """
        return self._file.number

    @property
    def path(self) -> str:
        """Where another process of the same user finds the memory while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @property
    def memory(self) -> SharedMemory:
        """What a worker is told."""
        return SharedMemory(self.fd, self.path, self.name, self.num_slots)

    @property
    def num_unclaimed(self) -> int:
        """Processes that found no slot."""
        return int(np.frombuffer(self._map, np.int64, 2)[1])

    def silence(self) -> None:
        """Ask all workers to measure no more."""
        self._map[:_WORD] = (1).to_bytes(_WORD, "little")

    def new_batches(self) -> list[tuple[int, NDArray[np.int64]]]:
        """Batches since the last call.

        Returns:
            Of each slot that has some: number of the worker, and int64 of shape (n, ``BATCH_COLUMNS``).
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
        """Copies of all slots that were ever used."""
        return [self._slot(slot) for slot, head in enumerate(self._heads) if head[Head.WORKER]]

    def _slot(self, slot: int) -> ReadSlot:
        head = self._heads[slot].copy()
        at = _PAGE + slot * _SLOT_BYTES
        return ReadSlot(head, _read_text(self._map, at, head))

    def close(self) -> None:
        """Let the memory go; what was read before stays."""
        self._heads = []
        self._map.close()
        self._file.close()


def _mapped(fd: int, size: int) -> mmap.mmap:
    """The memory behind a number, without a number of its own.

    Python keeps a second one for a map of a file, and closes it with the map, whatever it is by then.

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
    """A slot, as the worker that has it sees it.

    Args:
        memory: of all slots.

    Attributes:
        head: int64, by :class:`Head`.
        silent: int64: the first is not 0 once the training wants to hear no more.
        batches: int64: ``BATCH_COLUMNS`` numbers for each batch: its number in the epoch, begin, samples
            there, ready, CPU time, samples.
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
        """Put a text in the place of the one before; returns whether it was short enough."""
        if len(text) > _TEXT_BYTES:
            return False
        newest = self.head[Head.TEXT] + 1
        begin = self._at + _TEXTS_AT + (newest % _NUM_TEXTS) * _TEXT_BYTES
        self._map[begin : begin + len(text)] = text
        self.head[Head.TEXT_BYTES_ODD if newest % _NUM_TEXTS else Head.TEXT_BYTES_EVEN] = len(text)
        self.head[Head.TEXT] = newest
        return True


class SharedMemory(NamedTuple):
    """The memory of a loader, as its workers are told of it.

    Attributes:
        fd: its number in a child that inherits it; -1 in one that does not, which opens ``path``.
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
        """A slot for this process, see :func:`claim_slot`."""
        fd = self.fd if self.is_inherited else open_memory(self.path, self.name)
        return None if fd is None else claim_slot(fd, self.name, self.num_slots, worker)


def open_memory(path: str, name: str) -> int | None:
    """The memory in a child that inherits nothing; ``None`` where that path is another file by now."""
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
    """A slot that no living process has, in a worker; its own number's if that is free.

    Args:
        fd: of the memory; stays open as long as the claim is to hold.

    Returns:
        ``None`` where all are taken, or the number is another file's by now.
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
