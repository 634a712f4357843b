"""The progress line of a slow report."""

from __future__ import annotations

import io
import sys

import pytest

from lightning_modelprof.show import progress
from tests.support.fits import run_fit


class Terminal(io.StringIO):
    def isatty(self):
        return True


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
def test_slow_report_prints_one_line(tmp_path, monkeypatch, stream, is_over, terminal, lines):
    """One line per fit, whatever it waits for."""
    monkeypatch.setattr(progress, "_WAIT_S", 0 if is_over else 1_000)
    if is_over:  # before the report is ready, however busy the machine is
        monkeypatch.setattr(progress, "start_thread", lambda tell, _name: tell())
    stream = stream()
    monkeypatch.setattr(sys, "stderr", stream)
    run_fit(tmp_path, steps=(3, 6), terminal=terminal)
    said = [line for line in stream.getvalue().splitlines() if "modelprof" in line]
    assert said == ["lightning-modelprof: making the report ..."] * lines
