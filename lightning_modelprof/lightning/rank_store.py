"""Communication between the ranks of a job, through their process group's store.

A collective would wait forever for a rank that has no callback, has failed or is gone, though the training
itself would continue. So each rank writes messages under its own keys, and others check whether they exist,
waiting at most ``PATIENCE_S``.

In ``setup`` each rank writes its address. Lightning makes all ranks wait for each other after that hook, so a
rank without an address by then has no callback, and no rank needs to wait to find that out. The first rank
with an address leads: the others write all their messages under its address, which is new for every loop. So
messages of different loops can't be confused, whichever loops a rank took part in.

``set`` of torch's TCPStore returns before the store has the key, so another rank may miss it even after
Lightning's wait. Requests of one rank are answered in order: what must be there by then is checked once.

The store blocks on reading a missing key. So ranks read only keys that they have seen, and these are removed,
if at all, when all ranks have started the next loop.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import torch.distributed

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine.windows import recording_ranks

PATIENCE_S: Final = 30.0
"""Longest total wait for others, enough for other callbacks' work in the same hook."""


_SHARE_OF_TIME_OUT: Final = 4
"""No rank waits longer than a quarter of the process group's timeout, or ranks waiting for it might fail."""


MOST_BYTES: Final = 2**20
"""Maximum size of a message; the store disconnects senders of more than 8 MiB."""


_PREFIX: Final = "lightning-modelprof"


_MESSAGE, _NO_MESSAGE = b"+", b"-"


TOO_SHORT: Final = "\0"
"""Replaces the folder if the loop is too short for a report; no path has such a character."""


NOT_HERE: Final = "no ModelProfCallback joined there"


_LEFT: Final = "left the loop early"


class RankStore:
    """Connects the ranks that have the callback, for one loop; made on each in ``setup``.

    Attributes:
        absent: why a rank is missing, by rank; complete on the first rank after :meth:`receive`.
    """

    _old_keys: tuple[str, ...] = ()
    """Keys that this process wrote in its last loop."""

    def __init__(self, trainer: Any) -> None:
        self._rank, self._world_size = int(trainer.global_rank), int(trainer.world_size)
        self._store: Any = None
        self._first: int | None = None
        self._box = self._own_box = ""
        self._keys: list[str] = []
        self._has_sent = False
        self._announced: dict[str, int] = {}
        self.absent: dict[int, str] = {}

    def join(self) -> None:
        """Register this rank; to be called in ``setup``, after all ranks have left the loop before."""
        if self._world_size == 1:
            return
        store, address = _store(), uuid.uuid4().hex
        if store is None:
            return
        for key in RankStore._old_keys:
            store.delete_key(key)
        RankStore._old_keys = ()
        store.set(_address_of(self._rank), address)
        store.set(_place_of(self._rank), "1")
        store.check([_place_of(self._rank)])  # ``set`` returns before the store has the keys
        self._store, self._own_box = store, address

    # At the loop's start

    @property
    def is_first(self) -> bool:
        """Whether this rank puts everything together."""
        return self._rank == (0 if self._store is None else self._find_first())

    @property
    def can_talk(self) -> bool:
        return self._store is not None

    def find_absent(self) -> Collection[int]:
        """Return the missing ranks, on the first rank."""
        ranks = range(self._world_size)
        if self._store is not None and not self._store.check([*map(_place_of, ranks)]):
            for rank in ranks:
                if not self._store.check([_place_of(rank)]):
                    self.absent[rank] = NOT_HERE
        elif self._world_size > 1 and self._store is None:
            others = set(ranks) - {self._rank}
            self.absent |= dict.fromkeys(others, "the process group has no store to reach it through")
        return self.absent.keys()

    def agree_on_folder(self, folder: str) -> str | None:
        """Return the first rank's folder; ``None`` if it doesn't arrive in time.

        Args:
            folder: of this rank, or :data:`TOO_SHORT`; only the first rank's counts.
        """
        if self.is_first:
            if self._store is not None:
                self._put(self._key("folder"), folder.encode())
            return folder
        if self._store is None or not self._wait([key := self._key("folder")]):
            return None
        return str(self._store.get(key).decode())

    # Agreement on a stop, in two steps, between which Lightning makes all ranks wait for each other

    def propose_stop(self, num_steps: int) -> None:
        """Propose to end training after ``num_steps`` steps, if all ranks do."""
        if self._store is not None:
            key = self._key(f"stop/{num_steps}/{self._rank}")
            self._put(key, b"1")
            self._store.check([key])  # as in join

    def agrees_on_stop(self, num_steps: int) -> bool:
        """Whether all ranks have proposed it; to be called one hook later."""
        if self._store is None:
            return False
        keys = [self._key(f"stop/{num_steps}/{rank}") for rank in range(self._world_size)]
        return bool(self._store.check(keys))

    # While the loop runs

    def announce(self, what: str, step: int) -> None:
        """Tell the other ranks at which step something starts; for the first rank. Doesn't wait."""
        self._put(self._key(f"step/{what}"), str(step).encode())
        self._announced[what] = step

    def announced(self, what: str) -> int | None:
        """Return the step at which something starts, ``None`` if it isn't announced yet; doesn't wait."""
        store = self._store
        if what not in self._announced and store is not None and not self.is_first:
            key = self._key(f"step/{what}")
            if store.check([key]):
                self._announced[what] = int(store.get(key))
        return self._announced.get(what)

    # At the loop's end

    def send(self, message: bytes | None, why_not: str = "") -> None:
        """Send this rank's measurements to the first rank; doesn't wait.

        Args:
            message: ``None`` if there are none.
        """
        if self._store is None or self._has_sent or self.is_first:
            return
        self._has_sent = True
        if message is not None and len(message) > MOST_BYTES:
            message, why_not = None, f"its data exceeded {MOST_BYTES >> 20} MiB"
        packed = _NO_MESSAGE + why_not.encode() if message is None else _MESSAGE + message
        self._put(self._key(f"said/{self._rank}"), packed)

    def receive(self) -> dict[int, bytes]:
        """Return the other ranks' messages, on the first rank; ranks that are too late are absent."""
        store = self._store
        if store is None:
            return {}
        wanted = [rank for rank in range(self._world_size) if rank not in {self._rank, *self.absent}]
        self.absent |= dict.fromkeys(wanted, "could not be reached")  # in case the store fails below
        self._wait([self._key(f"said/{rank}") for rank in wanted])
        messages = {}
        for rank in wanted:
            key = self._key(f"said/{rank}")
            packed = bytes(store.get(key)) if store.check([key]) else None
            if packed is None:
                self.absent[rank] = f"sent nothing within {self._patience_s:g} s"
            elif packed.startswith(_NO_MESSAGE):
                self.absent[rank] = packed[1:].decode()
            else:
                messages[rank] = packed[1:]
                del self.absent[rank]
        return messages

    def leave(self) -> None:
        """Deregister this rank, so that others needn't wait for it."""
        store = self._store
        if store is None:
            return
        try:
            self.send(None, _LEFT)
            if bytes(store.get(_address_of(self._rank))) == self._own_box.encode():  # not a later loop's
                store.set(_address_of(self._rank), "")
                store.delete_key(_place_of(self._rank))
        except RuntimeError:  # the process with the store may be gone
            pass
        finally:
            self._store = None
            RankStore._old_keys += tuple(self._keys)

    # Store access

    def _find_first(self) -> int:
        if self._first is None:
            assert self._store is not None
            for rank in range(self._rank):
                key = _address_of(rank)
                box = self._store.get(key).decode() if self._store.check([key]) else ""
                if box:
                    self._first, self._box = rank, box
                    break
            else:
                self._first, self._box = self._rank, self._own_box
        return self._first

    def _key(self, what: str) -> str:
        self._find_first()
        return f"{_PREFIX}/{self._box}/{what}"

    def _put(self, key: str, value: bytes) -> None:
        self._keys.append(key)
        self._store.set(key, value)

    @property
    def _patience_s(self) -> float:
        time_out = getattr(self._store, "timeout", None)
        if time_out is None:
            return PATIENCE_S
        return min(PATIENCE_S, float(time_out.total_seconds()) / _SHARE_OF_TIME_OUT)

    def _wait(self, keys: Iterable[str]) -> bool:
        """Whether all keys appear in time. The store's own wait would ignore Ctrl+C."""
        keys, pause_s, until = list(keys), 0.001, time.monotonic() + self._patience_s
        while not self._store.check(keys):
            if time.monotonic() >= until:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return True


def _address_of(rank: int) -> str:
    """Key of the address of a rank's message box; never removed, and empty between loops."""
    return f"{_PREFIX}/address/{rank}"


def _place_of(rank: int) -> str:
    """Key that exists while the rank is registered; never read, so it may be removed at any time."""
    return f"{_PREFIX}/here/{rank}"


def _store() -> Any:
    """Return the store that the process group was set up with; ``None`` if the strategy has none.

    torch has no public name for it that all its versions share.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    get_store = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    if get_store is not None:
        return get_store()
    get_store = getattr(torch.distributed.group.WORLD, "get_group_store", None)
    return None if get_store is None else get_store()


class StepAnnouncements:
    """Announcements from the first rank about the step at which something starts.

    Args:
        guard: calls a function, and returns ``None`` if the ranks can't be reached.
    """

    def __init__(
        self, store: RankStore, is_first: bool, guard: Callable[[Callable[[], int | None]], int | None]
    ) -> None:
        self._rank_store = store
        self._guard = guard
        self.is_first = is_first

    def announce(self, what: str, step: int) -> None:
        self._guard(lambda: self._rank_store.announce(what, step))

    def announced(self, what: str) -> int | None:
        return self._guard(lambda: self._rank_store.announced(what))


def steps_until_stop(config: ProfileConfig, world_size: int) -> int | None:
    """Return the number of steps until the last window of a fit with several ranks has closed.

    ``None`` if that doesn't end the fit, or with one rank, which stops when its window has closed.
    """
    if not config.stop_after_profile or world_size == 1:
        return None
    last = config.schedule.window(config.schedule.repeat - 1)
    if last is None or not recording_ranks(config, world_size):
        return None
    return last.last + 2
