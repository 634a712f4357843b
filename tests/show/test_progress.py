"""The line that tells a person who waits that something is done."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from tests.support.fits import run_fit


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Timer:
    """Is over at once, or never; it keeps how long it was to take."""

    seconds = ()
    is_over = True
    daemon = False

    def __init__(self, seconds, do):
        self.seconds.append(seconds)
        self.do = do

    def start(self):
        if self.is_over:
            self.do()

    def cancel(self):
        pass

    def join(self, timeout):
        assert timeout


@pytest.fixture
def timer(monkeypatch):
    monkeypatch.setattr(Timer, "seconds", [])
    monkeypatch.setattr(threading, "Timer", Timer)
    return Timer


@pytest.mark.parametrize(
    ("stream", "is_over", "terminal", "lines"),
    [
        (Terminal, True, True, 1),
        (Terminal, False, True, 0),
        (Terminal, True, False, 0),
        (io.StringIO, True, True, 0),
    ],
    ids=["slow", "fast", "quiet", "no terminal"],
)
def test_one_line_once_the_report_takes_a_second(
    tmp_path, monkeypatch, timer, stream, is_over, terminal, lines
):
    """Of one fit, whatever is waited for."""
    monkeypatch.setattr(timer, "is_over", is_over)
    stream = stream()
    monkeypatch.setattr(sys, "stderr", stream)
    run_fit(tmp_path, steps=(3, 6), terminal=terminal)
    said = [line for line in stream.getvalue().splitlines() if "modelprof" in line]
    assert said == ["lightning-modelprof: making the report ..."] * lines
    assert set(timer.seconds) <= {1}
