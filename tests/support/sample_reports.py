"""Reports to test every output with; the GPU one has the numbers of the article that inspired it.

The article's Model Summary is ``ProfileStep 11  138.99 / 12.64 / 17.91 / 10.65 / 100.00`` and so on. It
prints 1.05 as the GPU total of Optimization, which contradicts its own ratio; here it's 1.02.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_modelprof.analysis.steps.benchmark import Benchmark, Statistics
from lightning_modelprof.report.model import (
    Cell,
    Column,
    Report,
    Table,
    Unit,
    apply_options,
)
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.summary import RunSummary, Summary
from tests.support.sample_flames import hostile_flame, stacks_flame

HOSTILE_NAMES = (
    "[Callback]EarlyStopping{'monitor': None}.on_train_batch_end",
    "[bold red]not markup[/bold red] :smile: [/]",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "std::array<char*, 3>>(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3>)",
    "a | b || c \\| d & e &amp; <script>alert(1)</script>",
    "__init__ *args **kwargs `code` ~~gone~~ # [link](http://example.com) {x}",
    "line one\nline two\r\n\ttabbed",
    "\x1b[31mred\x1b[0m bell\x07",
    "数据加载 データ é e\u0301 🚀",
    "half a surrogate \ud800",
    "",
)

_STATISTICS = (
    ("total", "Total", Unit.DURATION_NS),
    ("avg", "Avg", Unit.DURATION_NS),
    ("max", "Max", Unit.DURATION_NS),
    ("min", "Min", Unit.DURATION_NS),
    ("ratio", "Ratio(%)", Unit.RATIO),
)


def _ns(ms: float | None) -> int | None:
    return None if ms is None else round(ms * 1e6)


def _group(
    calls: int, total: float, of: float, largest: float | None = None, smallest: float | None = None
) -> tuple[Cell, ...]:
    """Total, avg, max, min, ratio; from milliseconds."""
    total_ns = round(total * 1e6)
    avg = None if largest is None else total_ns / calls
    return (total_ns, avg, _ns(largest), _ns(smallest), total / of)


def perf_summary() -> Table:
    columns = (
        Column("name", "Name"),
        *(Column(key, key, Unit.BY_ROW) for key in ("avg", "max", "min", "p50", "p90", "p99")),
    )
    return Table(
        id="perf_summary",
        title="Perf Summary",
        columns=columns,
        rows=(
            ("reader_cost", 4_960_000, 5_420_000, 4_690_000, 4_950_000, 5_310_000, 5_415_000),
            ("batch_cost", 12_800_000, 13_250_000, 12_460_000, 12_790_000, 13_160_000, 13_244_000),
            ("ips (steps/s)", 78.125, 80.257, 75.472, 78.186, 75.988, 75.506),
            ("ips (samples/s)", 5000.0, 5136.436, 4830.189, 5003.909, 4863.222, 4832.377),
            ("Reader Ratio", 0.3875, None, None, None, None, None),
        ),
        row_units=(Unit.DURATION_NS, Unit.DURATION_NS, Unit.RATE, Unit.RATE, Unit.RATIO),
        notes=(
            "Over 87 of 100 steps; left out: 10 skipped at the start, 2 profiled, 1 with validation inside.",
            "ips is the inverse of batch_cost over the same steps: its max is the fastest step.",
        ),
    )


def phases() -> Table:
    rows: list[tuple[str, int, int, int]] = [
        ("Step", 87, 1_113_600_000, 0),
        ("Dataloader", 87, 431_520_000, 1),
        ("Transfer", 87, 21_750, 1),
        ("Forward", 87, 341_040_000, 1),
        ("Backward", 87, 218_370_000, 1),
        ("Optimization", 87, 97_440_000, 1),
        ("Others", 87, 25_208_250, 1),
        ("callbacks", 174, 20_010_000, 2),
        ("logging", 87, 5_198_250, 2),
    ]
    step_ns = rows[0][2]
    return Table(
        id="phases",
        title="Phases of a Step",
        columns=(
            Column("name", "Phase"),
            Column("calls", "Calls", Unit.COUNT),
            Column("total_ns", "Total", Unit.DURATION_NS),
            Column("avg_ns", "Avg", Unit.DURATION_NS),
            Column("ratio", "Ratio", Unit.RATIO),
            Column("device_ns", "Device", Unit.DURATION_NS),
        ),
        rows=tuple(
            (name, calls, total, total / calls, total / step_ns, None) for name, calls, total, _ in rows
        ),
        depths=tuple(depth for *_, depth in rows),
        notes=("Phases are exclusive: they add up to the step exactly.",),
    )


def model_summary(*, gpu: bool) -> Table:
    cpu_rows = {
        "ProfileStep": _group(11, 138.99, 138.99, 17.91, 10.65),
        "Dataloader": _group(11, 16.88, 138.99, 6.91, 0.09),
        "Forward": _group(11, 45.18, 138.99, 4.41, 3.61),
        "Backward": _group(11, 27.63, 138.99, 2.85, 2.37),
        "Optimization": _group(11, 19.75, 138.99, 1.89, 1.61),
        "Others": _group(11, 29.55, 138.99),
    }
    gpu_rows = {
        "ProfileStep": _group(11, 8.81, 8.81, 0.80, 0.80),
        "Dataloader": _group(11, 0, 8.81, 0, 0),
        "Forward": _group(11, 2.73, 8.81, 0.25, 0.25),
        "Backward": _group(11, 4.04, 8.81, 0.37, 0.36),
        "Optimization": _group(11, 1.02, 8.81, 0.10, 0.09),
        "Others": _group(11, 1.02, 8.81),
    }
    notes = ["Unlike the overview, overlapping GPU events on different streams are summed directly."]
    if not gpu:
        notes = ["GPU columns are empty because this run used no device."]
    return Table(
        id="model_summary",
        title="Model Summary",
        columns=(
            Column("name", "Name"),
            Column("calls", "Calls", Unit.COUNT),
            *(Column(f"cpu_{key}", label, unit, "CPU") for key, label, unit in _STATISTICS),
            *(Column(f"gpu_{key}", label, unit, "GPU") for key, label, unit in _STATISTICS),
        ),
        rows=tuple(
            (
                name,
                None if name == "Others" else 11,
                *cells,
                *(gpu_rows[name] if gpu else (None,) * len(_STATISTICS)),
            )
            for name, cells in cpu_rows.items()
        ),
        depths=(0, 1, 1, 1, 1, 1),
        notes=tuple(notes),
    )


def memory_summary() -> Table:
    return Table(
        id="memory",
        title="Memory Summary",
        columns=(Column("name", "Device"), Column("peak_bytes", "Peak", Unit.BYTES)),
        rows=(("cuda:0", 3_221_225_472), ("host", 1_610_612_736)),
    )


def absent_table() -> Table:
    return Table(
        id="kernel_summary",
        title="Kernel Summary",
        columns=(Column("name", "Name"), Column("total_ns", "Total", Unit.DURATION_NS)),
        rows=(),
        absent_reason="the profiler window was never reached: training ended at step 7, it starts at step 20",
        notes=("A note of a table that has no rows.",),
    )


def statistics(avg: float, **others: float) -> Statistics:
    """A figure that is the same in every step, except for the given values."""
    same = dict.fromkeys(("max", "min", "p50", "p90", "p99"), avg)
    return Statistics(avg=avg, standard_error=None, **(same | others))


def benchmark_of(step_ns: float, **others: Any) -> Benchmark:
    """A benchmark of equally long steps."""
    unknown = dict.fromkeys(
        ("reader_cost_ns", "reader_ratio", "steps_per_s", "samples_per_s", "samples_per_step")
    )
    known = {"num_steps": 9, "batch_cost_ns": statistics(step_ns), "steps_per_s": statistics(1e9 / step_ns)}
    return Benchmark(**(unknown | known | others))


def gpu_report() -> Report:
    return Report(
        title="CifarClassifier: 100 steps in 1.31 s, 39% of each step waits for data",
        facts=(
            ("Device", "1 × NVIDIA H200 (cuda:0)"),
            ("Software", "Python 3.11.7, torch 2.13.0, lightning 2.6.6"),
            ("Steps", "100 in 2 epochs, batch size 64"),
            ("Window", "steps 12 to 22, 11 steps"),
        ),
        tables=(perf_summary(), phases(), model_summary(gpu=True), memory_summary(), absent_table()),
        notes=("MFU is not reported: no peak is known for this device.",),
        summary=Summary(
            run=RunSummary(created="2026-01-01T00:00:00+00:00", model="CifarClassifier"),
            benchmark=benchmark_of(12e6, num_steps=87, reader_ratio=statistics(0.3875)),
        ),
    )


def cpu_report() -> Report:
    return Report(
        title="CifarClassifier on the CPU",
        facts=(("Device", "cpu"),),
        tables=(perf_summary(), model_summary(gpu=False), absent_table()),
        notes=("Device times: not measured, because this run used no device.",),
        summary=Summary(run=RunSummary(created="2026-01-01T00:00:00+00:00", model="CifarClassifier")),
    )


def empty_report() -> Report:
    return Report(title="Nothing was measured", facts=(), tables=(), notes=())


def hostile_report() -> Report:
    columns = (
        Column("name", "Name <|>"),
        Column("where", "[Where]*_*"),
        Column("calls", "Calls", Unit.COUNT),
        Column("self_ns", "Self", Unit.DURATION_NS, "[GPU] &"),
        Column("share", "Share", Unit.RATIO, "[GPU] &"),
    )
    rows = tuple(
        (name, name[::-1], 10**index, 3**index, 1 / 10**index) for index, name in enumerate(HOSTILE_NAMES)
    )
    table = Table(id="hostile", title="Names <&|[]*_\n", columns=columns, rows=rows, notes=HOSTILE_NAMES[:-1])
    return Report(
        title=HOSTILE_NAMES[1],
        facts=tuple((name, name) for name in HOSTILE_NAMES),
        tables=(table,),
        notes=HOSTILE_NAMES,
        summary=Summary(
            run=RunSummary(
                created="",
                model=HOSTILE_NAMES[0],
                config={"names": list(HOSTILE_NAMES), "not_finite": [float("nan"), {"inf": float("inf")}]},
            ),
            settings={name: name for name in HOSTILE_NAMES},
        ),
    )


def long_report() -> Report:
    rows = tuple((f"aten::operator_{index}", index, index * 1_000, index / 10_000) for index in range(1_000))
    columns = (
        Column("name", "Operator"),
        Column("calls", "Calls", Unit.COUNT),
        Column("self_ns", "Self", Unit.DURATION_NS),
        Column("ratio", "Ratio", Unit.RATIO),
    )
    table = Table(id="operators", title="Operator Summary", columns=columns, rows=rows)
    return Report(title="1 000 rows", facts=(), tables=(table,), notes=())


_KERNELS = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3>)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::MulFunctor<float>, "
    "at::detail::Array<char*, 3> >(int, at::native::MulFunctor<float>, at::detail::Array<char*, 3>)",
    "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x32_warpgroupsize1x1x1_execute_segment_k_off_kernel",
)


def operators() -> Table:
    """A detailed Operator Summary, the widest table, with a tree of operators, children and kernels."""
    rows: list[tuple[Cell, ...]] = []
    depths = []
    for number, operator in enumerate(("aten::convolution_backward", "aten::linear", "aten::add_")):
        for depth, name in enumerate((operator, "cudaLaunchKernel", _KERNELS[number])):
            host = _group(40, 12.5 / (number + 1), 138.99, 0.92, 0.0013) if depth < 2 else (None,) * 5
            device = _group(40, 1.9 / (number + 1), 8.81, 0.061, 0.0475) if depth != 1 else (None,) * 5
            flops = 3_500_000_000 if depth == 0 and number < 2 else None
            module = f"model.encoder.layers.{number}.self_attention.out_proj" if depth == 0 else None
            rows.append((name, 40, *host, *device, flops, module))
            depths.append(depth)
    return Table(
        id="operator",
        title="Operator Summary",
        columns=(
            Column("name", "Name"),
            Column("calls", "Calls", Unit.COUNT),
            *(Column(f"cpu_{key}", label, unit, "CPU") for key, label, unit in _STATISTICS),
            *(Column(f"gpu_{key}", label, unit, "GPU") for key, label, unit in _STATISTICS),
            Column("flops", "FLOPs", Unit.FLOPS),
            Column("module", "Module"),
        ),
        rows=tuple(rows),
        depths=tuple(depths),
        notes=("A child's ratio is of its operator.",),
    )


def copies() -> Table:
    return Table(
        id="memory_manipulation",
        title="Memory Manipulation Summary",
        columns=(
            Column("name", "Name"),
            Column("calls", "Calls", Unit.COUNT),
            Column("bytes", "Size", Unit.BYTES),
            Column("bytes_per_s", "Bandwidth", Unit.BYTES_PER_S),
        ),
        rows=(
            ("Memcpy HtoD (Pageable -> Device)", 22, 17_301_504, 2.94e9),
            ("Memcpy DtoD (Device -> Device)", 11, 1_048_576, 1.234e12),
            ("Memset (Device)", 33, 512, None),
        ),
    )


def wide_report() -> Report:
    options = TableOptions(time_unit="us", row_limit=2)
    return Report(
        title="1 trace",
        facts=(),
        tables=(apply_options(operators(), options), copies()),
        notes=(),
    )


def flame_report() -> Report:
    return Report(
        title="flames",
        facts=(),
        tables=(),
        notes=(),
        flames=(stacks_flame(), hostile_flame(HOSTILE_NAMES)),
    )


ALL_REPORTS: dict[str, Callable[[], Report]] = {
    "empty": empty_report,
    "cpu": cpu_report,
    "gpu": gpu_report,
    "hostile": hostile_report,
    "long": long_report,
    "wide": wide_report,
    "flame": flame_report,
}
