"""A profile in a log directory from elsewhere is shown, or refused with one error of ours."""

from __future__ import annotations

import json
import zlib
from types import SimpleNamespace

import numpy as np
import pytest

from lightning_modelprof.analysis.trace_facts import analyze_trace
from lightning_modelprof.errors import ArchiveError
from lightning_modelprof.report.build_profile import run_profile, window_profile
from lightning_modelprof.run.chrome import read_trace
from lightning_modelprof.show.columns import pack_columns, unpack_columns
from lightning_modelprof.show.profile_blob import pack_head, pack_profile
from lightning_modelprof.tensorboard_plugin import answers as answers_module
from lightning_modelprof.tensorboard_plugin.answers import Answers
from lightning_modelprof.tensorboard_plugin.views import VIEWS
from tests.fits import run_fit
from tests.hostile_runs import as_text, mutated

NUM_MUTATIONS = 100


class Provider:
    """What the plugin needs of TensorBoard's data provider: blobs by run and tag."""

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
    """The profiles of a real fit with everything on, of the run and of a window: tag → its blobs."""
    folder = tmp_path_factory.mktemp("good")
    everything = dict.fromkeys(("flops", "sampling", "profile_memory"), True)
    callback = run_fit(folder, active=2, wait=2, **everything)
    traces = [read_trace(path) for path in sorted(folder.glob("modelprof/traces/*"))]
    window = window_profile([(trace, analyze_trace(trace)) for trace in traces], window=0)
    return {
        tag: (pack_head(profile), pack_profile(profile))
        for tag, profile in {"run": run_profile(callback.run, callback.report), "window": window}.items()
    }


@pytest.fixture(scope="module")
def answers(good):
    """Shows all that there is to see of a run ``bad``, beside the good one."""
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


def test_the_good_ones_are_shown(good, answers):
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


def test_what_cannot_be_drawn_is_told_in_a_sentence(good, answers, monkeypatch):
    """Numbers may be anything, so whatever they lead to is one error of ours in each view, and in Compare."""
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


def packed(content):
    """As columns; ``None`` if there is no way to write it as such."""
    try:
        columns = {name: np.array(column, np.int64) for name, column in content["columns"].items()}
        return pack_columns(content["meta"], columns)
    except (KeyError, AttributeError, TypeError, ValueError, OverflowError):
        return None


def test_other_bytes_are_refused(good, answers):
    head, [document, _] = good["run"]
    for bad in (b"", b"\xff", zlib.compress(b""), zlib.compress(b"MPC1\xff\xff\xff\xff")):
        assert answers({**good, "run": (head, [document, bad])}) == 1  # Compare, which needs them
