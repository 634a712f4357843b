"""Numbers in the dashboard's ticks, readouts and selections. Needs node."""

from __future__ import annotations

import json
import math
import shutil
import subprocess

import pytest

from tests.house.test_layering import SOURCE

FORMAT = SOURCE / "tensorboard_plugin" / "static" / "format.js"

TEXTS = [
    ("formatDuration", [0], "0 ns"),
    ("formatDuration", [12_345_678], "12.3 ms"),
    ("formatDuration", [-367_000], "-367 µs"),
    ("formatDuration", [999_999_999], "1.00 s"),
    ("formatDuration", [75_200_000_000], "75.2 s"),
    ("formatDuration", [9e12], "2.50 h"),
    ("formatBytes", [0], "0 B"),
    ("formatBytes", [1023], "1,023 B"),
    ("formatBytes", [-1536], "-1.50 KiB"),
    ("formatCount", [86_567_656], "86,567,656"),
    ("formatCount", [2.5], "2.50"),
    ("formatRatio", [0.4022], "40%"),
    ("formatRatio", [0.0424], "4.2%"),
    ("formatRatio", [0], "0%"),
    ("formatRate", [4938.6], "4,939"),
    ("formatRate", [0.0123456], "0.0123"),
    ("formatBegin", [158_367_123, 367_000], "158.4 ms"),
    ("formatBegin", [158_367_123, 3_670], "158.367 ms"),
    ("formatBegin", [0, 1_000], "0 ns"),
    ("formatTick", [0.1 + 0.2, 0.1], "0.3"),
    ("formatTick", [-1500.5, 0.5], "-1,500.5"),
    ("tickLabels", [[0, 2.5, 5, 7.5]], ["0", "2.5", "5.0", "7.5"]),
    ("tickLabels", [[7]], ["7"]),
    ("durationLabels", [[0, 2.5e6, 5e6]], ["0 ms", "2.5 ms", "5.0 ms"]),
]
WITHOUT_A_VALUE = [None, math.nan, math.inf, -math.inf]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Results of JavaScript functions, given their names and arguments."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    folder = tmp_path_factory.mktemp("format")
    (folder / "format.mjs").write_text(FORMAT.read_text(encoding="utf-8"), encoding="utf-8")

    def write(asked):
        (folder / "check.mjs").write_text(
            'import * as format from "./format.mjs";\n'
            f"const asked = {json.dumps(asked)};\n"
            "console.log(JSON.stringify(asked.map(([name, args]) => format[name](...args))));\n",
            encoding="utf-8",
        )
        done = subprocess.run([node, folder / "check.mjs"], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    return write


def test_numbers_have_three_significant_digits(written):
    found = written([(name, args) for name, args, _ in TEXTS])
    assert [(*asked[:2], text) for asked, text in zip(TEXTS, found, strict=True)] == TEXTS


@pytest.mark.parametrize(
    "name", ["formatDuration", "formatBytes", "formatCount", "formatRatio", "formatRate"]
)
def test_missing_number_is_a_dash(written, name):
    assert set(written([(name, [value]) for value in WITHOUT_A_VALUE])) == {"–"}
