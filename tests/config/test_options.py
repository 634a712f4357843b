"""Table options: our names, Paddle's and torch's, on the command line and in saved runs."""

from __future__ import annotations

import json
from enum import Enum

import pytest

from lightning_modelprof.cli.arguments import table_options
from lightning_modelprof.cli.main import main, make_parser
from lightning_modelprof.config.options import ProfileConfig, ReportOptions
from lightning_modelprof.report.model import apply_options
from lightning_modelprof.report.options import (
    DEFAULT_OPTIONS,
    SORT_KEYS,
    TIME_UNITS,
    VIEWS,
    TableOptions,
    parse_row_limit,
    parse_sort_key,
    parse_time_unit,
    parse_views,
    saved_options,
)
from tests.support.sample_reports import operators

SummaryView = Enum(
    "SummaryView",
    "DeviceView OverView ModelView DistributedView KernelView OperatorView MemoryView MemoryManipulationView"
    " UDFView",
)
SortedKeys = Enum("SortedKeys", "CPUTotal CPUAvg CPUMax CPUMin GPUTotal GPUAvg GPUMax GPUMin")

OURS = {
    "DeviceView": "device",
    "OverView": "overview",
    "ModelView": "model",
    "DistributedView": "distributed",
    "KernelView": "kernel",
    "OperatorView": "operator",
    "MemoryView": "memory",
    "MemoryManipulationView": "memory_manipulation",
    "UDFView": "userdefined",
}


@pytest.mark.parametrize("view", SummaryView)
def test_paddle_views_are_accepted(view):
    expected = (OURS[view.name],)
    for name in (view, view.name, f"SummaryView.{view.name}", f"paddle.profiler.{view}", view.name.lower()):
        assert parse_views(name) == expected
        assert parse_views([name]) == expected


@pytest.mark.parametrize("key", SortedKeys)
def test_paddle_sort_keys_are_accepted(key):
    expected = f"{key.name[:3]}_{key.name[3:]}".lower()
    assert expected in SORT_KEYS
    for name in (key, key.name, f"SortedKeys.{key.name}", f"paddle.profiler.{key}", key.name.lower()):
        assert parse_sort_key(name) == expected


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("count", "calls"),
        ("cpu_time", "cpu_avg"),
        ("cpu_time_total", "cpu_total"),
        ("self_cpu_time_total", "cpu_self"),
        ("cpu_memory_usage", "cpu_memory"),
        ("self_cpu_memory_usage", "cpu_self_memory"),
        *((f"{device}_memory_usage", "gpu_memory") for device in ("cuda", "xpu", "device", "privateuse1")),
        *(
            (f"self_{device}_memory_usage", "gpu_self_memory")
            for device in ("cuda", "xpu", "device", "privateuse1")
        ),
        *((f"{device}_time", "gpu_avg") for device in ("cuda", "xpu", "device", "privateuse1")),
        *((f"{device}_time_total", "gpu_total") for device in ("cuda", "xpu", "device", "privateuse1")),
        *((f"self_{device}_time_total", "gpu_self") for device in ("cuda", "xpu", "device", "privateuse1")),
    ],
)
def test_torch_sort_keys_are_accepted(key, expected):
    assert parse_sort_key(key) == parse_sort_key(key.upper()) == expected


def test_our_names_are_unchanged():
    assert parse_views(list(VIEWS)) == VIEWS
    assert [parse_sort_key(key) for key in SORT_KEYS] == list(SORT_KEYS)
    assert [parse_time_unit(unit) for unit in TIME_UNITS] == list(TIME_UNITS)
    assert parse_time_unit("MS") == "ms"
    assert {parse_time_unit("\u00b5s"), parse_time_unit("\u03bcs")} == {"us"}  # micro sign, Greek mu


def test_views_are_sorted_in_reading_order():
    assert parse_views(("kernel", "UDFView", "device")) == ("device", "kernel", "userdefined")


@pytest.mark.parametrize(
    ("parse", "value", "meant"),
    [
        (parse_views, "kernal", "kernel"),
        (parse_views, "operators", "operator"),
        (parse_views, "ops", "operator"),
        (parse_views, "memcpy", "memory_manipulation"),
        (parse_views, "KernelViews", "kernel"),
        (parse_sort_key, "cputotl", "cpu_total"),
        (parse_sort_key, "gpu", "gpu_total"),
        (parse_time_unit, "sec", "s"),
        (parse_time_unit, "msec", "ms"),
        (parse_time_unit, "nanosecond", "ns"),
    ],
)
def test_unknown_value_gets_nearest_suggestion(parse, value, meant):
    with pytest.raises(ValueError, match=f"unknown .* {value!r}. Did you mean {meant!r}\\? Leave it out"):
        parse(value)


@pytest.mark.parametrize("value", ["parsec", "", 3, None, 1.5, b"ms", ["ms"]])
def test_unrelated_value_gets_no_suggestion(value):
    with pytest.raises(
        ValueError, match=r"^unknown time unit .*Expected one of s, ms, us, ns\. Leave it out"
    ):
        parse_time_unit(value)


@pytest.mark.parametrize("value", [[], (), {}, 7, None, {"kernel"}, iter(["kernel"])])
def test_invalid_views_are_rejected(value):
    with pytest.raises(
        ValueError, match=r"expected a list of device, critical_path, .*, got .*Leave it out to show all"
    ):
        parse_views(value)


def test_repeated_view_is_rejected():
    with pytest.raises(ValueError, match=r"got 'kernel' twice: 'kernel' and 'KernelView'\. Remove one"):
        parse_views(["kernel", "memory", "KernelView"])


@pytest.mark.parametrize("value", [0, "0", "-3", "1.5", 2.0, True, "", "²", "many"])
def test_invalid_row_limit_is_rejected(value):
    with pytest.raises(ValueError, match=r"expected an integer of at least 1, got .*The default is 20"):
        parse_row_limit(value)


# The command line


@pytest.mark.parametrize("command", ["analyze", "report"])
def test_command_line_sets_table_options(command):
    names = "--views device,KernelView --sorted-by gpu_total --time-unit us"
    rest = "--thread-sep --op-detail --row-limit 50"
    options = table_options(make_parser().parse_args([command, "path", *names.split(), *rest.split()]))
    assert options == TableOptions(
        views=("device", "kernel"),
        sorted_by="gpu_total",
        time_unit="us",
        thread_sep=True,
        op_detail=True,
        row_limit=50,
    )
    assert table_options(make_parser().parse_args([command, "path"])) == DEFAULT_OPTIONS


def test_options_not_given_stay_as_saved():
    saved = TableOptions(views=("kernel",), thread_sep=True, op_detail=True, row_limit=7)
    arguments = make_parser().parse_args(["report", "path", "--no-thread-sep", "--time-unit", "s"])
    expected = TableOptions(views=("kernel",), op_detail=True, row_limit=7, time_unit="s")
    assert table_options(arguments, saved) == expected


@pytest.mark.parametrize("command", ["analyze", "report"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--views", "device,kernal"], "argument --views: unknown view 'kernal'. Did you mean 'kernel'?"),
        (["--views", "device,,kernel"], "argument --views: unknown view ''."),
        (["--views", "kernel,kernel"], "argument --views: expected each view once"),
        (
            ["--sorted-by", "cuda_total"],
            "argument --sorted-by: unknown sort key 'cuda_total'. Did you mean 'gpu_total'?",
        ),
        (
            ["--sorted-by", "npu_avg"],
            "argument --sorted-by: unknown sort key 'npu_avg'. Did you mean 'gpu_avg'?",
        ),
        (["--sorted-by", "time"], "argument --sorted-by: unknown sort key 'time'."),
        (["--time-unit", "100%"], "argument --time-unit: unknown time unit '100%'. Expected one of s, ms"),
        (["--row-limit", "0"], "argument --row-limit: expected an integer of at least 1, got '0'."),
    ],
)
def test_invalid_option_exits_with_usage_error(capsys, command, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main([command, "nowhere", *arguments])
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    last = shown.err.splitlines()[-1]
    assert last.startswith(f"lightning-modelprof {command}: error: {message}")


# A saved run


def test_saved_run_keeps_its_options():
    config = ProfileConfig(
        report=ReportOptions(
            views=["UDFView", SummaryView.OverView],
            sorted_by=SortedKeys.CPUMin,
            time_unit="NS",
            thread_sep=True,
            row_limit=3,
        )
    )
    saved = json.loads(json.dumps(config.as_plain()))
    assert saved_options(saved) == config.table_options
    assert saved_options({"active": 3}) == DEFAULT_OPTIONS, "of before there were options"
    with pytest.raises(ValueError, match="unknown sort key"):
        saved_options({"sorted_by": "beauty"})


def test_apply_options_sets_time_unit_and_row_limit():
    table = apply_options(operators(), TableOptions(time_unit="ns", row_limit=3))
    assert (table.time_unit, table.row_limit) == ("ns", 3)
    assert (table.rows, table.id, table.notes) == (operators().rows, operators().id, operators().notes)
