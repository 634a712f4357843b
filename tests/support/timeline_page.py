"""A page with only the dashboard's timeline, and traces to show in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.show.tensorboard.packing import pack_columns
from tests.support.dashboard_page import BYTES, HTML, SCRIPT, Files, Site, loaded, wait

PAGE = """<!doctype html><html data-theme="light"><meta charset="utf-8"><title>Timeline</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="html/parts.css"><link rel="stylesheet" href="timeline.css">
<style>body { margin: 8px; background: var(--page); color: var(--text); font: 14px/1.5 var(--sans); }</style>
<div id="place" style="--timeline-height: 96vh"></div><script type="module" src="page.js"></script></html>"""
START = """
import { unpackColumns } from "./columns.js";
import { mountTimeline } from "./timeline/view.js";
import * as format from "./format.js";
window.changes = [];
window.format = format;
const packed = await (await fetch("./data")).arrayBuffer();
const start = performance.now();
window.unpacked = await unpackColumns(packed);
window.unpackMs = performance.now() - start;
window.mount = (options = {}) => {
  window.view?.destroy();
  const place = document.getElementById("place");
  const onChange = (state) => window.changes.push(state);
  window.view = mountTimeline(place, window.unpacked, { title: "test", onChange, ...options });
  return true;
};
window.mount();
await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
window.openMs = performance.now() - start;
window.ready = true;
"""
Meta = dict[str, Any]
Columns = dict[str, NDArray[Any]]


def page_files(packed: bytes) -> Files:
    """The page with these columns, for :func:`tests.support.dashboard_page.serve`."""
    return {"": (PAGE.encode(), HTML), "page.js": (START.encode(), SCRIPT), "data": (packed, BYTES)}


@contextmanager
def opened(browser: Any, site: Site, packed: bytes) -> Iterator[None]:
    """Show these columns; check afterwards that the console is empty and no other server got a request."""
    with loaded(browser, site, page_files(packed)):
        wait(browser, "return window.ready === true")
        yield


def packed_trace(meta: Meta, columns: Columns) -> bytes:
    """The columns as sent to the dashboard."""
    return pack_columns(meta, columns, frozenset({"begin"}))


CATEGORIES = ("step", "operator", "runtime call", "kernel", "memcpy")
STEP, OPERATOR, RUNTIME_CALL, KERNEL, MEMCPY = range(5)
NAMES = ("aten::operator", "cudaLaunchKernel", "void gemm_kernel", "Memcpy")  # in all categories except steps
NUM_NAMES = 12  # of each, numbered


@dataclass(eq=False, kw_only=True)
class Row:
    """Slices of one lane and depth; ``launched_by`` are indices into the row ``launcher``."""

    lane: int
    depth: int
    begin: NDArray[np.int64]
    duration: NDArray[np.int64]
    category: int
    num_names: int
    launcher: Row | None = None
    launched_by: NDArray[np.int64] | None = None


def make_trace(
    num_operators: int = 60, num_steps: int = 10, num_levels: int = 3, begin_ns: int = 1_000_003
) -> tuple[Meta, Columns]:
    """A training-like trace: nested operators on two threads, kernels on three streams.

    Args:
        num_operators: on the outermost level of each thread in each step.
        num_steps: number of steps.
        num_levels: nesting depth of operators.
        begin_ns: start of the trace.

    Returns:
        Metadata and columns of a timeline.
    """
    random = np.random.default_rng(0)
    step_ns = 12_000_003
    first = begin_ns + step_ns * np.arange(num_steps)
    in_steps = np.full(num_steps, step_ns - 70_001)
    rows = [Row(lane=0, depth=0, begin=first, duration=in_steps, category=STEP, num_names=1)]
    launches = []
    for lane in (0, 1):
        begin, length = _cut(first + 1_000, np.full(num_steps, step_ns - 80_000), num_operators, random)
        depth = 1 - lane  # below the steps
        for pieces in (3, 2, *(1,) * (num_levels - 2)):
            rows.append(
                Row(
                    lane=lane,
                    depth=depth,
                    begin=begin,
                    duration=length,
                    category=OPERATOR,
                    num_names=NUM_NAMES,
                )
            )
            depth += 1
            begin, length = _cut(begin, length, pieces, random)
        launches.append(
            Row(lane=lane, depth=depth, begin=begin, duration=length, category=RUNTIME_CALL, num_names=3)
        )
    for stream in range(3):
        launcher = launches[stream % 2]
        chosen = np.arange(stream // 2, len(launcher.begin), 2)
        length = random.integers(1_000, 30_000, len(chosen))
        # Each starts at its launch, or at the previous one's end if later.
        total = np.cumsum(length)
        end = total + np.maximum.accumulate(launcher.begin[chosen] + 4_321 - (total - length))
        rows.append(
            Row(
                lane=2 + stream,
                depth=0,
                begin=end - length,
                duration=length,
                category=KERNEL if stream < 2 else MEMCPY,
                num_names=9,
                launcher=launcher,
                launched_by=chosen,
            )
        )
    rows = sorted((*rows, *launches), key=lambda row: (row.lane, row.depth))
    steps = [[number + 5, int(at), int(at) + step_ns] for number, at in enumerate(first)]
    return _packed_form(rows, steps, random)


def _cut(
    begin: NDArray[np.int64], length: NDArray[np.int64], pieces: int, random: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Slices inside each slice, with gaps between them."""
    room = length // pieces
    starts = begin[:, None] + room[:, None] * np.arange(pieces)
    left = random.random(starts.shape) * 0.2
    used = (0.4 + random.random(starts.shape) * 0.4) * room[:, None]
    inner = starts + (left * room[:, None]).astype(np.int64) + 1
    return inner.ravel(), np.maximum(used.astype(np.int64) - 2, 1).ravel()


def _packed_form(
    rows: list[Row], steps: list[list[int]], random: np.random.Generator
) -> tuple[Meta, Columns]:
    """Metadata and columns of these rows, in order of lane and depth."""
    begin = np.concatenate([row.begin for row in rows])
    duration = np.concatenate([row.duration for row in rows])
    category = np.concatenate([np.full(len(row.begin), row.category) for row in rows])
    first_name = [0, *(1 + NUM_NAMES * place for place in range(len(NAMES)))]
    name = np.concatenate(
        [first_name[row.category] + random.integers(0, row.num_names, len(row.begin)) for row in rows]
    )
    offset = np.cumsum([0, *(len(row.begin) for row in rows)])
    launch = np.full(len(begin), -1, np.int64)
    for place, row in enumerate(rows):
        if row.launcher is not None:
            launch[offset[place] : offset[place + 1]] = offset[rows.index(row.launcher)] + row.launched_by
    begin_ns, end_ns = steps[0][1], int((begin + duration).max())
    times = np.sort(random.integers(begin_ns, end_ns, 500))
    host, device = "host", "GPU 0"
    meta = {
        "source": "generated", "rank": 0, "begin_ns": begin_ns, "end_ns": end_ns,
        "lanes": [
            {"label": "main thread 1", "group": host, "is_device": False},
            {"label": "autograd thread 2", "group": host, "is_device": False},
            *({"label": f"GPU 0 stream {n}", "group": device, "is_device": True} for n in (7, 13, 20)),
        ],
        "names": ["ProfilerStep#", *(f"{name}_{number}" for name in NAMES for number in range(NUM_NAMES))],
        "categories": list(CATEGORIES),
        "details": ["shapes: [[64, 3], [3, 8]]\nmodel.py(12): forward"],
        "steps": steps,
        "notes": [],
        "counters": [{"label": "GPU 0 memory", "group": device, "unit": "bytes", "count": len(times)}],
        "rows": [[row.lane, row.depth, len(row.begin)] for row in rows],
    }  # fmt: skip
    columns = {
        "begin": begin,
        "duration": duration,
        "name": name,
        "category": category,
        "detail": np.where(category == OPERATOR, 0, -1),
        "launch": launch,
        "counter_0_time": times,
        "counter_0_value": np.cumsum(random.integers(-50, 60, len(times))).clip(0) * 1_000_000.0,
    }
    return meta, columns
