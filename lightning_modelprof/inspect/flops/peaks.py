"""The most FLOP/s that a device can do: given by the user, or from the table of data sheets, or unknown."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isfinite
from typing import NamedTuple

import torch

from lightning_modelprof.errors import quoted
from lightning_modelprof.flops.peak_table import DevicePeaks, devices_named
from lightning_modelprof.run.model_cost import PeakRate

_REMEDY = "give peak_flops_per_s=..."


class _Identity(NamedTuple):
    """What torch says of a device; ``units`` as in ``DevicePeaks``, ``None`` where it does not say."""

    name: str
    units: int | None


def peak_rates(
    device: torch.device, dtypes: Collection[str], override: float | Mapping[str, float] | None
) -> tuple[tuple[PeakRate, ...], str]:
    """The dense peaks of one device in some dtypes.

    float32 has the TF32 peak where torch may use TF32 for matrix products on an NVIDIA device
    (``torch.set_float32_matmul_precision``, ``torch.backends.cuda.matmul``); ``source`` says which it is.

    Args:
        device: the device that computes.
        dtypes: names such as ``bfloat16``; an empty name has no rate and is passed over.
        override: FLOP/s that the user gave, for every dtype or by dtype. A key ``float8`` holds for all
            formats of 8 bits. What a mapping lacks comes from the table.

    Returns:
        The rates that are known, by dtype in alphabetic order, and a note on those that are not; empty if
        all are.

    Raises:
        ValueError: when ``override`` has a name that is no dtype or a rate that is no positive number.

    Caveats:
        Convolutions of cuDNN may use TF32 where matrix products may not (``torch.backends.cudnn``); the
        peak is that of the matrix products.
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
            note = f"peak_flops_per_s has no rate for {lacking}; {note}"
        rates = sorted([*rates, *found], key=lambda rate: rate.dtype)
    return tuple(rates), note


def _checked(override: float | Mapping[str, float] | None) -> float | dict[str, float]:
    """The user's rates as floats."""
    if override is None:
        return {}
    if not isinstance(override, Mapping):
        return _checked_rate("peak_flops_per_s", override)
    rates: dict[str, float] = {}
    for dtype, rate in override.items():
        known = isinstance(dtype, str) and isinstance(getattr(torch, dtype, None), torch.dtype)
        if not known and dtype != "float8":
            raise ValueError(
                f"peak_flops_per_s: expected names of dtypes such as 'bfloat16', got {quoted(dtype)}."
                " Take the name that torch has, without 'torch.'"
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
    """The formats of 8 bits have one peak."""
    return "float8" if dtype.startswith("float8_") else dtype


def _from_table(device: torch.device, dtypes: list[str]) -> tuple[list[PeakRate], str]:
    """What the data sheet of the device has of these dtypes, and a note on the others."""
    try:
        identity = _identify(device)
    except Exception as error:  # a driver may raise anything, and a missing peak must not stop a fit
        return [], f"no peak is known for {str(device)!r} (it has no name: {error}); {_REMEDY}"
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
    """The rate, or an empty reason why there is none."""
    if key not in peaks.tera:
        return ""
    # The table's decimals have at most two places; rounding undoes what the product adds to them.
    return PeakRate(
        dtype=dtype, flops_per_s=float(round(peaks.tera[key] * 1e12)), source=f"{peaks.source}{remark}"
    )


def _float32_rate(peaks: DevicePeaks) -> PeakRate | str:
    """The rate of float32 under torch's present settings, or the reason why there is none."""
    if "tf32" not in peaks.tera:
        return _rate(peaks, "float32", "float32")
    if not _allows_tf32():
        return _rate(peaks, "float32", "float32", "; without TF32, which torch is set not to use")
    if peaks.maker == "NVIDIA":
        return _rate(peaks, "float32", "tf32", "; with TF32, which torch is set to use")
    return f" (torch is set to use TF32; whether it does on devices of {peaks.maker} cannot be told)"


def _allows_tf32() -> bool:
    """Whether matrix products may use TF32."""
    # The flag of torch 2.9; from there on the older one raises if the user has set the newer.
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if precision is not None:
        return bool(precision == "tf32")
    return bool(torch.backends.cuda.matmul.allow_tf32)


def _why_unknown(identity: _Identity, candidates: tuple[DevicePeaks, ...]) -> str:
    """What keeps a device whose name may look familiar out of the table."""
    if " MIG " in identity.name:
        return " (a MIG slice is a part of a device)"
    if "Laptop" in identity.name or "Max-Q" in identity.name:
        return " (the name does not tell a laptop's clocks)"
    if candidates:
        expected = " or ".join(str(peaks.units) for peaks in candidates)
        return f" with {identity.units} multiprocessors (the known one has {expected})"
    return ""


def _identify(device: torch.device) -> _Identity:
    """Name and units as torch reports them; for other devices than CUDA's and XPU's the type is the name."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return _Identity(properties.name, properties.multi_processor_count)
    if device.type == "xpu":
        found = torch.xpu.get_device_properties(device)
        return _Identity(found.name, found.gpu_eu_count)
    return _Identity(device.type, None)
