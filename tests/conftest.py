"""Settings of all tests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.chromium import start_chromium

# How long an example takes says nothing on a machine that does something else as well.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def browser():
    """One Chromium for all tests of pages."""
    driver = start_chromium()
    yield driver
    driver.quit()
