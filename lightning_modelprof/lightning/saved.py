"""The callback in files, in other processes, and in copies.

A file that holds a callback, as one of a model that keeps the arguments of its Trainer, is opened by others:
where this package is not installed, or by a loader that knows Lightning's classes only. So a file has a bare
``Callback`` of Lightning's with our arguments as plain attributes, which does nothing. Copies, and what goes
to another process of the same program, measure.
"""

from __future__ import annotations

import copy
import copyreg
import sys
import weakref
from typing import Any, Final

import torch

from lightning_modelprof.lightning.session_keeper import SessionKeeper
from lightning_modelprof.loop.session import LoopSession
from lightning_modelprof.run.loops import Loop

_PROCESSES: Final = "multiprocessing.reduction"
_CLOUD: Final = "cloudpickle"
"""Part of the module's name; joblib and Ray have copies of it below their own."""

_PACKAGES: Final = ("pytorch_lightning", "lightning")


class Saved(SessionKeeper):
    """How the callback is copied and pickled."""

    _original: weakref.ref[Saved] | None = None  # that this one is a copy of
    _has_own_results = False  # not those of a copy
    _package = ""  # of the Trainer that ran it

    def __copy__(self) -> Any:
        """One that measures, with the same arguments and results."""
        made = self._blank()
        vars(made).update({**self.__getstate__(), "_original": made._original})
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The same; results do not change, so they are shared."""
        made = memo[id(self)] = self._blank()  # first: what samples_fn is bound to may hold us
        memo.update({id(one): one for one in (self.report, self.run)})
        vars(made).update({**copy.deepcopy(self.__getstate__(), memo), "_original": made._original})
        return made

    def _blank(self) -> Saved:
        made = type(self).__new__(type(self))
        made._original = self._original or weakref.ref(self)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Without what is of a loop, or of this process."""
        return {**super().__getstate__(), "_original": None, "_has_own_results": False}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For other processes the callback itself, and for files a bare one of Lightning's."""
        pickler = sys._getframe(1).f_globals.get("__name__", "")  # nothing else tells who asks
        if pickler == _PROCESSES or _CLOUD in pickler:
            return copyreg.__newobj__, (type(self),), self.__getstate__()  # type: ignore[attr-defined]
        return self._bare_class(), (), self._plain_arguments()

    def _bare_class(self) -> type:
        """Lightning's own class, of the package whose Trainer ran it."""
        kinds = [kind for kind in type(self).__mro__ if kind.__name__ == "Callback"]
        if self._package == "pytorch_lightning":
            kinds.insert(0, sys.modules[self._package].Callback)
        return kinds[0]

    def _plain_arguments(self) -> dict[str, Any]:
        try:
            return self.config.as_plain()
        except Exception:  # an invalid value was never used, and must not keep a model from being saved
            return {}

    def _enter(self, trainer: Any, loop: Loop) -> None:
        super()._enter(trainer, loop)
        roots = [kind.__module__.partition(".")[0] for kind in type(trainer).__mro__]
        self._package = next((root for root in roots if root in _PACKAGES), "")

    def _take_results(self, of: LoopSession | SessionKeeper) -> None:
        super()._take_results(of)
        self._has_own_results = self.report is not None or self.run is not None
        original = None if self._original is None else self._original()
        if original is not None and not original._has_own_results:
            original.report, original.run = self.report, self.run


def know_lightning(own: type, lightnings: type) -> None:
    """Have files opened by ``torch.load`` that hold a callback, and older Trainers take ours.

    Args:
        own: class of our callback; a ``pytorch_lightning`` before 2.6 refuses what is no ``Callback`` of its
            own, so that becomes another base.
        lightnings: what stands for it in files.
    """
    torch.serialization.add_safe_globals([lightnings])
    other = sys.modules.get("pytorch_lightning")
    if other is None or issubclass(own, other.Callback):
        return
    if tuple(map(int, other.__version__.split(".")[:2])) < (2, 6):
        own.__bases__ = (*own.__bases__, other.Callback)
