"""A page with nothing but the timeline of the dashboard, and traces to show in it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.show.columns import pack_columns
from tests.dashboard_page import BYTES, HTML, SCRIPT, Files

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
    """The page with such columns, for :func:`tests.dashboard_page.serve`."""
    return {"": (PAGE.encode(), HTML), "page.js": (START.encode(), SCRIPT), "data": (packed, BYTES)}


def packed_trace(meta: Meta, columns: Columns) -> bytes:
    """The columns as the dashboard gets them."""
    return pack_columns(meta, columns, frozenset({"begin"}))


def make_trace(
    num_operators: int = 60, num_steps: int = 10, num_levels: int = 3, begin_ns: int = 1_000_003
) -> tuple[Meta, Columns]:
    """A trace as a training has it: operators in operators on two threads, kernels on three streams.

    Args:
        num_operators: on the outermost level of each thread in each step.
        num_steps: how many steps.
        num_levels: of operators in operators.
        begin_ns: when the trace begins.

    Returns:
        The description and the columns of a timeline.
    """
    random = np.random.default_rng(0)
    rows: list[tuple[int, int, NDArray[np.int64], NDArray[np.int64], int, int]] = []
    step_ns = 12_000_003
    first = begin_ns + step_ns * np.arange(num_steps)
    rows.append((0, 0, first, np.full(num_steps, step_ns - 70_001), 0, 1))
    launches: list[tuple[NDArray[np.int64], int]] = []
    for lane in (0, 1):
        begin, length = _cut(first + 1_000, np.full(num_steps, step_ns - 80_000), num_operators, random)
        depth = 1 - lane
        for level, pieces in enumerate((3, 2, *(1,) * (num_levels - 2))):
            rows.append((lane, depth + level, begin, length, 1, 12))
            begin, length = _cut(begin, length, pieces, random)
        rows.append((lane, depth + num_levels, begin, length, 2, 3))
        launches.append((begin, len(rows) - 1))
    kernel_rows = []
    for stream in range(3):
        begins, source = launches[stream % 2]
        chosen = np.arange(stream // 2, len(begins), 2)
        length = random.integers(1_000, 30_000, len(chosen))
        total = np.cumsum(length)
        end = total + np.maximum.accumulate(begins[chosen] + 4_321 - (total - length))
        kernel_rows.append((len(rows), source, chosen))
        rows.append((2 + stream, 0, end - length, length, 3 if stream < 2 else 4, 9))
    return _columns(rows, kernel_rows, first, step_ns, begin_ns, random)


def _cut(
    begin: NDArray[np.int64], length: NDArray[np.int64], pieces: int, random: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Slices inside of each slice, with gaps between them."""
    room = length // pieces
    starts = begin[:, None] + room[:, None] * np.arange(pieces)
    left = random.random(starts.shape) * 0.2
    used = (0.4 + random.random(starts.shape) * 0.4) * room[:, None]
    inner = starts + (left * room[:, None]).astype(np.int64) + 1
    return inner.ravel(), np.maximum(used.astype(np.int64) - 2, 1).ravel()


def _columns(rows, kernel_rows, first, step_ns, begin_ns, random):
    names = ["ProfilerStep#"]
    starts = {0: 0}
    for kind, label in (
        (1, "aten::operator"),
        (2, "cudaLaunchKernel"),
        (3, "void gemm_kernel"),
        (4, "Memcpy"),
    ):
        starts[kind] = len(names)
        names += [f"{label}_{number}" for number in range(12)]
    order = sorted(range(len(rows)), key=lambda place: rows[place][:2])
    offset = {}
    count = 0
    for place in order:
        offset[place] = count
        count += len(rows[place][2])
    launch = np.full(count, -1, np.int64)
    for place, source, chosen in kernel_rows:
        launch[offset[place] : offset[place] + len(chosen)] = offset[source] + chosen
    name, category = [], []
    for place in order:
        _, _, begin, _, kind, variety = rows[place]
        name.append(starts[kind] + random.integers(0, variety, len(begin)))
        category.append(np.full(len(begin), kind))
    begin = np.concatenate([rows[place][2] for place in order])
    duration = np.concatenate([rows[place][3] for place in order])
    end_ns = int((begin + duration).max())
    times = np.sort(random.integers(begin_ns, end_ns, 500))
    host, device = "host", "GPU 0"
    meta = {
        "source": "generated", "rank": 0, "begin_ns": begin_ns, "end_ns": end_ns,
        "lanes": [
            {"label": "main thread 1", "group": host, "is_device": False},
            {"label": "autograd thread 2", "group": host, "is_device": False},
            *({"label": f"GPU 0 stream {n}", "group": device, "is_device": True} for n in (7, 13, 20)),
        ],
        "names": names,
        "categories": ["step", "operator", "runtime call", "kernel", "memcpy"],
        "details": ["shapes: [[64, 3], [3, 8]]\nmodel.py(12): forward"],
        "steps": [[number + 5, int(at), int(at) + step_ns] for number, at in enumerate(first)],
        "notes": [],
        "counters": [{"label": "GPU 0 memory", "group": device, "unit": "bytes", "count": 500}],
        "rows": [[rows[place][0], rows[place][1], len(rows[place][2])] for place in order],
    }  # fmt: skip
    category_column = np.concatenate(category)
    columns = {
        "begin": begin,
        "duration": duration,
        "name": np.concatenate(name),
        "category": category_column,
        "detail": np.where(category_column == 1, 0, -1),
        "launch": launch,
        "counter_0_time": times,
        "counter_0_value": np.cumsum(random.integers(-50, 60, 500)).clip(0) * 1_000_000.0,
    }
    return meta, columns
