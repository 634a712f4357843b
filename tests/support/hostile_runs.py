"""Malicious saved runs: mutations of a good one."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

NUMBERS = [
    *(
        0,
        1,
        -1,
        2,
        7,
        10**4,
        10**9,
        2**31,
        -(2**31),
        2**53,
        2**60,
        2**62,
        2**63 - 1,
        2**63,
        -(2**63),
        2**64,
        10**30,
    ),
    *(0.5, -0.5, 1e30, 1e300, -1e300, 1e-300),
]
VALUES = [
    *NUMBERS,
    *(None, True, False, "", "x", "\0", "\x1b[31m", "forward", "../../../etc/passwd", "x" * 10_000, "\ud800"),
    *([], {}, [[]], [1, 2, 3], {"a": 1}, {"": {}}, [None], ["x"] * 1000, [0] * 1000),
]


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def places(content: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in it."""
    found = []
    left = [content]
    while left:
        inner = left.pop()
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        for key in keys:
            found.append((inner, key))
            if isinstance(inner[key], dict | list):
                left.append(inner[key])
    return found


def mutated(good: Any, seed: int) -> Any:
    """A random change of a good file; every kind of place is equally likely."""
    chance = random.Random(seed)
    content = copy.deepcopy(good)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        found = places(content)
        # Columns have the most places, so choose by name first.
        names: dict[str, list[tuple[Any, Any]]] = {}
        for container, key in found:
            name = str(key) if isinstance(container, dict) else f"item of {type(container[key]).__name__}"
            names.setdefault(name, []).append((container, key))
        container, key = chance.choice(names[chance.choice(sorted(names))])
        change(container, key, chance)
    return content


def change(container: Any, key: Any, chance: random.Random) -> None:
    value = container[key]
    kind = chance.randrange(8)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, list):
        container.insert(key, copy.deepcopy(value))
    elif kind == 2 and isinstance(value, list):
        chance.choice((value.reverse, lambda: chance.shuffle(value), value.clear))()
    elif kind == 3 and isinstance(value, list) and value:
        value[:] = [copy.deepcopy(value[0])] * len(value)
    elif kind == 4 and isinstance(value, list) and len(value) < 1000:
        value *= chance.choice((2, 10))
    elif kind == 5 and isinstance(value, int | float) and not isinstance(value, bool):
        container[key] = chance.choice((-value, value + 1, value * 1000, value - 1, *NUMBERS))
    elif kind == 6 and isinstance(container, dict):
        container[chance.choice(("x", "", "forward", "schema_version"))] = container.pop(key)
    else:
        container[key] = copy.deepcopy(chance.choice(VALUES))


def as_text(content: Any) -> bytes:
    return json.dumps(content).encode("utf-8", "surrogatepass")
