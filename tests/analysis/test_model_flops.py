"""FLOPs compared with time and peak, derived by hand; unknown values stay unknown."""

from __future__ import annotations

import pytest

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.modules.model_flops import ideal_seconds, model_flops
from lightning_modelprof.report.tables.run.flops import FLOPS, FLOPS_BY_OPERATOR
from lightning_modelprof.run.model_cost import ModelCost, OperatorCount, PeakRate, StepCount
from tests.support.diagnosed import analysis_of, steps_of
from tests.support.facts import tables_of, why_not


def operator(phase, flops, *, name="aten::mm", module="", dtype="float32", calls=1):
    return OperatorCount(phase=phase, module=module, operator=name, dtype=dtype, calls=calls, flops=flops)


def cost(*operators, peaks=(), errors=(), fake=False, note=""):
    count = StepCount(step=6, samples=4, on_fake_tensors=fake, operators=operators, errors=errors)
    return ModelCost(count=count, peaks=peaks, peak_note=note)


def peak(dtype="float32", rate=1e12, measured=False):
    return PeakRate(dtype=dtype, flops_per_s=rate, source="a data sheet", is_measured=measured)


STEP = (
    operator("forward", 600, calls=2),
    operator("forward", 400, name="aten::convolution", module="head"),
    operator("backward", 2000, calls=4),
    operator("recompute", 500),
    operator("optimizer", 100),
    operator("forward", 77, name="aten::_fft_c2c"),
    operator("backward", None, name="mylib::secret", module="head", calls=3),
)


def tables(facts, unit="samples"):
    known = analysis_of(steps_of(0), cost=ModelCost(), sample_unit=unit).replaced(flops=facts)
    return tables_of(known, FLOPS, FLOPS_BY_OPERATOR)


def test_totals_exclude_transforms():
    facts = model_flops(cost(*STEP), None)
    assert facts.phases == {"forward": 1000, "backward": 2000, "recompute": 500, "optimizer": 100}
    assert (facts.model_flops, facts.hardware_flops, facts.fourier) == (3000, 3600, {"forward": 77})


def test_rates_and_shares():
    """A step of 2 µs and a peak of 2.5 GFLOP/s: 3000 FLOPs are 1.5 GFLOP/s, three fifths of the peak."""
    facts = model_flops(cost(*STEP, peaks=(peak(rate=2.5e9),)), 2000)
    assert facts.model.flops_per_s == pytest.approx(1.5e9, rel=1e-12)
    assert facts.model.share_of_peak == pytest.approx(0.6, rel=1e-12)
    assert facts.hardware.share_of_peak == pytest.approx(0.72, rel=1e-12)


def test_each_dtype_has_its_own_peak():
    """1000 FLOPs at 1 kFLOP/s and 3000 at 6 kFLOP/s: one second and half a second."""
    entries = [operator("forward", 1000), operator("forward", 3000, dtype="bfloat16")]
    peaks = [peak(rate=1e3), peak("bfloat16", 6e3)]
    flops = {"float32": 1000, "bfloat16": 3000}
    assert ideal_seconds(flops, peaks) == pytest.approx(1.5)
    assert ideal_seconds(flops, peaks[:1]) is None  # a share with partial data would be too high
    assert ideal_seconds({}, peaks) is None
    assert model_flops(cost(*entries, peaks=peaks), 3e9).model.share_of_peak == pytest.approx(0.5)


@pytest.mark.parametrize("step_ns", [None, 0.0])
def test_rate_needs_clean_steps(step_ns):
    facts = model_flops(cost(*STEP, peaks=(peak(),)), step_ns)
    assert facts.model.flops_per_s is None
    assert facts.model.share_of_peak is None


def test_reason_for_missing_flops():
    assert why_not(model_flops, None, 1.0) == "not counted (set flops=True to count one step)"
    assert why_not(model_flops, ModelCost(count_note="why"), 1.0) == "why"
    phases, operators = tables(NotMeasured("why"))
    assert phases.absent_reason == operators.absent_reason == "why"


def test_phase_table():
    facts = model_flops(cost(*STEP, peaks=(peak(rate=2.5e9),)), 2000)
    table, _ = tables(facts, unit="tokens")
    assert [column.label for column in table.columns][4:] == ["Per token", "FLOP/s", "MFU / HFU"]
    assert table.rows == (
        ("Model", 3000, 1500, 3000 / 3600, 750.0, 3000 / 2e-6, 3000 / 2.5e9 / 2e-6),
        ("Forward", 1000, 500, 1000 / 3600, 250.0, None, None),
        ("Backward", 2000, 1000, 2000 / 3600, 500.0, None, None),
        ("Hardware", 3600, 1800, 1.0, 900.0, 3600 / 2e-6, 3600 / 2.5e9 / 2e-6),
        ("Recompute", 500, 250, 500 / 3600, 125.0, None, None),
        ("Optimizer", 100, 50, 100 / 3600, 25.0, None, None),
    )
    assert table.depths == (0, 1, 1, 0, 1, 1)
    text = " ".join(table.notes)
    assert "Counted during step 6." in text
    assert "make these figures too low: mylib::secret (3 calls)" in text
    assert "add 77 FLOPs" in text
    assert "Peak of float32: 2.5 GFLOP/s, a data sheet" in text


def test_note_if_peak_is_too_low():
    """3,000 FLOPs in 2 µs are 1.5 GFLOP/s."""
    for rate, is_said in ((2.5e9, False), (2.5e8, True)):
        table, _ = tables(model_flops(cost(*STEP, peaks=(peak(rate=rate),)), 2000))
        assert any("MFU is above 100%" in note for note in table.notes) == is_said


def test_rate_measured_by_older_version_is_not_peak():
    facts = model_flops(cost(*STEP, peaks=(peak(measured=True),), errors=("aten::mm: wrong",), fake=True), 10)
    assert facts.peaks == ()
    assert facts.model.flops_per_s == pytest.approx(3000 / 10e-9)
    assert (facts.model.share_of_peak, facts.hardware.share_of_peak) == (None, None)
    table, _ = tables(facts)
    assert table.columns[-1].label == "MFU / HFU"
    text = " ".join(table.notes)
    assert "MFU and HFU require the device's peak for float32. The device's peak is unknown" in text
    assert "A formula failed: aten::mm: wrong." in text
    assert "on a copy of the model without data and without the optimizer." in text


def test_optimizer_that_steps_rarely_counts_partially():
    """It steps in one step of four: 3500 FLOPs and 25 of 100 in 2 µs are 1.7625 GFLOP/s, 0.705 of peak."""
    facts = model_flops(cost(*STEP, peaks=(peak(rate=2.5e9),)), 2000, optimizer_share=0.25)
    assert facts.hardware.flops_per_s == pytest.approx(1.7625e9, rel=1e-12)
    assert facts.hardware.share_of_peak == pytest.approx(0.705, rel=1e-12)
    assert (facts.model.flops_per_s, facts.hardware_flops) == (pytest.approx(1.5e9), 3600)
    table, _ = tables(facts)
    per_sample = {row[0]: row[4] for row in table.rows}
    assert per_sample["Hardware"] == 3525 / 4
    assert per_sample["Optimizer"] == 25 / 4
    assert "stepped in 25% of the clean steps" in " ".join(table.notes)


def test_dtype_without_peak_is_named():
    entries = (operator("forward", 1000), operator("forward", 3000, dtype="bfloat16"))
    facts = model_flops(cost(*entries, peaks=(peak("bfloat16"),)), 2000)
    assert (facts.without_peak, facts.model.share_of_peak) == (("float32",), None)
    assert "require the device's peak for float32" in " ".join(tables(facts)[0].notes)


def test_note_without_clean_steps():
    table, _ = tables(model_flops(cost(*STEP), None))
    assert "There are no clean steps" in " ".join(table.notes)
    table, _ = tables(model_flops(cost(*STEP), 2000))
    assert "clean" not in " ".join(table.notes)


@pytest.mark.parametrize(
    ("entry", "total"),
    [(operator("forward", 77, name="aten::_fft_c2c"), 0), (operator("forward", None, name="my::op"), None)],
)
def test_only_transforms_are_zero_and_only_unknown_work_is_unknown(entry, total):
    facts = model_flops(cost(entry, peaks=(peak(),)), 5)
    assert (facts.model_flops, facts.hardware_flops) == (total, total)
    assert facts.hardware.flops_per_s is None


def test_phases_that_did_not_run_have_no_column():
    _, table = tables(model_flops(cost(operator("forward", 6, calls=2)), None))
    assert [column.key for column in table.columns] == [
        "operator",
        "calls",
        "flops",
        "ratio",
        "forward_flops",
    ]
    assert table.rows == (("aten::mm", 2, 6, 1.0, 6),)
    assert table.notes == ()


def test_operator_table():
    _, table = tables(model_flops(cost(*STEP), None))
    assert table.rows == (
        ("aten::mm", 8, 3200, 3200 / 3600, 600, 2000, 500, 100),
        ("aten::convolution", 1, 400, 400 / 3600, 400, None, None, None),
        ("aten::_fft_c2c", 1, 77, None, 77, None, None, None),
        ("mylib::secret", 3, None, None, None, None, None, None),
    )


def test_only_uncounted_work_is_not_zero():
    facts = model_flops(cost(operator("forward", None, name="mylib::secret")), 5)
    assert facts.model_flops is None
    phases, _ = tables(facts)
    assert phases.rows[0][1] is None
