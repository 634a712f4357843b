"""Traces in archives are read in place, never unpacked to disk and never without a limit."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from lightning_modelprof.cli.main import main


def trace_text(num_steps=3):
    events = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 1, "tid": 1}
        | {"ts": 100 * step, "dur": 100}
        for step in range(num_steps)
    ]
    events += [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 100 * step + 5, "dur": 90}
        for step in range(num_steps)
    ]
    return json.dumps({"traceEvents": events}).encode()


TEXT = trace_text()
TWO_RANKS = {"iteration_5/rank0_trace.json": TEXT, "iteration_5/rank1_trace.json.gz": gzip.compress(TEXT)}


def add_to_tar(archive, name, data, **fields):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for key, value in fields.items():
        setattr(member, key, value)
    archive.addfile(member, io.BytesIO(data))


def make_archive(path, files):
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in files.items():
                archive.writestr(name, data)
    else:
        with tarfile.open(path, "w" if path.suffix == ".tar" else "w:gz") as archive:
            for name, data in files.items():
                add_to_tar(archive, name, data)
    return path


def analyze(capsys, *arguments, code=0):
    assert main(["analyze", *map(str, arguments), "--json", "-"]) == code
    return json.loads(capsys.readouterr().out)["summary"]["traces"]


KINDS = ["traces.zip", "traces.tar", "traces.tar.gz", "traces.tgz"]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("by_folder", [False, True])
def test_archive_is_read_like_a_folder(tmp_path, capsys, name, by_folder):
    others = {"readme.txt": b"hello", "config.json": b"{}", "__MACOSX/._rank0_trace.json": b"\0\5\x16\7"}
    archive = make_archive(tmp_path / name, {**others, **TWO_RANKS})
    before = sorted(tmp_path.rglob("*"))
    traces = analyze(capsys, tmp_path if by_folder else archive)
    assert [(one["source"], one["rank"]) for one in traces] == [
        (str(archive / inside), rank) for rank, inside in enumerate(TWO_RANKS)
    ]
    assert {one["tables_suffix"] for one in traces} == {""}
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", KINDS)
def test_json_without_trace_in_name_is_read_as_fallback(tmp_path, capsys, name):
    archive = make_archive(tmp_path / name, {"profile.json": TEXT})
    assert [one["num_events"] for one in analyze(capsys, archive)] == [6]


@pytest.mark.parametrize("name", KINDS)
def test_members_with_outside_paths_are_skipped(tmp_path, capsys, name):
    """Names that lead out of the archive are skipped, whether or not the path exists."""
    (tmp_path / "outside_trace.json").write_bytes(trace_text(9))
    evil = ["../outside_trace.json", str(tmp_path / "outside_trace.json"), "a/../../outside_trace.json"]
    evil += ["C:\\trace.json", "..\\outside_trace.json"]
    archive = make_archive(tmp_path / name, {**dict.fromkeys(evil, trace_text(8)), "good_trace.json": TEXT})
    assert [one["source"] for one in analyze(capsys, archive)] == [str(archive / "good_trace.json")]


def test_links_in_tar_are_not_followed(tmp_path, capsys):
    (tmp_path / "outside_trace.json").write_bytes(TEXT)
    with tarfile.open(tmp_path / "t.tar.gz", "w:gz") as archive:
        for kind, name in ((tarfile.SYMTYPE, "a_trace.json"), (tarfile.LNKTYPE, "b_trace.json")):
            add_to_tar(archive, name, b"", type=kind, linkname=str(tmp_path / "outside_trace.json"))
        add_to_tar(archive, "c_trace.json", TEXT)
    assert len(analyze(capsys, tmp_path / "t.tar.gz")) == 1


@pytest.mark.parametrize("kind", [b"x", b"L", b"g"])
def test_huge_tar_header_is_not_read(tmp_path, capsys, kind):
    member = tarfile.TarInfo("x")
    member.type, member.size = kind, 2**32
    (tmp_path / "t.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    assert main(["analyze", str(tmp_path / "t.tar")]) == 1
    error = capsys.readouterr().err
    assert "bytes in one read" in error
    assert error.count("\n") == 1


def test_zip_bomb_is_rejected(tmp_path, capsys):
    archive = tmp_path / "t.zip"
    with (
        zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened,
        opened.open("a_trace.json", "w") as member,
    ):
        for _ in range(2**28 // 2**20 + 1):
            member.write(bytes(2**20))
    assert main(["analyze", str(archive)]) == 1
    assert "expands more than 200 times" in capsys.readouterr().err


def test_limit_applies_to_member_text(tmp_path, capsys):
    archive = make_archive(tmp_path / "t.zip", {"a_trace.json": trace_text(30_000)})
    assert main(["analyze", str(archive), "--max-gib", "0.001"]) == 1
    assert "--max-gib" in capsys.readouterr().err


@pytest.mark.parametrize("times", [2, 3])
def test_nested_gzip_is_read(tmp_path, capsys, times):
    packed = TEXT
    for _ in range(times):
        packed = gzip.compress(packed)
    (tmp_path / "trace.json.gz").write_bytes(packed)
    assert [one["num_events"] for one in analyze(capsys, tmp_path / "trace.json.gz")] == [6]


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"BZh91AY", "bzip2 file"),
        (b"\xfd7zXZ\x00\x00", "xz file"),
        (b"\x28\xb5\x2f\xfd\x00", "zstd file"),
        (b"7z\xbc\xaf\x27\x1c", "7z archive"),
        (b"Rar!\x1a\x07\x00", "rar archive"),
    ],
)
def test_unsupported_format_is_named(tmp_path, capsys, head, name):
    (tmp_path / "trace.json").write_bytes(head + os.urandom(5000))
    assert main(["analyze", str(tmp_path / "trace.json")]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    expected = f"expected a Chrome trace in JSON, got a {name}. Unpack it first.\n"
    assert shown.err.endswith(expected)


@pytest.mark.parametrize("name", KINDS)
def test_archive_without_traces_is_an_error(tmp_path, capsys, name):
    archive = make_archive(tmp_path / name, {"a.txt": b"hello", "b.txt": b"hello"})
    assert main(["analyze", str(archive)]) == 1
    assert "no trace files (*.json or *.json.gz) among 2 files" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["t.tar", "t.tar.gz"])
def test_cut_off_archive_is_read_as_far_as_possible(tmp_path, capsys, name):
    text = trace_text(500)
    archive = make_archive(tmp_path / name, {"rank0_trace.json": text, "rank1_trace.json": text})
    raw = archive.read_bytes()
    archive.write_bytes(raw[: int(len(raw) * 0.8)])
    traces = analyze(capsys, archive, code=1)
    assert traces[0]["num_events"] == 1000
    assert any(one["is_damaged"] for one in traces)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("arguments", [["--brief"], [], ["--full"]])
def test_cut_off_trace_is_reported_and_exits_with_1(tmp_path, capsys, is_packed, arguments):
    raw = gzip.compress(trace_text(500)) if is_packed else trace_text(500)
    file: Path = tmp_path / "trace.json"
    file.write_bytes(raw)
    assert main(["analyze", str(file), *arguments]) == 0
    assert "cut off" not in capsys.readouterr().out
    file.write_bytes(raw[: len(raw) * 3 // 4])
    assert main(["analyze", str(file), *arguments]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "The file is cut off" in out
