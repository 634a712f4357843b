"""The dashboard serves a run's own traces by bare file name, and no other file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.errors import ArchiveError
from lightning_modelprof.report.build_dashboard_entry import window_profile
from lightning_modelprof.show.tensorboard.profile_blob import pack_head, pack_profile
from lightning_modelprof.tensorboard_plugin.answers import Answers
from lightning_modelprof.tensorboard_plugin.stored_profiles import find_trace
from tests.support.traces import event, make_trace
from tests.tensorboard_plugin.test_hostile_profiles import Provider

NAME = "rank0_steps_3-5.pt.trace.json.gz"
RUN, TAG = "net/version_0", "modelprof/window_0"
SECRET = b"secret"


@pytest.fixture
def logdir(tmp_path):
    """A log directory with a trace, and with secret files wherever a wrong path could lead."""
    root = tmp_path / "logs"
    traces = root / RUN / "modelprof" / "traces"
    traces.mkdir(parents=True)
    (traces / NAME).write_bytes(b"trace")
    above = (tmp_path / "modelprof", tmp_path, root / "net" / "modelprof", root / "net", root / RUN)
    for folder in (tmp_path, traces.parent, traces / "deeper", *(one / "traces" for one in above)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"x{NAME}").write_bytes(SECRET)
    (traces / "notes.txt").write_bytes(SECRET)
    (traces / "folder.pt.trace.json").mkdir()
    (traces / "link.pt.trace.json").symlink_to(tmp_path / f"x{NAME}")
    (root / "linked").symlink_to(tmp_path)
    return root


def test_trace_is_found_by_name(logdir):
    assert find_trace(str(logdir), RUN, TAG, NAME).read_bytes() == b"trace"
    assert find_trace(str(logdir / RUN), ".", TAG, NAME).read_bytes() == b"trace"


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "notes.txt", "folder.pt.trace.json", "link.pt.trace.json", f"{NAME}\0", f"x{NAME}"),
        *(f"../x{NAME}", f"deeper/x{NAME}", f"..\\x{NAME}", f"/etc/{NAME}", f"C:{NAME}", f"./{NAME}"),
    ],
)
def test_anything_but_bare_trace_name_is_refused(logdir, name):
    assert find_trace(str(logdir), RUN, TAG, name) is None


@pytest.mark.parametrize(
    ("run", "tag"),
    [
        *((run, TAG) for run in ("..", f"{RUN}/..", f"../logs/{RUN}", "linked", "/", "net\0")),
        *((RUN, tag) for tag in ("", "..", "../x", "/", "...", "modelprof_1/window_0", "a\0/x", "..\\..")),
    ],
)
def test_run_and_tag_cannot_leave_log_directory(logdir, run, tag):
    for name in (NAME, f"x{NAME}"):
        assert find_trace(str(logdir), run, tag, name) is None


def test_absolute_path_is_not_a_run(logdir):
    assert find_trace(str(logdir), str(logdir.parent), TAG, f"x{NAME}") is None


def test_unsupported_log_directory_has_no_trace(logdir, monkeypatch):
    monkeypatch.chdir(logdir)
    for odd in ("", "gs://bucket/logs", f"a:{logdir},b:{logdir}", "\0"):
        assert find_trace(odd, RUN, TAG, NAME) is None


def answers_with(logdir, source):
    """The dashboard's answers if an event file names ``source`` as the trace."""
    trace = replace(make_trace([event("user_annotation", "ProfilerStep#1", 0, 100)]), source=source)
    profile = window_profile([(trace, TraceFacts(trace))], window=0)
    provider = Provider()
    provider.put(RUN, TAG, pack_head(profile), pack_profile(profile))
    return Answers(provider, str(logdir))


def asked(answers):
    [columns] = answers.view(None, "", {"run": RUN, "window": TAG, "view": "trace"})["columns"]
    return columns["file"], columns["where"]


def test_trace_view_names_file_or_its_location(logdir):
    answers = answers_with(logdir, f"traces/{NAME}")
    assert asked(answers) == (NAME, "")
    assert answers.trace(None, "", {"run": RUN, "tag": TAG, "file": NAME}) == b"trace"
    packed = logdir / RUN / "modelprof" / "traces" / NAME
    packed.rename(packed.with_suffix(""))  # not compressed yet
    assert asked(answers) == (NAME.removesuffix(".gz"), "")
    packed.with_suffix("").unlink()
    assert asked(answers) == (
        "",
        f"The trace isn't in this log directory. It's traces/{NAME} in the run's directory.",
    )
    assert asked(answers_with(logdir, "v100.json.gz")) == (
        "",
        "The trace isn't in this log directory. It's v100.json.gz.",
    )


@pytest.mark.parametrize("source", [f"../../../x{NAME}", "/etc/passwd", f"{'a' * 10_000}/x{NAME}"])
def test_paths_in_event_file_are_never_opened(logdir, source):
    answers = answers_with(logdir, source)
    assert asked(answers)[0] == ""
    for name in (source, source.rpartition("/")[2]):
        with pytest.raises(ArchiveError, match="expected the trace"):
            answers.trace(None, "", {"run": RUN, "tag": TAG, "file": name})
