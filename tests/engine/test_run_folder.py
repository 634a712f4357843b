"""Tests that a run's files stay in its own directory, whatever happens to paths, disks and signals."""

from __future__ import annotations

import errno
import os
import signal
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_modelprof.engine import outputs, run_folder
from lightning_modelprof.engine.inspection_control import InspectionControl
from lightning_modelprof.engine.run_folder import CLAIM_FILE, check_writeable, claim_directory
from lightning_modelprof.errors import ConfigError
from lightning_modelprof.measure.setup import environment
from lightning_modelprof.run import archive
from lightning_modelprof.run.archive import load_run
from tests.support.fits import (
    REPORT_FILES,
    Net,
    fit_quietly,
    loader,
    make_callback,
    make_trainer,
    our_warnings,
    run_fit,
)

pytestmark = pytest.mark.slow

EARLIER = b"an earlier run"


def put_earlier_run(folder: Path) -> dict[str, bytes]:
    """Create the files of an earlier run; return their contents."""
    folder.mkdir(parents=True)
    for name in (*sorted(REPORT_FILES), "run_rank1.json"):
        (folder / name).write_bytes(EARLIER)
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def at(batch, do):
    """Module that calls ``do`` at one batch."""
    return Net(lambda index: do() if index == batch else None)


def is_whole(folder: Path) -> bool:
    """Whether a directory has exactly the files of a finished run of 32 steps."""
    names = {file.name for file in folder.iterdir()} - {"traces"}
    run = load_run(folder)
    return names == REPORT_FILES and run.info.status == "finished" and len(run.ranks[0].steps) == 32


# The directory stays where it was claimed


def test_run_is_saved_without_working_directory(tmp_path, monkeypatch):
    """The run is measured and saved, as its paths are absolute."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    callback = run_fit(tmp_path, dirpath=tmp_path / "out", active=2, sampling=True, trainer={"logger": False})
    assert is_whole(tmp_path / "out")
    assert callback.run.ranks[0].stacks is not None


def test_tilde_means_home_directory(tmp_path, monkeypatch):
    home, work = tmp_path / "home", tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    run_fit(tmp_path, dirpath="~/out", active=0)
    assert is_whole(home / "out")
    assert not list(work.iterdir())


@pytest.mark.parametrize("dirpath", ["out", "a/b/out", "../work/out", Path("out")])
def test_files_stay_in_place_if_training_changes_directory(tmp_path, monkeypatch, dirpath):
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere" / "work"
    work.mkdir()
    earlier = put_earlier_run(elsewhere / dirpath)
    monkeypatch.chdir(work)
    with our_warnings() as messages:
        run_fit(tmp_path, module=at(5, lambda: os.chdir(elsewhere)), dirpath=dirpath, steps=(3, 8))
    assert messages == []
    assert contents((elsewhere / dirpath).resolve()) == earlier
    assert is_whole((work / dirpath).resolve())
    assert len(list(tmp_path.rglob("*.pt.trace.json.gz"))) == 1


@pytest.mark.parametrize("make_logger", [CSVLogger, TensorBoardLogger])
def test_relative_logger_directory_stays_in_place(tmp_path, monkeypatch, make_logger):
    elsewhere = tmp_path / "elsewhere"
    earlier = put_earlier_run(elsewhere / "logs" / "lightning_logs" / "version_0" / "modelprof")
    monkeypatch.chdir(tmp_path)
    module = at(5, lambda: os.chdir(elsewhere))
    trainer = {"logger": make_logger("logs"), "log_every_n_steps": 1000}
    run_fit(tmp_path, module=module, dirpath=None, active=0, trainer=trainer)
    assert contents(elsewhere / "logs" / "lightning_logs" / "version_0" / "modelprof") == earlier
    here = tmp_path / "logs" / "lightning_logs" / "version_0" / "modelprof"
    assert load_run(here).info.status == "finished"


def test_relative_path_without_working_directory_is_rejected(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match=r"can't write files to"):
        run_fit(tmp_path, dirpath="out")


@pytest.mark.parametrize("has_folder", [True, False])
def test_directory_replaced_by_link_is_not_written_to(tmp_path, has_folder):
    folder, elsewhere = tmp_path / "out" / "modelprof", tmp_path / "elsewhere"
    elsewhere.mkdir()

    def swap():
        folder.rename(tmp_path / "moved")
        if not has_folder:
            elsewhere.rmdir()
        folder.symlink_to(elsewhere)

    with our_warnings() as messages:
        callback = run_fit(folder.parent, module=at(5, swap), dirpath=str(folder), steps=(3, 8))
    assert len(messages) == 1
    assert f"{folder} now points to another directory: {elsewhere}" in messages[0]
    assert not contents(elsewhere)
    assert elsewhere.exists() == has_folder
    assert len(callback.run.ranks[0].steps) == 32
    assert callback.report is not None


def test_run_moved_behind_link_continues_there(tmp_path):
    """The link leads to the same directory."""
    folder, moved = tmp_path / "out" / "modelprof", tmp_path / "moved"

    def move():
        folder.rename(moved)
        folder.symlink_to(moved)

    with our_warnings() as messages:
        run_fit(folder.parent, module=at(5, move), dirpath=str(folder))
    assert not messages
    assert is_whole(moved)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Directory for temporary files, shared with other users."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(run_folder.tempfile, "tempdir", str(folder))
    return folder


def test_temporary_files_are_in_private_directory(temporary):
    found = run_folder._private_folder()
    assert found == run_folder._private_folder()
    assert found.parent == temporary
    assert found.name == f"modelprof-{os.getuid()}"
    assert stat.S_IMODE(found.stat().st_mode) == 0o700


@pytest.mark.parametrize("what", ["a link", "a dangling link", "a file", "another user's"])
def test_directory_prepared_by_another_user_is_not_used(tmp_path, temporary, monkeypatch, what):
    trap, theirs = temporary / f"modelprof-{os.getuid()}", tmp_path / "theirs"
    if what == "a link":
        theirs.mkdir()
    if "link" in what:
        trap.symlink_to(theirs)
    elif what == "a file":
        trap.touch()
    else:
        uid = os.getuid()
        trap.mkdir()
        monkeypatch.setattr(run_folder.os, "getuid", lambda: uid + 1)
        trap.rename(trap.with_name(f"modelprof-{uid + 1}"))
    found = run_folder._private_folder()
    assert found.parent == temporary
    assert not found.is_symlink()
    assert found.name not in (f"modelprof-{os.getuid()}", trap.name)
    assert stat.S_IMODE(found.stat().st_mode) == 0o700


def test_retargeted_parent_link_does_not_overwrite_other_run(tmp_path):
    """Like ``latest`` when the next run starts."""
    mine, theirs, link = tmp_path / "mine", tmp_path / "theirs", tmp_path / "latest"
    mine.mkdir()
    earlier = put_earlier_run(theirs / "modelprof")
    link.symlink_to(mine)

    def move():
        link.unlink()
        link.symlink_to(theirs)

    with our_warnings() as messages:
        callback = run_fit(link, module=at(5, move), steps=(3, 8))
    assert contents(theirs / "modelprof") == earlier
    assert len(messages) == 1
    assert "another run has been saved there" in messages[0]
    assert len(callback.run.ranks[0].steps) == 32, "nothing measured is lost"
    assert callback.report is not None


def test_replacing_run_is_not_overwritten(tmp_path):
    folder = tmp_path / "modelprof"

    def move():
        folder.rename(tmp_path / "kept")
        put_earlier_run(folder)

    with our_warnings() as messages:
        run_fit(tmp_path, module=at(5, move), steps=(3, 8))
    assert set(contents(folder).values()) == {EARLIER}
    assert len(messages) == 1
    assert load_run(tmp_path / "kept").info.status == "running"


# Claiming the directory


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EMFILE, errno.EDQUOT, errno.EACCES])
def test_directory_that_cannot_be_claimed_is_not_written_to(tmp_path, monkeypatch, code):
    earlier = put_earlier_run(tmp_path / "modelprof")
    mkdir = Path.mkdir

    def fail(self, *args, **kwargs):
        if self.name == "modelprof_1":
            raise OSError(code, os.strerror(code), str(self))
        mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", fail)
    with our_warnings() as messages:
        callback = run_fit(tmp_path, active=0)
    assert contents(tmp_path / "modelprof") == earlier
    assert not (tmp_path / "modelprof_1").exists()
    assert len(messages) == 1
    assert os.strerror(code) in messages[0]
    assert len(callback.run.ranks[0].steps) == 32


def test_claiming_below_dangling_link_raises(tmp_path):
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    with pytest.raises(OSError, match="File exists"):
        claim_directory(tmp_path / "nowhere" / "modelprof")


@pytest.mark.parametrize("dirpath", ["nowhere", "nowhere/out"])
def test_dangling_link_is_rejected_before_training(tmp_path, dirpath):
    """Otherwise files would go to ``nowhere_1``, where users wouldn't look."""
    (tmp_path / "nowhere").symlink_to("missing")
    with pytest.raises(ConfigError, match="nowhere is a link to missing, which does not exist"):
        run_fit(tmp_path, active=0, dirpath=tmp_path / dirpath)
    assert [place.name for place in tmp_path.iterdir()] == ["nowhere"]
    (tmp_path / "missing").mkdir()
    run_fit(tmp_path, active=0, dirpath=tmp_path / dirpath)
    assert is_whole((tmp_path / dirpath).resolve())


@pytest.mark.parametrize(
    "what", ["a link to missing, which does not exist", "a link to itself", "a file", ""]
)
def test_obstacle_in_logger_directory_is_named(tmp_path, what):
    """Without a ``dirpath``, files go to ``modelprof_1``. A warning says why, unless a run is in the way."""
    logger = CSVLogger(tmp_path, version=0)
    folder = Path(logger.log_dir, "modelprof")
    folder.parent.mkdir(parents=True)
    if what == "a file":
        folder.write_bytes(EARLIER)
    elif what:
        folder.symlink_to(folder if "itself" in what else "missing")
    else:
        put_earlier_run(folder)
    with our_warnings() as messages:
        callback = run_fit(tmp_path, active=0, dirpath=None, trainer={"logger": logger})
    other = folder.with_name("modelprof_1")
    assert is_whole(other)
    expected = f"{folder} is {what.replace('itself', str(folder))}"
    notes = [note for note in callback.run.ranks[0].notes if str(folder) in note]
    assert [message for message in messages if expected in message] == (messages if what else [])
    assert len(messages) == len(notes) == bool(what)
    assert all(expected in note and str(other) in note for note in notes)


@pytest.fixture
def ctrl_c():
    """Make Ctrl-C raise even in background jobs, which ignore it."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("before", ["mkdir", "touch"])
def test_double_ctrl_c_while_claiming_leaves_no_archive(tmp_path, monkeypatch, before):
    """At a fixed point, and again while the first is handled: no archive is better than an empty one."""
    usual = getattr(Path, before)
    told = []

    def interrupt(self, *args, **kwargs):
        usual(self, *args, **kwargs)
        if self.name in ("modelprof", CLAIM_FILE, "run.json"):
            signal.raise_signal(signal.SIGINT)

    def again(self, session):
        told.append(session)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Path, before, interrupt)
    monkeypatch.setattr(run_folder, "itertools", SimpleNamespace(count=lambda: iter(range(3))))
    callback = make_callback(tmp_path, active=0)
    monkeypatch.setattr(type(callback), "_take_results", again)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run_fit(tmp_path, active=0)
    assert told, "the second one came while the first was handled"
    monkeypatch.undo()
    assert not list(tmp_path.rglob("run.json"))
    run_fit(tmp_path, active=0)
    (found,) = tmp_path.rglob("run.json")
    assert load_run(found).info.status == "finished"


def test_claim_lost_to_another_run_is_removed(tmp_path, monkeypatch):
    """Another run saves its archive and removes its claim between our check and our claim."""
    touch = Path.touch

    def save_first(self, *args, **kwargs):
        if self.parent.name == "modelprof":
            (self.parent / "run.json").write_bytes(EARLIER)
        touch(self, *args, **kwargs)

    monkeypatch.setattr(Path, "touch", save_first)
    assert claim_directory(tmp_path / "modelprof").name == "modelprof_1"
    assert contents(tmp_path / "modelprof") == {"run.json": EARLIER}


# The archive stays readable, and is saved again when possible


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOSPC, errno.EDQUOT])
def test_run_is_saved_later_after_error_on_full_disk(tmp_path, monkeypatch, code):
    """From batch 4 to 12 no file can be opened, so an import by torch within our code fails."""
    batch = 0

    def note(index):
        nonlocal batch
        batch = index

    failed_at = []
    write, inspect = archive.write_atomically, InspectionControl.begin_step

    def writes(path, raw):
        if 4 <= batch < 12:
            raise OSError(code, os.strerror(code), str(path))
        write(path, raw)

    def fails(self, step):
        if 5 <= step < 12:
            failed_at.append(step)
            raise OSError(code, os.strerror(code))
        inspect(self, step)

    monkeypatch.setattr(archive, "write_atomically", writes)
    monkeypatch.setattr(InspectionControl, "begin_step", fails)
    with our_warnings() as messages:
        callback = run_fit(tmp_path, module=Net(note), active=1, wait=3, flops=True)
    run = load_run(tmp_path / "modelprof")
    assert run.info.status == callback.run.info.status == "aborted"
    assert len(run.ranks[0].steps) == len(callback.run.ranks[0].steps) == failed_at[0]
    assert len(messages) == 2, "the error, and that it could not be saved there and then"


def test_run_is_saved_once_disk_accepts_files(tmp_path, monkeypatch):
    """The claim file reserves the directory until the first archive exists."""
    batch = 0

    def note(index):
        nonlocal batch
        batch = index

    write = archive.write_atomically

    def writes(path, raw):
        if batch < 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, raw)

    monkeypatch.setattr(archive, "write_atomically", writes)
    seen = []
    module = Net(
        lambda index: (note(index), seen.append({f.name for f in (tmp_path / "modelprof").iterdir()}))
    )
    with our_warnings() as messages:
        run_fit(tmp_path, module=module, active=0)
    assert len(messages) == 1
    assert seen[1] == {CLAIM_FILE}
    assert is_whole(tmp_path / "modelprof")


@pytest.mark.parametrize("first", [1, 40, 150, 400])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.5, 2**70, -(2**70)])
def test_broken_clock_leaves_readable_archive(tmp_path, first, value):
    """Whatever the clock returns after the failure, the archive is readable and has the steps before."""
    callback = make_callback(tmp_path, active=0)
    reads, read = 0, callback._clock

    def clock():
        nonlocal reads
        reads += 1
        return read() if reads < first else value

    callback._clock = clock
    with our_warnings():
        fit_quietly(make_trainer(tmp_path, callback), Net(), loader())
    steps = load_run(tmp_path / "modelprof").ranks[0].steps
    if first == 400 and value != 0.5:
        assert len(steps) >= 5, "steps that were measured before it failed"


def test_run_is_saved_without_date(tmp_path, monkeypatch):
    class NoDate:
        @staticmethod
        def now():
            raise OSError("no date")

    for module in (environment, outputs):
        monkeypatch.setattr(module, "datetime", NoDate, raising=False)
    with our_warnings() as messages:
        callback = run_fit(tmp_path, active=0)
    assert messages == []
    assert is_whole(tmp_path / "modelprof")
    assert callback.report is not None


def test_relative_path_is_checked_once_per_working_directory(tmp_path, monkeypatch):
    made = []
    mkdir = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", lambda self, *args: made.append(1) or mkdir(self, *args))
    for name in ("a", "b"):
        mkdir(tmp_path / name)
        monkeypatch.chdir(tmp_path / name)
        for _ in range(3):
            check_writeable(Path("run"))
    assert len(made) == 2
