"""Whose code it is, and what to write if a library makes the DataLoader or optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from lightning_modelprof.place import Place
from lightning_modelprof.record import Record
from lightning_modelprof.report.advice.libraries import LIBRARIES, LibraryWays, as_arguments, reached
from lightning_modelprof.report.model import Finding
from lightning_modelprof.run.setup import LoaderSetup, TrainingSetup


class Owner(Record, frozen=True, kw_only=True):
    """A library that makes what the user would otherwise make.

    Attributes:
        place: the function that does.
        is_own_way: workaround if the library has no argument, as the end of a sentence.
    """

    package: str
    place: Place
    is_own_way: str = ""

    @property
    def _ways(self) -> LibraryWays:
        return LIBRARIES.get(self.package, LibraryWays(package=self.package))

    def loader(self, kind: str, **arguments: Any) -> str:
        """Return what to write for these DataLoader arguments."""
        return self._call(kind, arguments, *reached(self._ways.loader, arguments, kind))

    def optimizer(self, kind: str, **arguments: Any) -> str:
        """Return what to write for these optimizer arguments."""
        return self._call(kind, arguments, *reached(self._ways.optimizer, arguments, kind))

    @property
    def cheaper_batches(self) -> str:
        """The library's way to cheaper batches, as a sentence with a leading space, or ``""``."""
        said, _ = reached(self._ways.batches, {"": None}, "")
        return f" Alternatively, {said} ({self.package})." if said else ""

    def _call(self, kind: str, arguments: dict[str, Any], said: str, left: dict[str, Any]) -> str:
        made = f"{self.package} makes the {kind} in {self.where}"
        if not said:
            return (
                f"Set {as_arguments(arguments)} through {self.package}, which makes the {kind} in"
                f" {self.where}{self.is_own_way}"
            )
        rest = f", which has no argument for {as_arguments(left)}" if left else ""
        return f"{said[:1].upper()}{said[1:]} ({made}{rest})"

    @property
    def where(self) -> str:
        """Its function, with file and line."""
        return self.place.named


def owner_of_loader(setup: TrainingSetup | None, loader: LoaderSetup | None) -> Owner | None:
    """Return the library that makes a loader; ``None`` if the user does.

    It owns the hook that returns the loader, or the call of the Trainer that takes it. A loader that user
    code hands over is the user's, except for libraries with a known function for it.
    """
    if setup is None or loader is None:
        return None
    place = loader.made_by or setup.package_call
    if place is not None:
        return Owner(package=place.package, place=place) if place.package else None
    for part in (loader.dataset, loader.collate):
        if part is not None and part.package in LIBRARIES and _is_library_of(setup, part.package):
            return Owner(package=part.package, place=part)
    return None


def owner_of_optimizer(setup: TrainingSetup | None) -> Owner | None:
    """Return the library whose ``configure_optimizers`` runs; ``None`` if it's the user's."""
    place = None if setup is None else setup.module_hooks.get("configure_optimizers")
    if place is None or not place.package:
        return None
    way = ", or override configure_optimizers in a subclass"
    return Owner(package=place.package, place=place, is_own_way=way)


def loader_call(setup: TrainingSetup | None, loader: LoaderSetup, **arguments: Any) -> str:
    """Return what the user writes to give a loader these arguments."""
    return written_call(loader.kind, arguments, owner_of_loader(setup, loader))


def written_call(kind: str, arguments: Mapping[str, Any], owner: Owner | None) -> str:
    """Return the loader arguments to set, or how its library sets them."""
    if owner is not None:
        return owner.loader(kind, **arguments)
    return f"Set {as_arguments(arguments)}{'' if kind == 'DataLoader' else f' on {kind}'}"


def _is_library_of(setup: TrainingSetup, package: str) -> bool:
    return any(one.package == package for one in setup.libraries)


def with_owners(finding: Finding, setup: TrainingSetup | None) -> Finding:
    """Mark the finding's library locations, and add the user's call to them."""
    if setup is None or not setup.libraries:
        return finding
    locations = tuple(_with_owner(one, setup) for one in finding.locations)
    return replace(finding, locations=locations, action=_with_override_hint(finding.action, locations))


def _with_override_hint(action: str, locations: Sequence[Place]) -> str:
    if not action or not locations or not locations[0].package or locations[0].package in action:
        return action
    first = locations[0]
    what = first.function or "This code"
    return (
        f"{action} {what} is part of {first.package}; look for an argument that changes it, or override it."
    )


def _with_owner(location: Place, setup: TrainingSetup) -> Place:
    inner = None if location.inner is None else _with_owner(location.inner, setup)
    library = location.package or _library_at(location.file, setup)
    call = location.call
    if library and call is None and setup.user_call is not None and location.file is not None:
        call = setup.user_call.exact()
    return replace(location, package=library, inner=inner, call=call)


def _library_at(file: str | None, setup: TrainingSetup) -> str:
    if file is None:
        return ""
    return next((one.package for one in setup.libraries if _is_below(file, one.folders)), "")


def _is_below(file: str, folders: Sequence[str]) -> bool:
    path = PurePath(file)
    return any(path.is_relative_to(folder) for folder in folders)
