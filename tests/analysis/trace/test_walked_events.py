"""Very few places of the package walk a trace's events one by one, so that ``analyze`` stays fast.

We count the lines that Python runs, not time, so the machine's speed and load don't matter. Comparing a trace
with the same one twice as long cancels lines that don't depend on its length.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

import lightning_modelprof
from lightning_modelprof import analyze
from lightning_modelprof.show.document import render_json
from lightning_modelprof.show.text import render_text
from tests.support.traces import real_file

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
from analyze_ratio import repeated

OURS = Path(lightning_modelprof.__file__).parent
LEAST_WALK = 0.5
"""Lines of one function per event: even the shortest loop over all events runs at least one."""
WALKS = {"trace/": 22, "analysis/timeline/nesting.py": 8.5, "analysis/trace/critical_path.py": 4}
"""Files that may walk the events, and their lines per event: the readers, the call tree, and the critical
path, which reads at most 20,000 device events."""


def lines_of(work):
    """Number of lines that each function of the package ran; files in WALKS are summed."""
    lines = Counter()

    def count(frame, event, _):
        if event == "line":
            lines[frame.f_code.co_filename, frame.f_code.co_name] += 1
        return count

    def begin(frame, event, _):
        return count if frame.f_code.co_filename.startswith(str(OURS)) else None

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        work()
    finally:
        sys.settrace(before)
    found = Counter()
    for (file, name), number in lines.items():
        place = Path(file).relative_to(OURS).as_posix()
        found[next((one for one in WALKS if place.startswith(one)), f"{place}: {name}")] += number
    return found


def lines_per_event(name, folder, view=lambda begins: None):
    """Additional lines per additional event of a real trace, by function; the view counts as one more."""
    document = json.loads(gzip.decompress(real_file(name).read_bytes()))
    lines, num_events = [], []
    for times in (1, 2):
        file = folder / f"{times}.json"
        longer = repeated(document, times)
        file.write_text(json.dumps(longer))
        begins = [event["ts"] for event in longer["traceEvents"] if event["ph"] == "X"]

        def work(file=file, begins=begins):
            report = analyze(file)
            render_json(report)
            render_text(report)
            view(begins)

        work()  # warms up what is cached per name
        lines.append(lines_of(work))
        num_events.append(len(begins))
    lines[1].subtract(lines[0])
    return {place: number / (num_events[1] - num_events[0]) for place, number in lines[1].items()}


@pytest.mark.parametrize("name", ["sampled_2rank_rank0", "h100_gpt2", "h100_item"])
def test_few_places_walk_events(name, tmp_path):
    lines = lines_per_event(name, tmp_path)
    assert lines["trace/"] > LEAST_WALK
    walks = {place: number for place, number in lines.items() if number >= LEAST_WALK}
    assert [place for place in walks if place not in WALKS] == []
    assert [place for place, number in walks.items() if number > WALKS[place]] == []


@pytest.mark.parametrize("loop", ["[begin for begin in begins]", "sum(begin for begin in begins)"])
def test_loop_over_all_events_is_found(loop, tmp_path):
    code = compile(loop, str(OURS / "view.py"), "eval")
    lines = lines_per_event("h100_pageable", tmp_path, lambda begins: eval(code, {"begins": begins}))
    assert [place for place, number in lines.items() if number >= LEAST_WALK and "view.py" in place] != []
