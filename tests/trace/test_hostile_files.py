"""A file from elsewhere is either shown or rejected quickly with one of our errors."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import pickle
import stat
import zlib
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_modelprof.cli.main import main
from lightning_modelprof.errors import ArchiveError, TraceError
from lightning_modelprof.reading import read_report
from lightning_modelprof.reading_traces import analyze
from lightning_modelprof.run import opening
from lightning_modelprof.run.archive import load_run, save_run
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import StepTimings
from lightning_modelprof.show.document import render_json
from lightning_modelprof.show.tensorboard import packing as columns
from lightning_modelprof.show.tensorboard.packing import unpack_columns
from lightning_modelprof.show.tensorboard.profile_blob import unpack_profile
from lightning_modelprof.show.text import render_text
from lightning_modelprof.trace import columns as trace_columns
from lightning_modelprof.trace import reader as chrome
from lightning_modelprof.trace import text as trace_text
from tests.support.fits import run_fit
from tests.support.hostile_runs import as_text, deep, mutated

NUM_MUTATIONS = 150
NAMES = frozenset(
    {"name", "callback", "function", "file", "module", "class_name", "kind_name", "host", "model"}
)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The run.json of a real fit with everything enabled."""
    folder = tmp_path_factory.mktemp("good")
    everything = dict.fromkeys(("flops", "sampling", "profile_memory"), True)
    run_fit(folder, active=2, wait=2, repeat=2, **everything)
    return json.loads((folder / "modelprof" / "run.json").read_bytes())


@pytest.fixture
def show(tmp_path):
    def show(content):
        (tmp_path / "run.json").write_bytes(content if isinstance(content, bytes) else as_text(content))
        return render_text(read_report(tmp_path))

    return show


def test_valid_run_is_shown(good, show):
    assert "Perf Summary" in show(good)


def test_mutations_are_shown_or_rejected(good, show):
    outcomes = {"shown": 0, "refused": 0}
    lengths = []
    for seed in range(NUM_MUTATIONS):
        try:
            show(mutated(good, seed))
            outcomes["shown"] += 1
            continue
        except ArchiveError as error:
            lengths.append(len(str(error)))
        outcomes["refused"] += 1
    assert max(lengths) < 2_000
    assert min(outcomes.values()) > NUM_MUTATIONS // 10, outcomes


def rank(content):
    return content["ranks"][0]


def steps(content):
    return rank(content)["steps"]


def fill(name, value):
    return lambda content: steps(content).update({name: [value] * len(steps(content)["step"])})


def windows(content, **changes):
    rank(content)["windows"][0].update(changes)


REFUSED = {
    "a thousand million ranks": lambda content: content["info"].update(world_size=10**9),
    "no rank at all": lambda content: content["info"].update(world_size=0),
    "a negative rank": lambda content: rank(content).update(rank=-1),
    "negative steps": lambda content: steps(content).update(step=[-n for n in steps(content)["step"]][::-1]),
    "durations of -1": fill("duration_ns", -1),
    "durations of 2**63": fill("duration_ns", 2**63),
    "durations of 2**63 - 1": fill("duration_ns", 2**63 - 1),
    "durations of -2**63": fill("duration_ns", -(2**63)),
    "negative samples": fill("samples", -5),
    "negative tags": fill("tags", -1),
    "all tags": fill("tags", 2**62),
    "a hundred thousand windows": lambda content: rank(content).update(
        windows=[{**rank(content)["windows"][0], "index": n} for n in range(100_000)]
    ),
    "a trace above the folder": lambda content: windows(content, trace_file="../other/trace.json"),
    "an absolute trace": lambda content: windows(content, trace_file="/etc/passwd"),
    "a trace on a drive": lambda content: windows(content, trace_file="C:\\trace.json"),
    "a trace with a zero byte": lambda content: windows(content, trace_file="a\0b"),
    "row_limit is a list": lambda content: content["info"]["config"].update(row_limit=[1]),
    "views that are numbers": lambda content: content["info"]["config"].update(views=[1, 2]),
    "an info that is a number": lambda content: content.update(info=7),
    "a stack of negative time": lambda content: rank(content)["stacks"]["stacks"].append(
        {"phase": "forward", "frames": [], "samples": 1, "time_ns": -1}
    ),
    "a negative interval at first": lambda content: rank(content)["stacks"].update(first_interval_ns=-1),
    "a negative interval in the end": lambda content: rank(content)["stacks"].update(last_interval_ns=-1),
    "sampling of negative cost": lambda content: rank(content)["stacks"].update(cost_ns=-1),
    "memory of 2**100": lambda content: rank(content)["memory"].update(peak_rss_bytes=2**100),
}

ODD = {
    "the same rank twice": lambda content: content["ranks"].append(rank(content)),
    "steps in reverse": lambda content: steps(content)["step"].reverse(),
    "the same step again and again": fill("step", 7),
    "durations of 0": fill("duration_ns", 0),
    "samples of 2**62": fill("samples", 2**62),
    "an unknown phase outside": lambda content: rank(content).update(outside_ns={"x": 1}),
    "the same window twice": lambda content: rank(content)["windows"].append(rank(content)["windows"][0]),
    "a window that ends before it begins": lambda content: windows(content, first_step=9, last_step=3),
    "steps outside of their window": lambda content: windows(content, recorded_steps=[10**6]),
    "steps of a window in reverse": lambda content: windows(content, recorded_steps=[4, 3]),
    "a configuration 900 deep": lambda content: content["info"].update(config={"active": deep(900)}),
    "a configuration 20 deep": lambda content: content["info"].update(config={"active": deep(20)}),
    "a configuration without end": lambda content: content["info"].update(config={"x": [0] * 100_000}),
    "rules that are a number": lambda content: content["info"]["config"].update(rules=7),
    "rules that are a list": lambda content: content["info"]["config"].update(rules=["x"]),
    "modules to ignore that are a number": lambda content: content["info"]["config"].update(ignore_modules=7),
    "modules to ignore that are numbers": lambda content: content["info"]["config"].update(
        ignore_modules=[7]
    ),
    "a frame that there is not": lambda content: rank(content)["stacks"]["stacks"].append(
        {"phase": "forward", "frames": [10**6], "samples": 1, "time_ns": 1}
    ),
    "a stack in no phase": lambda content: rank(content)["stacks"]["stacks"].append(
        {"phase": "x", "frames": [], "samples": 1, "time_ns": 1}
    ),
    "memory that goes back": lambda content: rank(content)["memory"].update(
        curve=[
            {"step": step, "rss_bytes": 1, "allocated_bytes": None, "reserved_bytes": None} for step in (7, 3)
        ]
    ),
    "the same modules twice": lambda content: rank(content)["model_cost"]["modules"].extend(
        rank(content)["model_cost"]["modules"]
    ),
    "modules without the model": lambda content: rank(content)["model_cost"]["modules"].pop(0),
    "modules before those around them": lambda content: rank(content)["model_cost"]["modules"].reverse(),
}
"""Types and ranges are valid; the result is shown or is one of our errors."""


@pytest.mark.parametrize("spoil", REFUSED.values(), ids=REFUSED)
def test_wrong_types_and_ranges_are_rejected(good, show, spoil):
    content = json.loads(json.dumps(good))
    spoil(content)
    with pytest.raises(ArchiveError, match="damaged"):
        show(content)


@pytest.mark.parametrize("spoil", ODD.values(), ids=ODD)
def test_impossible_runs_are_shown_or_rejected(good, show, spoil):
    content = json.loads(json.dumps(good))
    spoil(content)
    with suppress(ArchiveError):
        show(content)


@pytest.mark.parametrize("command", ["report", "compare", "list", "tensorboard"])
def test_internal_error_is_one_line(good, tmp_path, monkeypatch, capsys, command):
    content = json.loads(json.dumps(good))
    content["info"]["config"]["ignore_modules"] = 7
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_bytes(as_text(content))
    monkeypatch.chdir(tmp_path)
    rest = {"compare": ["one", "two"], "list": ["."], "tensorboard": ["one", "--logdir", "logs"]}
    main([command, *rest.get(command, ["one"])])
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "has a bug" in line]
    assert len(lines) == (2 if command == "list" else 1)
    assert all("run.json: expected a run to make a report of, got TypeError" in line for line in lines)


@pytest.mark.parametrize(
    "raw", [b"[" * 10**6, b'{"a":' * 10**6, b"1" * 10**5, b"\xff\xfe{}", b'"' + b"x" * 10**7]
)
def test_content_that_is_not_a_run_is_rejected(show, raw):
    with pytest.raises(ArchiveError) as caught:
        show(raw)
    assert len(str(caught.value)) < 2_000


# Special files


def test_pipe_without_writer_does_not_block(tmp_path, good):
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(ArchiveError, match="not a regular file"):
        load_run(tmp_path)
    folder = tmp_path / "run"
    (folder / "traces").mkdir(parents=True)
    content = json.loads(json.dumps(good))
    content["info"]["world_size"] = 2
    (folder / "run.json").write_bytes(as_text(content))
    os.mkfifo(folder / "run_rank1.json")
    for window in rank(content)["windows"]:
        os.mkfifo(folder / window["trace_file"])
    text = render_text(read_report(folder))
    assert "Perf Summary" in text
    assert "isn't a regular file" in text


@pytest.mark.skipif(not stat.S_ISCHR(Path("/dev/zero").stat().st_mode), reason="no /dev/zero")
def test_endless_device_is_rejected(tmp_path):
    (tmp_path / "run.json").symlink_to("/dev/zero")
    with pytest.raises(ArchiveError, match="not a regular file"):
        load_run(tmp_path)
    (tmp_path / "trace.json").symlink_to("/dev/zero")
    with pytest.raises(TraceError, match="not a regular file"):
        analyze(tmp_path / "trace.json")


def test_huge_file_is_rejected(tmp_path, monkeypatch):
    with (tmp_path / "run.json").open("wb") as file:
        file.truncate(2**40)  # sparse, so it takes no space
    monkeypatch.setattr(opening, "MAX_ARCHIVE_BYTES", 2**20)
    with pytest.raises(ArchiveError, match="larger than 1 MiB"):
        load_run(tmp_path)


def test_small_file_with_endless_events_is_rejected_early(tmp_path, monkeypatch):
    """A text hundreds of times as large as its gzip file isn't a trace."""
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b"{}," * 10**7 + b"{}]}"))
    monkeypatch.setattr(trace_text, "_LOOSE_BYTES", 2**22)
    monkeypatch.setattr(trace_text, "_MANY_EVENTS", 10**8)
    with pytest.raises(TraceError, match="unpack it first"):
        analyze(path)


@pytest.mark.parametrize("broken", [b"", b"{]},"], ids=["whole", "damaged"])
def test_many_empty_events_end_reading_early(tmp_path, monkeypatch, broken):
    """The limit counts decoded events, so it doesn't depend on compression."""
    decoded = []
    decode = trace_columns.decode_events

    def counting(text, **digits):
        events = decode(text, **digits)
        decoded.append(len(events))
        return events

    monkeypatch.setattr(trace_columns, "decode_events", counting)
    monkeypatch.setattr(trace_text, "_MANY_EVENTS", 100_000)
    path = tmp_path / "trace.json"
    one = b'{"ph":"X"},'
    path.write_bytes(b'{"traceEvents": [' + one + broken + one * 2_000_000 + b"{}]}")
    with pytest.raises(TraceError, match=r"trace\.json: .* bytes on average"):
        analyze(path)
    assert sum(decoded) < 500_000


def test_any_number_of_smallest_events_is_read(monkeypatch):
    monkeypatch.setattr(trace_text, "_MANY_EVENTS", 10)
    smallest = b'{"ph":"X","name":"a","ts":%d,"dur":1}'
    text = b'{"traceEvents": [' + b",\n".join(smallest % (10_000 + n) for n in range(5_000)) + b"]}"
    assert len(chrome.parse_trace(text, "small")) == 5_000


# Impossible paths


class BadPath(os.PathLike):
    def __fspath__(self):
        raise RuntimeError("no \x1b[31mpath")

    def __repr__(self):
        raise RuntimeError("no repr")


IMPOSSIBLE = {
    "zero byte": "a\0b",
    "half a pair": "a\ud800b",
    "much too long": "a/" * 5_000_000,
    "bytes": b"a\0b",
    "nothing": None,
    "own": BadPath(),
}
READERS = [(read_report, ArchiveError), (analyze, TraceError)]


@pytest.mark.parametrize("path", IMPOSSIBLE)
@pytest.mark.parametrize(("read", "kind"), READERS)
def test_impossible_path_is_rejected_in_one_line(read, kind, path):
    with pytest.raises(kind, match="can't read ") as caught:
        read(IMPOSSIBLE[path])
    assert len(str(caught.value)) < 1_000
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(("read", "kind"), READERS)
def test_paths_that_lead_nowhere_are_rejected(read, kind, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("text")
    for place in ("loop", "loop/below", "file/below", "none"):
        with pytest.raises(kind) as caught:
            read(tmp_path / place)
        assert str(caught.value).isprintable()


def test_error_is_one_line_of_bounded_length():
    error = ArchiveError("\x1b[2J\x1b]0;gone\x07\x9b31m\u202e\u2028\udce9\n" + "x" * 3_000_000 + "the end")
    assert len(str(error)) <= 4_100
    assert str(error).isprintable()
    assert str(error).endswith("the end")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# Missing permissions


class _Forbidden:
    """Denies access to a folder by patching, because root can read everything."""

    def __init__(self, monkeypatch, folder):
        ask = Path.stat

        def stat_(self, **options):
            if folder in self.parents:
                raise PermissionError(13, "Permission denied", str(self))
            return ask(self, **options)

        monkeypatch.setattr(Path, "stat", stat_)
        monkeypatch.setattr(Path, "exists", lambda self: bool(stat_(self)))


@pytest.mark.parametrize("command", [("report",), ("compare", "."), ("tensorboard", "--logdir", "logs")])
def test_unreadable_folder_is_reported(tmp_path, monkeypatch, capsys, command):
    folder = tmp_path / "closed"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    _Forbidden(monkeypatch, folder)
    assert main([command[0], str(folder), *command[1:]]) != 0
    told = capsys.readouterr().err
    assert ": Permission denied. Check the path and" in told
    assert "can't write" not in told


# Dashboard blobs


def test_compressed_bomb_in_blob_is_rejected(monkeypatch):
    monkeypatch.setattr(columns, "MAX_UNPACKED_BYTES", 2**20)
    packed = zlib.compress(b" " * 2**24)
    with pytest.raises(ArchiveError, match="more than 1,048,576 bytes"):
        unpack_profile(packed)
    with pytest.raises(ValueError, match="more than 1,048,576 bytes"):
        unpack_columns(packed)


def test_cut_off_blob_is_rejected():
    with pytest.raises(ArchiveError, match="cut off"):
        unpack_profile(zlib.compress(b'{"head": {"schema_version": 1}}')[:-3])


# Lone surrogates


def test_lone_surrogate_in_any_text_is_saved_and_shown(good, tmp_path):
    path = tmp_path / "run.json"
    path.write_bytes(as_text(good))
    run = load_run(path)

    def spoiled(value):
        if dataclasses.is_dataclass(value) and not isinstance(value, StepTimings | StepTotals):
            return dataclasses.replace(
                value,
                **{
                    field.name: name + "\udc80"
                    if isinstance(name := getattr(value, field.name), str) and field.name in NAMES
                    else spoiled(name)
                    for field in dataclasses.fields(value)
                    if field.init
                },
            )
        if isinstance(value, tuple):
            return tuple(map(spoiled, value))
        return value

    odd = spoiled(run)
    assert "\\udc80" in repr((odd.info, odd.ranks))
    save_run(odd, path)
    text = render_text(read_report(path))
    assert "\\udc80" in text
    json.loads(render_json(read_report(path)))
