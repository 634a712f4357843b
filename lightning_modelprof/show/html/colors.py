"""One color per meaning in all views, and the CSS for it.

A color is the same on light and dark pages. Readers who see no red, no green or no blue can also tell
adjacent colors apart; ``tests/show/test_colors.py`` measures it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import fill
from typing import Final

from lightning_modelprof.record import Record


class Meaning(Record, frozen=True):
    """A color and what it stands for.

    Attributes:
        name: CSS name after ``--m-``.
        words: keys of series and of step card parts, and kinds of timeline slices.
    """

    name: str
    color: str
    words: tuple[str, ...]


MEANINGS: Final = (
    Meaning(
        "data-loading",
        "#e59206",
        (
            "dataloader",
            "idle_input",
            "data loading",
            "idle: data loading",
            "critical path: data loading",
        ),
    ),
    Meaning("batch", "#f8c888", ()),
    Meaning("transfer", "#845f80", ("memcpy", "critical path: copy")),
    Meaning("forward", "#3d6caa", ("activations",)),
    Meaning("backward", "#8de3fe", ("gradients",)),
    Meaning("optimizer", "#92c390", ("optimizer_state",)),
    Meaning(
        "communication",
        "#db193c",
        ("idle_communication", "idle: communication", "critical path: communication"),
    ),
    Meaning("kernel", "#8db65b", ("computing", "critical path: kernel")),
    Meaning("tensor-cores", "#03aa89", ("tensor_cores",)),
    Meaning("memory", "#e3dc40", ("memset",)),
    Meaning("validation", "#a38fde", ()),
    Meaning("callbacks", "#9d3952", ("module_hooks",)),
    Meaning("logging", "#4b5b09", ()),
    Meaning("host", "#b77962", ("other", "idle_host", "idle: host", "critical path: host")),
    Meaning(
        "waiting",
        "#989bfb",
        ("idle_sync", "synchronization", "idle_gap", "idle_stream", "idle: kernel gap"),
    ),
    Meaning("other-stream", "#7870d8", ("idle: other stream",)),
    Meaning("operator", "#72abcd", ("cpu_exec",)),
    Meaning("runtime", "#b36409", ("runtime call", "critical path: launch")),
    Meaning("module", "#285699", ()),
    Meaning("python", "#348396", ("python function",)),
    Meaning("phase", "#7f4de1", ()),
    Meaning("profiler", "#dc9aa0", ("profiler overhead",)),
    Meaning(
        "rest",
        "#d0d0d0",
        (
            "before",
            "idle",
            "idle: unknown",
            "critical path: unexplained",
            "step",
        ),
    ),
    Meaning("user-range", "#f068b8", ("user range",)),
    Meaning("device-range", "#f87040", ("device range",)),
    Meaning("other-event", "#c0e8c0", ("other event",)),
)

NAMELESS: Final = ("#1086e0", "#ce6177", "#36803b", "#977ebe", "#c0943f", "#3ecce9", "#adde78")
"""Colors without a meaning, as for operators by name; the first five are visible in thin lines."""

_MEANING_OF: Final = {word: one for one in MEANINGS for word in (one.name, *one.words)}


def color_class(word: str) -> str | None:
    """Return the color class that ``word`` always has, such as ``m-forward``; ``None`` if it has none."""
    meaning = _MEANING_OF.get(word)
    return None if meaning is None else f"m-{meaning.name}"


def nameless_class(place: int) -> str:
    """Return the color class of the series at ``place`` among those without a meaning."""
    return f"c{1 + place % len(NAMELESS)}"


def color_classes(words: Sequence[str]) -> list[str]:
    """Choose the color classes of one picture's series; the second of two with one meaning gets another."""
    found: list[str] = []
    for word in words:
        own = color_class(word)
        free = (one for place in range(len(NAMELESS)) if (one := nameless_class(place)) not in found)
        found.append(own if own is not None and own not in found else next(free, nameless_class(0)))
    return found


def color_of(color_class: str) -> str:
    return _COLOR_OF[color_class]


_COLOR_OF: Final = {
    **{f"m-{one.name}": one.color for one in MEANINGS},
    **{f"c{place}": color for place, color in enumerate(NAMELESS, 1)},
}


def colors_css() -> str:
    """Write the generated part of ``parts.css``: a variable and class per color, a variable per word."""
    words = {re.sub(r"[^a-z]+", "-", word): one.name for one in MEANINGS for word in one.words}
    variables = [
        *(f"--{name}: {color};" for name, color in _COLOR_OF.items()),
        *(f"--m-{word}: var(--m-{name});" for word, name in words.items() if word != name),
    ]
    return _lines([":root {", *variables, "}"]) + _lines(
        [f".{name} {{ --c: var(--{name}); }}" for name in _COLOR_OF]
    )


def _lines(rules: Sequence[str]) -> str:
    spaces = str.maketrans(" ", "\0")  # keeps each rule on one line
    text = " ".join(rule.translate(spaces) for rule in rules)
    return fill(text, 150, break_long_words=False, break_on_hyphens=False).translate({0: " "}) + "\n"
