"""Charts of bare traces, with hand-derived figures, and their place in the report."""

from __future__ import annotations

import pytest

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.build_trace import build_trace_report
from lightning_modelprof.report.charts.all_charts import trace_charts
from lightning_modelprof.report.charts.chart import MAX_BINS
from lightning_modelprof.report.charts.device import kernel_types, operator_shares, trace_steps
from lightning_modelprof.show.html.chart import chart_view
from tests.analysis.trace.test_step_breakdown import NCCL, make, step
from tests.support.facts import why_not
from tests.support.traces import load

US = 1000
FETCH = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
GEMM = "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn"


def two_steps(first=5, second=6):
    """Step one fetches for 30 us, computes 60 and idles 10; step two computes 50 and idles 50."""
    return TraceFacts(
        make(
            step(first, 0, 100),
            step(second, 100, 200),
            ("user_annotation", FETCH, 0, 30),
            ("cpu_op", "aten::mm", 30, 90),
            ("cpu_op", "aten::mm", 100, 150),
        )
    )


def layers_us(chart):
    return {series.key: tuple(value / US for value in series.values) for series in chart.series}


def test_steps_are_split_into_layers():
    chart = trace_steps({0: two_steps()})
    assert (chart.kind, chart.x, chart.x_label) == ("stacked", (5.0, 6.0), "step")
    assert layers_us(chart) == {"dataloader": (30, 0), "cpu_exec": (60, 50), "rest": (10, 50)}


def test_steps_with_gap_are_renumbered():
    chart = trace_steps({0: two_steps(5, 9)})
    assert (chart.x, chart.x_label) == ((1.0, 2.0), "recorded steps, renumbered from 1")


def steps_of(*fetches_us):
    """Steps with fetches of these lengths, each followed by 60 us of operators."""
    events, at = [], 0
    for number, fetch in enumerate(fetches_us, 5):
        events += [step(number, at, at + fetch + 60), ("user_annotation", FETCH, at, at + fetch)]
        events.append(("cpu_op", "aten::mm", at + fetch, at + fetch + 60))
        at += fetch + 60
    return TraceFacts(make(*events))


def test_slow_steps_get_a_reason():
    """The median step takes 101 us, 41 of them for the fetch; step 7 fetches for 80, step 9 for 240."""
    chart = trace_steps({0: steps_of(40, 40, 80, 41, 240)})
    assert chart.notes[1] == (
        "Slowest: step 9 with 0.3 ms (DataLoader +0.199 ms), step 7 with 0.14 ms (DataLoader +0.039 ms). The"
        " median is 0.101 ms; in parentheses is the category that exceeds its own median the most."
    )
    assert len(trace_steps({0: steps_of(40, 80)}).notes) == 1, "two steps have no usual one"
    even = trace_steps({0: steps_of(40, 41, 42)})
    assert even.notes[1] == "No step takes 5% longer than the median of 0.101 ms."


def test_many_steps_are_binned():
    """802 equal steps need bins of three, with one step in the last; each mean is 8 and 2 us."""
    events = [
        one for n in range(802) for one in (step(n, 10 * n, 10 * n + 10), ("cpu_op", "o", 10 * n, 10 * n + 8))
    ]
    chart = trace_steps({0: TraceFacts(make(*events))})
    assert len(chart.x) == 268 <= MAX_BINS
    assert chart.x[:2] == (0.0, 3.0)
    assert {key: set(values) for key, values in layers_us(chart).items()} == {"cpu_exec": {8}, "rest": {2}}


def test_operators_are_sorted_by_cpu_self_time():
    """aten::linear takes 60 us, 40 of them in aten::addmm; six operators take 1 to 6 us and one 0.5."""
    small = [("cpu_op", f"aten::op{n}", 100 + 10 * n, 100 + 10 * n + n) for n in range(1, 7)]
    facts = TraceFacts(
        make(
            ("cpu_op", "aten::linear", 0, 60),
            ("cpu_op", "aten::addmm", 10, 50),
            *small,
            ("cpu_op", "aten::tiny", 300, 300.5),
        )
    )
    chart = operator_shares({0: facts})
    assert layers_us(chart) == {
        "operator aten::addmm": (40,),
        "operator aten::linear": (20,),
        **{f"operator aten::op{n}": (n,) for n in (6, 5, 4, 3, 2)},
        "rest": (1.5,),
    }
    assert layers_us(operator_shares({0: facts, 1: facts}))["operator aten::linear"] == (40,)
    assert chart.notes == ("Sorted by CPU self time.",)


def test_one_operator_gives_no_chart():
    assert operator_shares({0: TraceFacts(make(("cpu_op", "aten::mm", 0, 10)))}) is None


def test_ranks_are_shown_side_by_side():
    """Means over both steps are 15, 55 and 30 us."""
    facts = two_steps()
    chart = trace_steps({2: facts, 3: facts})
    assert (chart.x, chart.x_label) == ((2.0, 3.0), "rank")
    assert layers_us(chart) == {"dataloader": (15, 15), "cpu_exec": (55, 55), "rest": (30, 30)}


def test_distant_ranks_are_renumbered():
    """The rank comes from the file."""
    facts = two_steps()
    chart = trace_steps({0: facts, 10**12: facts})
    assert (chart.x, chart.x_label) == ((1.0, 2.0), "ranks with steps, renumbered from 1")


def test_rank_without_steps_has_no_point():
    facts = two_steps()
    lacking = facts.replaced(step_breakdown=NotMeasured("none"))
    assert trace_steps({0: facts, 1: lacking}).x == (0.0,)
    assert why_not(trace_steps, {0: lacking}) == "none"


def kernels(*named):
    return TraceFacts(
        make(step(0, 0, 100), *(("kernel", name, 10 * n, 10 * n + us) for n, (name, us) in enumerate(named)))
    )


def test_kernels_are_grouped_by_kind():
    facts = kernels((GEMM, 6), ("relu", 3), (NCCL, 2), ("add", 1))
    chart = kernel_types({0: facts})
    assert layers_us(chart) == {"tensor_cores": (6,), "kernel": (4,), "communication": (2,)}
    assert layers_us(kernel_types({0: facts, 1: facts})) == {
        "tensor_cores": (12,),
        "kernel": (8,),
        "communication": (4,),
    }


@pytest.mark.parametrize("facts", [kernels(("relu", 3)), kernels(), two_steps()])
def test_one_kernel_kind_gives_no_chart(facts):
    assert "kernel_types" not in [chart.id for chart in trace_charts({0: facts})]


def test_separate_traces_have_separate_charts():
    report = build_trace_report([two_steps(5, 6), two_steps(7, 8)])
    assert [chart.id for chart in report.charts] == ["step_breakdown", "step_breakdown_1"]
    assert report.charts[1].title == "Step time breakdown by step of trace 1"


def test_colors_are_distinct():
    view = chart_view(
        trace_steps(
            {
                0: TraceFacts(
                    make(
                        step(0, 0, 100),
                        ("kernel", "k", 0, 10),
                        ("gpu_memcpy", "m", 10, 20),
                        ("gpu_memset", "s", 20, 30),
                        ("kernel", NCCL, 30, 40),
                        ("cuda_runtime", "cudaLaunchKernel", 40, 50),
                        ("user_annotation", FETCH, 50, 60),
                        ("cpu_op", "o", 60, 70),
                    )
                )
            }
        )
    )
    assert len(view.layers) == 8
    assert len({layer.color for layer in view.layers}) == 8


def test_real_trace_shows_data_wait():
    """According to the removed plugin, DataLoader is 33% of this trace's steps."""
    chart = trace_steps({0: TraceFacts(load("v100_resnet50_workers0"))})
    sums = {series.key: sum(series.values) for series in chart.series}
    assert chart.x == (5.0, 6.0, 7.0, 8.0, 9.0, 10.0)
    assert sums["dataloader"] / sum(sums.values()) == pytest.approx(0.334, abs=0.0005)
