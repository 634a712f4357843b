"""Runs each check of ``lightning-modelprof selftest`` on the machine's GPU."""

from __future__ import annotations

import pytest
import torch

from lightning_modelprof.selftest.runner import CHECKS, run_check

pytestmark = pytest.mark.gpu


def device_here():
    """Kind of GPU that torch finds, or ``None``."""
    for kind in ("cuda", "xpu"):
        if getattr(torch, kind).is_available():
            return kind
    return "mps" if torch.backends.mps.is_available() else None


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_selftest_check_passes_on_gpu(check):
    device = device_here()
    if device is None:
        pytest.skip("needs a CUDA, XPU or MPS device")
    if check.kinds and device not in check.kinds:
        pytest.skip(f"needs a device of {' or '.join(check.kinds)}")
    result = run_check(check, device, check.seconds)
    if result.status == "SKIP":
        pytest.skip(result.reason)
    assert [one.sentence() for one in result.comparisons if not one.passes] == []
    assert result.status == "PASS", result.reason
