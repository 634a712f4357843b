"""Line wrapping matches a slow search, and long words cost no more than many short ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.show.layout import display_width
from lightning_modelprof.show.terminal import screen
from lightning_modelprof.show.terminal.screen import wrap


def slow_wrap(text, width):
    width, lines, line = max(width, 2), [], ""
    for word in text.split(" "):
        longer = f"{line} {word}" if line else word
        if display_width(longer) <= width:
            line = longer
            continue
        if line:
            lines.append(line)
        line = word
        while display_width(line) > width:
            end = next(end for end in range(width, 0, -1) if display_width(line[:end]) <= width)
            lines.append(line[:end])
            line = line[end:]
    return [*lines, line] if line or not lines else lines


@given(st.text("ab 宽\u0301é", max_size=60), st.integers(0, 12))
def test_wrap_matches_slow_search(text, width):
    assert wrap(text, width) == slow_wrap(text, width)


@pytest.mark.parametrize(("letter", "width", "num_letters"), [("宽", 80, 40), ("x", 100, 100)])
def test_long_word_is_not_measured_for_each_line(monkeypatch, letter, width, num_letters):
    """Measuring the rest again for each line would take hours for a word of megabytes."""
    measured = []
    monkeypatch.setattr(
        screen, "display_width", lambda text: measured.append(len(text)) or display_width(text)
    )
    lines = wrap(letter * 100_000, width)
    assert len(lines) == 100_000 // num_letters
    assert set(lines) == {letter * num_letters}
    assert sum(measured) <= 2 * 100_000 + width * len(lines)


def test_word_of_20_megabytes_is_wrapped():
    assert len(wrap("x" * 20_000_000, 100)) == 200_000
