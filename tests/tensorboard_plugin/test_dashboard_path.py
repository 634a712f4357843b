"""Links of slices in the critical path's lane, in a real browser. Needs Chromium."""

from __future__ import annotations

import pytest

from lightning_modelprof.report.timeline.timeline import timeline_of
from lightning_modelprof.show.tensorboard.timeline_columns import pack_timeline
from tests.support.dashboard_page import wait
from tests.support.timeline_page import opened
from tests.support.traces import event, make_trace

pytestmark = pytest.mark.slow


def test_critical_path_slice_links_to_its_whole(browser, site):
    found = timeline_of(
        make_trace(
            [
                event("user_annotation", "ProfilerStep#1", 0, 100),
                event("cuda_runtime", "cudaLaunchKernel", 10, 14, correlation=1),
                event("kernel", "gemm", 12, 90, 7, 0, device=0, stream=7, correlation=1),
                event("cuda_runtime", "cudaDeviceSynchronize", 20, 92),
            ]
        )
    )
    names = [found.names[name] for name in found.name.tolist()]
    words = [found.categories[category] for category in found.category.tolist()]
    part = next(at for at, word in enumerate(words) if word == "critical path: kernel")
    kernel = next(at for at, word in enumerate(words) if word == "kernel")
    call = names.index("cudaLaunchKernel")
    text = "return document.getElementById('place').innerText"
    with opened(browser, site, pack_timeline(found)):
        assert "critical path" in browser.execute_script(text)
        browser.execute_script("window.view.select(arguments[0])", part)
        wait(browser, f"{text}.includes('Part of')")
        assert "Launched by" not in browser.execute_script(text)
        browser.execute_script("window.view.select(arguments[0])", kernel)
        wait(browser, f"{text}.includes('Launched by')")
        browser.execute_script("window.view.select(arguments[0])", call)
        wait(browser, f"{text}.includes('Launches')")
        # Only the kernel, not the slice of the path that is part of it or leads to it.
        assert browser.execute_script(text).count("gemm") == 1
