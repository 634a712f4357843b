"""The page's scripts in few requests: a bundle from the wheel, or all modules at the same time.

The build hook loads only this file, so it imports nothing but the standard library.
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
"""Files that the page shares with report.html, under ``html/`` in the page."""


ENTRY: Final = "index.js"


BUNDLE: Final = "bundle.js"
"""Only in wheels: no bundle is ever written into a clone."""


_IMPORTED: Final = re.compile(
    rb'^(?:import\s+"|(?:import|export)\b[^;"]*?\bfrom\s+")(\.[^"]+)"', re.MULTILINE
)
_LATER: Final = re.compile(rb'\bawait import\("(\.[^"]+)"\)')


def script_files() -> dict[str, Path]:
    """Map the names of all modules in the page to their files."""
    files = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*.js")}
    files.pop(BUNDLE, None)
    return files | {f"html/{path.relative_to(SHARED).as_posix()}": path for path in SHARED.rglob("*.js")}


def digest(scripts: Mapping[str, bytes]) -> str:
    """Hash the modules, to mark their bundle."""
    total = hashlib.sha256()
    for name, content in sorted(scripts.items()):
        total.update(f"{name} {len(content)}\n".encode() + content)
    return total.hexdigest()


def marked(bundle: bytes, scripts: Mapping[str, bytes]) -> bytes:
    """Mark a bundle with the hash of its modules."""
    return _mark(scripts) + bundle


def chosen_bundle(bundle: bytes, scripts: Mapping[str, bytes]) -> bytes | None:
    """Return the bundle if it was made from exactly these modules, else ``None``."""
    return bundle if bundle.startswith(_mark(scripts)) else None


def in_few_requests(scripts: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return what to send in place of some modules, by name.

    A bundle replaces the first module. Without one, each module that the page itself loads imports everything
    it needs, however deep, so that the browser requests all of it at the same time. The imports are on the
    first line, so that line numbers don't change.
    """
    file = STATIC / BUNDLE
    if file.is_file() and (bundle := chosen_bundle(file.read_bytes(), scripts)) is not None:
        return {ENTRY: bundle}
    loaded = {ENTRY, *(_from(name, path) for name in scripts for path in _LATER.findall(scripts[name]))}
    return {name: _imports(name, scripts) + scripts[name] for name in sorted(loaded & scripts.keys())}


def _mark(scripts: Mapping[str, bytes]) -> bytes:
    return f"// Bundle of the modules next to it; their hash is {digest(scripts)}\n".encode()


def _imports(entry: str, scripts: Mapping[str, bytes]) -> bytes:
    """Write imports of all that a module needs, the deepest dependencies last."""
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
