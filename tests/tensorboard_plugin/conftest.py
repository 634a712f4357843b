"""Fixtures of the dashboard's tests: profiles in a TensorBoard, and the dashboard's files without one."""

from __future__ import annotations

import pytest

from tests.support.dashboard_page import serve
from tests.support.dashboard_profiles import RUNS, write_logs
from tests.support.tensorboard_server import tensorboard


@pytest.fixture(scope="session")
def logdir(tmp_path_factory):
    """Profiles of all kinds; tests only read them."""
    root = tmp_path_factory.mktemp("logs")
    write_logs(root, tmp_path_factory.mktemp("work"))
    return root


@pytest.fixture(scope="session")
def server(logdir):
    """A TensorBoard that reads the log directory only once, as nothing is added."""
    with tensorboard(logdir, "--reload_interval", "0") as running:
        yield running.wait_for(*RUNS)


@pytest.fixture(scope="session")
def site():
    """A server of the dashboard's files for test pages: its address, and the files served before them."""
    files = {}
    with serve(files) as address:
        yield address, files
