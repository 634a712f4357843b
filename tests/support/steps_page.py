"""A page with only the Steps view, and runs to show in it."""

from __future__ import annotations

import numpy as np

from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag, StepTimings
from tests.support.dashboard_page import BYTES, HTML, SCRIPT, Files

PAGE = """<!doctype html>
<html lang="en" data-theme="light">
<meta charset="utf-8">
<title>Steps</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="html/parts.css">
<link rel="stylesheet" href="dashboard.css">
<link rel="stylesheet" href="vendor/uplot/uPlot.min.css">
<link rel="stylesheet" href="steps/steps.css">
<body style="display: block"><main></main>
<script type="module" src="page.js"></script>
"""

START = """
import { unpackColumns } from "./columns.js";
import { mountSteps } from "./steps/steps.js";

window.states = [];
// The view waits for a pause before it works out figures; tests have no need of a long one.
const later = window.setTimeout;
window.setTimeout = (act, pause, ...given) => later(act, Math.min(pause, 10), ...given);
const packed = await (await fetch("steps.bin")).arrayBuffer();
window.unpacked = await unpackColumns(packed);
const container = document.querySelector("main");
const onChange = (state) => window.states.push(state);
window.mount = (options) => {
  window.view?.destroy();
  window.view = mountSteps(container, window.unpacked, { ...options, onChange });
};
window.mount(JSON.parse(decodeURIComponent(location.hash.slice(1)) || "{}"));
"""


def page_files(packed: bytes) -> Files:
    """The page with these steps, for :func:`tests.support.dashboard_page.serve`."""
    return {
        "": (PAGE.encode(), HTML),
        "page.js": (START.encode(), SCRIPT),
        "steps.bin": (packed, BYTES),
    }


WEIGHTS = {
    "dataloader": 2.0,
    "transfer": 0.4,
    "forward": 5.0,
    "backward": 7.0,
    "optimizer": 1.5,
    "zero_grad": 0.1,
    "callbacks": 0.6,
    "logging": 0.8,
    "other": 0.5,
}


def sample_steps(n, *, seed=0, epoch=100, has_samples=True, weights=WEIGHTS):
    """A run with occasional slow batches, epochs, a profiler window and steps without an optimizer step."""
    random = np.random.default_rng(seed)
    phases = np.zeros((n, len(PHASES)), np.int64)
    for key, weight in weights.items():
        phases[:, PHASE_INDEX[key]] = 1e6 * weight * random.gamma(40, 1 / 40, n)
    late = random.random(n) < 0.07
    phases[late, PHASE_INDEX["dataloader"]] += (9e6 * random.gamma(4, 1 / 4, n)[late]).astype(np.int64)
    index = np.arange(n)
    tags = np.where(index % epoch == 0, int(StepTag.FIRST_OF_EPOCH), 0)
    tags[:10] |= int(StepTag.SKIP_FIRST)
    for first, last, tag in (
        (12, 14, StepTag.PROFILER_WARMUP),
        (14, 20, StepTag.PROFILED),
        (20, 21, StepTag.PROFILER_STOP),
    ):
        tags[first:last] |= int(tag)
    tags[index % 4 != 3] |= int(StepTag.NO_OPTIMIZER_STEP)
    phases[index % epoch == 0, PHASE_INDEX["dataloader_init"]] = 30_000_000
    phases[14:20, PHASE_INDEX["profiler"]] = 11_000_000
    return StepTimings(
        step=index,
        duration_ns=phases.sum(axis=1),
        phases_ns=phases,
        device_phases_ns=np.full((n, len(PHASES)), NOT_MEASURED, np.int64),
        samples=np.full(n, 32) if has_samples else np.full(n, NOT_MEASURED),
        tags=tags.astype(np.int64),
    )


def with_profiler_time(steps, time_ns):
    """Lengthen every fifth step, clean or not, by profiler time."""
    steps.phases_ns[::5, PHASE_INDEX["profiler"]] += time_ns
    steps.duration_ns[::5] += time_ns
    return steps
