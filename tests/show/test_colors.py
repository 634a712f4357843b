"""Each colour has one meaning and is distinct for any colour vision, in light and dark themes."""

from __future__ import annotations

from importlib.resources import files
from itertools import combinations

import numpy as np
import pytest

from lightning_modelprof.analysis.trace.idle import CAUSES
from lightning_modelprof.analysis.trace.step_breakdown import STEP_CATEGORIES
from lightning_modelprof.report.timeline.details import WORDS
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.show.html.colors import (
    MEANINGS,
    NAMELESS,
    color_class,
    color_classes,
    color_of,
    colors_css,
)

# Machado, Oliveira, Fernandes (2009): A physiologically-based model for simulation of color vision
# deficiency. Severity 1.0, for linear RGB.
VISIONS = {
    "full": np.eye(3),
    "no red": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no green": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "no blue": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)

PHASES_OF_A_STEP = (
    "dataloader",
    "transfer",
    "forward",
    "backward",
    "optimizer",
    "callbacks",
    "logging",
    "validation",
    "other",
    "rest",
)
ON_THE_HOST = (
    "operator",
    "runtime call",
    "module",
    "python function",
    "phase",
    "data loading",
    "communication",
    "synchronization",
    "step",
)
ON_A_DEVICE = ("kernel", "memcpy", "memset", "communication", *(f"idle: {cause}" for cause in CAUSES))
IN_MEMORY = ("before", "optimizer_state", "gradients", "batch", "activations", "other")
BESIDE_EACH_OTHER = (PHASES_OF_A_STEP, STEP_CATEGORIES, ON_THE_HOST, ON_A_DEVICE, IN_MEMORY)

LEAST = 14
"""Distance in Lab (CIE76). About 2.3 is just noticeable between two patches."""

LEAST_OF_ANY = 7
"""For any two meanings, even if rarely seen together."""


def linear_of(color: str):
    values = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab_of(linear):
    ratios = (TO_XYZ @ linear) / TO_XYZ.sum(axis=1)
    x, y, z = np.where(ratios > 216 / 24389, np.cbrt(ratios), (24389 / 27 * ratios + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def seen(color: str, vision: str):
    return lab_of(np.clip(np.array(VISIONS[vision]) @ linear_of(color), 0, 1))


def too_near(colors: dict[str, str], least: float) -> list[str]:
    found = []
    for vision in VISIONS:
        for one, other in combinations(colors, 2):
            if colors[one] == colors[other]:
                continue  # one meaning
            distance = float(np.linalg.norm(seen(colors[one], vision) - seen(colors[other], vision)))
            if distance < least:
                found.append(f"{one} and {other} to an eye with {vision}: {distance:.1f}")
    return found


def test_lab_matches_known_colours():
    """Reference values are from tables of the CIE definition."""
    np.testing.assert_allclose(lab_of(linear_of("#ffffff")), [100, 0, 0], atol=0.02)
    np.testing.assert_allclose(lab_of(linear_of("#ff0000")), [53.24, 80.09, 67.20], atol=0.02)
    np.testing.assert_allclose(lab_of(linear_of("#0000ff")), [32.30, 79.19, -107.86], atol=0.02)


@pytest.mark.parametrize("words", BESIDE_EACH_OTHER, ids=lambda words: words[0])
def test_neighbouring_colours_are_distinct_for_any_vision(words):
    assert too_near({word: color_of(color_class(word)) for word in words}, LEAST) == []


def test_any_two_meanings_have_distinct_colours():
    assert too_near({one.name: one.color for one in MEANINGS}, LEAST_OF_ANY) == []


def test_nameless_series_and_rest_have_distinct_colours():
    colors = {str(place): color for place, color in enumerate(NAMELESS)}
    assert too_near(colors | {"rest": color_of("m-rest")}, LEAST) == []


@pytest.mark.parametrize("page", ["#ffffff", "#15181c"], ids=["light", "dark"])
def test_every_colour_is_visible_on_page(page):
    colors = {f"c{place}": color for place, color in enumerate(NAMELESS)}
    colors |= {one.name: one.color for one in MEANINGS}
    distances = {
        (name, vision): np.linalg.norm(seen(color, vision) - seen(page, vision))
        for vision in VISIONS
        for name, color in colors.items()
    }
    assert len(distances) > 10
    assert [one for one, distance in distances.items() if distance <= LEAST] == []


def test_data_loading_and_communication_differ():
    loading = {
        color_class(word) for word in ("dataloader", "data loading", "idle: data loading", "idle_input")
    }
    communication = {color_class(word) for word in ("communication", "idle: communication")}
    assert len(loading) == len(communication) == 1
    assert loading != communication


@pytest.mark.parametrize("word", [*STEP_CATEGORIES, *WORDS, *(f"idle: {cause}" for cause in CAUSES)])
def test_every_kind_has_meaning(word):
    assert color_class(word) is not None


def test_word_has_one_meaning():
    words = [word for one in MEANINGS for word in (one.name, *one.words)]
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("phase", [phase.key for phase in PHASES])
def test_series_of_one_chart_have_distinct_colours(phase):
    keys = dict.fromkeys(("dataloader", "module_hooks", "callbacks", "zero_grad", phase, "rest"))
    assert len(set(color_classes(list(keys)))) == len(keys)


def test_page_has_these_colours():
    """``parts.css`` holds a copy; replace it with the result of ``colors_css``."""
    css = files("lightning_modelprof.show.html").joinpath("parts.css").read_text(encoding="utf-8")
    assert colors_css() in css
