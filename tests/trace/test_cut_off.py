"""Files cut off in the middle of a step: only whole steps count."""

import json

import pytest

from lightning_modelprof import analyze
from tests.support.traces import event

STEP_US, KERNEL_US, KERNELS, STEPS = 10_000, 3_000, 3, 4


def step_events(number):
    """One step in launch order; the GPU computes for 90% of it."""
    begin = STEP_US * number
    yield event("user_annotation", f"ProfilerStep#{number}", begin, begin + STEP_US, pid=50)
    for place in range(KERNELS):
        at, ids = begin + 50 + 20 * place, {"correlation": KERNELS * number + place + 1}
        yield event("cpu_op", "aten::mm", at, at + 15, pid=50)
        yield event("cuda_runtime", "cudaLaunchKernel", at + 5, at + 10, pid=50, **ids)
        ran = begin + 500 + KERNEL_US * place
        yield event("kernel", "sgemm", ran, ran + KERNEL_US, pid=0, tid=7, device=0, stream=7, **ids)


def whole_file(order):
    events = [one for number in range(STEPS) for one in step_events(number)]
    if order == "by time":
        events.sort(key=lambda one: one["ts"])
    elif order == "host first":  # as in torch.profiler's files
        events.sort(key=lambda one: one["cat"] not in ("user_annotation", "cpu_op"))
    elif order == "device last":
        events.sort(key=lambda one: one["cat"] == "kernel")
    head = '{"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": [\n'
    return head, [json.dumps(one) for one in events]


ORDERS = ["by launch", "by time", "host first", "device last"]


@pytest.mark.parametrize("order", ORDERS)
def test_cut_off_step_is_in_no_figure(tmp_path, order):
    head, events = whole_file(order)
    kinds = []
    for num_read in range(2, len(events)):
        file = tmp_path / "cut.trace.json"
        file.write_text(head + ",\n".join(events[:num_read]) + ",\n" + events[num_read][:20])
        report = analyze(file)
        verdict, warnings = report.verdict, [text for label, text in report.facts if label == "Warning"]
        kinds.append(verdict.kind)
        assert any("incomplete and left out" in text for text in warnings), num_read
        if verdict.kind == "cannot_tell":
            assert verdict.summary == "The file is cut off and has no complete step."
        else:
            assert (verdict.kind, "90%" in verdict.summary) == ("device_bound", True), num_read
            assert not any("have no kernel" in text for text in warnings), num_read
    assert kinds == sorted(kinds)  # at first no step is whole, then some are
    assert {"cannot_tell", "device_bound"} == set(kinds)


@pytest.mark.parametrize("order", ORDERS)
def test_most_whole_steps_are_kept(tmp_path, order):
    """The last of four steps is cut off, so at most one more is uncertain."""
    head, events = whole_file(order)
    file = tmp_path / "cut.trace.json"
    file.write_text(head + ",\n".join(events[:-1]) + ",\n" + events[-1][:20])
    table = next(one for one in analyze(file).tables if one.id == "step_breakdown")
    assert len(table.rows) >= STEPS - 2


def test_whole_file_keeps_its_last_step(tmp_path):
    head, events = whole_file("by time")
    file = tmp_path / "whole.trace.json"
    file.write_text(head + ",\n".join(events) + "]}")
    report = analyze(file)
    assert not any("left out" in text for label, text in report.facts if label == "Warning")
    assert report.summary.traces[0].steps == tuple(range(STEPS))
