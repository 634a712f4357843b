"""Profiles in an event file of version 2, whose reports had sections instead of a summary."""

from __future__ import annotations

import json
import shutil
import zlib
from dataclasses import replace

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from lightning_modelprof.errors import ArchiveError
from lightning_modelprof.report.summary import Summary
from lightning_modelprof.run.records import WindowStatus
from lightning_modelprof.show.tensorboard.profile_blob import unpack_head, unpack_profile
from lightning_modelprof.units import format_duration
from tests.support.fits import ROOT
from tests.support.tensorboard_server import tensorboard

FOLDER = ROOT / "tests" / "data" / "profiles"
RUN, WINDOW = "modelprof/run", "modelprof/window_0"


@pytest.fixture(scope="module")
def profiles():
    """Tag → head, first blob as written, and the profile that is read from it."""
    (file,) = FOLDER.iterdir()
    values = [value for event in EventFileLoader(str(file)).Load() for value in event.summary.value]
    return {
        value.tag: (
            unpack_head(value.metadata.plugin_data.content),
            json.loads(zlib.decompress(value.tensor.string_val[0])),
            unpack_profile(value.tensor.string_val[0]),
        )
        for value in values
    }


def test_stored_profiles_have_version_2_and_sections(profiles):
    assert list(profiles) == [RUN, WINDOW]
    for head, written, _ in profiles.values():
        assert head.schema_version == written["head"]["schema_version"] == 2
        assert {"sections", "summary"} & written["report"].keys() == {"sections"}


def test_figures_of_run_are_read(profiles):
    _, written, read = profiles[RUN]
    sections, summary = written["report"]["sections"], read.report.summary
    benchmark = sections["benchmark"]
    assert summary.run.model == sections["run"]["model"] == read.head.model
    assert summary.run.excluded_steps[0].num_steps == sections["run"]["excluded_steps"][0]["num_steps"]
    assert summary.settings == sections["settings"]
    assert summary.benchmark.num_steps == benchmark["steps"] > 0
    assert summary.benchmark.batch_cost_ns.p99 == benchmark["batch_cost_ns"]["p99"]
    assert summary.benchmark.reader_ratio.avg == benchmark["reader_ratio"]
    assert summary.benchmark.steps_per_s.standard_error == benchmark["ips"]["standard_error"]
    assert summary.run.steps_unit == benchmark["ips"]["unit"]
    assert summary.benchmark.samples_per_s.avg == benchmark["samples_per_s"]["avg"]
    assert summary.run.samples_unit == benchmark["samples_per_s"]["unit"]
    assert [one.key for one in summary.phases] == [one["phase"] for one in sections["phases"]]
    assert sum(one.total_ns for one in summary.phases) == summary.run.wall_ns
    assert summary.own_cost.share == sections["own_cost"]["share"]
    assert summary.flops.phases["backward"] == sections["flops"]["backward"]["flops"]
    assert summary.flops.params == sections["flops"]["params"]
    assert summary.memory.num_points == sections["memory"]["num_points"]
    (growing,), (line,) = summary.memory.growing, sections["memory"]["growing"][0]["lines"]
    assert (growing.lines[0].function, growing.lines[0].line) == (line["name"], line["line"])


def test_figures_of_window_are_read(profiles):
    _, written, read = profiles[WINDOW]
    (trace,), (section,) = read.report.summary.traces, written["report"]["sections"]["traces"]
    assert (trace.source, trace.num_events) == (section["source"], section["num_events"])
    assert list(trace.steps) == section["steps"]
    assert read.report.summary == Summary(traces=(trace,))


@pytest.mark.parametrize("name", ["benchmark", "phases", "flops", "memory", "run"])
def test_unmeasured_figures_are_missing(profiles, name):
    written = json.loads(json.dumps(profiles[RUN][1]))
    written["report"]["sections"][name] = None
    assert not getattr(unpack_profile(zlib.compress(json.dumps(written).encode())).report.summary, name)


def test_figures_with_missing_field_are_left_out(profiles):
    """Earlier profiles have no field for the report's wait after the loop."""
    written = json.loads(json.dumps(profiles[RUN][1]))
    del written["report"]["sections"]["own_cost"]["report_wait_ns"]
    summary = unpack_profile(zlib.compress(json.dumps(written).encode())).report.summary
    assert summary == replace(profiles[RUN][2].report.summary, own_cost=None)


def test_deeply_nested_profile_is_refused(profiles):
    written = json.dumps(profiles[RUN][1]).replace(
        '"sections": {', f'"sections": {{"deep": {"[" * 800}{"]" * 800}, '
    )
    with pytest.raises(ArchiveError, match="expected a lightning-modelprof profile"):
        unpack_profile(zlib.compress(written.encode()))


def test_ranks_and_windows_of_run_are_read(profiles):
    written = json.loads(json.dumps(profiles[RUN][1]))
    sections = written["report"]["sections"]
    pace = {
        "rank": 1,
        "host": "a",
        "num_steps": 9,
        "num_clean": 8,
        "step_ns": 1.5,
        "phases_ns": {"forward": None},
    }
    sections["ranks"] = {
        "ranks": [pace],
        "world_size": 2,
        "num_common": 8,
        "own_phases": [],
        "imbalance_ns": None,
        "straggler": None,
        "step_ns": 1.5,
    }
    sections["windows"] = [{"index": 0, "first_step": 1, "last_step": 2, "status": "refused"}]
    sections["all_ranks_command"] = "lightning-modelprof tensorboard a"
    summary = unpack_profile(zlib.compress(json.dumps(written).encode())).report.summary
    assert summary.ranks.ranks[0].phases_ns == {"forward": None}
    assert summary.windows[0].status is WindowStatus.REFUSED
    assert summary.all_ranks_command == sections["all_ranks_command"]


def test_dashboard_shows_old_profiles(profiles, tmp_path):
    (tmp_path / "old").mkdir()
    for file in FOLDER.iterdir():
        shutil.copy(file, tmp_path / "old")
    summary = profiles[RUN][2].report.summary
    with tensorboard(tmp_path) as server:
        server.wait_for("old")
        run = str(server.ask("view", run="old", profile=RUN, view="overview")["documents"])
        window = str(server.ask("view", run="old", window=WINDOW, view="overview")["documents"])
    assert format_duration(summary.benchmark.batch_cost_ns.avg).partition(" ")[0] in run
    assert summary.run.steps_unit in run
    assert summary.run.model in run
    assert "mi250_toy" in window
