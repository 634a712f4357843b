"""The process beside the training that packs and analyzes traces: it is waited for by nobody, and may die."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from lightning_modelprof.loop import helper as helpers
from lightning_modelprof.loop.helper import ProcessHelper, ThreadHelper
from lightning_modelprof.loop.trace_work import ReportTask, Setting
from lightning_modelprof.measure.resources.cpu import read_cpu
from lightning_modelprof.processes import OWN_PROCESSES, start_module
from lightning_modelprof.reading import read_report
from lightning_modelprof.report.options import DEFAULT_OPTIONS
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.records import WindowStatus
from tests.support.fits import (
    ROOT,
    Net,
    fit_quietly,
    loader,
    make_callback,
    make_trainer,
    our_warnings,
    report_of,
    run_fit,
    run_script,
    table_of,
    windows_of,
)

pytestmark = [pytest.mark.helper, pytest.mark.slow]

LAST_STEP = 31


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files, which must be empty in the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    assert left_in(folder) == []
    assert not OWN_PROCESSES
    assert [one for one in psutil.Process().children() if "helper" in " ".join(one.cmdline())] == []


def left_in(folder):
    """Without what jinja2 keeps there for all programs of a user, and what killed workers leave."""
    return [path for path in folder.iterdir() if not path.name.startswith(("_jinja2-cache", "pymp-"))]


def traces_in(folder):
    return sorted(path.name for path in (folder / "modelprof" / "traces").iterdir())


def helper_of(callback):
    return callback._session._parts.results._helper


def slowly(seconds, name, *arguments, **how):
    """Start the process so that it sleeps before each task."""
    code = (
        "import sys, time; from lightning_modelprof.loop import helper, trace_work\n"
        "do = trace_work.TraceWork.do\n"
        f"trace_work.TraceWork.do = lambda *given: (time.sleep({seconds}), do(*given))[1]\n"
        "helper.main()"
    )
    popen = subprocess.Popen

    def start(command, **options):
        return popen([command[0], "-c", code, *command[3:]], **options)

    subprocess.Popen = start
    try:
        return start_module(name, *arguments, **how)
    finally:
        subprocess.Popen = popen


def at(step, do):
    """A model that does something in one of its steps."""
    return Net(at_batch=lambda number: do() if number == step else None)


def test_it_does_what_is_done_without_it(tmp_path, temporary):
    seen = []
    callback = make_callback(tmp_path, steps=(3, 6))

    def look():
        helper = helper_of(callback)
        seen.extend([type(helper), psutil.Process(helper._process.pid).nice()])

    fit_quietly(make_trainer(tmp_path, callback), at(6, look), loader())
    assert seen == [ProcessHelper, helpers._NICENESS], "of low priority from its start on"
    (window,) = windows_of(callback)
    assert window.status is WindowStatus.COMPLETE
    assert traces_in(tmp_path) == ["rank0_steps_3-5.pt.trace.json.gz"]
    assert table_of(callback.report, "model_summary").rows
    used_ns = callback.run.ranks[0].helper_cpu_ns
    assert used_ns > 0
    assert report_of(tmp_path)["own_cost"]["helper_cpu_ns"] == used_ns
    notes = table_of(callback.report, "perf_summary").notes
    assert any(note.startswith("A process of its own analyzed the traces") for note in notes)
    assert read_report(tmp_path / "modelprof").tables == callback.report.tables


def test_it_has_no_torch():
    code = "import sys, lightning_modelprof.loop.helper; assert not {'torch', 'lightning'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_weights_are_the_same(tmp_path, temporary):
    weights = []
    for kind in ("with", "without"):
        torch.manual_seed(3)
        module, folder = Net(dropout=0.5), tmp_path / kind
        callbacks = [make_callback(folder, active=2, wait=3, repeat=0)] if kind == "with" else []
        fit_quietly(make_trainer(folder, *callbacks), module, loader())
        weights.append(torch.nn.utils.parameters_to_vector(module.parameters()))
    assert torch.equal(*weights)


def test_the_training_waits_for_nothing(tmp_path, temporary, monkeypatch):
    """Whatever follows an export takes two seconds, and no step does."""
    monkeypatch.setattr(helpers, "start_module", partial(slowly, 2))
    open_at_the_end, begin = [], []
    callback = make_callback(tmp_path, active=2, wait=2, repeat=2)

    def look(step):
        if step == 3:
            begin.append(time.monotonic())
        if step == LAST_STEP:
            open_at_the_end.append(helper_of(callback).num_open)
            begin.append(time.monotonic())

    fit_quietly(make_trainer(tmp_path, callback), Net(at_batch=look), loader())
    assert open_at_the_end[0] >= 2
    assert begin[1] - begin[0] < 2
    assert [window.status for window in windows_of(callback)] == [WindowStatus.COMPLETE] * 2
    assert len(traces_in(tmp_path)) == 2
    assert table_of(callback.report, "model_summary_1").rows


def test_a_report_alone_is_made_by_it_when_the_loop_was_long(tmp_path, temporary, monkeypatch):
    started = []
    monkeypatch.setattr(
        helpers, "start_module", lambda *args, **how: started.append(1) or start_module(*args, **how)
    )
    callback = run_fit(tmp_path, active=0)
    assert started == [1]
    assert callback.report is not None
    assert report_of(tmp_path)["run"]["status"] == "finished"


@pytest.mark.parametrize("files", [True, False])
@pytest.mark.parametrize("kill", ["kill", "stop"])
def test_it_dies_or_stands_still(tmp_path, temporary, monkeypatch, kill, files):
    monkeypatch.setattr(helpers, "start_module", partial(slowly, 60))
    monkeypatch.setattr(helpers, "STALLED_S", 1.5)
    callback = make_callback(tmp_path, steps=(3, 6), files=files)

    def send():
        os.kill(helper_of(callback)._process.pid, getattr(signal, f"SIG{kill.upper()}"))

    with our_warnings() as messages:
        fit_quietly(make_trainer(tmp_path, callback), at(12, send), loader())
    (message,) = messages
    why = "ended by signal 9" if kill == "kill" else "did nothing for 1.5 s"
    assert f"the process that analyzes traces {why}; lightning-modelprof analyze reads it" in message
    assert callback.run.info.status == "finished"
    assert len(callback.run.ranks[0].steps) == 32
    (window,) = windows_of(callback)
    assert why in table_of(callback.report, "model_summary").absent_reason
    if files:
        assert window.trace_file == "traces/rank0_steps_3-5.pt.trace.json"
        assert traces_in(tmp_path) == ["rank0_steps_3-5.pt.trace.json"]
        assert table_of(read_report(tmp_path / "modelprof"), "model_summary").rows
        assert report_of(tmp_path)["run"]["status"] == "finished"


def test_it_dies_when_it_has_analyzed_all(tmp_path, temporary):
    """The report has no tables of the window, and says why."""
    callback = make_callback(tmp_path, steps=(3, 6))

    def kill():
        results = callback._session._parts.results
        deadline = time.monotonic() + 60
        while results._helper.num_open:
            assert time.monotonic() < deadline
            results.hear()
        os.kill(results._helper._process.pid, signal.SIGKILL)

    with our_warnings() as messages:
        fit_quietly(make_trainer(tmp_path, callback), at(12, kill), loader())
    (message,) = messages
    assert "ended by signal 9" in message
    (window,) = windows_of(callback)
    assert "ended by signal 9" in table_of(callback.report, "model_summary").absent_reason
    assert traces_in(tmp_path) == [Path(window.trace_file).name] == ["rank0_steps_3-5.pt.trace.json.gz"]
    assert table_of(read_report(tmp_path / "modelprof"), "model_summary").rows


def test_it_had_nothing_to_do_for_long(tmp_path, temporary, monkeypatch):
    """It is no reason to give up that it used no CPU time while nobody asked for anything."""
    monkeypatch.setattr(helpers, "STALLED_S", 0.0)
    monkeypatch.setattr(helpers, "_LOOK_S", 0.0)
    monkeypatch.setattr(helpers, "used_s", lambda number: 1.0)
    setting = Setting(directory=None, created="", rank=0, is_first=True, loop="fit", options=DEFAULT_OPTIONS)
    helper = ProcessHelper(setting)
    for _ in range(2):
        helper.send(ReportTask(run=tmp_path / "nothing", trace_notes={}))
        helper.look()
        assert not helper.problem
        while helper.num_open:
            helper.answers()
    helper.close()


def test_it_runs_out_of_memory(tmp_path, temporary):
    """The system gives it none for the trace."""
    callback = make_callback(tmp_path, steps=(3, 6), record_shapes=True)

    def limit():
        process = psutil.Process(helper_of(callback)._process.pid)
        process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms // 2,) * 2)

    with our_warnings() as messages:
        fit_quietly(make_trainer(tmp_path, callback), at(6, limit), loader())
    assert messages
    assert callback.run.info.status == "finished"
    assert callback.report is not None
    (window,) = windows_of(callback)
    assert (tmp_path / "modelprof" / window.trace_file).exists()
    assert table_of(read_report(tmp_path / "modelprof"), "model_summary").rows


def test_ctrl_c_while_it_is_waited_for(tmp_path, temporary, monkeypatch):
    monkeypatch.setattr(helpers, "start_module", partial(slowly, 60))
    monkeypatch.setattr(ProcessHelper, "look", lambda self: os.kill(os.getpid(), signal.SIGINT))
    callback = make_callback(tmp_path, steps=(3, 6))
    with pytest.raises(SystemExit):
        fit_quietly(make_trainer(tmp_path, callback), Net(), loader())
    assert len(load_run(tmp_path / "modelprof").ranks[0].steps) == 32
    assert traces_in(tmp_path) == ["rank0_steps_3-5.pt.trace.json"]


def test_a_thread_where_processes_are_forbidden(tmp_path, temporary, monkeypatch):
    def forbidden(*args, **how):
        raise PermissionError("no more processes")

    seen = []
    monkeypatch.setattr(helpers, "start_module", forbidden)
    callback = make_callback(tmp_path, steps=(3, 6))
    module = at(12, lambda: seen.append(type(helper_of(callback))))
    fit_quietly(make_trainer(tmp_path, callback), module, loader())
    assert seen == [ThreadHelper]
    assert traces_in(tmp_path) == ["rank0_steps_3-5.pt.trace.json.gz"]
    assert table_of(callback.report, "model_summary").rows
    assert callback.run.ranks[0].helper_cpu_ns > 0


@pytest.mark.parametrize(("executable", "is_frozen"), [("/usr/bin/my-app", False), ("", False), (None, True)])
def test_a_program_that_is_no_python_is_not_started_again(monkeypatch, executable, is_frozen):
    if executable is not None:
        monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "frozen", is_frozen, raising=False)
    with pytest.raises(OSError, match="no Python that could be started"):
        start_module("lightning_modelprof.loop.helper")


def test_what_it_uses_is_not_the_workers(tmp_path, temporary):
    process = start_module("lightning_modelprof.loop.helper", str(os.getpid()), "1", stdin=subprocess.PIPE)
    try:
        assert process.pid in OWN_PROCESSES
        assert process.pid in [one.pid for one in psutil.Process().children()]
        assert process.pid not in [one.pid for one in read_cpu().family]
    finally:
        process.kill()
        process.communicate()
        OWN_PROCESSES.discard(process.pid)


SCRIPT = """
    import os, signal, sys, tempfile, time
    from pathlib import Path
    from lightning.pytorch import Callback
    from tests.support.fits import *

    folder, how = Path(sys.argv[1]), sys.argv[2]

    class Kill(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            helper = callback._session._parts.results._helper
            if batch_idx == 8:
                (folder / "pid").write_text(str(helper._process.pid))
                if how == "training":
                    os.kill(os.getpid(), signal.SIGKILL)
                os.kill(helper._process.pid, signal.SIGKILL)
                time.sleep(0.2)

    if how == "helper":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as programs do that write to pipes
    callback = make_callback(folder, active=1, wait=2, repeat=0)
    fit_quietly(make_trainer(folder, callback, Kill()), Net(), loader(num_workers=int(sys.argv[3])))
    print("done")
"""


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_training_is_killed(tmp_path, num_workers):
    folder = Path(tempfile.mkdtemp())  # a short name: it is part of those of sockets
    before = set(Path("/dev/shm").iterdir())
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), "training", str(num_workers)]
    env = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, stderr=subprocess.DEVNULL, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    number = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert left_in(folder) == []
    assert {
        path
        for path in set(Path("/dev/shm").iterdir()) - before
        if not ("torch" in path.name or path.name.startswith("sem."))
    } == set()
    shutil.rmtree(folder)
    traces = traces_in(tmp_path)
    assert traces
    assert not any(name.startswith(".") for name in traces)


def test_writing_to_one_that_is_gone_does_not_end_the_program(tmp_path):
    done = run_script(SCRIPT, tmp_path, "helper", 0, cwd=tmp_path, fresh=True)
    assert done.stdout.strip().endswith("done"), done.stderr
    assert load_run(tmp_path / "modelprof").info.status == "finished"
