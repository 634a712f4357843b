"""Tests the CI summary that lists everything skipped."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "skipped.py"

pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="a copy without .ci")

TESTS = """
import pytest

@pytest.mark.skipif(True, reason="Chromium is not installed")
@pytest.mark.parametrize("number", range(3))
def test_page(number):
    pass

def test_node():
    pytest.skip("node is not installed: it runs the page's decoder")

def test_library():
    pytest.importorskip("no_such_library")

def test_other_page():
    pytest.skip("Chromium is not installed")

def test_it():
    pass
"""


def test_skipped_tests_are_counted_by_reason(tmp_path):
    file, log = tmp_path / "test_some.py", tmp_path / "log"
    file.write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "--rootdir", tmp_path, file]
    log.write_text(subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout)
    command = [sys.executable, SCRIPT, log, "Types: npm is not installed"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == [
        "Skipped: 4",
        "  - Types: npm is not installed",
        "  - 4 tests: Chromium is not installed",
        "  - 1 test: node is not installed: it runs the page's decoder",
        "  - 1 test: could not import 'no_such_library': No module named 'no_such_library'",
    ]


def test_summary_says_if_nothing_was_skipped():
    summary = runpy.run_path(str(SCRIPT))["summary"]
    assert summary("12 passed in 3 s", []) == "Skipped: nothing"
