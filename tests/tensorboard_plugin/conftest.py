"""What tests of the dashboard share: profiles in a TensorBoard, and the dashboard's files without one."""

from __future__ import annotations

import pytest

from tests.support.dashboard_page import serve
from tests.support.dashboard_profiles import RUNS, write_logs
from tests.support.tensorboard_server import tensorboard


@pytest.fixture(scope="session")
def logdir(tmp_path_factory):
    """Profiles of all kinds, which tests only read."""
    root = tmp_path_factory.mktemp("logs")
    write_logs(root, tmp_path_factory.mktemp("work"))
    return root


@pytest.fixture(scope="session")
def server(logdir):
    """A TensorBoard that looks once what there is, as nothing is added."""
    with tensorboard(logdir, "--reload_interval", "0") as running:
        yield running.wait_for(*RUNS)


@pytest.fixture(scope="session")
def site():
    """Serves the dashboard's files to pages of tests: its address, and what is served before them."""
    files = {}
    with serve(files) as address:
        yield address, files
