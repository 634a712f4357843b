"""How the user of a library reaches what the library makes for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Way:
    """One argument, or setting, of a library.

    Attributes:
        words: what its user writes. ``{arguments}`` becomes ``num_workers=2, persistent_workers=True``,
            ``{items}`` the same as items of a dict, ``{value}`` the value of the first, ``{kind}`` the class.
        target: what has it, as ``module:name.of.attribute``.
        parameter: of the target's signature; ``""`` if the target is an attribute to be set.
        reaches: the arguments of a DataLoader or an optimizer that it sets; all of them if empty.
    """

    words: str
    target: str
    parameter: str = ""
    reaches: tuple[str, ...] = ()

    def says(self, arguments: Mapping[str, Any], kind: str) -> str:
        """The words with these arguments of a class."""
        return (
            self.words.replace("{arguments}", as_arguments(arguments))
            .replace("{items}", ", ".join(f"{name!r}: {value!r}" for name, value in arguments.items()))
            .replace("{value}", repr(next(iter(arguments.values()), None)))
            .replace("{kind}", kind)
        )


@dataclass(frozen=True, kw_only=True)
class LibraryWays:
    """The ways that one library has.

    Attributes:
        package: the name that it is imported by.
        loader: to arguments of the DataLoader that it makes.
        optimizer: to arguments of the optimizer that it makes.
        batches: to cheaper batches, such as a cache.
    """

    package: str
    loader: Sequence[Way] = ()
    optimizer: Sequence[Way] = ()
    batches: Sequence[Way] = ()


def reached(ways: Sequence[Way], arguments: Mapping[str, Any], kind: str) -> tuple[str, dict[str, Any]]:
    """What the user writes for some arguments, and those that no way reaches.

    Args:
        ways: of a library, the best first.
        arguments: name → value.
        kind: the class whose arguments they are.
    """
    left, said = dict(arguments), []
    for way in ways:
        taken = {name: value for name, value in left.items() if not way.reaches or name in way.reaches}
        if taken:
            said.append(way.says(taken, kind))
            left = {name: value for name, value in left.items() if name not in taken}
    return " and ".join(said), left


def as_arguments(arguments: Mapping[str, Any]) -> str:
    """As they are written in a call."""
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
