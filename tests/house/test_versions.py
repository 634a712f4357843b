"""Tests that pyproject.toml claims only tested versions, and that the docs have the table of results."""

from __future__ import annotations

import json
import re
import runpy

import pytest

from tests.support.fits import ROOT

SCRIPT, RESULTS = ROOT / "benchmarks" / "compat.py", ROOT / "benchmarks" / "compat.json"

KNOWN = {"tests/lightning/test_phases_fake_clock.py::test_progress_bar_is_as_it_was"}
"""Fails with Lightning 2.4 and rich 14 or newer."""

pytestmark = pytest.mark.skipif(not RESULTS.is_file(), reason="a copy without all of the house")


@pytest.fixture(scope="module")
def compat():
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def results():
    return {name: one for name, one in json.loads(RESULTS.read_text()).items() if "reason" not in one}


def test_every_claimed_python_ran(results):
    text = (ROOT / "pyproject.toml").read_text()
    claimed = set(re.findall(r"Programming Language :: Python :: (3\.\d+)", text))
    assert claimed == {one["python"].rpartition(".")[0] for one in results.values()}


def test_lower_bounds_ran(compat, results):
    versions = results["oldest"]["versions"]
    assert [one for one in compat["lower_bounds"]() if not same(*one.split("=="), versions)] == []


def same(name, bound, versions):
    """Whether the version matches the bound; ``2.4`` matches ``2.4.0``."""
    return f"{versions[name]}.0".startswith(f"{bound}.") or versions[name] == bound


def test_newest_python_patch_is_found(compat, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for patch in ("3.12.9", "3.12.10", "3.13.1"):
        python = tmp_path / ".pyenv" / "versions" / patch / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
    assert "/3.12.10/" in compat["find_python"]("3.12")


def test_all_recorded_runs_passed(results):
    assert {name: one["selftest_failed"] for name, one in results.items() if one["selftest_failed"]} == {}
    assert {failed for one in results.values() for failed in one["tests_failed"]} <= KNOWN
    assert all(one["tests"]["passed"] > 200 for one in results.values())


def test_docs_table_matches_results(compat, results):
    text = (ROOT / "docs" / "compatibility.md").read_text()
    assert compat["table"](json.loads(RESULTS.read_text())) in text
