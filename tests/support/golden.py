"""Golden files: approved outputs.

Refresh them with ``MODELPROF_UPDATE_GOLDEN=1`` and read the difference before you commit it.
"""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN_DIR = Path(__file__).parents[1] / "data" / "golden"
UPDATE_VARIABLE = "MODELPROF_UPDATE_GOLDEN"


def check_golden(name: str, actual: str) -> None:
    """Compare with ``tests/data/golden/<name>``, or write it if the environment asks for that."""
    path = GOLDEN_DIR / name
    if os.environ.get(UPDATE_VARIABLE) == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(actual.encode("utf-8"))
    assert path.exists(), f"no golden file {name}: run once with {UPDATE_VARIABLE}=1 and look at it"
    expected = path.read_bytes().decode("utf-8")
    assert actual == expected, f"{name} changed; if that is right, refresh it with {UPDATE_VARIABLE}=1"
