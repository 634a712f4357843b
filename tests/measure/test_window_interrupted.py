"""Ctrl-C or an error while a window closes loses no recorded data and leaves no profiler on."""

from __future__ import annotations

import pytest
import torch

from lightning_modelprof.engine import trace_work
from lightning_modelprof.engine.outputs import Outputs
from lightning_modelprof.measure.window import capture
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.records import WindowStatus
from tests.support.fits import (
    Net,
    fit_quietly,
    is_profiling,
    loader,
    make_callback,
    make_trainer,
    our_warnings,
    run_fit,
    table_of,
    windows_of,
)

pytestmark = pytest.mark.slow

PLACES = {
    "stop": (torch.profiler.profile, "stop_trace"),
    "export": (torch.profiler.profile, "export_chrome_trace"),
    "cpu": (capture.Capture, "_noted"),
    "save": (Outputs, "save_trace"),
    "parse": (trace_work, "parse_trace"),
    "analyze": (trace_work, "TraceFacts"),
}


def fail_in(monkeypatch, place, error, *, after):
    owner, name = PLACES[place]
    work = getattr(owner, name)

    def fails(*arguments, **options):
        monkeypatch.undo()
        if after:
            work(*arguments, **options)
        raise error

    monkeypatch.setattr(owner, name, fails)


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize(
    ("place", "has_files"),
    [(place, has_files) for place in PLACES for has_files in (True, False) if has_files or place != "save"],
)
def test_ctrl_c_while_window_closes(tmp_path, monkeypatch, place, after, has_files):
    callback = make_callback(tmp_path, steps=(2, 4), files=has_files)
    fail_in(monkeypatch, place, KeyboardInterrupt(), after=after)
    with pytest.raises(SystemExit):
        fit_quietly(make_trainer(tmp_path, callback), Net(), loader())
    assert not is_profiling()
    (window,) = windows_of(callback)
    assert window.recorded_steps == (2, 3)
    assert callback.report is not None
    if place in ("save", "parse", "analyze"):
        assert window.status is WindowStatus.COMPLETE
        reason = table_of(callback.report, "model_summary").absent_reason
        assert "training was interrupted while its trace was" in reason
    else:
        assert window.status is WindowStatus.PARTIAL
        assert window.note == "training was interrupted first, while its trace was being saved"
    has_trace = has_files and place in ("save", "parse", "analyze")
    assert (window.trace_file is not None) == has_trace
    if has_files:
        left = [path.name for path in (tmp_path / "modelprof" / "traces").glob("*")]
        # The raw trace stays if it's the only one.
        assert len(left) == (2 if place == "save" and after else has_trace)
        assert load_run(tmp_path / "modelprof").ranks[0].windows == callback.run.ranks[0].windows
    # Nothing is left over that would keep the next window from opening.
    assert windows_of(run_fit(tmp_path / "next", steps=(2, 4)))[0].status is WindowStatus.COMPLETE


@pytest.mark.parametrize(
    "error", [MemoryError("no memory"), ZeroDivisionError("ours")], ids=["memory", "ours"]
)
@pytest.mark.parametrize("place", ["parse", "analyze"])
def test_failed_analysis_loses_only_itself(tmp_path, monkeypatch, place, error):
    fail_in(monkeypatch, place, error, after=False)
    with our_warnings() as messages:
        callback = run_fit(tmp_path, active=2, repeat=2, wait=2, warmup=1)
    (message,) = messages
    said = f"its trace couldn't be analyzed: {type(error).__name__}: {error}"
    assert f"window 0: {said}" in message
    first, second = windows_of(callback)
    assert first.status is second.status is WindowStatus.COMPLETE
    assert (tmp_path / "modelprof" / first.trace_file).exists()
    assert callback.run.info.status == "finished"
    assert table_of(callback.report, "model_summary_1").rows
    assert any(said in (table.absent_reason or "") for table in callback.report.tables)
