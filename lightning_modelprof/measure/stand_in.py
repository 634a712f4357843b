"""What stands in the place of something of the user's or Lightning's while we measure."""

from __future__ import annotations

from typing import Any


class StandIn:
    """Called in the place of ``original``; a copy or pickle of the object that has it has the original."""

    __slots__ = ("original",)

    def __init__(self, original: Any) -> None:
        self.original = original

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.original,)


def original_of(thing: Any) -> Any:
    """What a stand-in of ours stands in for; anything else is itself."""
    return thing.original if issubclass(type(thing), StandIn) else thing


def _itself(original: Any) -> Any:
    return original
