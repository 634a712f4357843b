"""Rules, tables and charts are found wherever the package is installed, and an empty result is an error."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lightning_modelprof
from lightning_modelprof.report.charts.all_charts import CHARTS
from lightning_modelprof.report.discovery import found_beside, place_in
from lightning_modelprof.report.rules.all_rules import _ORDER, RULES
from lightning_modelprof.report.tables.run.all_tables import KINDS

COUNT = """
import lightning_modelprof
from lightning_modelprof.report.charts.all_charts import CHARTS
from lightning_modelprof.report.rules.all_rules import RULES
from lightning_modelprof.report.tables.run.all_tables import KINDS
print(lightning_modelprof.__file__, len(RULES), len(KINDS), len(CHARTS))
"""


def test_everything_is_found_in_zip(tmp_path):
    source = Path(lightning_modelprof.__file__).parent
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as packed:
        for file in source.rglob("*.py"):
            packed.write(file, file.relative_to(source.parent))
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'package.zip')!r})\n{COUNT}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    file, *numbers = done.stdout.split()
    assert "package.zip" in file
    assert list(map(int, numbers)) == [len(RULES), len(KINDS), len(CHARTS)]


def test_rules_are_ordered_and_new_ones_come_last():
    found = [rule.kind for rule in RULES]
    assert found[: len(_ORDER)] == list(_ORDER)
    assert len(set(found)) == len(found)
    last = len(_ORDER)
    assert [place_in(_ORDER, name) for name in (_ORDER[0], _ORDER[-1], "of_tomorrow")] == [0, last - 1, last]


def test_finding_nothing_is_an_error():
    with pytest.raises(ImportError, match="expected its modules, found none"):
        found_beside("lightning_modelprof.report.charts.all_charts", [], str)
