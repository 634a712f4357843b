"""The verdict and findings in every text output, including hostile names."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lightning_modelprof.place import Place
from lightning_modelprof.report.model import (
    Evidence,
    Finding,
    Report,
    Severity,
    Status,
    Unit,
    Verdict,
)
from lightning_modelprof.show.document import render_json
from lightning_modelprof.show.findings import found_texts, saving_text
from lightning_modelprof.show.terminal.terminal import print_report
from lightning_modelprof.show.text import render_text

HOSTILE = "[bold]<img src=x onerror=alert(1)>\x1b[31m|`a`\nb"

SLOW = Finding(
    kind="slow_callback",
    status=Status.FOUND,
    severity=Severity.CRITICAL,
    title="Slow callback",
    summary="Slow takes 10 ms per step.",
    action="Do less in Slow.",
    saving_ns_per_step=10_000_000.0,
    locations=tuple(Place(file=f"/home/me/{n}.py", line=n, function="Slow.hook") for n in range(1, 6)),
    evidence=(Evidence(label="time per step", value=10_000_000, unit=Unit.DURATION_NS),),
)
HINT = Finding(
    kind="conv_bias_before_batchnorm",
    status=Status.FOUND,
    severity=None,
    title=HOSTILE,
    summary=HOSTILE,
    action=HOSTILE,
    locations=(Place(module=HOSTILE),),
)
CLEAN = Finding(kind="slow_logger", status=Status.CLEAN, title="Logging", summary="All is well.")
SILENT = Finding(kind="amp_off", status=Status.NOT_EVALUATED, title="AMP", summary="no CUDA device")


def report(*findings, ratio=0.987):
    return Report(
        title="a run",
        facts=(("Device", "cpu"),),
        tables=(),
        notes=(),
        verdict=Verdict(kind="overhead_bound", summary="45% of a step is overhead.", accounted_ratio=ratio),
        findings=findings,
    )


def test_verdict_is_first_line():
    lines = render_text(report(SLOW, CLEAN, SILENT)).split("\n")
    assert lines[:3] == [
        "OVERHEAD-BOUND: 45% of a step is overhead.",
        "",
        "a run",
    ]


def test_text_shows_findings():
    text = render_text(report(SLOW, CLEAN, SILENT))
    assert (
        "Findings:\n"
        "- [CRITICAL] Slow callback (slow_callback): −10 ms/step\n"
        "  Slow takes 10 ms per step.\n"
        "  Fix: Do less in Slow.\n"
        "  Evidence: time per step 10.0 ms\n"
        "  Where: /home/me/1.py:1 in Slow.hook\n"
        "  Where: /home/me/2.py:2 in Slow.hook\n"
        "  Where: /home/me/3.py:3 in Slow.hook\n"
        "  Where: 2 more places\n"
        "Passed: Logging.\n"
        "1 finding, 1 passed, 1 not checked; report.json lists all checks.\n"
    ) in text
    assert "All is well" not in text


LOSS = Place(file="losses.py", line=5, function="weighted_nll", is_exact=True)
STEP = Place(file="train.py", line=40, function="Net.training_step", is_exact=True, inner=LOSS)


@pytest.mark.parametrize(
    ("location", "words"),
    [
        (
            STEP,
            "train.py:40 in Net.training_step → losses.py:5 in weighted_nll (where most of the time goes)",
        ),
        (LOSS, "losses.py:5 in weighted_nll"),
        (replace(LOSS, is_exact=False), "losses.py:5 in weighted_nll"),
        (replace(LOSS, module="net.loss"), "losses.py:5 in weighted_nll, module net.loss"),
        (replace(LOSS, function=None), "losses.py:5"),
        (replace(LOSS, line=None, is_exact=False), "losses.py in weighted_nll"),
        (replace(LOSS, file=None), "in weighted_nll"),  # a line without a file means nothing
        (Place(module="net.loss"), "module net.loss"),
        (replace(STEP, inner=Place()), "train.py:40 in Net.training_step"),
    ],
)
def test_places_are_written_in_words(location, words):
    (text,) = found_texts((replace(SLOW, locations=(location,)),))
    assert text.lines[-1] == f"Where: {words}"


def test_unknown_place_is_omitted():
    (text,) = found_texts((replace(SLOW, locations=(Place(),)),))
    assert text.lines == (
        "Slow takes 10 ms per step.",
        "Fix: Do less in Slow.",
        "Evidence: time per step 10.0 ms",
    )


def test_json_has_inner_line():
    document = json.loads(render_json(report(replace(SLOW, locations=(STEP,)))))
    (place,) = document["findings"][0]["locations"]
    assert (place["is_exact"], place["inner"]["file"], place["inner"]["line"]) == (True, "losses.py", 5)
    assert place["inner"]["inner"] is None


def test_only_low_accounted_ratio_is_noted():
    assert "named phases" not in render_text(report(SLOW, ratio=None))
    assert "Only 50% of the wall time is in named phases." in render_text(report(SLOW, ratio=0.5))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_terminal_shows_findings_within_width(monkeypatch, width):
    for name, value in (("COLUMNS", str(width)), ("FORCE_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
    print_report(report(SLOW, HINT), drawn := io.StringIO(), full=True)
    text = drawn.getvalue()
    assert text.split("\n")[1].startswith("OVERHEAD-BOUND:")
    assert "[CRITICAL]" in text
    assert "[not judged]" in text
    assert "\x1b" not in text
    assert max(map(len, text.split("\n"))) <= width


def test_json_has_all_findings():
    document = json.loads(render_json(report(SLOW, HINT, CLEAN, SILENT)))
    assert [one["status"] for one in document["findings"]] == ["found", "found", "clean", "not_evaluated"]
    first = document["findings"][0]
    assert first["evidence"] == [
        {"label": "time per step", "text": "10.0 ms", "value": 10_000_000, "unit": "ns"}
    ]
    assert first["saving"]["text"] == saving_text(SLOW)
    assert first["locations"][0] == {
        "at": "/home/me/1.py:1",
        "where": "in Slow.hook",
        "file": "/home/me/1.py",
        "line": 1,
        "function": "Slow.hook",
        "module": "",
        "package": "",
        "is_library": False,
        "is_exact": False,
        "inner": None,
        "call": None,
    }
    assert (first["severity"], document["findings"][1]["severity"]) == ("critical", None)


def test_library_place_omits_install_folder():
    place = Place(file="/usr/lib/python3/site-packages/torch/utils/data/dataset.py", line=206)
    assert str(place) == "torch/utils/data/dataset.py:206"


def test_notebook_cell_is_named_by_number(monkeypatch):
    """As in its traceback; once the notebook has closed, the number is unknown."""
    place = Place(file="/tmp/ipykernel_12/3456.py", line=7, function="noise", is_exact=True)
    assert str(place) == "a notebook cell:7 in noise"
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name={place.file: ("Cell", "In[3]")}.get))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert str(place) == "In[3]:7 in noise"
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert str(place) == "a notebook cell:7 in noise"
