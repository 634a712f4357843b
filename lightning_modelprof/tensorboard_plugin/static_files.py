"""The files of the page: found once, handed out by name. No path from a request is ever opened."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from lightning_modelprof.show.html.page import SHARED_FILES, SHARED_FOLDER

_STATIC: Final = Path(__file__).with_name("static")

_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
"""Said and not guessed: some systems take .js for plain text, which browsers refuse to run."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file of the page."""

    content: bytes
    media_type: str


@cache
def static_files() -> dict[str, StaticFile]:
    """Name → file: those of the dashboard, and under ``html/`` those that it shares with report.html."""
    files = {path.relative_to(_STATIC).as_posix(): path for path in _STATIC.rglob("*")}
    files |= {f"html/{name}": SHARED_FOLDER / name for name in SHARED_FILES}
    return {
        name: StaticFile(path.read_bytes(), _TYPES[path.suffix])
        for name, path in sorted(files.items())
        if path.suffix in _TYPES
    }
