"""Peak FLOP/s of a device: given by the user, from the table of data sheets, or unknown."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import isfinite
from typing import Final, NamedTuple

import torch

from lightning_modelprof.errors import quoted
from lightning_modelprof.record import Record
from lightning_modelprof.run.model_cost import PeakRate

_REMEDY = 'set inspect={"peak_flops_per_s": ...}'


class _Identity(NamedTuple):
    """A device's identity in torch; ``units`` as in ``DevicePeaks``, ``None`` if torch doesn't report any."""

    name: str
    units: int | None


def peak_rates(
    device: torch.device, dtypes: Collection[str], override: float | Mapping[str, float] | None
) -> tuple[tuple[PeakRate, ...], str]:
    """Return one device's dense peaks for some dtypes.

    float32 has the TF32 peak where torch may use TF32 for matrix products on an NVIDIA device
    (``torch.set_float32_matmul_precision``, ``torch.backends.cuda.matmul``); ``source`` says which applies.

    Args:
        dtypes: names such as ``bfloat16``; an empty name is skipped.
        override: the user's FLOP/s, for all dtypes or by dtype. The key ``float8`` covers all 8-bit formats.
            The table supplies whatever a mapping lacks.

    Returns:
        The known rates in alphabetical order of dtype, and a note on unknown ones; empty if all are known.

    Raises:
        ValueError: when ``override`` has a name that isn't a dtype or a rate that isn't a positive number.

    Caveats:
        cuDNN's convolutions may use TF32 where matrix products may not (``torch.backends.cudnn``); the peak
        is that of matrix products.
    """
    given = _checked(override)
    rates: list[PeakRate] = []
    missing: list[str] = []
    for dtype in sorted({dtype for dtype in dtypes if dtype}):
        flops_per_s = given if isinstance(given, float) else given.get(dtype, given.get(_family(dtype)))
        if flops_per_s is None:
            missing.append(dtype)
        else:
            rates.append(PeakRate(dtype=dtype, flops_per_s=flops_per_s, source="given by the user"))
    note = ""
    if missing:
        found, note = _from_table(device, missing)
        if note and given:
            known = {rate.dtype for rate in found}
            lacking = ", ".join(dtype for dtype in missing if dtype not in known)
            note = f'inspect={{"peak_flops_per_s": ...}} has no rate for {lacking}; {note}'
        rates = sorted([*rates, *found], key=lambda rate: rate.dtype)
    return tuple(rates), note


def _checked(override: float | Mapping[str, float] | None) -> float | dict[str, float]:
    if override is None:
        return {}
    if not isinstance(override, Mapping):
        return _checked_rate("peak_flops_per_s", override)
    rates: dict[str, float] = {}
    for dtype, rate in override.items():
        known = isinstance(dtype, str) and isinstance(getattr(torch, dtype, None), torch.dtype)
        if not known and dtype != "float8":
            raise ValueError(
                f"peak_flops_per_s: expected dtype names such as 'bfloat16', got {quoted(dtype)}."
                " Use torch's name without 'torch.'"
            )
        rates[dtype] = _checked_rate(f"peak_flops_per_s[{dtype!r}]", rate)
    return rates


def _checked_rate(where: str, rate: object) -> float:
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if not (is_number and isfinite(rate) and rate > 0):  # type: ignore[arg-type,operator]  # checked before
        raise ValueError(
            f"{where}: expected a positive number of FLOP/s, such as 312e12 for 312 TFLOP/s, got"
            f" {quoted(rate)}"
        )
    return float(rate)  # type: ignore[arg-type]


def _family(dtype: str) -> str:
    """Map all 8-bit formats to one key, as they share a peak."""
    return "float8" if dtype.startswith("float8_") else dtype


def _from_table(device: torch.device, dtypes: list[str]) -> tuple[list[PeakRate], str]:
    try:
        identity = _identify(device)
    except Exception as error:  # a driver may raise anything, and a missing peak must not stop a fit
        return [], f"no peak is known for {str(device)!r} (its name can't be read: {error}); {_REMEDY}"
    candidates = devices_named(identity.name)
    peaks = next((found for found in candidates if found.units in {None, identity.units}), None)
    if peaks is None:
        reason = _why_unknown(identity, candidates)
        return [], f"no peak is known for {identity.name!r}{reason}; {_REMEDY}"
    rates: list[PeakRate] = []
    missing: list[str] = []
    for dtype in dtypes:
        rate = _float32_rate(peaks) if dtype == "float32" else _rate(peaks, dtype, _family(dtype))
        if isinstance(rate, PeakRate):
            rates.append(rate)
        else:
            missing.append(f"{dtype}{rate}")
    note = f"no peak is known for {', '.join(missing)} on {identity.name!r}; {_REMEDY}" if missing else ""
    return rates, note


def _rate(peaks: DevicePeaks, dtype: str, key: str, remark: str = "") -> PeakRate | str:
    """Return the rate, or an empty reason."""
    if key not in peaks.tera:
        return ""
    # The table has at most two decimals; rounding removes the product's error.
    return PeakRate(
        dtype=dtype, flops_per_s=float(round(peaks.tera[key] * 1e12)), source=f"{peaks.source}{remark}"
    )


def _float32_rate(peaks: DevicePeaks) -> PeakRate | str:
    """Return float32's rate under torch's current settings, or why there is none."""
    if "tf32" not in peaks.tera:
        return _rate(peaks, "float32", "float32")
    if not _allows_tf32():
        return _rate(peaks, "float32", "float32", "; without TF32, which is off in torch")
    if peaks.maker == "NVIDIA":
        return _rate(peaks, "float32", "tf32", "; with TF32, which is on in torch")
    return f" (TF32 is on in torch, but its effect on {peaks.maker} devices is unknown)"


def _allows_tf32() -> bool:
    # torch 2.9's flag; from then on the old one raises if the user has set the new one.
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if precision is not None:
        return bool(precision == "tf32")
    return bool(torch.backends.cuda.matmul.allow_tf32)


def _why_unknown(identity: _Identity, candidates: tuple[DevicePeaks, ...]) -> str:
    if " MIG " in identity.name:
        return " (a MIG slice is only part of a device)"
    if "Laptop" in identity.name or "Max-Q" in identity.name:
        return " (a laptop's clocks aren't in its name)"
    if candidates:
        expected = " or ".join(str(peaks.units) for peaks in candidates)
        return f" with {identity.units} multiprocessors (the known one has {expected})"
    return ""


def _identify(device: torch.device) -> _Identity:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return _Identity(properties.name, properties.multi_processor_count)
    if device.type == "xpu":
        found = torch.xpu.get_device_properties(device)
        return _Identity(found.name, found.gpu_eu_count)
    return _Identity(device.type, None)


class DevicePeaks(Record, frozen=True, kw_only=True):
    """Peaks of one device model.

    Attributes:
        names: pattern of torch's full device name.
        units: multiprocessors (NVIDIA), compute units (AMD) or vector engines (Intel) in torch. They
            distinguish models of the same name, and part of a device from the whole. ``None`` if unsure.
        source: title and year.
        tera: TFLOP/s by dtype.
        maker: only for NVIDIA does torch's flag determine whether float32 products use TF32.
    """

    names: str
    units: int | None
    source: str
    tera: dict[str, float]
    maker: str = "NVIDIA"


def devices_named(name: str) -> tuple[DevicePeaks, ...]:
    return tuple(peaks for peaks in DEVICE_PEAKS if re.fullmatch(peaks.names, name))


def _matrix(
    half: float,
    *,
    float32: float | None = None,
    tf32: float | None = None,
    float64: float | None = None,
    float8: float | None = None,
    int8: float | None = None,
    bfloat16: bool = True,
) -> dict[str, float]:
    """Return peaks by dtype; ``half`` is for float16, and for bfloat16 unless the device has none."""
    peaks = {
        "float64": float64,
        "float32": float32,
        "tf32": tf32,
        "float16": half,
        "bfloat16": half if bfloat16 else None,
        "float8": float8,
        "int8": int8,
    }
    return {dtype: tera for dtype, tera in peaks.items() if tera is not None}


_HOPPER_SXM: Final = _matrix(989.4, float64=66.9, float32=66.9, tf32=494.7, float8=1978.9, int8=1978.9)


_HOPPER_PCIE: Final = _matrix(756, float64=51.2, float32=51.2, tf32=378, float8=1513, int8=1513)


_HOPPER_NVL: Final = _matrix(835.5, float64=60, float32=60, tf32=417.5, float8=1670.5, int8=1670.5)


_EXPORT: Final = ("float32", "tf32", "float16", "bfloat16", "float8", "int8")  # float64 is cut down there


_HOPPER_PAPER: Final = "NVIDIA H100 Tensor Core GPU Architecture white paper, 2023"


_AMPERE_PAPER: Final = "NVIDIA Ampere GA102 GPU Architecture white paper, 2021"


DEVICE_PEAKS: Final = (
    # ---- NVIDIA: Volta and Turing, without bfloat16 and TF32
    DevicePeaks(
        names=r"Tesla V100-SXM2-(16|32)GB",
        units=80,
        source="NVIDIA V100 Tensor Core GPU data sheet, 2020",
        tera=_matrix(125, float64=7.8, float32=15.7, bfloat16=False),
    ),
    DevicePeaks(
        names=r"Tesla V100-PCIE-(16|32)GB",
        units=80,
        source="NVIDIA V100 Tensor Core GPU data sheet, 2020",
        tera=_matrix(112, float64=7, float32=14, bfloat16=False),
    ),
    DevicePeaks(
        names=r"Tesla V100S-PCIE-32GB",
        units=80,
        source="NVIDIA V100 Tensor Core GPU data sheet, 2020",
        tera=_matrix(130, float64=8.2, float32=16.4, bfloat16=False),
    ),
    DevicePeaks(
        names=r"(NVIDIA )?(Tesla )?T4",
        units=40,
        source="NVIDIA T4 Tensor Core GPU data sheet, 2019",
        tera=_matrix(65, float32=8.1, int8=130, bfloat16=False),
    ),
    DevicePeaks(
        names=r"(NVIDIA )?GeForce RTX 2080 Ti",
        units=68,
        source="NVIDIA Turing GPU Architecture white paper, 2018, at the reference clock",
        tera=_matrix(53.8, float32=13.4, int8=215.2, bfloat16=False),
    ),
    # ---- NVIDIA: Ampere
    DevicePeaks(
        names=r"(NVIDIA )?A100(-(SXM4|PCIE)-[48]0GB| 80GB PCIe)",
        units=108,
        source="NVIDIA A100 Tensor Core GPU data sheet, 2021",
        tera=_matrix(312, float64=19.5, float32=19.5, tf32=156, int8=624),
    ),
    DevicePeaks(
        names=r"NVIDIA A30",
        units=56,
        source="NVIDIA A30 Tensor Core GPU data sheet, 2021",
        tera=_matrix(165, float64=10.3, float32=10.3, tf32=82, int8=330),
    ),
    DevicePeaks(
        names=r"(NVIDIA )?A40",
        units=84,
        source=_AMPERE_PAPER,
        tera=_matrix(149.7, float32=37.4, tf32=74.8, int8=299.3),
    ),
    DevicePeaks(
        names=r"NVIDIA A10",
        units=72,
        source="NVIDIA A10 Tensor Core GPU data sheet, 2021",
        tera=_matrix(125, float32=31.2, tf32=62.5, int8=250),
    ),
    DevicePeaks(
        names=r"NVIDIA A10G",
        units=80,
        source="NVIDIA A10G Tensor Core GPU data sheet, 2021",
        tera=_matrix(70, float32=35, tf32=35, int8=140),
    ),
    DevicePeaks(
        names=r"NVIDIA A2",
        units=10,
        source="NVIDIA A2 Tensor Core GPU data sheet, 2021",
        tera=_matrix(18, float32=4.5, tf32=9, int8=36),
    ),
    DevicePeaks(
        names=r"(NVIDIA )?RTX A6000",
        units=84,
        source=_AMPERE_PAPER,
        tera=_matrix(154.8, float32=38.7, tf32=77.4, int8=309.7),
    ),
    DevicePeaks(
        names=r"(NVIDIA )?RTX A5000",
        units=64,
        source="NVIDIA RTX A5000 data sheet, 2021",
        tera=_matrix(111.1, float32=27.8),
    ),
    DevicePeaks(
        names=r"(NVIDIA )?RTX A4000",
        units=48,
        source="NVIDIA RTX A4000 data sheet, 2021",
        tera=_matrix(76.7, float32=19.2),
    ),
    DevicePeaks(
        names=r"(NVIDIA )?GeForce RTX 3090",
        units=82,
        source=f"{_AMPERE_PAPER}, float32 accumulation",
        tera=_matrix(71.2, float32=35.6, tf32=35.6, int8=284.7),
    ),
    # ---- NVIDIA: Ada
    DevicePeaks(
        names=r"NVIDIA L4",
        units=58,
        source="NVIDIA L4 Tensor Core GPU data sheet, 2023",
        tera=_matrix(121, float32=30.3, tf32=60, float8=242.5, int8=242.5),
    ),
    DevicePeaks(
        names=r"NVIDIA L40",
        units=142,
        source="NVIDIA L40 GPU data sheet, 2023",
        tera=_matrix(181.05, float32=90.5, tf32=90.5, float8=362, int8=362),
    ),
    DevicePeaks(
        names=r"NVIDIA L40S",
        units=142,
        source="NVIDIA L40S GPU data sheet, 2023",
        tera=_matrix(362.05, float32=91.6, tf32=183, float8=733, int8=733),
    ),
    DevicePeaks(
        names=r"NVIDIA RTX 6000 Ada Generation",
        units=142,
        source="NVIDIA Ada GPU Architecture white paper, 2023",
        tera=_matrix(364.2, float32=91.1, tf32=182.1, float8=728.5, int8=728.5),
    ),
    DevicePeaks(
        names=r"NVIDIA GeForce RTX 4090",
        units=128,
        source="NVIDIA Ada GPU Architecture white paper, 2023, float32 accumulation",
        tera=_matrix(165.2, float32=82.6, tf32=82.6, float8=330.3, int8=660.6),
    ),
    # ---- NVIDIA: Hopper
    DevicePeaks(names=r"NVIDIA H100 80GB HBM3", units=132, source=_HOPPER_PAPER, tera=_HOPPER_SXM),
    DevicePeaks(names=r"NVIDIA H100 PCIe", units=114, source=_HOPPER_PAPER, tera=_HOPPER_PCIE),
    DevicePeaks(
        names=r"NVIDIA H100 NVL",
        units=132,
        source="NVIDIA H100 Tensor Core GPU data sheet, 2024",
        tera=_HOPPER_NVL,
    ),
    DevicePeaks(
        names=r"NVIDIA H800( PCIe)?",
        units=132,
        source=f"{_HOPPER_PAPER} (the H100 SXM, whose float64 alone is cut)",
        tera={dtype: _HOPPER_SXM[dtype] for dtype in _EXPORT},
    ),
    DevicePeaks(
        names=r"NVIDIA H800( PCIe)?",
        units=114,
        source=f"{_HOPPER_PAPER} (the H100 PCIe, whose float64 alone is cut)",
        tera={dtype: _HOPPER_PCIE[dtype] for dtype in _EXPORT},
    ),
    DevicePeaks(
        names=r"NVIDIA H20",
        units=78,
        source="NVIDIA HGX H20 product brief, 2023",
        tera=_matrix(148, tf32=74, float8=296, int8=296),
    ),
    DevicePeaks(
        names=r"NVIDIA H200",
        units=132,
        source="NVIDIA H200 Tensor Core GPU data sheet, 2024, digits of the H100 white paper",
        tera=_HOPPER_SXM,
    ),
    DevicePeaks(
        names=r"NVIDIA H200 NVL",
        units=132,
        source="NVIDIA H200 Tensor Core GPU data sheet, 2024",
        tera=_HOPPER_NVL,
    ),
    DevicePeaks(
        names=r"NVIDIA GH200 (120GB|480GB|144G HBM3e)",
        units=132,
        source="NVIDIA GH200 Grace Hopper Superchip data sheet, 2024, digits of the H100 white paper",
        tera=_HOPPER_SXM,
    ),
    # ---- NVIDIA: Blackwell
    DevicePeaks(
        names=r"NVIDIA B200",
        units=148,
        source="NVIDIA HGX B200 data sheet, 2025",
        tera=_matrix(2250, float64=37, float32=75, tf32=1125, float8=4500, int8=4500),
    ),
    DevicePeaks(
        names=r"NVIDIA GB200",
        units=None,
        source="NVIDIA GB200 NVL72 data sheet, 2024, for one of the two GPUs of a superchip",
        tera=_matrix(2500, float64=40, float32=80, tf32=1250, float8=5000, int8=5000),
    ),
    DevicePeaks(
        names=r"NVIDIA B300 SXM6 AC",
        units=148,
        source="NVIDIA HGX B300 data sheet, 2025",
        tera=_matrix(2250, float32=75, tf32=1125, float8=4500),
    ),
    DevicePeaks(
        names=r"NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        units=188,
        source="NVIDIA RTX Blackwell PRO GPU Architecture white paper, 2025",
        tera=_matrix(503.8, float32=126, tf32=251.9, float8=1007.6, int8=1007.6),
    ),
    DevicePeaks(
        names=r"NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        units=188,
        source="NVIDIA RTX PRO 6000 Blackwell Max-Q data sheet, 2025: an eighth of its sparse FP4 rate",
        tera=_matrix(438.9, float32=110),
    ),
    DevicePeaks(
        names=r"NVIDIA GeForce RTX 5090",
        units=170,
        source="NVIDIA RTX Blackwell GPU Architecture white paper, 2025, float32 accumulation",
        tera=_matrix(209.5, float32=104.8, tf32=104.8, float8=419, int8=838),
    ),
    # ---- AMD; torch sees a MI250X as two devices
    DevicePeaks(
        names=r"AMD Instinct MI250X( / MI250)?",
        units=110,
        source="AMD Instinct MI250X data sheet, 2022, half of it for one of the two dies",
        tera=_matrix(191.5, float64=47.85, float32=47.85, int8=191.5),
        maker="AMD",
    ),
    DevicePeaks(
        names=r"AMD Instinct (MI250|MI250X / MI250)",
        units=104,
        source="AMD Instinct MI250 data sheet, 2022, half of it for one of the two dies",
        tera=_matrix(181.05, float64=45.25, float32=45.25, int8=181.05),
        maker="AMD",
    ),
    DevicePeaks(
        names=r"AMD Instinct MI300X",
        units=304,
        source="AMD Instinct MI300X data sheet, 2023",
        tera=_matrix(1307.4, float64=163.4, float32=163.4, tf32=653.7, float8=2614.9, int8=2614.9),
        maker="AMD",
    ),
    DevicePeaks(
        names=r"AMD Instinct MI325X",
        units=304,
        source="AMD Instinct MI325X data sheet, 2024",
        tera=_matrix(1307.4, float64=163.4, float32=163.4, tf32=653.7, float8=2614.9, int8=2614.9),
        maker="AMD",
    ),
    # ---- Intel; a device is the card or one of its two stacks, by ZE_FLAT_DEVICE_HIERARCHY
    DevicePeaks(
        names=r"Intel\(R\) Data Center GPU Max 1550",
        units=1024,
        source="Intel Data Center GPU Max Series product brief, 2023",
        tera=_matrix(839, float64=52.4, float32=52.4, tf32=419, int8=1678),
        maker="Intel",
    ),
    DevicePeaks(
        names=r"Intel\(R\) Data Center GPU Max 1550",
        units=512,
        source="Intel Data Center GPU Max Series product brief, 2023, half of it for one of the two stacks",
        tera=_matrix(419.5, float64=26.2, float32=26.2, tf32=209.5, int8=839),
        maker="Intel",
    ),
)
