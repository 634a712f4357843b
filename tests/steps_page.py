"""The view Steps in a page of its own: a tiny server that sends TensorBoard's security policy."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

import lightning_modelprof
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.records import NOT_MEASURED, StepTag, StepTimings

PACKAGE = Path(lightning_modelprof.__file__).parent
FOLDERS = (PACKAGE / "tensorboard_plugin" / "static", PACKAGE / "show")

# What TensorBoard 2.21 sends with every page of a plugin.
POLICY = "; ".join(
    (
        "default-src 'self'",
        "font-src 'self' data:",
        "frame-src 'self' https://ui.perfetto.dev",
        "img-src 'self' data: blob:",
        "object-src 'none'",
        "style-src 'self' https://www.gstatic.com data: 'unsafe-inline'",
        "connect-src 'self'",
        "script-src 'self' 'unsafe-eval'",
    )
)
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}

PAGE = """<!doctype html>
<html lang="en" data-theme="light">
<meta charset="utf-8">
<title>Steps</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="html/parts.css">
<link rel="stylesheet" href="html/report.css">
<link rel="stylesheet" href="vendor/uplot/uPlot.min.css">
<link rel="stylesheet" href="steps/steps.css">
<body style="display: block"><main></main>
<script type="module" src="page.js"></script>
"""

SCRIPT = """
import { unpackColumns } from "./columns.js";
import { mountSteps } from "./steps/steps.js";

window.states = [];
const options = JSON.parse(decodeURIComponent(location.hash.slice(1)) || "{}");
const packed = await (await fetch("steps.bin")).arrayBuffer();
window.unpacked = await unpackColumns(packed);
const container = document.querySelector("main");
const onChange = (state) => window.states.push(state);
window.view = mountSteps(container, window.unpacked, { ...options, onChange });
"""


class Handler(BaseHTTPRequestHandler):
    """Static files of the package, the page, and one blob of packed steps."""

    def __init__(self, blob, *args):
        self.blob = blob
        super().__init__(*args)

    def do_GET(self):
        path = self.path.partition("?")[0].lstrip("/")
        own = {
            "": (PAGE.encode(), ".html"),
            "page.js": (SCRIPT.encode(), ".js"),
            "steps.bin": (self.blob(), ""),
        }
        files = [folder / path for folder in FOLDERS if path and (folder / path).is_file()]
        if path in own:
            data, suffix = own[path]
        elif files:
            data, suffix = files[0].read_bytes(), files[0].suffix
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", TYPES.get(suffix, "application/octet-stream"))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        """Nothing: the tests' output is for failures."""


@contextmanager
def serve(blob):
    """Address of the page; ``blob`` is called for the packed steps."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, blob))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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
    """A run with slow batches now and then, epochs, one profiler window and steps that did not step."""
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
