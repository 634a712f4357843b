"""Flame graphs on the page: widths and texts by hand, and omitted boxes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lightning_modelprof.report.model import Unit
from lightning_modelprof.show.document import render_json
from lightning_modelprof.show.html.flame import MAX_BOXES, flame_view
from lightning_modelprof.show.tensorboard.scalars import markdown_summary
from lightning_modelprof.show.text import render_text
from tests.show.test_show_html import drawn_of, page_of, report_of
from tests.support.sample_flames import flame_of, stacks_flame, wide_flame
from tests.support.sample_reports import flame_report


def test_boxes_match_hand_calculation():
    view = flame_view(stacks_flame())
    assert (view.total, view.rows) == ("100 ms", 4)
    assert [(b.text, float(b.left), float(b.width), b.row, b.kind) for b in view.boxes] == [
        ("Dataloader", 0, 0.3, 0, "phase"),
        ("Digits.__getitem__", 0, 0.3, 1, "users"),
        ("Image.convert", 0, 0.28, 2, "installed"),
        ("Forward", 0.3, 0.5, 0, "phase"),
        ("Net.training_step", 0.3, 0.49, 1, "users"),
        ("Net.forward", 0.3, 0.09, 2, "users"),
        ("Module._call_impl", 0.3, 0.08, 3, "installed"),
        ("weighted_nll", 0.39, 0.4, 2, "users"),
        ("log_softmax", 0.39, 0.15, 3, "installed"),
        ("Optimizer", 0.8, 0.2, 0, "phase"),
        ("Adam.step", 0.8, 0.2, 1, "installed"),
    ]
    abouts = {box.text: box.about for box in view.boxes}
    assert abouts["weighted_nll"] == ("weighted_nll, train.py:12 (your code)\n40.0 ms, 40%; self 25.0 ms")
    assert abouts["Adam.step"] == "Adam.step, train.py:12 (library)\n20.0 ms, 20%; all self time"
    assert abouts["Net.training_step"].endswith("\n49.0 ms, 49%; self 0 ns")


def test_legend_names_kinds_if_several():
    assert flame_view(stacks_flame()).kinds == (
        ("users", "your code"),
        ("installed", "library"),
        ("phase", "phase"),
    )
    modules = flame_view(flame_of((("Net", 1.0, None, (("head", 1.0, None, ()),)),)))
    assert modules.kinds == ()
    assert {box.kind for box in modules.boxes} == {"phase"}


def test_merged_box_is_not_a_phase():
    view = flame_view(flame_of((("Forward", 0.0, None, (("f", 9.0, True, ()), ("other", 1.0, None, ()))),)))
    assert [box.kind for box in view.boxes] == ["phase", "users", "joined"]
    assert [kind for kind, _ in view.kinds] == ["users", "phase", "joined"]


@pytest.mark.parametrize("own", [0.0, float("nan"), float("inf"), -1.0])
def test_flame_without_width_has_no_graph(own):
    assert flame_view(flame_of((("a", own, None, ()),))) is None
    assert flame_view(flame_of(())) is None
    report = report_of(flames=(flame_of((("a", own, None, ()),)),))
    assert drawn_of(report)["flames"] == []
    assert page_of(report).all("section") == []


def test_widest_boxes_and_their_parents_stay():
    flame = wide_flame(MAX_BOXES + 500)
    view = flame_view(flame)
    ranked = sorted((frame.total for frame in flame.frames), reverse=True)
    assert len(view.boxes) == MAX_BOXES
    assert sorted((float(box.width) * 1e9 for box in view.boxes), reverse=True) == pytest.approx(
        ranked[:MAX_BOXES], rel=1e-6
    )
    assert view.notes[-1].startswith("500 boxes below 0.0")
    spans = [(box.row, float(box.left), float(box.left) + float(box.width)) for box in view.boxes]
    rows = {}
    for row, left, right in spans:
        rows.setdefault(row, []).append((left - 1e-8, right + 1e-8))
    for row, left, right in spans:
        assert row == 0 or any(a <= left and right <= b for a, b in rows[row - 1])


def test_deep_chain_of_equal_widths_is_kept():
    node = ("last", 1.0, None, ())
    for place in range(600):
        node = (f"f{place}", 0.0, None, (node,))
    flame = flame_of((node,))
    chains = replace(flame, frames=tuple(flame.frames) * 1)
    view = flame_view(chains)
    assert view.rows == 601
    assert {box.width for box in view.boxes} == {1.0}


def test_page_holds_every_box():
    flames = drawn_of(flame_report())["flames"]
    texts = [box[4] for box in flames[0]["boxes"]]
    assert texts[:11] == [box.text for box in flame_view(stacks_flame()).boxes]
    assert all(box[6] for flame in flames for box in flame["boxes"])
    page = page_of(flame_report())
    assert [one["text"] for one in page.within(page.one("nav"), "a")] == ["Flame graphs"]


def test_box_texts_use_flame_unit():
    flame = replace(flame_of((("Net", 2.0**30, None, ()),)), unit=Unit.BYTES)
    assert flame_view(flame).boxes[0].about == "Net\n1.00 GiB, 100%; all self time"


def test_text_outputs_omit_flame_graphs():
    report = flame_report()
    assert "weighted_nll" not in render_text(report)
    assert "weighted_nll" not in markdown_summary(report)
    assert len(json.loads(render_json(report))["flames"]) == len(report.flames)
