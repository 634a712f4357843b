"""A profile in a foreign log directory is shown, or refused with an ``ArchiveError``."""

from __future__ import annotations

import json
import zlib
from types import SimpleNamespace

import numpy as np
import pytest

from lightning_modelprof.analysis.compare import _times_as_fast
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.errors import ArchiveError
from lightning_modelprof.report.build_dashboard_entry import run_profile, window_profile
from lightning_modelprof.show.html.chart import chart_view
from lightning_modelprof.show.tensorboard.packing import pack_columns, unpack_columns
from lightning_modelprof.show.tensorboard.profile_blob import pack_head, pack_profile, unpack_profile
from lightning_modelprof.tensorboard_plugin import answers as answers_module
from lightning_modelprof.tensorboard_plugin.answers import Answers
from lightning_modelprof.tensorboard_plugin.views import VIEWS
from lightning_modelprof.trace.reader import read_trace
from tests.support.fits import run_fit
from tests.support.hostile_runs import as_text, mutated

pytestmark = pytest.mark.slow

NUM_MUTATIONS = 100


class Provider:
    """The part of TensorBoard's data provider that the plugin uses: blobs by run and tag."""

    def __init__(self):
        self.blobs, self.heads = {}, {}

    def put(self, run, tag, head, blobs):
        self.heads[run, tag], self.blobs[run, tag] = head, blobs

    def list_blob_sequences(self, context, **_):
        found = {}
        for (run, tag), head in self.heads.items():
            found.setdefault(run, {})[tag] = SimpleNamespace(plugin_content=head, max_wall_time=1.0)
        return found

    def read_blob_sequences(self, context, *, run_tag_filter, **_):
        [run], [tag] = run_tag_filter.runs, run_tag_filter.tags
        values = [SimpleNamespace(blob_key=(run, tag, number)) for number in range(len(self.blobs[run, tag]))]
        return {run: {tag: [SimpleNamespace(step=0, wall_time=id(self.blobs[run, tag]), values=values)]}}

    def read_blob(self, context, *, blob_key):
        run, tag, number = blob_key
        return self.blobs[run, tag][number]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Profiles of the run and a window of a real fit with everything on: tag → head and blobs."""
    folder = tmp_path_factory.mktemp("good")
    everything = dict.fromkeys(("flops", "sampling", "profile_memory"), True)
    callback = run_fit(folder, active=2, wait=2, **everything)
    traces = [read_trace(path) for path in sorted(folder.glob("modelprof/traces/*"))]
    window = window_profile([(trace, TraceFacts(trace)) for trace in traces], window=0)
    return {
        tag: (pack_head(profile), pack_profile(profile))
        for tag, profile in {"run": run_profile(callback.run, callback.report), "window": window}.items()
    }


@pytest.fixture(scope="module")
def answers(good):
    """Opens every view of a run ``bad`` next to the good one, and returns the number of refusals."""
    provider = Provider()
    shown = Answers(provider)
    for tag, (head, blobs) in good.items():
        provider.put("good", tag, head, blobs)

    def ask(bad):
        for tag, (head, blobs) in bad.items():
            provider.put("bad", tag, head, blobs)
        chosen = {"run": "bad", "profile": "run", "window": "window"}
        before = {"before_run": "good", "before_profile": "run", "before_window": "window"}
        shown.profiles(None, "", {})
        routes = [lambda view=view.key: shown.view(None, "", {**chosen, "view": view}) for view in VIEWS]
        routes.append(lambda: shown.compare(None, "", chosen | before))
        refusals = [said for route in routes if (said := refusal(route))]
        assert all(len(said) < 2_200 for said in refusals)
        return len(refusals)

    return ask


def refusal(route):
    """Why a route is refused; ``""`` if its answer can be sent."""
    try:
        json.dumps(route())
    except ArchiveError as error:
        return str(error)
    return ""


def test_good_profiles_are_shown(good, answers):
    assert answers(good) == 0


@pytest.mark.parametrize("tag", ["run", "window"])
def test_mutated_documents_are_shown_or_refused(good, answers, tag):
    head, [document, *columns] = good[tag]
    content = json.loads(zlib.decompress(document))
    outcomes = {"shown": 0, "refused": 0}
    for seed in range(NUM_MUTATIONS):
        bad = zlib.compress(as_text(mutated(content, seed)))
        outcomes["refused" if answers({**good, tag: (head, [bad, *columns])}) else "shown"] += 1
    assert min(outcomes.values()) > NUM_MUTATIONS // 10, outcomes


def test_error_while_drawing_is_explained(good, answers, monkeypatch):
    """Numbers can be anything, so any exception becomes an ``ArchiveError`` in each view and in Compare."""
    monkeypatch.setattr(answers_module, "render", lambda *_: 1 / 0)
    monkeypatch.setattr(answers_module, "compare_sides", lambda *_: 1 / 0)
    assert answers(good) == len(VIEWS) + 1


def test_mutated_steps_are_shown_or_refused(good, answers):
    head, [document, steps] = good["run"]
    meta, columns = unpack_columns(steps)
    content = {"meta": meta, "columns": {name: column.tolist() for name, column in columns.items()}}
    outcomes = {"shown": 0, "refused": 0}
    for seed in range(NUM_MUTATIONS):
        bad = packed(mutated(content, seed))
        if bad is not None:
            outcomes["refused" if answers({**good, "run": (head, [document, bad])}) else "shown"] += 1
    assert min(outcomes.values()) > NUM_MUTATIONS // 10, outcomes


@pytest.mark.parametrize(
    ("column", "number", "reason"),
    [
        ("duration", -1, "duration_ns is below 0"),
        ("phase_0", -2, "phases_ns is below -1"),
        ("phase_0", 2**50, "a phase is longer than its step"),
        ("exclusion", 99, "unknown exclusion reason"),
        ("step", 0, "the steps are out of order"),
        ("samples", -2, "samples is below -1"),
    ],
)
def test_invalid_steps_do_not_reach_browser(good, column, number, reason):
    head, [document, steps] = good["run"]
    meta, columns = unpack_columns(steps)
    columns[column][-1] = number
    provider = Provider()
    provider.put("bad", "run", head, [document, pack_columns(meta, columns)])
    arguments = {"run": "bad", "tag": "run", "kind": "steps"}
    with pytest.raises(ArchiveError, match=reason):
        Answers(provider).columns(None, "", arguments)
    provider.put("bad", "run", head, [document, steps])
    assert Answers(provider).columns(None, "", arguments) == steps


@pytest.mark.parametrize(
    ("column", "number", "reason"),
    [
        ("duration", -1, "slice_duration_ns is below 0"),
        ("begin", -1, "slice_begin_ns is below 0"),
        ("name", 2**40, "name is below 0 or not below"),
        ("name", -1, "name is below 0 or not below"),
        ("category", 2**40, "category is below 0 or not below"),
        ("detail", -2, "detail is below -1"),
        ("launch", 2**40, "launch is below -1 or not below"),
        ("counter_0_time", 0, "the points of a counter are out of order"),
        ("steps", [[1, 20, 10]], "ends before it starts"),
        ("steps", [[1, "soon", 10]], "no timeline"),
        ("end_ns", -(2**40), "ends before it starts"),
        ("begin_ns", "soon", "no timeline"),
        ("lanes", [], "lane is below 0 or not below"),
        ("rows", "deep", "depth is below 0 or not below"),
        ("rows", "other", "their lengths"),
    ],
)
def test_invalid_timeline_does_not_reach_browser(good, column, number, reason):
    head, [document, timeline, *_] = good["window"]
    meta, columns = unpack_columns(timeline)
    if column == "rows":
        meta["rows"][-1][1 if number == "deep" else 2] += 2**20
    elif column in meta:
        meta[column] = number
    else:
        columns[column][-1] = number
    provider = Provider()
    provider.put("bad", "window", head, [document, pack_columns(meta, columns)])
    arguments = {"run": "bad", "tag": "window", "kind": "timeline", "rank": "0"}
    with pytest.raises(ArchiveError, match=reason):
        Answers(provider).columns(None, "", arguments)
    provider.put("bad", "window", head, [document, timeline])
    assert Answers(provider).columns(None, "", arguments) == timeline


@pytest.mark.parametrize("tag", ["run", "window"])
def test_truncated_columns_do_not_reach_browser(good, tag):
    head, [document, whole, *_] = good[tag]
    raw = zlib.decompress(whole)
    arguments = {"run": "bad", "tag": tag, "kind": "steps" if tag == "run" else "timeline"}
    if tag == "window":
        arguments["rank"] = "0"
    provider = Provider()
    provider.put("bad", tag, head, [document, whole])
    assert Answers(provider).columns(None, "", arguments) == whole
    for bad in (b"", b"\xff", whole[:-9], *(zlib.compress(raw[:end]) for end in (0, 4, 6, 8, 50, -1))):
        provider.put("bad", tag, head, [document, bad])
        with pytest.raises(ArchiveError, match="can't read its"):
            Answers(provider).columns(None, "", arguments)


@pytest.mark.parametrize("points", [(1.0, 1.0), (2.0, 1.0)])
def test_chart_with_unordered_points_is_refused(good, points):
    content = json.loads(zlib.decompress(good["run"][1][0]))
    chart = next(one for one in content["report"]["charts"] if len(one["x"]) > 1)
    chart["x"][:2] = points
    with pytest.raises(ArchiveError, match="are out of order"):
        unpack_profile(zlib.compress(as_text(content)))


def test_chart_below_zero_is_drawn(good):
    content = json.loads(zlib.decompress(good["run"][1][0]))
    chart = next(one for one in content["report"]["charts"] if len(one["x"]) > 1)
    for series in chart["series"]:
        series["values"] = [-1.0] * len(chart["x"])
    report = unpack_profile(zlib.compress(as_text(content))).report
    view = chart_view(next(one for one in report.charts if one.id == chart["id"]))
    assert view.y_ticks[0].label == "0"


@pytest.mark.parametrize(("change", "speed"), [(-1.0, None), (-0.5, 2.0), (1.0, 0.5), (None, None)])
def test_vanished_time_has_no_speedup(change, speed):
    assert _times_as_fast(change) == speed


def packed(content):
    """The content as columns; ``None`` if it can't be packed."""
    try:
        columns = {name: np.array(column, np.int64) for name, column in content["columns"].items()}
        return pack_columns(content["meta"], columns)
    except (KeyError, AttributeError, TypeError, ValueError, OverflowError):
        return None


def test_steps_of_other_bytes_are_refused(good, answers):
    head, [document, _] = good["run"]
    for bad in (b"", b"\xff", zlib.compress(b""), zlib.compress(b"MPC1\xff\xff\xff\xff")):
        assert answers({**good, "run": (head, [document, bad])}) == 1  # Compare needs the steps
