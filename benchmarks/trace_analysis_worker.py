"""One measurement of ``trace_analysis.py`` in a separate process; also runs in a peer's Python.

    python benchmarks/trace_analysis_worker.py NAME ARGUMENTS...

It prints one line of JSON: CPU seconds, peak memory and a description of the work.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

Details = dict[str, Any]


class Meter:
    """CPU time and peak memory of a ``with`` block, child processes included."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.peak_bytes = 0

    def __enter__(self) -> Meter:
        self._memory_bytes = _resident_bytes()
        self._cpu_s = _cpu_s()
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu_s = _cpu_s() - self._cpu_s
        self.peak_bytes = _peak_bytes() - self._memory_bytes


def ours(path: str) -> tuple[Meter, Details]:
    import lightning_modelprof.report.build_trace  # noqa: F401, PLC0415  # as analyze_files would
    from lightning_modelprof.reading_traces import analyze_files  # noqa: PLC0415
    from lightning_modelprof.show.document import render_json  # noqa: PLC0415
    from lightning_modelprof.show.text import render_text  # noqa: PLC0415

    with Meter() as meter:
        report = analyze_files([Path(path)])
        size = len(render_json(report)), len(render_text(report))
    absent = [table.title for table in report.tables if table.absent_reason]
    rows = sum(len(table.rows) for table in report.tables)
    return meter, {
        "tables": len(report.tables),
        "without data": absent,
        "rows": rows,
        "JSON and text bytes": size,
    }


def json_loads(path: str) -> tuple[Meter, Details]:
    with Meter() as meter:
        raw = Path(path).read_bytes()
        document = json.loads(gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw)
    return meter, {"events": len(document["traceEvents"])}


def torch_tb_profiler(path: str) -> tuple[Meter, Details]:
    """Do the plugin's work for a run with one worker, without its processes and its web server."""
    from torch_tb_profiler import io as plugin_io  # noqa: PLC0415
    from torch_tb_profiler.profiler.data import DistributedRunProfileData, RunProfileData  # noqa: PLC0415
    from torch_tb_profiler.profiler.loader import RunLoader  # noqa: PLC0415
    from torch_tb_profiler.profiler.run_generator import RunGenerator  # noqa: PLC0415
    from torch_tb_profiler.run import Run  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        caches = plugin_io.Cache(folder)
        loader = RunLoader("run", str(Path(path).parent), caches)
        with Meter() as meter:
            data = RunProfileData.parse("worker", None, path, folder)
            profile = RunGenerator("worker", None, data).generate_run_profile()
            distributed = Run("run", folder)
            distributed.add_profile(DistributedRunProfileData(data))
            loader._process_spans(distributed)
    return meter, {"views": [view.display_name for view in profile.views]}


def hta(path: str) -> tuple[Meter, Details]:
    """Run all analyses that need no user argument, except ``get_aten_op_kernels_and_delay``.

    That one takes longer than all others. The details list the failures.
    """
    from hta.trace_analysis import TraceAnalysis  # noqa: PLC0415

    names = (
        *("get_temporal_breakdown", "get_idle_time_breakdown", "get_gpu_kernel_breakdown"),
        *("get_gpu_user_annotation_breakdown", "get_comm_comp_overlap", "get_cuda_kernel_launch_stats"),
        *("get_memory_bw_summary", "get_memory_bw_time_series", "get_queue_length_summary"),
        "get_queue_length_time_series",
    )
    without_pictures = {*names[:6]}
    failed = {}
    with Meter() as meter:
        analysis = TraceAnalysis(trace_files={0: path})
        for name in names:
            if problem := _problem_of(
                analysis, name, {"visualize": False} if name in without_pictures else {}
            ):
                failed[name] = problem
    return meter, {"analyses": len(names), "failed": failed}


def _problem_of(analysis: Any, name: str, arguments: dict[str, Any]) -> str:
    try:
        getattr(analysis, name)(**arguments)
    except Exception as error:  # any error of a peer
        return f"{type(error).__name__}: {error}"[:80]
    return ""


def key_averages(num_steps: str, order: str) -> tuple[None, Details]:
    """Record a window of a CPU training, then make torch's table and ours, in this order or reversed."""
    import torch  # noqa: PLC0415
    from torch.profiler import ProfilerActivity, profile, schedule  # noqa: PLC0415

    from lightning_modelprof.reading_traces import analyze_files  # noqa: PLC0415
    from lightning_modelprof.show.document import render_json  # noqa: PLC0415
    from lightning_modelprof.show.text import render_text  # noqa: PLC0415

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 8), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters())
    batches: Any = torch.utils.data.DataLoader(
        list(torch.randn((int(num_steps) + 3) * 8, 16, 64)), batch_size=8
    )
    plan = schedule(skip_first=1, wait=0, warmup=1, active=int(num_steps), repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, record_shapes=True) as window:
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            window.step()

    meters = {"torch": Meter(), "export": Meter(), "tables": Meter()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "window.pt.trace.json"

        def of_torch() -> None:
            with meters["torch"]:
                window.key_averages().table()

        def of_ours() -> None:
            with meters["export"]:
                window.export_chrome_trace(str(path))
            with meters["tables"]:
                report = analyze_files([path])
                render_json(report)
                render_text(report)

        for run in (of_torch, of_ours) if order == "0" else (of_ours, of_torch):
            run()
        return None, {
            "torch_s": meters["torch"].cpu_s,
            "ours_s": meters["export"].cpu_s + meters["tables"].cpu_s,
            "export_s": meters["export"].cpu_s,
            "num_events": len(window.events()),
            "json_bytes": path.stat().st_size,
        }


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _status_bytes(key: str) -> int | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = dict(line.partition(":")[::2] for line in status.read_text().splitlines())
    return int(lines[key].split()[0]) * 1024 if key in lines else None


def _resident_bytes() -> int:
    return _status_bytes("VmRSS") or _maximum_bytes(resource.RUSAGE_SELF)


def _peak_bytes() -> int:
    # Not ru_maxrss if there's another way, because a new process inherits it from its parent.
    own = _status_bytes("VmHWM") or _maximum_bytes(resource.RUSAGE_SELF)
    return max(own, _maximum_bytes(resource.RUSAGE_CHILDREN))


def _maximum_bytes(who: int) -> int:
    return resource.getrusage(who).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


WORKERS: dict[str, Callable[..., tuple[Meter | None, Details]]] = {
    worker.__name__: worker for worker in (ours, json_loads, torch_tb_profiler, hta, key_averages)
}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    name, *arguments = sys.argv[1:]
    answer: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            meter, answer["details"] = WORKERS[name](*arguments)
        except ModuleNotFoundError as error:
            if error.name not in ("torch_tb_profiler", "hta"):
                raise
            answer, meter = {"not_installed": str(error)}, None
    if meter is not None:
        answer |= {"cpu_s": meter.cpu_s, "peak_bytes": meter.peak_bytes, "process_bytes": _peak_bytes()}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
