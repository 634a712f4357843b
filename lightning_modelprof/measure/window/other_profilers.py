"""Other torch profilers in this process.

torch has one profiler at a time and does not say so: whoever prepares or starts one ends what another
records. Starting what another one has ended, or exporting it, crashes the process. While windows may open,
the functions by which every torch profiler is prepared, started and stopped are therefore watched.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any, Final

from torch.autograd import profiler as torch_profiler

from lightning_modelprof.measure.window.torch_profiler import is_profiling

_WATCHED: Final = ("_prepare_profiler", "_enable_profiler", "_disable_profiler")


class ProfilerWatch:
    """What the torch profilers of this process do.

    Attributes:
        begun: how often one was prepared or started.
        is_waiting: whether one was prepared since, and has not started, which torch does not tell.
        recording: what ``begun`` was when a window of ours began to record; ``None`` while none does.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users = 0
        self._originals: dict[str, Callable[..., Any]] = {}
        self.begun = 0
        self.is_waiting = False
        self.recording: int | None = None
        self._none_waited = False  # when we came, of those that somebody had made before

    def begin(self) -> None:
        """Begin to watch; each call needs an :meth:`end`."""
        with self._lock:
            self._users += 1
            if self._users > 1 or not all(hasattr(torch_profiler, name) for name in _WATCHED):
                return
            self.is_waiting = self._none_waited = False
            for name, before in zip(_WATCHED, (self._on_prepare, self._on_start, self._on_stop), strict=True):
                self._originals[name] = original = getattr(torch_profiler, name)
                setattr(torch_profiler, name, _after(before, original))

    def end(self) -> None:
        """Watch no longer."""
        with self._lock:
            self._users -= 1
            if not self._users:
                for name, original in self._originals.items():
                    setattr(torch_profiler, name, original)
                self._originals = {}

    def is_one_waiting(self) -> bool:
        """Whether a profiler is prepared and has not started.

        Takes 20 ms until it once said no, as it looks at all objects; from then on what is prepared is seen.
        """
        if self.is_waiting or self._none_waited:
            return self.is_waiting
        is_waiting = _is_one_waiting()
        self._none_waited = bool(self._originals) and not is_waiting and not is_profiling()
        return is_waiting

    def leave(self, begun: int) -> None:
        """Nobody will start the profiler that was the ``begun``-th, if it still waits."""
        if begun == self.begun:
            self.is_waiting = False

    def _on_prepare(self) -> None:
        self._make_way()
        self.begun += 1
        self.is_waiting = True

    def _on_start(self) -> None:
        self._make_way()
        self.begun += 1
        self.is_waiting = False

    def _on_stop(self) -> None:
        self.is_waiting = False

    def _make_way(self) -> None:
        """End what a window of ours records: some profilers refuse to start beside it, to the user's harm."""
        if self.recording == self.begun and is_profiling():
            self.recording = None
            with contextlib.suppress(RuntimeError):
                self._originals["_disable_profiler"]()


def _after(before: Callable[[], None], original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        before()
        return original(*args, **kwargs)

    return call


def _is_one_waiting() -> bool:
    """Whether a profiler that somebody made before we came is prepared and has not started."""
    if is_profiling():
        return False
    kind = torch_profiler.profile
    return any(
        isinstance(one, kind) and getattr(one, "entered", False) and getattr(one, "kineto_results", 1) is None
        for one in gc.get_referrers(kind)
    )


watch: Final = ProfilerWatch()
"""Of this process."""
