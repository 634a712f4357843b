"""No dashboard view is too wide, cuts its text or logs a message, and the check finds such faults."""

from __future__ import annotations

import pytest

from tests.support.chromium import said
from tests.support.dashboard_looks import FAULTS, KEYS, REAL, WIDTHS, Pages, look, write_logs
from tests.support.dashboard_page import HTML, serve
from tests.support.tensorboard_server import tensorboard

pytestmark = pytest.mark.slow

CUT = "style='width:30px;overflow:hidden;white-space:nowrap'"
PAGE = "<!doctype html><html><body style='margin:0'><main style='overflow:auto'>{}</main></body></html>"


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("<p>all is well</p>", None),
        ("<p style='width:5000px'>wide</p>", "px wide in"),
        (f"<p {CUT}>much longer than that</p>", "cut: p"),
        (f"<p {CUT} title='all'>much longer than that</p>", None),
        (f"<div {CUT}><b>much longer</b></div>", "cut: b in div"),
        ("<div style='width:30px;overflow:auto'><b style='white-space:nowrap'>much longer</b></div>", None),
        ("<svg width=200 height=50><text x=180 y=20>out of it</text></svg>", "out of its drawing"),
        ("<svg width=200 height=50><text y=20>one</text><text x=5 y=22>two</text></svg>", "on each other"),
        ("<svg width=200 height=50><text y=20 font-size=4>tiny</text></svg>", "too small to read"),
        ("<div class=xs><i>1,000</i><i style='margin-left:-20px'>2,000</i></div>", "ticks on each other"),
    ],
)  # fmt: skip
def test_faults_are_found(browser, body, fault):
    with serve({"": (PAGE.format(body).encode(), HTML)}) as address:
        browser.get(address)
        found = browser.execute_script(FAULTS)
        said(browser)
    assert (found == []) is (fault is None), found
    assert fault is None or any(fault in one for one in found), found


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A TensorBoard with every subject, and their link parameters."""
    logs = tmp_path_factory.mktemp("looks") / "logs"
    logs.mkdir()
    subjects = write_logs(logs)
    with tensorboard(logs) as server:
        yield server.wait_for(*(choice["run"] for choice in subjects.values())), subjects


@pytest.mark.parametrize("subject", ["cifar", "windows", "ranks", *REAL])
def test_views_have_no_faults(browser, shown, subject):
    server, subjects = shown
    views = KEYS if subject in ("windows", "V100") else ("overview", "trace", "compare")
    browser.execute_script("return 1")
    said(browser)
    try:
        wrong = {
            name: faults
            for name, faults in look(
                Pages(browser, server), {subject: subjects[subject]}, views, WIDTHS, None
            )
            if faults
        }
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wrong == {}
