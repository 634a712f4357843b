"""Peak rates are looked up by exact device name, are dense, and agree with the hardware's specifications."""

from __future__ import annotations

from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.fabric.utilities import throughput

from lightning_modelprof.inspect.flops import peaks as module
from lightning_modelprof.inspect.flops.peaks import DEVICE_PEAKS, devices_named, peak_rates

CUDA = torch.device("cuda", 0)
ALL = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int8")


@pytest.fixture
def device(monkeypatch):
    """A device with a name and a number of multiprocessors, as torch would report it."""

    def make(name, units=None):
        if units is None:
            units = devices_named(name)[0].units or 1
        found = SimpleNamespace(name=name, multi_processor_count=units, gpu_eu_count=units)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
        monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: found)
        return torch.device("xpu" if "Intel" in name else "cuda", 0)

    return make


@pytest.fixture(autouse=True)
def without_tf32(monkeypatch):
    monkeypatch.setattr(module, "_allows_tf32", lambda: False)


@pytest.fixture
def with_tf32(without_tf32, monkeypatch):
    monkeypatch.setattr(module, "_allows_tf32", lambda: True)


def tera(found):
    rates, _ = found
    return {rate.dtype: rate.flops_per_s / 1e12 for rate in rates}


# ---- Numbers

# Name → multiprocessors, clock in GHz, and FLOPs per multiprocessor and clock cycle, by dtype. From the
# architecture white papers: cores x 2 for float32, tensor cores x multiply-adds x 2 for the rest.
VOLTA = {"float64": 64, "float32": 128, "float16": 1024}
TURING = {"float32": 128, "float16": 1024, "int8": 2048}
TURING_HALF = TURING | {"float16": 512}  # GeForce: half the rate when accumulating in float32
GA100 = {"float64": 128, "float32": 128, "tf32": 1024, "float16": 2048, "bfloat16": 2048, "int8": 4096}
GA102 = {"float32": 256, "tf32": 512, "float16": 1024, "bfloat16": 1024, "int8": 2048}
GA102_HALF = {"float32": 256, "tf32": 256, "float16": 512, "bfloat16": 512, "int8": 2048}
A10G = GA102_HALF | {"int8": 1024}
ADA = GA102 | {"float8": 2048}
ADA_HALF = GA102_HALF | {"float8": 1024}
L40 = ADA_HALF | {"int8": 1024}
HOPPER_CORES = {"float64": 256, "float32": 256}
HOPPER_TENSOR = {"tf32": 2048, "float16": 4096, "bfloat16": 4096, "float8": 8192, "int8": 8192}
BLACKWELL_TENSOR = {key: 2 * value for key, value in HOPPER_TENSOR.items()}
CDNA2 = {"float64": 256, "float32": 256, "float16": 1024, "bfloat16": 1024, "int8": 1024}
CDNA3 = {"float64": 256, "float32": 256, "tf32": 1024, "float16": 2048, "bfloat16": 2048}
CDNA3 |= {"float8": 4096, "int8": 4096}
# A vector engine has 16 lanes of float32; eight of them and eight matrix engines make an Xe core.
XE = {"float64": 32, "float32": 32, "tf32": 256, "float16": 512, "bfloat16": 512, "int8": 1024}

MADE_OF = [
    ("Tesla V100-SXM2-16GB", 80, 1.53, VOLTA),
    ("Tesla V100-PCIE-32GB", 80, 1.38, VOLTA),
    ("Tesla V100S-PCIE-32GB", 80, 1.597, VOLTA),
    ("Tesla T4", 40, 1.59, TURING),
    ("NVIDIA GeForce RTX 2080 Ti", 68, 1.545, TURING_HALF),
    ("NVIDIA A100-SXM4-80GB", 108, 1.41, GA100),
    ("NVIDIA A30", 56, 1.44, GA100),
    ("NVIDIA A40", 84, 1.74, GA102),
    ("NVIDIA A10", 72, 1.695, GA102),
    ("NVIDIA A10G", 80, 1.71, A10G),
    ("NVIDIA A2", 10, 1.77, GA102),
    ("NVIDIA RTX A6000", 84, 1.8, GA102),
    ("NVIDIA RTX A5000", 64, 1.695, GA102),
    ("NVIDIA RTX A4000", 48, 1.56, GA102),
    ("NVIDIA GeForce RTX 3090", 82, 1.695, GA102_HALF),
    ("NVIDIA L4", 58, 2.04, ADA),
    ("NVIDIA L40", 142, 2.49, L40),
    ("NVIDIA L40S", 142, 2.52, ADA),
    ("NVIDIA RTX 6000 Ada Generation", 142, 2.505, ADA),
    ("NVIDIA GeForce RTX 4090", 128, 2.52, ADA_HALF),
    ("NVIDIA GeForce RTX 5090", 170, 2.407, ADA_HALF),
    ("NVIDIA H100 80GB HBM3", 132, 1.98, HOPPER_CORES),
    ("NVIDIA H100 80GB HBM3", 132, 1.83, HOPPER_TENSOR),  # a lower clock under tensor load
    ("NVIDIA H100 PCIe", 114, 1.755, HOPPER_CORES),
    ("NVIDIA H100 PCIe", 114, 1.62, HOPPER_TENSOR),
    ("NVIDIA H100 NVL", 132, 1.785, HOPPER_CORES),
    ("NVIDIA H100 NVL", 132, 1.545, HOPPER_TENSOR),
    ("NVIDIA B200", 148, 1.98, {"float64": 128, "float32": 256}),
    ("NVIDIA B200", 148, 1.856, BLACKWELL_TENSOR),
    ("NVIDIA B300 SXM6 AC", 148, 1.98, {"float32": 256}),
    ("NVIDIA B300 SXM6 AC", 148, 1.856, BLACKWELL_TENSOR),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 188, 2.617, ADA),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 188, 2.28, ADA),
    ("AMD Instinct MI250X", 110, 1.7, CDNA2),
    ("AMD Instinct MI250X / MI250", 110, 1.7, CDNA2),
    ("AMD Instinct MI250X / MI250", 104, 1.7, CDNA2),
    ("AMD Instinct MI325X", 304, 2.1, CDNA3),
    ("AMD Instinct MI300X", 304, 2.1, CDNA3),
    ("Intel(R) Data Center GPU Max 1550", 1024, 1.6, XE),
    ("Intel(R) Data Center GPU Max 1550", 512, 1.6, XE),
]


@pytest.mark.parametrize(("name", "units", "ghz", "per_clock"), MADE_OF, ids=lambda value: str(value)[:40])
def test_peak_is_derived_from_hardware(name, units, ghz, per_clock):
    (peaks,) = [found for found in devices_named(name) if found.units == units]
    shared = peaks.tera.keys() & per_clock.keys()
    assert shared
    derived = {dtype: units * per_clock[dtype] * ghz / 1000 for dtype in shared}
    # Data sheets round: the L40S's 366 to 362, the B200's tensor cores to 1125.
    assert {dtype: peaks.tera[dtype] for dtype in shared} == pytest.approx(derived, rel=0.021)


def test_every_number_is_derived_or_listed():
    derived = {(name, units, dtype) for name, units, _, per_clock in MADE_OF for dtype in per_clock}
    not_derived = {
        (name, dtype)
        for name, peaks in ((found.names, found) for found in DEVICE_PEAKS)
        for dtype in peaks.tera
        if not any(d == dtype and peaks in devices_named(n) and u == peaks.units for n, u, d in derived)
    }
    # Same chips as the H100 SXM or NVL; GB200 clocks are unpublished; H20's tensor cores are cut down.
    assert {name for name, _ in not_derived} == {
        r"NVIDIA H800( PCIe)?",
        r"NVIDIA H20",
        r"NVIDIA H200",
        r"NVIDIA H200 NVL",
        r"NVIDIA GH200 (120GB|480GB|144G HBM3e)",
        r"NVIDIA GB200",
    }


@pytest.mark.parametrize(
    ("name", "bfloat16"),
    [
        ("NVIDIA H200", 989.4),  # not 1979, which counts sparsity
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA RTX A6000", 154.8),  # not 38.7, the rate without tensor cores
        ("NVIDIA A40", 149.7),
        ("NVIDIA GeForce RTX 3090", 71.2),  # not 142, which accumulates in float16
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA A10G", 70),  # not the A10's 125
        ("NVIDIA A10", 125),
        ("AMD Instinct MI250X", 191.5),  # one of the two dies
    ],
)
def test_known_dense_rates(device, name, bfloat16):
    assert tera(peak_rates(device(name), ("bfloat16",), None)) == {"bfloat16": bfloat16}


def test_rates_are_consistent():
    assert DEVICE_PEAKS
    for peaks in DEVICE_PEAKS:
        rates = peaks.tera
        assert rates.get("bfloat16", rates["float16"]) == rates["float16"], peaks.names
        ordered = [rates[d] for d in ("float64", "float32", "tf32", "float16", "float8") if d in rates]
        assert ordered == sorted(ordered), peaks.names
        assert rates["float16"] / rates.get("tf32", rates["float16"] / 2) == pytest.approx(2, rel=0.02)


def test_every_entry_has_source_and_year():
    assert DEVICE_PEAKS
    for peaks in DEVICE_PEAKS:
        assert peaks.maker in peaks.source, peaks.names
        assert any(f", 20{year}" in peaks.source for year in range(18, 27)), peaks.names
        assert peaks.maker in {"NVIDIA", "AMD", "Intel"}


# Where Lightning's table (2.6.6) differs for a device that both tables have, and why our number differs.
SPARSE = "with sparsity, not dense"
NOT_TENSOR = "without the tensor cores, which torch uses"
FLOAT64 = "without the tensor cores, which cuBLAS uses for float64"
A10 = "the A10's"
ACCUMULATE = "accumulates in float16"
FOUNDERS = "Founders Edition's clock"
BOTH_CARDS = "of a pair of cards"
DIFFERENT = {
    "h200 sxm1": {
        "float64": FLOAT64,
        "tfloat32": SPARSE,
        "bfloat16": SPARSE,
        "float16": SPARSE,
        "int8": SPARSE,
    },
    "h200 nvl1": {
        "float64": FLOAT64,
        "tfloat32": SPARSE,
        "bfloat16": SPARSE,
        "float16": SPARSE,
        "int8": SPARSE,
    },
    "h100 nvl": {
        "float64": BOTH_CARDS,
        "float32": BOTH_CARDS,
        "tfloat32": BOTH_CARDS,
        "bfloat16": BOTH_CARDS,
        "float16": BOTH_CARDS,
        "int8": BOTH_CARDS,
    },
    "h100 sxm": {"float64": FLOAT64},
    "h100 pcie": {"float64": FLOAT64},
    "a100": {"float64": FLOAT64},
    "rtx 4090": {"bfloat16": NOT_TENSOR, "float16": NOT_TENSOR},
    "a6000": {"bfloat16": NOT_TENSOR, "float16": NOT_TENSOR},
    "a40": {"bfloat16": NOT_TENSOR, "float16": NOT_TENSOR},
    "rtx 3090": {"bfloat16": NOT_TENSOR, "float16": NOT_TENSOR},
    "a10g": {"float32": A10, "tfloat32": A10, "bfloat16": A10, "float16": A10, "int8": A10},
    "rtx 2080 ti": {"float32": FOUNDERS, "float16": NOT_TENSOR, "int8": FOUNDERS},
}
OUR_NAME = {
    "h200 sxm1": "NVIDIA H200",
    "h200 nvl1": "NVIDIA H200 NVL",
    "h100 nvl": "NVIDIA H100 NVL",
    "h100 sxm": "NVIDIA H100 80GB HBM3",
    "h100 pcie": "NVIDIA H100 PCIe",
    "rtx 4090": "NVIDIA GeForce RTX 4090",
    "l4": "NVIDIA L4",
    "l40": "NVIDIA L40",
    "a100": "NVIDIA A100-SXM4-40GB",
    "a6000": "NVIDIA RTX A6000",
    "a40": "NVIDIA A40",
    "a10g": "NVIDIA A10G",
    "rtx 3090": "NVIDIA GeForce RTX 3090",
    "t4": "Tesla T4",
    "rtx 2080 ti": "NVIDIA GeForce RTX 2080 Ti",
    "v100 sxm": "Tesla V100-SXM2-16GB",
    "v100 pcie": "Tesla V100-PCIE-16GB",
    "v100s pcie": "Tesla V100S-PCIE-32GB",
}


def test_lightning_agrees_except_for_listed_differences():
    if lightning.__version__ != "2.6.6":
        pytest.skip("written against the table of lightning 2.6.6")
    found = {}
    for chip, name in OUR_NAME.items():
        ours = devices_named(name)[0].tera
        theirs = {
            str(dtype).removeprefix("torch."): r / 1e12 for dtype, r in throughput._CUDA_FLOPS[chip].items()
        }
        different = {
            dtype
            for dtype, rate in theirs.items()
            if (key := {"tfloat32": "tf32"}.get(dtype, dtype)) in ours
            and ours[key] != pytest.approx(rate, rel=0.02)
        }
        if different:
            found[chip] = different
    assert found == {chip: set(reasons) for chip, reasons in DIFFERENT.items()}


# ---- Devices


@pytest.mark.parametrize(
    ("name", "units", "reason"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 14, " (a MIG slice is only part of a device)"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76, " (a laptop's clocks aren't in its name)"),
        ("NVIDIA GeForce RTX 4090 D", 114, ""),
        ("NVIDIA GeForce RTX 3090 Ti", 84, ""),
        ("NVIDIA A100-SXM-64GB", 124, ""),
        ("NVIDIA L40G", 142, ""),
        ("GRID A100-20C", 108, ""),
        ("NVIDIA A100X", 108, ""),
        ("NVIDIA H100 80GB HBM2e", 114, ""),
        ("Quadro RTX 6000", 72, ""),
        ("NVIDIA H200", 66, " with 66 multiprocessors (the known one has 132)"),
        ("NVIDIA H800", 120, " with 120 multiprocessors (the known one has 132 or 114)"),
        ("AMD Instinct MI300X", 38, " with 38 multiprocessors (the known one has 304)"),  # a partition
        ("nvidia h200", 132, ""),
        ("", 1, ""),
    ],
)
def test_unknown_devices_have_no_peak(device, name, units, reason):
    rates, note = peak_rates(device(name, units), ALL, None)
    assert rates == ()
    assert note == f'no peak is known for {name!r}{reason}; set inspect={{"peak_flops_per_s": ...}}'


@pytest.mark.parametrize("name", ["A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"])
def test_all_names_of_a100(device, name):
    assert tera(peak_rates(device(name), ("float16",), None)) == {"float16": 312}


def test_one_name_for_two_devices(device):
    assert tera(peak_rates(device("NVIDIA H800", 132), ("bfloat16",), None)) == {"bfloat16": 989.4}
    assert tera(peak_rates(device("NVIDIA H800", 114), ("bfloat16",), None)) == {"bfloat16": 756}
    whole, half = (
        tera(peak_rates(device("Intel(R) Data Center GPU Max 1550", units), ("bfloat16",), None))
        for units in (1024, 512)
    )
    assert whole == {"bfloat16": 839}
    assert half == {"bfloat16": 419.5}


def test_name_and_units_have_one_entry():
    for name, units, _, _ in MADE_OF:
        assert len([found for found in devices_named(name) if found.units == units]) == 1


@pytest.mark.parametrize("kind", ["cpu", "mps", "meta"])
def test_devices_without_data_sheet(kind):
    assert peak_rates(torch.device(kind), ("float32",), None) == (
        (),
        f'no peak is known for {kind!r}; set inspect={{"peak_flops_per_s": ...}}',
    )


def test_failing_driver_is_noted(monkeypatch):
    def fail(device):
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    rates, note = peak_rates(CUDA, ("float32",), None)
    assert rates == ()
    assert note == (
        "no peak is known for 'cuda:0' (its name can't be read: no driver); set"
        ' inspect={"peak_flops_per_s": ...}'
    )


# ---- Dtypes


def test_rates_have_source(device):
    rates, note = peak_rates(device("NVIDIA H100 80GB HBM3"), ("float8_e5m2", "", "bfloat16", "int8"), None)
    source = "NVIDIA H100 Tensor Core GPU Architecture white paper, 2023"
    assert [(r.dtype, r.flops_per_s, r.source, r.is_measured) for r in rates] == [
        ("bfloat16", 989.4e12, source, False),
        ("float8_e5m2", 1978.9e12, source, False),
        ("int8", 1978.9e12, source, False),
    ]
    assert note == ""


def test_unsupported_dtypes_have_no_peak(device):
    rates, note = peak_rates(device("Tesla T4"), ("bfloat16", "float16", "complex64"), None)
    assert [rate.dtype for rate in rates] == ["float16"]
    assert (
        note
        == "no peak is known for bfloat16, complex64 on 'Tesla T4'; set inspect={\"peak_flops_per_s\": ...}"
    )


def test_float32_without_tf32(device):
    (rate,), note = peak_rates(device("NVIDIA A100-SXM4-40GB"), ("float32",), None)
    assert rate.flops_per_s == 19.5e12
    assert rate.source.endswith("2021; without TF32, which is off in torch")
    assert note == ""


def test_float32_with_tf32(device, with_tf32):
    (rate,), note = peak_rates(device("NVIDIA A100-SXM4-40GB"), ("float32",), None)
    assert rate.flops_per_s == 156e12
    assert rate.source.endswith("2021; with TF32, which is on in torch")
    assert note == ""


def test_tf32_setting_is_ignored_without_tf32(device, with_tf32):
    (rate,), _ = peak_rates(device("Tesla V100-SXM2-16GB"), ("float32",), None)
    assert rate.flops_per_s == 15.7e12
    assert "TF32" not in rate.source


@pytest.mark.parametrize(
    ("name", "maker"), [("AMD Instinct MI300X", "AMD"), ("Intel(R) Data Center GPU Max 1550", "Intel")]
)
def test_tf32_is_unknown_on_other_makers_devices(device, with_tf32, name, maker):
    rates, note = peak_rates(device(name), ("float32", "float16"), None)
    assert [rate.dtype for rate in rates] == ["float16"]
    assert note == (
        f"no peak is known for float32 (TF32 is on in torch, but its effect on {maker} devices"
        f' is unknown) on {name!r}; set inspect={{"peak_flops_per_s": ...}}'
    )


def test_tf32_follows_torch_setting(monkeypatch, request):
    monkeypatch.undo()  # use the real function
    before = torch.get_float32_matmul_precision()
    request.addfinalizer(lambda: torch.set_float32_matmul_precision(before))
    for precision, allows in (("high", True), ("highest", False), ("medium", True)):
        torch.set_float32_matmul_precision(precision)
        assert module._allows_tf32() is allows


def test_tf32_follows_newer_torch_setting(monkeypatch):
    monkeypatch.undo()
    for value, allows in (("tf32", True), ("ieee", False), ("none", False)):
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=value))
        assert module._allows_tf32() is allows
    for allows in (True, False):
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=allows))
        assert module._allows_tf32() is allows


# ---- User-given peaks


def test_one_number_for_every_dtype(device):
    rates, note = peak_rates(device("NVIDIA H200"), ("float32", "complex64", "bfloat16"), 5 * 10**12)
    assert [(r.dtype, r.flops_per_s, r.source) for r in rates] == [
        ("bfloat16", 5e12, "given by the user"),
        ("complex64", 5e12, "given by the user"),
        ("float32", 5e12, "given by the user"),
    ]
    assert all(isinstance(rate.flops_per_s, float) for rate in rates)
    assert note == ""


def test_table_fills_in_dtypes_without_given_peak(device):
    given = {"float32": 1e12, "float8": 2e12, "float8_e5m2": 3e12}
    asked = ("float8_e4m3fn", "float8_e5m2", "float32", "bfloat16", "float64")
    rates, note = peak_rates(device("NVIDIA L4"), asked, given)
    assert tera((rates, note)) == {"bfloat16": 121, "float32": 1, "float8_e4m3fn": 2, "float8_e5m2": 3}
    assert [rate.source == "given by the user" for rate in rates] == [False, True, True, True]
    assert note.startswith(
        'inspect={"peak_flops_per_s": ...} has no rate for float64; no peak is known for float64 on \'NVIDIA'
    )


def test_given_peak_queries_no_device(monkeypatch):
    monkeypatch.setattr(module, "_identify", None)
    assert tera(peak_rates(torch.device("cpu"), ("float32",), 1e12)) == {"float32": 1}
    assert peak_rates(torch.device("cpu"), ("",), None) == ((), "")


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), True, "312e12", [1e12]])
def test_invalid_rates_are_rejected(wrong):
    with pytest.raises(ValueError, match=r"^peak_flops_per_s: expected a positive number of FLOP/s.*got "):
        peak_rates(CUDA, ("float32",), wrong)
    with pytest.raises(ValueError, match=r"^peak_flops_per_s\['float32'\]: expected a positive"):
        peak_rates(CUDA, ("float32",), {"float32": wrong})


@pytest.mark.parametrize("wrong", ["fp32", "", torch.float32, 3, "nn", "tf32"])
def test_invalid_dtypes_are_rejected(wrong):
    with pytest.raises(ValueError, match=r"^peak_flops_per_s: expected dtype names such as 'bfloat16'"):
        peak_rates(CUDA, ("float32",), {wrong: 1e12})
