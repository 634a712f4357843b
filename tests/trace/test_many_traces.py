"""Several processes analyze the traces of several ranks, with the same report and errors as one process."""

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
    """The started processes, on a machine with two CPUs."""
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


def test_report_matches_single_process(folder, helpers, monkeypatch):
    report = analyze_files([folder])
    (helper,) = helpers
    assert len(helper.answers()) == 1
    assert helper._process.returncode == 0
    assert render_json(report) == render_json(alone([folder], monkeypatch))
    assert len(helpers) == 1


def test_trace_is_freed_before_next_one_is_read(folder, monkeypatch):
    """Facts are lazy, but with several traces none is kept in memory for them."""
    alive, read = [], reading_traces.read_with_progress

    def count(*args):
        gc.collect()
        alive.append(sum(isinstance(one, Timeline) for one in gc.get_objects()))
        return read(*args)

    monkeypatch.setattr(reading_traces, "read_with_progress", count)
    alone([folder], monkeypatch)
    assert alive == [alive[0]] * 2


def test_unanswered_work_is_done_in_main_process(folder, helpers, monkeypatch, tmp_path):
    (python := tmp_path / "python").symlink_to(shutil.which("false"))
    monkeypatch.setattr(sys, "executable", str(python))
    report = analyze_files([folder])
    (helper,) = helpers
    assert helper.answers() == {}
    assert render_json(report) == render_json(alone([folder], monkeypatch))


def test_report_is_complete_if_no_process_starts(folder, helpers, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(folder / "none"))
    report = analyze_files([folder])
    assert not helpers
    assert render_json(report) == render_json(alone([folder], monkeypatch))


def test_error_is_the_same_and_ends_other_processes(folder, helpers, monkeypatch):
    broken = folder / "broken.trace.json"
    broken.write_text("hello")
    files = [*sorted(folder.glob("*.gz")), broken]
    with pytest.raises(TraceError) as error:
        analyze_files(files)
    with pytest.raises(TraceError) as expected:
        alone(files, monkeypatch)
    assert str(error.value) == str(expected.value)
    assert all(helper._process.returncode is not None for helper in helpers)


def test_small_traces_use_one_process(folder, helpers, monkeypatch):
    monkeypatch.setattr(reading_traces, "_HELPED_BYTES", 2**28)
    (folder / "tiny.trace.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))
    analyze_files([folder])
    assert not helpers
