"""The scripts of the page in few requests: one that was made with the wheel, or all modules in one go.

The build hook loads this file alone, so it imports nothing but Python's own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Final

STATIC: Final = Path(__file__).with_name("static")


SHARED: Final = Path(__file__).parents[1] / "show" / "html"
"""What the page shares with report.html; it stands under ``html/`` in the page."""


ENTRY: Final = "index.js"


BUNDLE: Final = "bundle.js"
"""In a wheel only: no bundle is ever written into a clone."""


_IMPORTED: Final = re.compile(
    rb'^(?:import\s+"|(?:import|export)\b[^;"]*?\bfrom\s+")(\.[^"]+)"', re.MULTILINE
)
_LATER: Final = re.compile(rb'\bawait import\("(\.[^"]+)"\)')


def script_files() -> dict[str, Path]:
    """Name in the page → file, of all modules."""
    files = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*.js")}
    files.pop(BUNDLE, None)
    return files | {f"html/{path.relative_to(SHARED).as_posix()}": path for path in SHARED.rglob("*.js")}


def digest(scripts: Mapping[str, bytes]) -> str:
    """What a bundle is marked with: other sources have another."""
    total = hashlib.sha256()
    for name, content in sorted(scripts.items()):
        total.update(f"{name} {len(content)}\n".encode() + content)
    return total.hexdigest()


def marked(bundle: bytes, scripts: Mapping[str, bytes]) -> bytes:
    """A bundle with the mark of what it was made of."""
    return _mark(scripts) + bundle


def chosen_bundle(bundle: bytes, scripts: Mapping[str, bytes]) -> bytes | None:
    """The bundle if it was made of these very modules, else ``None``."""
    return bundle if bundle.startswith(_mark(scripts)) else None


def in_few_requests(scripts: Mapping[str, bytes]) -> dict[str, bytes]:
    """What is sent in the place of some modules, by name.

    A bundle is sent as the first module. Where there is none, a module that the page loads by itself names
    all that it needs, however deep, so that the browser asks for all of it at once; on the first line, so
    that each line keeps its number.
    """
    file = STATIC / BUNDLE
    if file.is_file() and (bundle := chosen_bundle(file.read_bytes(), scripts)) is not None:
        return {ENTRY: bundle}
    loaded = {ENTRY, *(_from(name, path) for name in scripts for path in _LATER.findall(scripts[name]))}
    return {name: _imports(name, scripts) + scripts[name] for name in sorted(loaded & scripts.keys())}


def _mark(scripts: Mapping[str, bytes]) -> bytes:
    return f"// Bundle of the modules next to it; their hash is {digest(scripts)}\n".encode()


def _imports(entry: str, scripts: Mapping[str, bytes]) -> bytes:
    """Statements that import all that a module needs, what is used most deeply last."""
    found, waiting = {entry: None}, [entry]
    while waiting:
        name = waiting.pop()
        for path in _IMPORTED.findall(scripts.get(name, b"")):
            if (wanted := _from(name, path)) not in found:
                found[wanted] = None
                waiting.append(wanted)
    up = "../" * entry.count("/") or "./"
    return "".join(f'import "{up}{name}"; ' for name in found if name != entry).encode()


def _from(name: str, path: bytes) -> str:
    return normpath(str(PurePosixPath(name).parent / path.decode()))
