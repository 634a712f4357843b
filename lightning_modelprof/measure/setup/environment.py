"""The software and hardware of a run, read once when the loop starts."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, Protocol

import torch

from lightning_modelprof.measure.stored import variables_of
from lightning_modelprof.measure.user_code import INSTALLED, UserCode, absolute_file, folders_of, library_of
from lightning_modelprof.place import Place
from lightning_modelprof.run.loops import LoopKind
from lightning_modelprof.run.records import RunInfo
from lightning_modelprof.run.setup import WRAPPERS, Library

_LIGHTNINGS: Final = ("lightning", "pytorch_lightning")


class AnyLoop(Protocol):
    """Whatever runs the loop, such as ``loop.loop.Loop``."""

    @property
    def kind(self) -> LoopKind: ...

    @property
    def module(self) -> Any: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def world_size(self) -> int: ...

    @property
    def precision(self) -> str: ...

    @property
    def strategy(self) -> str: ...

    @property
    def accumulate(self) -> int: ...

    @property
    def run_by(self) -> tuple[type, ...]: ...

    @property
    def optimizers(self) -> Sequence[Any]: ...

    def loaders(self) -> Sequence[Any]: ...

    def live(self) -> Any: ...


def run_info(
    loop: AnyLoop,
    *,
    config: dict[str, Any],
    sample_unit: str,
    version: str,
    libraries: Sequence[Library] = (),
) -> RunInfo:
    """Describe a loop that is about to start; ``libraries`` are those that it belongs to."""
    device = loop.device
    return RunInfo(
        created=_now(),
        loop=loop.kind.key,
        model="" if loop.module is None else written_class(loop.module).__name__,
        device_type=device.type,
        device_name=device_name(device),
        num_threads=torch.get_num_threads(),
        world_size=loop.world_size,
        precision=loop.precision,
        strategy=loop.strategy,
        accumulate_grad_batches=loop.accumulate,
        sample_unit=sample_unit,
        host=platform.node(),
        versions={
            "lightning-modelprof": version,
            "torch": str(torch.__version__),
            **_versions(loop.run_by),
            **{one.package: one.version for one in libraries if one.version},
            "python": platform.python_version(),
        },
        config=config,
    )


def _versions(run_by: Iterable[type]) -> dict[str, str]:
    """Return versions of Lightning, and of installed packages with a class among these and their bases."""
    found = {}
    for kind in (base for one in run_by for base in one.__mro__):
        if not {"Trainer", "LightningModule"}.intersection(base.__name__ for base in kind.__mro__):
            continue
        package = kind.__module__.partition(".")[0]
        module = sys.modules.get(package)
        version, file = getattr(module, "__version__", None), getattr(module, "__file__", None)
        is_library = package in _LIGHTNINGS or not {*INSTALLED}.isdisjoint(Path(str(file)).parts)
        if isinstance(version, str) and is_library:
            found[package] = version
    return found


def _now() -> str:
    try:
        return datetime.now().astimezone().isoformat(timespec="microseconds")
    except Exception:  # a replaced datetime, or an invalid date: the label is missing
        return ""


def written_class(module: Any) -> type:
    """Return the user's class inside wrappers, also for ``fully_shard``, which substitutes its own class."""
    kind = type(module)
    while kind.__name__ in WRAPPERS:
        inner = variables_of(module).get("_modules", {}).get(WRAPPERS[kind.__name__])
        if inner is None:
            break
        module, kind = inner, type(inner)
    is_sharded = kind.__bases__[0].__name__ == "FSDPModule"
    return kind.__bases__[-1] if is_sharded else kind


def device_name(device: torch.device) -> str:
    """Return the device's own name; the processor's or machine's for others."""
    if device.type in {"cuda", "xpu"}:
        return str(getattr(torch, device.type).get_device_name(device))
    return platform.processor() or platform.machine()


_TRAINERS: Final = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")


_ENTRIES: Final = ("fit", "validate", "test", "predict")


_OF_LIGHTNING: Final = ("LightningModule", "LightningDataModule")
"""By name, as there are two Lightning packages."""


class TrainerCall(NamedTuple):
    """The caller of the Trainer.

    Attributes:
        from_library: the library's function that called it; ``None`` where the user's code did.
        user: the user's line that led there; ``None`` without a library in between, or without such a line.
        files: user files with the functions that led there.
        lines: user lines that led there, innermost first.
    """

    from_library: Place | None
    user: Place | None
    files: frozenset[str] = frozenset()
    lines: tuple[Place, ...] = ()
    configured_by: str = ""


_CONFIGURATORS: Final = {
    "lightning.pytorch.cli": "LightningCLI",
    "pytorch_lightning.cli": "LightningCLI",
    "hydra": "Hydra",
}
"""Modules that call functions with settings from YAML files."""


def trainer_call() -> TrainerCall:
    """Find the caller of the running Trainer; call from a hook."""
    user_code, library, user = UserCode(), None, None
    lines: list[Place] = []
    configured_by = ""
    for frame in _callers(sys._getframe(1)):
        module, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        if user_code.is_users(frame):
            lines.append(_line(frame))
            user = user or lines[0]
        elif user is None and library is None and (package := library_of(module, absolute_file(file))):
            library = _line(frame, package)
        configured_by = configured_by or _configurator(module)
    files = frozenset(line.file for line in lines if line.file is not None)
    return TrainerCall(library, None if library is None else user, files, tuple(lines), configured_by)


def _configurator(module: str) -> str:
    names = (name for start, name in _CONFIGURATORS.items() if f"{module}.".startswith(f"{start}."))
    return next(names, "")


def read_libraries(trainer: Any, module: Any, call: TrainerCall) -> tuple[Library, ...]:
    """Return a loop's libraries: those of the module, the DataModule, and the Trainer's caller."""
    classes = [*_written(written_class(module)), *_written(type(getattr(trainer, "datamodule", None)))]
    packages = [library_of(kind.__module__, _file_of(kind)) for kind in classes]
    packages.append("" if call.from_library is None else call.from_library.package)
    return tuple(
        Library(package=package, version=_version(package), folders=folders_of(package))
        for package in dict.fromkeys(filter(None, packages))
    )


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames outside the nearest Trainer, innermost first."""
    is_outside = False
    while frame is not None:
        is_trainer = frame.f_globals.get("__name__") in _TRAINERS
        if is_outside and not is_trainer:
            yield frame
        is_outside = is_outside or (is_trainer and frame.f_code.co_name in _ENTRIES)
        frame = frame.f_back


def _line(frame: FrameType, library: str = "") -> Place:
    code = frame.f_code
    return Place(
        function=getattr(code, "co_qualname", code.co_name),
        file=absolute_file(code.co_filename),
        line=frame.f_lineno or code.co_firstlineno,
        is_library=bool(library),
        package=library,
    )


def _written(kind: type) -> Iterator[type]:
    """Yield a class and those of its bases that derive from Lightning's."""
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
