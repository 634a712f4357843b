"""Line wrapping matches a slow search, and long words cost no more than many short ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.show.layout import display_width
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


def test_word_of_millions_of_wide_characters_is_wrapped():
    """Measuring the rest again for each line would take hours."""
    lines = wrap("宽" * 2_000_000, 80)
    assert len(lines) == 50_000
    assert set(lines) == {"宽" * 40}


def test_word_of_100_megabytes_is_wrapped():
    assert len(wrap("x" * 100_000_000, 100)) == 1_000_000
