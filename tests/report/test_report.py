"""Notes and reasons in the report match the facts."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_modelprof import MissingExtraError
from lightning_modelprof.analysis.facts import Facts, WindowFacts
from lightning_modelprof.analysis.steps.benchmark import _REASONS
from lightning_modelprof.errors import require
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.tables.run.perf_summary import _ADVICE
from lightning_modelprof.report.tables.trace.model_summary import window_model_summary
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.records import RankRecord, Run, RunInfo, Window, WindowStatus
from lightning_modelprof.run.steps import StepTag, StepTimings
from lightning_modelprof.show.text import render_text
from tests.support.fits import loader, run_fit


def report_of(tags, **record):
    """Report of 1 ms steps with these tags."""
    n = len(tags)
    phases = np.zeros((n, len(PHASES)), np.int64)
    phases[:, 0] = 1_000_000
    steps = StepTimings(
        step=np.arange(n),
        duration_ns=np.full(n, 1_000_000),
        phases_ns=phases,
        device_phases_ns=np.full((n, len(PHASES)), -1),
        samples=np.ones(n, np.int64),
        tags=np.array(tags, np.int64),
    )
    run = Run(info=RunInfo(created="today"), ranks=(RankRecord(rank=0, steps=steps, **record),))
    return build_report(Facts(run))


def perf_summary_of(tags):
    (table,) = (table for table in report_of(tags).tables if table.id == "perf_summary")
    return table


FIRST, SKIP, VALIDATION = StepTag.FIRST_OF_EPOCH, StepTag.SKIP_FIRST, StepTag.VALIDATION


@pytest.mark.parametrize(
    ("tags", "advice"),
    [
        ([SKIP | FIRST, *[SKIP] * 9], "train for longer or set a smaller skip_first=..."),
        ([*[SKIP] * 10, *[FIRST] * 1], "train for longer or set a smaller skip_first=..."),
        ([*[SKIP | FIRST] * 10, *[FIRST] * 90], "use more batches per epoch"),
        (
            [*[SKIP | FIRST] * 10, *[FIRST] * 6],
            "train for longer or set a smaller skip_first=...; use more batches per epoch",
        ),
        ([FIRST, *[VALIDATION] * 30], "validate less often (the Trainer's val_check_interval)"),
        (
            [SKIP, *[StepTag.PROFILED] * 30],
            "train for longer or profile fewer steps (active=..., repeat=...)",
        ),
    ],
)
def test_no_clean_step_gives_advice(tags, advice):
    table = perf_summary_of(tags)
    assert table.absent_reason == f"none of the {len(tags)} steps is clean; {advice}"


def test_every_reason_has_advice():
    assert {reason for _, reason in _REASONS} == set(_ADVICE)


def test_absent_table_shows_excluded_steps():
    text = render_text(report_of([SKIP | FIRST, *[SKIP] * 9, FIRST]))
    lines = text.split("\n")
    at = next(index for index, line in enumerate(lines) if line.startswith("Perf Summary: none of"))
    assert lines[at + 1] == "Note:"
    assert lines[at + 2].startswith(
        "Excluded steps: 10 initial (skip_first=...), 1 at the start of an epoch. A"
    )


def test_absent_table_has_no_notes():
    notes = {table.id: table.notes for table in report_of([]).tables if not table.rows}
    assert "perf_summary" in notes
    assert not any(notes.values())


def test_skip_first_counts_requested_steps():
    notes = perf_summary_of([SKIP | FIRST, *[SKIP] * 9, *[0] * 20, FIRST]).notes
    assert "Based on 20 clean steps out of 31." in notes
    expected = (
        "10 initial (skip_first=...), 1 at the start of an epoch. A step is counted under the first reason"
    )
    assert f"Excluded steps: {expected} that applies." in notes
    assert "Excluded steps: 1 at the start of an epoch." in perf_summary_of([FIRST, *[0] * 20]).notes


@pytest.mark.parametrize("num_clean", [1, 2, 9, 10])
def test_few_clean_steps_are_noted_as_unreliable(num_clean):
    notes = perf_summary_of([*[SKIP] * 10, *[0] * num_clean]).notes
    steps = "1 clean step" if num_clean == 1 else f"{num_clean} clean steps"
    assert notes[0] == f"Based on {steps} out of {10 + num_clean}."
    few = [note for note in notes if "are unreliable" in note]
    assert len(few) == (num_clean < 10)
    assert all(
        "For more clean steps, train for longer or set a smaller skip_first=...." in note for note in few
    )


def test_few_steps_without_exclusions_only_need_longer_training():
    (note,) = (note for note in perf_summary_of([0] * 3).notes if "are unreliable" in note)
    assert note.endswith("For more clean steps, train for longer.")


@pytest.mark.parametrize(
    ("status", "note", "expected"),
    [
        (WindowStatus.NOT_REACHED, "training ended first", "not recorded: training ended before step 12"),
        (
            WindowStatus.NOT_REACHED,
            "training was interrupted first",
            "not recorded: training was interrupted before step 12",
        ),
        (
            WindowStatus.EMPTY,
            "training failed first",
            "not recorded: training failed before the end of step 12",
        ),
        (
            WindowStatus.REFUSED,
            "another torch profiler was recording",
            "another torch profiler was recording",
        ),
        (WindowStatus.COMPLETE, "", "the trace has none of the recorded steps"),
    ],
)
def test_missing_model_summary_is_explained(status, note, expected):
    window = Window(index=0, first_step=12, last_step=14, status=status, note=note)
    table = window_model_summary(WindowFacts(window=window, facts=None))
    assert table.absent_reason == expected
    assert table.title == "Model Summary (steps 12 to 14)"
    noted = WindowFacts(window=window, facts=None, trace_note="a reason of its own")
    assert window_model_summary(noted).absent_reason == "a reason of its own"


def test_unreached_window_is_explained(tmp_path):
    run_fit(tmp_path, data=loader(16), steps=(12, 15))
    text = (tmp_path / "modelprof" / "report.txt").read_text()
    assert "Model Summary (steps 12 to 14): not recorded: training ended before step 12\n" in text


@pytest.mark.parametrize(
    ("count", "words"), [(1, "1 batch started but didn't finish, and isn't"), (3, "3 batches started")]
)
def test_unfinished_batches_are_noted(count, words):
    saved_while_running, note = report_of([0], unfinished_steps=count).notes
    assert saved_while_running.startswith("This was saved while the loop ran")
    assert note.startswith(words)
    assert "This is normal once per epoch where training_step takes a dataloader_iter" in note


# Extras


def test_require_names_missing_packages():
    require("json", "csv", extra="examples", where="here")
    with pytest.raises(MissingExtraError) as caught:
        require("json", "no_such_one", "nor_this", extra="examples", where="here")
    assert str(caught.value) == (
        "here needs no_such_one and nor_this, which are not installed."
        ' Install from the clone: pip install -e ".[examples]"'
    )
