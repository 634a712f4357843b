"""Tests the background process that packs and analyzes traces. It may die, and training doesn't wait."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from lightning_modelprof.engine import helper as helpers
from lightning_modelprof.engine import trace_work
from lightning_modelprof.engine.helper import Helper, ProcessHelper, ThreadHelper
from lightning_modelprof.engine.run_folder import RunFolder
from lightning_modelprof.engine.trace_work import Setting, TraceTask
from lightning_modelprof.measure.resources.cpu import ProcessPace, read_cpu, read_pace
from lightning_modelprof.processes import OWN_PROCESSES, start_module
from lightning_modelprof.reading import read_report
from lightning_modelprof.report.options import DEFAULT_OPTIONS
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.records import Window, WindowStatus
from tests.support.fits import (
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


@pytest.fixture(autouse=True)
def _has_a_cpu(monkeypatch):
    """Pretend that the helper always gets a CPU, even on a busy machine."""
    monkeypatch.setattr(helpers, "_NICENESS", 1)
    monkeypatch.setattr(helpers, "read_pace", lambda number: ProcessPace(time.monotonic(), wants_cpu=True))


def lack_a_cpu(monkeypatch):
    monkeypatch.setattr(helpers, "read_pace", lambda number: ProcessPace(1.0, wants_cpu=True))


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Directory for temporary files, which must be empty at the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    assert left_in(folder) == []
    assert not OWN_PROCESSES
    deadline = time.monotonic() + 60
    while helpers_alive():  # a killed helper still has low priority until it ends
        assert time.monotonic() < deadline
        time.sleep(0.01)


def helpers_alive():
    alive = []
    for one in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ZombieProcess: it has ended
            alive += [one] if "helper" in " ".join(one.cmdline()) else []
    return alive


def left_in(folder):
    """Files in the directory, except those that killed workers leave."""
    return [path for path in folder.iterdir() if not path.name.startswith("pymp-")]


def traces_in(folder):
    return sorted(path.name for path in (folder / "modelprof" / "traces").iterdir())


def helper_of(callback):
    return callback._session._results.traces._helper


def slowly(seconds, name, *arguments, **how):
    """Start the helper so that it sleeps before each task."""
    return doing(f"time.sleep({seconds})", name, *arguments, **how)


def doing(what, name, *arguments, **how):
    """Start the helper so that it runs ``what`` before each task."""
    code = (
        "import os, sys, time; from lightning_modelprof.engine import helper, trace_work\n"
        "do = trace_work.TraceWork.do\n"
        "def do_later(*given):\n"
        f"    {what}\n"
        "    return do(*given)\n"
        "trace_work.TraceWork.do = do_later\n"
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
    """Model that calls ``do`` in one step."""
    return Net(at_batch=lambda number: do() if number == step else None)


def test_helper_gives_same_results_at_low_priority(tmp_path, temporary):
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
    assert report_of(tmp_path)["summary"]["own_cost"]["helper_cpu_ns"] == used_ns
    notes = table_of(callback.report, "perf_summary").notes
    assert any(note.startswith("Traces were analyzed in a background process") for note in notes)
    assert read_report(tmp_path / "modelprof").tables == callback.report.tables


def test_helper_does_not_import_torch():
    code = (
        "import sys, lightning_modelprof.engine.helper; assert not {'torch', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_weights_are_unchanged(tmp_path, temporary):
    weights = []
    for kind in ("with", "without"):
        torch.manual_seed(3)
        module, folder = Net(dropout=0.5), tmp_path / kind
        callbacks = [make_callback(folder, active=2, wait=3, repeat=0)] if kind == "with" else []
        fit_quietly(make_trainer(folder, *callbacks), module, loader())
        weights.append(torch.nn.utils.parameters_to_vector(module.parameters()))
    assert torch.equal(*weights)


def test_training_does_not_wait_for_helper(tmp_path, temporary, monkeypatch):
    """The helper can't work before the last step, which training still reaches."""
    go = tmp_path / "go"
    until = f"while not os.path.exists({str(go)!r}): time.sleep(0.01)"
    monkeypatch.setattr(helpers, "start_module", partial(doing, until))
    open_at_the_end = []
    callback = make_callback(tmp_path, active=2, wait=2, repeat=2)

    def look():
        open_at_the_end.append(helper_of(callback).num_open)
        go.touch()

    fit_quietly(make_trainer(tmp_path, callback), at(LAST_STEP, look), loader())
    assert open_at_the_end[0] >= 2
    assert [window.status for window in windows_of(callback)] == [WindowStatus.COMPLETE] * 2
    assert len(traces_in(tmp_path)) == 2
    assert table_of(callback.report, "model_summary_1").rows


def test_no_helper_starts_for_report_alone(tmp_path, temporary, monkeypatch):
    started = []
    monkeypatch.setattr(
        helpers, "start_module", lambda *args, **how: started.append(1) or start_module(*args, **how)
    )
    callback = run_fit(tmp_path, active=0)
    assert started == []
    assert callback.report is not None
    assert report_of(tmp_path)["summary"]["run"]["status"] == "finished"


@pytest.mark.parametrize("files", [True, False])
def test_killed_helper_is_reported(tmp_path, temporary, monkeypatch, files):
    monkeypatch.setattr(helpers, "start_module", partial(slowly, 60))
    callback = make_callback(tmp_path, steps=(3, 6), files=files)

    def kill():
        os.kill(helper_of(callback)._process.pid, signal.SIGKILL)

    with our_warnings() as messages:
        fit_quietly(make_trainer(tmp_path, callback), at(12, kill), loader())
    (message,) = messages
    why = "was killed by signal 9"
    assert f"the process that analyzes traces {why}; read it with lightning-modelprof analyze" in message
    assert callback.run.info.status == "finished"
    assert len(callback.run.ranks[0].steps) == 32
    (window,) = windows_of(callback)
    assert why in table_of(callback.report, "model_summary").absent_reason
    if files:
        assert window.trace_file == "traces/rank0_steps_3-5.pt.trace.json"
        assert traces_in(tmp_path) == ["rank0_steps_3-5.pt.trace.json"]
        assert table_of(read_report(tmp_path / "modelprof"), "model_summary").rows
        assert report_of(tmp_path)["summary"]["run"]["status"] == "finished"


def sleeping_python(folder):
    """Interpreter that never reaches our module."""
    path = folder / "python-that-sleeps"
    path.write_text("#!/bin/sh\nexec sleep 600\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize("files", [True, False])
@pytest.mark.parametrize("why", ["stopped", "never_starts", "lacks_a_cpu"])
def test_training_thread_takes_over_if_helper_stalls(tmp_path, temporary, monkeypatch, why, files):
    """Nothing is lost, and no warning appears."""
    monkeypatch.setattr(helpers, "STALLED_S", 0.5)
    monkeypatch.setattr(helpers, "_PACE_S", 0.1)
    callback, do = make_callback(tmp_path, steps=(3, 6), files=files), list
    if why == "lacks_a_cpu":
        lack_a_cpu(monkeypatch)
        monkeypatch.setattr(helpers, "start_module", partial(slowly, 600))
    elif why == "stopped":
        monkeypatch.setattr(helpers, "read_pace", read_pace)
        monkeypatch.setattr(helpers, "start_module", partial(slowly, 600))

        def do():
            os.kill(helper_of(callback)._process.pid, signal.SIGSTOP)
    else:
        monkeypatch.setattr(helpers, "read_pace", read_pace)
        monkeypatch.setattr(sys, "executable", sleeping_python(tmp_path))
    with our_warnings() as messages:
        fit_quietly(make_trainer(tmp_path, callback), at(12, do), loader())
    assert messages == []
    assert callback.run.info.status == "finished"
    (window,) = windows_of(callback)
    assert window.status is WindowStatus.COMPLETE
    assert table_of(callback.report, "model_summary").rows
    if files:
        assert window.trace_file == "traces/rank0_steps_3-5.pt.trace.json.gz"
        assert traces_in(tmp_path) == ["rank0_steps_3-5.pt.trace.json.gz"]
        assert read_report(tmp_path / "modelprof").tables == callback.report.tables


@pytest.mark.parametrize("files", [True, False])
def test_finished_work_is_not_repeated(tmp_path, temporary, monkeypatch, files):
    """The helper analyzes the first window, gets no CPU for the second, and is killed while packing it."""
    left = tmp_path / "modelprof" / "traces" / f".rank0_steps_9-11.pt.trace.json.gz.{'0a' * 16}"
    callback, analyzed = make_callback(tmp_path, active=3, wait=2, repeat=2, files=files), []
    monkeypatch.setattr(
        trace_work,
        "TraceFacts",
        lambda trace, do=trace_work.TraceFacts: analyzed.append(trace.source) or do(trace),
    )

    def look(step):
        results = callback._session._results.traces
        if step == 7:
            deadline = time.monotonic() + 60
            while results._helper.num_open:
                assert time.monotonic() < deadline
                results.poll()
                time.sleep(0.01)  # leaves the helper a CPU
            os.kill(results._helper._process.pid, signal.SIGSTOP)
        if step == LAST_STEP and files:
            left.write_bytes(b"half of it")

    lack_a_cpu(monkeypatch)
    with our_warnings() as messages:
        fit_quietly(make_trainer(tmp_path, callback), Net(at_batch=look), loader())
    assert messages == []
    assert [Path(name).name for name in analyzed] == ["rank0_steps_9-11.pt.trace.json.gz"]
    assert table_of(callback.report, "model_summary").rows
    assert table_of(callback.report, "model_summary_1").rows
    assert not left.exists()
    if files:
        names = ["rank0_steps_3-5.pt.trace.json.gz", "rank0_steps_9-11.pt.trace.json.gz"]
        assert traces_in(tmp_path) == names
        assert read_report(tmp_path / "modelprof").tables == callback.report.tables


def setting_of(folder=None):
    return Setting(folder=RunFolder(path=folder, created=""), loop="fit", options=DEFAULT_OPTIONS)


@pytest.mark.parametrize(
    ("share", "wants_cpu", "waits_s"),
    [(0.4, True, 0.5), (0.4, False, 5.0), (0.0, False, 5.0), (0.6, True, None)],
)
def test_wait_for_helper_depends_on_its_pace(tmp_path, temporary, monkeypatch, share, wants_cpu, waits_s):
    """The clock advances by half a second each time the helper's pace is read."""
    clock = [0.0]

    def pace(number):
        clock[0] += 0.5
        return ProcessPace(clock[0] * share, wants_cpu)

    fake = SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep)
    monkeypatch.setattr(helpers, "time", fake)
    monkeypatch.setattr(helpers, "_PACE_S", 0.0)
    monkeypatch.setattr(helpers, "read_pace", pace)
    monkeypatch.setattr(helpers, "start_module", partial(slowly, 600))
    helper = ProcessHelper(setting_of())
    window = Window(index=0, first_step=0, last_step=1, recorded_steps=(0, 1))
    helper.send(TraceTask(window=window, raw=tmp_path / "none", packs=False))
    came, num_looks = [], 0
    while not came and num_looks < 100:
        helper.look()
        came = helper.answers()
        num_looks += 1
    assert [answer.window for answer in came] == ([] if waits_s is None else [0])
    begin_s = 0.5  # the first reading is the baseline
    assert waits_s is None or clock[0] - begin_s == waits_s
    assert not helper.problem
    helper.close()


def test_packed_trace_is_read_again(tmp_path):
    callback = run_fit(tmp_path, steps=(3, 6))
    (window,) = windows_of(callback)
    folder = tmp_path / "modelprof"
    setting = Setting(
        folder=RunFolder(path=folder, created=callback.run.info.created),
        loop="fit",
        options=DEFAULT_OPTIONS,
    )
    work = trace_work.TraceWork(setting)
    answer = work.do(TraceTask(window=window, raw=folder / "traces" / "gone.json", packs=True))
    assert (answer.is_packed, answer.note, answer.problems) == (True, "", ())
    assert list(work.facts) == [0]


@pytest.mark.parametrize("kind", [Helper, ThreadHelper, ProcessHelper])
def test_unsaved_trace_is_deleted_after_answer(tmp_path, temporary, kind):
    """The training process may be dead by then."""
    raw = tmp_path / "raw.json"
    raw.write_text("{}")
    helper = kind(setting_of())
    window = Window(index=0, first_step=0, last_step=1, recorded_steps=(0, 1))
    helper.send(TraceTask(window=window, raw=raw, packs=False))
    deadline = time.monotonic() + 60
    while helper.num_open or raw.exists():
        assert time.monotonic() < deadline
        helper.answers()
    assert helper.num_open == 0
    helper.close()


def test_unkillable_helper_is_abandoned(monkeypatch):
    """A process blocked by a disk ends only when the disk answers."""
    waits = []

    class Stuck:
        pid = -1

        def kill(self):
            pass

        def wait(self, timeout=None):
            assert timeout is not None
            waits.append(timeout)
            raise subprocess.TimeoutExpired("", timeout)

    helpers._end((), Stuck(), os.getpid())
    assert waits == [helpers._GONE_S]


def test_helper_killed_after_analysis_loses_nothing(tmp_path, temporary):
    """Its results are available for the report."""
    callback = make_callback(tmp_path, steps=(3, 6))

    def kill():
        results = callback._session._results.traces
        deadline = time.monotonic() + 60
        while results._helper.num_open:
            assert time.monotonic() < deadline
            results.poll()
        os.kill(results._helper._process.pid, signal.SIGKILL)

    with our_warnings() as messages:
        fit_quietly(make_trainer(tmp_path, callback), at(12, kill), loader())
    assert messages == []
    (window,) = windows_of(callback)
    assert table_of(callback.report, "model_summary").rows
    assert traces_in(tmp_path) == [Path(window.trace_file).name] == ["rank0_steps_3-5.pt.trace.json.gz"]
    assert read_report(tmp_path / "modelprof").tables == callback.report.tables


def test_lost_results_are_reported(tmp_path, temporary, monkeypatch):
    """The report has no tables for the window and says why."""
    monkeypatch.setattr(helpers.ProcessHelper, "facts", lambda self: {})
    callback = make_callback(tmp_path, steps=(3, 6))
    with our_warnings() as messages:
        fit_quietly(make_trainer(tmp_path, callback), Net(), loader())
    (message,) = messages
    assert "lost its results" in message
    assert "lost its results" in table_of(callback.report, "model_summary").absent_reason
    assert table_of(read_report(tmp_path / "modelprof"), "model_summary").rows


def test_newest_facts_are_never_overwritten(tmp_path):
    """Readers may know the place of the newest facts or of those before."""
    with (tmp_path / "facts").open("w+b", buffering=0) as file:
        kept, places = helpers._KeptFacts(file.fileno()), [(0, 0)]
        for number in range(20):
            facts = {number: "x" * (1000 * (number * 7 % 5) + 1)}
            place = kept.keep(facts)
            assert kept.keep(facts) == place, "nothing new"
            before, (begin, end) = places[-1], place
            assert end <= before[0] or begin >= before[1]
            assert pickle.loads(os.pread(file.fileno(), end - begin, begin)) == facts
            places.append(place)
        assert max(end for _, end in places) < 4 * 4100


def test_helper_out_of_memory_keeps_report_and_trace(tmp_path, temporary):
    """The system refuses memory for the trace."""
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


def test_ctrl_c_while_waiting_for_helper_keeps_run(tmp_path, temporary, monkeypatch):
    # After handling the signal once, in another test, Lightning ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(helpers, "start_module", partial(slowly, 60))
    monkeypatch.setattr(ProcessHelper, "look", lambda self: os.kill(os.getpid(), signal.SIGINT))
    callback = make_callback(tmp_path, steps=(3, 6))
    with pytest.raises(SystemExit):
        fit_quietly(make_trainer(tmp_path, callback), Net(), loader())
    signal.signal(signal.SIGINT, before)
    assert len(load_run(tmp_path / "modelprof").ranks[0].steps) == 32
    assert traces_in(tmp_path) == ["rank0_steps_3-5.pt.trace.json"]


def test_thread_replaces_helper_if_processes_are_forbidden(tmp_path, temporary, monkeypatch):
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
def test_program_that_is_not_python_is_not_started(monkeypatch, executable, is_frozen):
    if executable is not None:
        monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "frozen", is_frozen, raising=False)
    with pytest.raises(OSError, match="can't start Python"):
        start_module("lightning_modelprof.engine.helper")


def test_helper_cpu_is_not_counted_as_workers(tmp_path, temporary):
    numbers = (str(os.getpid()), "1", "1")
    process = start_module("lightning_modelprof.engine.helper", *numbers, stdin=subprocess.PIPE)
    try:
        assert process.pid in OWN_PROCESSES
        assert process.pid in [one.pid for one in psutil.Process().children()]
        assert process.pid not in [one.pid for one in read_cpu().family]
    finally:
        process.kill()
        process.communicate()
        OWN_PROCESSES.discard(process.pid)


CLOSES_ALL = """
    import os, resource, sys, time
    from pathlib import Path
    from lightning_modelprof.engine import helper as helpers
    from tests.support.fits import *

    helpers._NICENESS = 1
    folder, is_long = Path(sys.argv[1]), sys.argv[2] == "after_a_look"
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    theirs = []

    def look(step):
        results = callback._session._results.traces
        if step == 12:
            assert results._helper is not None
            while is_long and results._helper.num_open:
                results.poll()
                time.sleep(0.01)
            os.closerange(3, min(most, 4096))
            for number in range(60):
                theirs.append(open(folder / f"theirs{number}", "w+"))
                theirs[-1].write("a line of theirs")
                theirs[-1].flush()
            look.numbers = [(os.fstat(one.fileno()).st_ino, one.fileno()) for one in theirs]

    callback = make_callback(folder, steps=(3, 6))
    with our_warnings() as messages:
        fit_quietly(make_trainer(folder, callback), Net(at_batch=look), loader())
    assert [(os.fstat(number).st_ino, number) for _, number in look.numbers] == look.numbers
    for one in theirs:
        one.write("!")
        one.close()
    assert {path.read_text() for path in folder.glob("theirs*")} == {"a line of theirs!"}
    assert callback.run.info.status == "finished"
    assert len(callback.run.ranks[0].steps) == 32
    assert (folder / "modelprof" / "report.html").exists()
    (message,) = messages
    print(message)
"""


@pytest.mark.parametrize("when", ["while_it_works", "after_a_look"])
def test_program_may_close_and_reuse_our_file_descriptors(tmp_path, when):
    done = run_script(CLOSES_ALL, tmp_path, when, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the process that analyzes traces lost" in done.stdout
    assert table_of(read_report(tmp_path / "modelprof"), "model_summary").rows


SCRIPT = """
    import os, signal, sys, tempfile, time
    from pathlib import Path
    from lightning.pytorch import Callback
    from lightning_modelprof.engine import helper as helpers
    from tests.support.fits import *

    helpers._NICENESS = 1
    folder, how = Path(sys.argv[1]), sys.argv[2]

    class Kill(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            helper = callback._session._results.traces._helper
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
def test_killed_training_leaves_no_temporary_files(tmp_path, num_workers):
    folder = Path(tempfile.mkdtemp())  # a short name, as it is part of socket paths
    before = set(Path("/dev/shm").iterdir())
    done = run_script(SCRIPT, tmp_path, "training", num_workers, cwd=tmp_path, env={"TMPDIR": str(folder)})
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
        if not ("torch" in path.name or path.name.startswith(("sem.", "joblib_")))  # joblib: from other tests
    } == set()
    shutil.rmtree(folder)
    traces = traces_in(tmp_path)
    assert traces
    assert not any(name.startswith(".") for name in traces)


def test_writing_to_dead_helper_does_not_end_program(tmp_path):
    done = run_script(SCRIPT, tmp_path, "helper", 0, cwd=tmp_path)
    assert done.stdout.strip().endswith("done"), done.stderr
    assert load_run(tmp_path / "modelprof").info.status == "finished"
