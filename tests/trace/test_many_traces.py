"""Traces of several ranks are analyzed by several processes, with the same report and the same errors."""

from __future__ import annotations

import gc
import gzip
import shutil
import sys

import pytest

from lightning_modelprof import reading_traces
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.errors import TraceError
from lightning_modelprof.reading_traces import analyze_files
from lightning_modelprof.show.document import render_json
from tests.support.traces import FOLDER


@pytest.fixture
def folder(tmp_path):
    for file in FOLDER.glob("sampled_2rank_*.gz"):
        shutil.copy(file, tmp_path)
    return tmp_path


@pytest.fixture
def helpers(monkeypatch):
    """The processes that were started; the machine has two processors."""
    started = []

    class Helper(reading_traces._Helper):
        def __init__(self, *args):
            super().__init__(*args)
            started.append(self)

    monkeypatch.setattr(reading_traces, "_num_cpus", lambda: 2)
    monkeypatch.setattr(reading_traces, "_HELPED_BYTES", 1)
    monkeypatch.setattr(reading_traces, "_Helper", Helper)
    return started


def alone(paths, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(reading_traces, "_num_cpus", lambda: 1)
        return analyze_files(paths)


def test_the_report_is_that_of_one_process(folder, helpers, monkeypatch):
    report = analyze_files([folder])
    (helper,) = helpers
    assert len(helper.answers()) == 1
    assert helper._process.returncode == 0
    assert render_json(report) == render_json(alone([folder], monkeypatch))
    assert len(helpers) == 1


def test_a_trace_is_gone_when_the_next_one_is_read(folder, monkeypatch):
    """Its facts are lazy, but of several traces none is kept for them."""
    alive, read = [], reading_traces.read_with_progress

    def count(*args):
        gc.collect()
        alive.append(sum(isinstance(one, Timeline) for one in gc.get_objects()))
        return read(*args)

    monkeypatch.setattr(reading_traces, "read_with_progress", count)
    alone([folder], monkeypatch)
    assert alive == [alive[0]] * 2


def test_what_a_process_does_not_answer_is_done_here(folder, helpers, monkeypatch, tmp_path):
    (python := tmp_path / "python").symlink_to(shutil.which("false"))
    monkeypatch.setattr(sys, "executable", str(python))
    report = analyze_files([folder])
    (helper,) = helpers
    assert helper.answers() == {}
    assert render_json(report) == render_json(alone([folder], monkeypatch))


def test_no_other_process_can_be_started(folder, helpers, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(folder / "none"))
    report = analyze_files([folder])
    assert not helpers
    assert render_json(report) == render_json(alone([folder], monkeypatch))


def test_an_error_is_the_same_and_ends_the_others(folder, helpers, monkeypatch):
    broken = folder / "broken.trace.json"
    broken.write_text("hello")
    files = [*sorted(folder.glob("*.gz")), broken]
    with pytest.raises(TraceError) as error:
        analyze_files(files)
    with pytest.raises(TraceError) as expected:
        alone(files, monkeypatch)
    assert str(error.value) == str(expected.value)
    assert all(helper._process.returncode is not None for helper in helpers)


def test_a_few_megabytes_are_for_one_process(folder, helpers, monkeypatch):
    monkeypatch.setattr(reading_traces, "_HELPED_BYTES", 2**28)
    (folder / "tiny.trace.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))
    analyze_files([folder])
    assert not helpers
