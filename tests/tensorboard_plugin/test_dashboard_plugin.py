"""The dashboard's routes in a real TensorBoard serve exactly what was measured, and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_modelprof.cli.main import main
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.show.tensorboard.profile_blob import unpack_steps
from lightning_modelprof.show.tensorboard.timeline_columns import unpack_timeline
from lightning_modelprof.tensorboard_plugin.views import VIEWS
from lightning_modelprof.trace.reader import read_trace
from lightning_modelprof.units import format_duration
from tests.support.dashboard_profiles import fit
from tests.support.documents import raw_rows
from tests.support.page_document import numbers, tables_of
from tests.support.tensorboard_server import tensorboard

pytestmark = pytest.mark.slow

RUN = {"run": "net/version_0", "profile": "modelprof/run", "window": "modelprof/window_1"}
BEFORE = {f"before_{key}": value for key, value in RUN.items()}
STEPS = {"run": RUN["run"], "tag": "modelprof/run"}
TRACE = {"run": RUN["run"], "tag": RUN["window"], "file": "rank0_steps_16-17.pt.trace.json.gz"}


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    root = tmp_path_factory.mktemp("logs")
    fit(root)
    fit(root, version=1)
    return root


@pytest.fixture(scope="module", params=[True, False], ids=["fast loader", "slow loader"])
def server(request, logdir):
    with tensorboard(logdir, is_fast=request.param) as running:
        yield running.wait_for("net/version_0", "net/version_1")


def numbers_of(table):
    """Numbers in the rows of a report.json table, without names and texts."""
    units = {column["key"]: column["unit"] for column in table["columns"]}
    first = table["columns"][0]["key"]
    rows = [
        [
            float(value)
            for key, value in row.items()
            if key != first and units[key] != "text" and isinstance(value, int | float)
        ]
        for row in raw_rows(table)
    ]
    return [row for row in rows if row]


def test_profiles_are_listed_with_details(server):
    answer = server.ask("profiles")
    assert [run["name"] for run in answer["runs"]] == ["net/version_0", "net/version_1"]
    profiles = {profile["tag"]: profile for profile in answer["runs"][0]["profiles"]}
    assert set(profiles) == {
        "modelprof/window_0",
        "modelprof/window_1",
        "modelprof/run",
        "modelprof_1/validate/run",
    }
    assert profiles["modelprof/run"]["kind"] == "run"
    assert profiles["modelprof/run"]["label"] == "32 steps, finished"
    assert profiles["modelprof_1/validate/run"]["loop"] == "validate"
    window = profiles["modelprof/window_1"]
    assert (window["kind"], window["window"], window["label"]) == ("window", 1, "steps 16 to 17")
    assert not any(profile["problem"] for profile in profiles.values())
    assert [view["key"] for view in answer["views"]] == [view.key for view in VIEWS]


def test_tab_is_active(server):
    assert "modelprof" in server.active()


def test_numbers_of_run_match_report_json(server, logdir):
    report = json.loads((logdir / "net/version_0/modelprof/report.json").read_text())
    drawn = tables_of(server.ask("view", view="tables", run=RUN["run"], profile=RUN["profile"])["documents"])
    filled = {name for name, table in report["tables"].items() if table["rows"]}
    assert set(drawn) == filled
    for name in filled:
        assert numbers(drawn[name]) == numbers_of(report["tables"][name]), name
    assert sum(len(numbers(drawn[name])) for name in filled) > 60


def test_numbers_of_window_match_its_trace(server, logdir, tmp_path):
    folder = logdir / "net/version_0/modelprof"
    window = load_run(folder).ranks[0].windows[1]
    assert main(["analyze", str(folder / window.trace_file), "--json", str(tmp_path / "trace.json")]) == 0
    report = json.loads((tmp_path / "trace.json").read_text())
    drawn = tables_of(server.ask("view", view="tables", run=RUN["run"], window=RUN["window"])["documents"])
    filled = {name for name, table in report["tables"].items() if table["rows"]}
    assert {"operators", "model_summary", "step_breakdown"} < filled
    assert set(drawn) == filled
    for name in filled:
        assert numbers(drawn[name]) == numbers_of(report["tables"][name]), name


def test_every_view_has_content_or_says_what_to_do(server):
    assert VIEWS
    for view in VIEWS:
        answer = server.ask("view", view=view.key, **RUN)
        assert answer["title"] == view.title
        assert answer["documents"] or answer["columns"] or view.key in ("kernels", "distributed", "workers")
        assert len(answer["empty"]) > 20


def test_steps_view_has_figures_and_histogram_of_run(server, logdir):
    report = json.loads((logdir / "net/version_0/modelprof/report.json").read_text())
    [document] = server.ask("view", view="steps", **RUN)["documents"]
    cost, _, unit = format_duration(report["summary"]["benchmark"]["batch_cost_ns"]["avg"]).partition(" ")
    assert f"<b>{cost}</b> {unit}" in document["above"]
    assert "<h2>Whole run</h2>" in document["above"]
    assert "step_time" in {chart["id"] for chart in document["charts"]}
    others = server.ask("view", view="trace", **RUN)["documents"]
    assert not any("<h2>Whole run</h2>" in one["above"] for one in others)


def test_served_steps_match_saved_run(server, logdir):
    steps = load_run(logdir / "net/version_0/modelprof").ranks[0].steps
    served = unpack_steps(server.columns(run=RUN["run"], tag="modelprof/run", kind="steps"))
    assert served.step.tolist() == steps.step.tolist()
    assert served.duration_ns.tolist() == steps.duration_ns.tolist()
    assert served.phases_ns.sum(axis=1).tolist() == steps.duration_ns.tolist()


def test_served_timeline_matches_trace(server, logdir):
    folder = logdir / "net/version_0/modelprof"
    trace = read_trace(folder / load_run(folder).ranks[0].windows[1].trace_file)
    served = unpack_timeline(server.columns(run=RUN["run"], tag=RUN["window"], kind="timeline", rank=0))
    assert len(served) == len(trace)
    assert np.array_equal(np.sort(served.slice_begin_ns), np.sort(trace.begin_ns))
    names = sorted(trace.names[name] for name in trace.name)
    assert sorted(served.names[name] for name in served.name) == names


def test_trace_file_is_served_unchanged(server, logdir):
    folder = logdir / RUN["run"] / "modelprof"
    saved = folder / load_run(folder).ranks[0].windows[1].trace_file
    [columns] = server.ask("view", view="trace", **RUN)["columns"]
    assert (columns["file"], columns["where"]) == (saved.name, "") == (TRACE["file"], "")
    status, media_type, body = server.raw("plugin/modelprof/trace", **TRACE)
    assert (status, media_type) == (200, "application/octet-stream")
    assert body == saved.read_bytes()


def test_compare_view_matches_compare_command(server, logdir, tmp_path):
    runs = [str(logdir / "net" / f"version_{number}" / "modelprof") for number in (0, 1)]
    main(["compare", *runs, "--json", str(tmp_path / "compare.json")])
    said = json.loads((tmp_path / "compare.json").read_text())
    other = RUN | {"run": "net/version_1"}
    drawn = tables_of(server.ask("compare", **BEFORE, **other)["documents"])
    for name in ("comparison_figures", "comparison_phases"):
        assert numbers(drawn[name]) == numbers_of(said["tables"][name])
    assert "comparison_steps" in drawn, "the windows are compared, too"


def test_windows_of_one_run_are_compared_without_run(server):
    sides = RUN | BEFORE | {"before_window": "modelprof/window_0"}
    drawn = tables_of(server.ask("compare", **sides)["documents"])
    assert "comparison_steps" in drawn
    assert "comparison_figures" not in drawn


def test_profile_is_not_compared_with_itself(server):
    answer = server.ask("compare", **RUN, **BEFORE)
    assert answer["documents"] == []
    assert "Select another" in answer["empty"]


WRONG = {
    "no run": ("view", {"view": "overview"}, "Select one"),
    "unknown run": ("view", RUN | {"run": "../../etc"}, "'modelprof/run' in the run '../../etc'"),
    "unknown tag": ("view", RUN | {"profile": "loss"}, "expected a profile 'loss'"),
    "unknown view": ("view", RUN | {"view": "secrets"}, "expected one of the views overview, steps"),
    "a rank that is no number": ("view", RUN | {"rank": "-1"}, "expected a rank number, got '-1'"),
    "no such columns": ("columns", STEPS | {"kind": "timeline"}, "got none"),
    "an unknown kind": ("columns", STEPS | {"kind": "/etc/passwd"}, "got none"),
    "columns of nothing": ("columns", {}, "expected a profile"),
    "a rank of a million digits": ("view", RUN | {"rank": "9" * 5_000}, "expected a rank number"),
    "a trace of no run": ("trace", TRACE | {"run": "../../etc"}, "in the run '../../etc'"),
    "a trace of no window": ("trace", TRACE | {"tag": "../x"}, "expected a profile '../x'"),
    "a trace by its path": ("trace", TRACE | {"file": "../run.json"}, "expected the trace '../run.json'"),
    "a file that is no trace": ("trace", TRACE | {"file": "run.json"}, "expected the trace 'run.json'"),
    "half a comparison": ("compare", RUN, "Select one"),
}


@pytest.mark.parametrize(("route", "arguments", "sentence"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_explained(server, route, arguments, sentence):
    assert sentence in server.problem(route, **arguments)


@pytest.mark.parametrize(
    "path",
    [
        "static/../plugin.py",
        "static/%2e%2e/plugin.py",
        "static//etc/passwd",
        "static/tsconfig.json",
        "static/",
        "static/vendor/uplot",
        "static/html/report.html.j2",
    ],
)
def test_only_page_files_are_served(server, path):
    status, _, body = server.raw(f"plugin/modelprof/{path}")
    assert status == 404
    assert b"import" not in body


def test_scripts_have_javascript_media_type(server):
    status, media_type, body = server.raw("plugin/modelprof/static/index.js")
    assert (status, media_type) == (200, "text/javascript; charset=utf-8")
    assert b"export async function render" in body


def test_tab_is_inactive_without_profiles(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="plain")
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.finalize("success")
    with tensorboard(tmp_path) as server:
        assert server.ask("profiles")["runs"] == []
        assert "modelprof" not in server.active()


def test_plugin_imports_almost_nothing():
    """The plugin is imported at every TensorBoard's start: no torch, no numpy, no other subpackage."""
    code = (
        "import sys, tensorboard.program, tensorboard.default; before = set(sys.modules)\n"
        "import lightning_modelprof.tensorboard_plugin.plugin\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    new = done.stdout.split()
    assert all(name.startswith(("lightning_modelprof", "tensorboard.")) for name in new)
    assert {name for name in new if not name.startswith("tensorboard.")} == {
        "lightning_modelprof",
        "lightning_modelprof.errors",
        "lightning_modelprof.tensorboard_plugin",
        "lightning_modelprof.tensorboard_plugin.plugin",
    }


def test_imported_run_equals_logged_run(server, logdir, tmp_path, capsys):
    logs = tmp_path / "imported"
    assert main(["tensorboard", str(logdir / "net/version_0/modelprof"), "--logdir", str(logs)]) == 0
    assert "version_0: 3 profiles" in capsys.readouterr().out
    with tensorboard(logs) as other:
        other.wait_for("version_0")
        for view in VIEWS:
            there = other.ask("view", view=view.key, **(RUN | {"run": "version_0"}))
            here = server.ask("view", view=view.key, **RUN)
            for one in there["columns"] if view.key == "trace" else ():  # the file stays where it was saved
                assert TRACE["file"] in one.pop("where")
                assert one.pop("file") == ""
            for one in here["columns"] if view.key == "trace" else ():
                del one["where"], one["file"]
            assert there == here, view.key


def test_import_never_overwrites(logdir, tmp_path, capsys):
    for _ in range(2):
        assert main(["tensorboard", str(logdir / "net/version_0/modelprof"), "--logdir", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version_0", "version_0_1"]
    assert capsys.readouterr().out.count("tensorboard --logdir") == 2


def test_import_takes_all_runs_of_folder(logdir, tmp_path):
    assert main(["tensorboard", str(logdir), "--logdir", str(tmp_path)]) == 0
    runs = sorted(path.relative_to(tmp_path).as_posix() for path in (tmp_path / "net").iterdir())
    # Two fits, each with a validation in its own folder.
    assert runs == ["net/version_0", "net/version_0_1", "net/version_1", "net/version_1_1"]


def test_failed_import_is_explained(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["tensorboard", str(tmp_path / "empty"), "--logdir", str(tmp_path / "logs")]) == 1
    assert "no trace files (*.json or *.json.gz) in" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("hello")
    assert main(["tensorboard", str(tmp_path / "bad.json"), "--logdir", str(tmp_path / "logs")]) == 1
    assert "bad.json" in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


def test_text_of_link_is_never_markup(server):
    sentence = server.problem("view", run="<script>alert(1)</script>", profile="x")
    assert "<script>" in sentence, "JSON says it as it is; the page sets it as text"
    assert re.search("application/json", server.raw("plugin/modelprof/view")[1])


def test_all_files_have_known_types():
    """Only a browser would notice a file of a type that isn't served."""
    static = Path(main.__code__.co_filename).parent / "tensorboard_plugin" / "static"
    kinds = {path.suffix for path in static.rglob("*") if path.is_file()}
    assert kinds <= {".js", ".css", ".json", ".md", ".ts", ""}
