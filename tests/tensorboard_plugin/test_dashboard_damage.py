"""Unreadable profiles, hostile names, and the good profiles next to them."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modelprof.errors import ArchiveError
from lightning_modelprof.place import Place
from lightning_modelprof.report.dashboard_entry import DashboardEntry
from lightning_modelprof.report.model import Finding, Status
from lightning_modelprof.show.tensorboard.event_file import tag_of, write_event_file
from lightning_modelprof.show.tensorboard.profile_blob import (
    PROFILE_SCHEMA_VERSION,
    pack_head,
    pack_profile,
    unpack_head,
    unpack_profile,
)
from tests.support.dashboard_profiles import HOSTILE, newer, profile_of, report_of, write_raw
from tests.support.sample_reports import ALL_REPORTS
from tests.support.tensorboard_server import tensorboard


def in_version_1(location):
    """A location as findings of version 1 stored it, with ``null`` for unknown fields."""
    names = ("file", "line", "function", "module", "is_exact", "inner", "package", "call")
    return {name: getattr(location, name) or None for name in names} | {
        "is_exact": location.is_exact,
        "package": "",
    }


def test_findings_of_version_1_are_read():
    step = Place(file="/home/me/net.py", line=30, function="Net.training_step", is_exact=True)
    locations = (step, Place(module="net"))
    finding = Finding(kind="input_bound", status=Status.FOUND, title="t", summary="s", locations=locations)
    packed = pack_profile(profile_of(replace(report_of(), findings=(finding,))))[0]
    document = json.loads(zlib.decompress(packed))
    document["head"]["schema_version"] = 1
    document["report"]["findings"][0]["locations"] = [*map(in_version_1, locations)]
    stored = unpack_profile(zlib.compress(json.dumps(document).encode()))
    assert stored.report.findings == (finding,)


@pytest.fixture(scope="module", params=[True, False], ids=["fast loader", "slow loader"])
def server(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("logs")
    good = profile_of(report_of())
    head, blobs = pack_head(good), pack_profile(good)
    write_event_file(root / "good", [(tag_of(good), good)])
    write_raw(root / "no head", "modelprof/window_0", b"\xff\x00", blobs)
    write_raw(
        root / "newer head",
        "modelprof/window_0",
        head.replace(b'version":%d' % PROFILE_SCHEMA_VERSION, b'version":99'),
        blobs,
    )
    write_raw(root / "newer", "modelprof/window_0", head, [newer(blobs[0])])
    write_raw(root / "cut off", "modelprof/window_0", head, [blobs[0][:40]])
    write_raw(root / "no json", "modelprof/window_0", head, [zlib.compress(b"hello")])
    write_raw(root / "another document", "modelprof/window_0", head, [zlib.compress(b'{"head": 3}')])
    write_raw(root / "nothing", "modelprof/window_0", head, [])
    hostile = profile_of(report_of(HOSTILE, HOSTILE), HOSTILE)
    write_event_file(root / "<b>hostile</b>", [("modelprof/<i>window</i>", hostile)])
    with tensorboard(root, is_fast=request.param) as running:
        yield running.wait_for("good", "no head", "newer", "<b>hostile</b>")


def test_unreadable_head_is_reported_for_its_profile_only(server):
    runs = {run["name"]: run["profiles"][0] for run in server.ask("profiles")["runs"]}
    assert runs["good"]["problem"] == ""
    assert "expected a lightning-modelprof profile" in runs["no head"]["problem"]
    assert "newer lightning-modelprof" in runs["newer head"]["problem"]
    assert "kind" not in runs["no head"]


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        ("newer", "A newer lightning-modelprof wrote it; update"),
        ("cut off", "damaged bytes"),
        ("no json", "expected a lightning-modelprof profile, got"),
        ("another document", "expected a lightning-modelprof profile, got"),
        ("nothing", "expected"),
    ],
)
def test_damaged_profile_is_explained(server, run, sentence):
    arguments = {"run": run, "window": "modelprof/window_0", "view": "overview"}
    assert sentence in server.problem("view", **arguments)


def test_good_profile_is_shown_next_to_damaged_ones(server):
    answer = server.ask("view", run="good", window="modelprof/window_0", view="operators")
    [document] = answer["documents"]
    name, (text, value), *_ = document["tables"][0]["rows"][0]
    assert name == "row"
    assert (text.startswith("3"), str(value)[0]) == (True, "3")


def test_hostile_names_are_text(server):
    place = {"run": "<b>hostile</b>", "window": "modelprof/<i>window</i>"}
    for view in ("overview", "operators", "tables"):
        for document in server.ask("view", view=view, **place)["documents"]:
            html = document["above"] + document["below"]
            assert "<img" not in html
            assert "onerror" not in html.replace("&lt;img src=x onerror=alert(1)&gt;", "")
    (profile,) = (run["profiles"][0] for run in server.ask("profiles")["runs"] if run["name"] == place["run"])
    assert "\x1b" not in profile["label"]


@pytest.mark.parametrize("name", ALL_REPORTS)
def test_every_report_survives_packing(name):
    report = ALL_REPORTS[name]()
    stored = unpack_profile(pack_profile(profile_of(report, rank_reports={0: report, 3: report}))[0])
    if "\\ud" in repr(asdict(report)):  # a lone surrogate has no UTF-8, only an escape
        return
    for part in ("title", "facts", "tables", "notes", "verdict", "findings", "charts", "flames"):
        assert repr(getattr(stored.report, part)) == repr(getattr(report, part)).replace("nan", "None"), part
    assert stored.rank_reports[3] == stored.report
    assert stored.head.ranks == (0, 3)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_random_bytes_are_refused(data):
    for read in (unpack_head, unpack_profile, lambda raw: unpack_profile(zlib.compress(raw))):
        with pytest.raises(ArchiveError, match=r"^expected a lightning-modelprof profile"):
            read(data)


def test_run_name_that_tensorboard_cannot_load_is_explained(tmp_path):
    """A bug in TensorBoard's fast loader, which the page can only explain."""
    good = profile_of(report_of())
    write_event_file(tmp_path / 'a "quoted" run', [(tag_of(good), good)])
    arguments = {"run": 'a "quoted" run', "window": "modelprof/window_0", "view": "overview"}
    with tensorboard(tmp_path) as running:
        running.wait_for('a "quoted" run')
        status, media_type, body = running.raw("plugin/modelprof/view", **arguments)
        assert media_type == "application/json"
        assert status == 200 or "--load_fast=false" in json.loads(body)["error"]
    with tensorboard(tmp_path, is_fast=False) as running:
        running.wait_for('a "quoted" run')
        assert "documents" in running.ask("view", **arguments)


def test_tag_consists_of_folder_loop_and_window():
    assert tag_of(profile_of(report_of())) == "modelprof/window_0"
    assert tag_of(profile_of(report_of(), window=3), "modelprof_1") == "modelprof_1/window_3"
    run = DashboardEntry(kind="run", loop="test", window=None, label="", report=report_of())
    assert tag_of(run) == "modelprof/test/run"


def test_no_profiles_create_no_file(tmp_path):
    write_event_file(tmp_path / "run", [])
    assert list(Path(tmp_path).iterdir()) == []
