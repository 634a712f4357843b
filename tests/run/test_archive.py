"""Saving and loading runs: round trips, invalid files, and crashes during training or a save."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import stat
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modelprof import ArchiveError, read_report
from lightning_modelprof.place import Place
from lightning_modelprof.run.archive import encode_record, load_run, save_run, write_atomically
from lightning_modelprof.run.locate import RUN_FILE
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.records import (
    RUN_SCHEMA_VERSION,
    AllRanks,
    CallbackTime,
    RankRecord,
    Run,
    RunInfo,
    Window,
    WindowStatus,
)
from lightning_modelprof.run.setup import TrainingSetup
from lightning_modelprof.run.stacks import StackFrame, StackSamples
from lightning_modelprof.run.steps import NOT_MEASURED, StepTimings
from tests.support.fits import report_of, run_fit, run_script

pytestmark = pytest.mark.slow

NS = st.integers(-1, 2**62)
COUNT = st.integers(0, 10**9)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
JSON = st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), TEXT, st.lists(TEXT, max_size=2))


@st.composite
def step_timings(draw):
    n = draw(st.integers(0, 5))

    def column(low=-1, high=2**56):
        return np.array(draw(st.lists(st.integers(low, high), min_size=n, max_size=n)), np.int64)

    def matrix(unused):
        # Most phases are the same in every step and aren't saved then.
        columns = [column() if draw(st.booleans()) else np.full(n, unused) for _ in PHASES]
        return np.stack(columns, axis=1).astype(np.int64).reshape(n, len(PHASES))

    phases_ns = matrix(0)
    return StepTimings(
        step=np.array(sorted(draw(st.sets(st.integers(0, 2**62), min_size=n, max_size=n))), np.int64),
        duration_ns=np.where(phases_ns == NOT_MEASURED, 0, phases_ns).sum(axis=1),
        phases_ns=phases_ns,
        device_phases_ns=matrix(NOT_MEASURED),
        samples=column(),
        tags=column(0, 2**9 - 1),
    )


windows = st.builds(
    Window,
    index=COUNT,
    first_step=st.integers(0, 10),
    last_step=st.integers(20, 30),
    recorded_steps=st.sets(st.integers(10, 20), max_size=3).map(sorted).map(tuple),
    status=st.sampled_from(WindowStatus),
    trace_file=st.none() | st.just("traces/one.json.gz"),
    note=TEXT,
    close_ns=st.none() | NS,
)
records = st.builds(
    RankRecord,
    rank=COUNT,
    steps=step_timings(),
    outside_ns=st.dictionaries(st.sampled_from([phase.key for phase in PHASES]), NS, max_size=2),
    unfinished_steps=COUNT,
    callbacks=st.lists(
        st.builds(CallbackTime, callback=TEXT, hook=TEXT, calls=COUNT, total_ns=NS), max_size=2
    ).map(tuple),
    windows=st.lists(windows, max_size=2, unique_by=lambda window: window.index).map(
        lambda found: tuple(sorted(found, key=lambda window: window.index))
    ),
    notes=st.lists(TEXT, max_size=2).map(tuple),
)
all_ranks = st.builds(
    AllRanks,
    world_size=st.integers(1, 10**5),
    num_steps=COUNT,
    batch_total_ns=NS,
    batch_max_ns=NS,
    batch_min_ns=NS,
    reader_total_ns=st.none() | NS,
    samples=st.none() | COUNT,
)
infos = st.builds(
    RunInfo,
    created=TEXT,
    status=TEXT,
    model=TEXT,
    num_threads=st.none() | COUNT,
    versions=st.dictionaries(TEXT, TEXT, max_size=2),
    config=st.dictionaries(TEXT, JSON, max_size=3),
)
runs = st.builds(
    Run,
    info=infos,
    ranks=st.lists(records, min_size=1, max_size=2, unique_by=lambda record: record.rank).map(tuple),
    all_ranks=st.none() | all_ranks,
)


def a_run(**kwargs):
    return Run(
        info=RunInfo(created="today"), ranks=(RankRecord(rank=0, steps=StepTimings.empty()),), **kwargs
    )


def assert_same_run(one, other):
    assert dataclasses.replace(one, ranks=()) == dataclasses.replace(other, ranks=())
    for a, b in zip(one.ranks, other.ranks, strict=True):
        assert dataclasses.replace(a, steps=None) == dataclasses.replace(b, steps=None)
        for name, column in a.steps.columns().items():
            loaded = b.steps.columns()[name]
            assert loaded.dtype == np.int64, name
            assert np.array_equal(column, loaded), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@settings(max_examples=60)
@given(runs)
def test_round_trip(folder, run):
    save_run(run, folder / RUN_FILE)
    assert_same_run(run, load_run(folder / RUN_FILE))
    assert_same_run(run, load_run(str(folder)))  # a folder works too


def test_round_trip_of_real_fit(tmp_path):
    callback = run_fit(tmp_path, active=2, repeat=2)
    assert_same_run(callback.run, load_run(tmp_path / "modelprof"))


# Invalid saved runs


@pytest.fixture
def saved(tmp_path):
    """A real run as decoded JSON for a test to corrupt, and a function that writes it back."""
    run_fit(tmp_path, active=2)
    path = tmp_path / "modelprof" / RUN_FILE
    return json.loads(path.read_text()), lambda content: path.write_text(json.dumps(content)) and path


def steps_of_file(content):
    return content["ranks"][0]["steps"]


def as_version_2(content):
    """Old field names: a place's function and a stack frame's Python module."""
    if isinstance(content, list):
        return [as_version_2(one) for one in content]
    if not isinstance(content, dict):
        return content
    names = {"python_module": "module"}
    if "function" in content and "is_library" in content:
        names = {"function": "name"}
    return {names.get(key, key): as_version_2(value) for key, value in content.items()}


def test_reads_places_and_stack_frames_of_version_2(saved):
    content, write = saved
    hook = Place(function="Net.training_step", file="/home/me/net.py", line=30, is_library=True)
    frame = StackFrame(
        file="/lib/x.py", line=9, function="f", function_line=5, python_module="torch.x", is_users=False
    )
    run = load_run(write(content))
    record = replace(
        run.ranks[0],
        setup=TrainingSetup(module_hooks={"training_step": hook}),
        stacks=StackSamples(frames=(frame,)),
    )
    new = json.loads(encode_record(replace(run, ranks=(record,))))
    old = as_version_2(new) | {"schema_version": 2}
    assert "python_module" not in json.dumps(old)
    read = load_run(write(old)).ranks[0]
    assert (read.setup.module_hooks, read.stacks.frames) == ({"training_step": hook}, (frame,))


def test_newer_version_is_rejected(saved):
    content, write = saved
    content["schema_version"] = RUN_SCHEMA_VERSION + 1
    content["ranks"] = "of another shape than today"
    path = write(content)
    with pytest.raises(ArchiveError) as caught:
        load_run(path)
    assert str(path) in str(caught.value)
    assert f"expected schema_version {RUN_SCHEMA_VERSION} or lower, got {RUN_SCHEMA_VERSION + 1}" in str(
        caught.value
    )
    assert "Upgrade lightning-modelprof" in str(caught.value)


SPOIL = {
    "no version": lambda content: content.pop("schema_version"),
    "version is text": lambda content: content.update(schema_version="1"),
    "no ranks": lambda content: content.pop("ranks"),
    "empty ranks": lambda content: content.update(ranks=[]),
    "info is a list": lambda content: content.update(info=[]),
    "steps are a list": lambda content: content["ranks"][0].update(steps=[]),
    "a column is missing": lambda content: steps_of_file(content).pop("samples"),
    "a column is shorter": lambda content: steps_of_file(content)["duration_ns"].pop(),
    "a phase is shorter": lambda content: steps_of_file(content)["phases_ns"]["forward"].pop(),
    "phases are a list": lambda content: steps_of_file(content).update(phases_ns=[[1]]),
    "an unknown phase": lambda content: steps_of_file(content)["phases_ns"].update(dance=[]),
    "a fraction": lambda content: steps_of_file(content)["duration_ns"].__setitem__(0, 1.5),
    "a null": lambda content: steps_of_file(content)["tags"].__setitem__(0, None),
    "beyond 64 bits": lambda content: steps_of_file(content)["step"].__setitem__(0, 2**70),
    "lists in lists": lambda content: steps_of_file(content)["step"].__setitem__(0, [1]),
    "unknown status of a window": lambda content: content["ranks"][0]["windows"][0].update(status="great"),
}


@pytest.mark.parametrize("spoil", SPOIL.values(), ids=SPOIL)
def test_wrong_content_is_rejected(saved, spoil):
    content, write = saved
    spoil(content)
    path = write(content)
    with pytest.raises(ArchiveError, match="isn't a saved run") as caught:
        load_run(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "raw",
    [b"", b"  ", b"hello", b"[]", b"null", b"{}", b"\x00\xff" * 50, b"\x1f\x8b\x08\x00", b"[" * 100_000],
)
def test_garbage_is_rejected(tmp_path, raw):
    (tmp_path / RUN_FILE).write_bytes(raw)
    with pytest.raises(ArchiveError, match="isn't a saved run"):
        load_run(tmp_path)


def test_error_lists_runs_below_folder_newest_first(tmp_path):
    for number in range(12):
        file = tmp_path / "logs" / f"version_{number}" / "modelprof" / RUN_FILE
        file.parent.mkdir(parents=True)
        file.write_text("{}")
        os.utime(file, (number, number))
    with pytest.raises(ArchiveError) as caught:
        load_run(tmp_path)
    names = ", ".join(str(tmp_path / "logs" / f"version_{number}" / "modelprof") for number in (11, 10, 9))
    assert f"such as {names} (12 found here, newest first)" in str(caught.value)


@pytest.mark.parametrize("name", ["nothing.json", "."])
def test_missing_file_is_rejected(tmp_path, name):
    with pytest.raises(ArchiveError, match=r"Give the directory that contains run\.json"):
        load_run(tmp_path / name)


def test_every_truncation_is_rejected(saved):
    content, write = saved
    path = write(content)
    raw = path.read_bytes()
    assert len(raw) > 60
    for length in range(0, len(raw), len(raw) // 60):
        path.write_bytes(raw[:length])
        with pytest.raises(ArchiveError):
            load_run(path)


@given(st.data())
def test_damaged_bytes_raise_only_archive_errors(folder, data):
    save_run(a_run(all_ranks=None), folder / "damaged.json")
    raw = bytearray((folder / "damaged.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (folder / "damaged.json").write_bytes(bytes(raw))
    with suppress(ArchiveError):
        assert isinstance(load_run(folder / "damaged.json"), Run)


# Writing


def test_writing_replaces_file_and_creates_folders(tmp_path):
    path = tmp_path / "new" / "folder" / "file"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


@pytest.mark.skipif(os.name == "nt", reason="there are no such permissions")
def test_written_files_have_usual_permissions(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write_atomically(tmp_path / "ours", b"")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert stat.S_ISREG((tmp_path / "ours").stat().st_mode)


class FullDisk:
    """A file that takes only half of each write, then fails."""

    def __init__(self, file):
        self._file = file

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def write(self, data):
        self._file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


def fail_to_rename(*args):
    raise KeyboardInterrupt


open_file = Path.open


@pytest.mark.parametrize(
    ("target", "name", "replacement", "error"),
    [
        pytest.param(
            Path,
            "open",
            lambda path, mode: FullDisk(open_file(path, mode, 0)),
            OSError,
            id="the disk is full",
        ),
        pytest.param(Path, "replace", fail_to_rename, KeyboardInterrupt, id="interrupted before the rename"),
    ],
)
def test_failure_leaves_only_old_file(tmp_path, monkeypatch, target, name, replacement, error):
    path = tmp_path / "file"
    write_atomically(path, b"old and complete")
    with monkeypatch.context() as patched:
        patched.setattr(target, name, replacement)
        with pytest.raises(error):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old and complete"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# Killed runs

FIT = """
import os, signal, sys, time
from pathlib import Path
import lightning_modelprof.engine.plan as save_timer
from tests.support.fits import *

save_timer._MIN_INTERVAL_NS = save_timer._INTERVAL_FACTOR = 0  # save at every step
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where it is ignored

def at_batch(batch_idx):
    if batch_idx == 23:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        time.sleep(5)  # a signal may take a moment

run_fit(Path("."), module=Net(at_batch), steps=(3, 5), terminal=True)
"""


def test_kill_keeps_data_up_to_last_save(tmp_path):
    result = run_script(FIT, "SIGKILL", cwd=tmp_path)
    assert result.returncode == -signal.SIGKILL, result.stderr[-3000:]
    run = load_run(tmp_path / "modelprof")
    (record,) = run.ranks
    assert run.info.status == "running"
    assert record.steps.step.tolist() == list(range(23))  # killed in step 23
    assert record.windows[0].status is WindowStatus.COMPLETE
    packed = tmp_path / "modelprof" / record.windows[0].trace_file
    deadline = time.monotonic() + 60  # the process that packs traces ends on its own
    while not packed.exists() or packed.with_suffix("").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert read_report(tmp_path / "modelprof").summary.run.num_steps == 23, "of the archive"
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


def test_ctrl_c_leaves_report(tmp_path):
    result = run_script(FIT, "SIGINT", cwd=tmp_path)
    assert result.returncode != 0
    run = load_run(tmp_path / "modelprof")
    assert run.info.status == "interrupted"
    assert len(run.ranks[0].steps) == 23
    assert run.ranks[0].unfinished_steps == 1
    assert report_of(tmp_path)["summary"]["run"]["status"] == "interrupted"
    assert "Net, 23 training steps (interrupted)" in result.stdout
