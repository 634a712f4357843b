"""Which libraries a loop belongs to: of the LightningModule, the DataModule and the Trainer's caller."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final, NamedTuple

from lightning_modelprof.measure.setup.environment import written_class
from lightning_modelprof.measure.user_code import UserCode, absolute_file, folders_of, library_of
from lightning_modelprof.run.setup import CodePlace, Library

_TRAINERS: Final = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
_ENTRIES: Final = ("fit", "validate", "test", "predict")
_OF_LIGHTNING: Final = ("LightningModule", "LightningDataModule")
"""By name, as there are two Lightnings."""


class TrainerCall(NamedTuple):
    """Who called the Trainer.

    Attributes:
        from_library: its function that did; ``None`` where the user's own code did.
        user: the user's line that led there; ``None`` without a library between, or where there is none.
        files: of the user, with the functions that led there.
    """

    from_library: CodePlace | None
    user: CodePlace | None
    files: frozenset[str] = frozenset()


def trainer_call() -> TrainerCall:
    """Who called the Trainer that runs now. To be called from a hook."""
    user_code, library, user = UserCode(), None, None
    files = set()
    for frame in _callers(sys._getframe(1)):
        module, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        if user_code.is_users(frame):
            files.add(absolute_file(file))
            user = user or _line(frame)
        elif user is None and library is None and (package := library_of(module, absolute_file(file))):
            library = _line(frame, package)
    return TrainerCall(library, None if library is None else user, frozenset(files))


def read_libraries(trainer: Any, module: Any, call: TrainerCall) -> tuple[Library, ...]:
    """The libraries of a loop: of the module, of the DataModule, and of who called the Trainer."""
    kinds = [*_written(written_class(module)), *_written(type(getattr(trainer, "datamodule", None)))]
    packages = [library_of(kind.__module__, _file_of(kind)) for kind in kinds]
    packages.append("" if call.from_library is None else call.from_library.package)
    return tuple(
        Library(package=package, version=_version(package), folders=folders_of(package))
        for package in dict.fromkeys(filter(None, packages))
    )


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames outside of the nearest Trainer, innermost first."""
    is_outside = False
    while frame is not None:
        is_trainer = frame.f_globals.get("__name__") in _TRAINERS
        if is_outside and not is_trainer:
            yield frame
        is_outside = is_outside or (is_trainer and frame.f_code.co_name in _ENTRIES)
        frame = frame.f_back


def _line(frame: FrameType, library: str = "") -> CodePlace:
    code = frame.f_code
    return CodePlace(
        name=getattr(code, "co_qualname", code.co_name),
        file=absolute_file(code.co_filename),
        line=frame.f_lineno or code.co_firstlineno,
        is_library=bool(library),
        package=library,
    )


def _written(kind: type) -> Iterator[type]:
    """A class and those of its bases that derive from Lightning's."""
    for base in kind.__mro__:
        names = {one.__name__ for one in base.__mro__[1:]}
        if names.intersection(_OF_LIGHTNING):
            yield base


def _file_of(kind: type) -> str | None:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return None if file is None else absolute_file(file)


def _version(package: str) -> str:
    found = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(found, str):
        return found
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
