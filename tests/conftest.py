"""Settings of all tests."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.chromium import start_chromium

OURS = "lightning_modelprof"

# How long an example takes says nothing on a machine that does something else as well.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Threads that wait for each other make small models many times slower on a machine that has more to do.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def _warnings_are_errors(request, caplog):
    """A warning of ours that is an error becomes a line in the log, so that training goes on; not here."""
    yield
    if request.node.get_closest_marker("logs_warnings") is None:
        said = [one.getMessage() for one in caplog.get_records("call") if one.name.startswith(OURS)]
        assert said == []


@pytest.fixture(scope="session")
def browser():
    """One Chromium for all tests of pages."""
    driver = start_chromium()
    yield driver
    driver.quit()
