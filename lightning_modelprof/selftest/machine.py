"""The machine in an attachment: card, driver and versions, and nothing that names its owner."""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.errors import printable

_PACKAGES: Final = ("lightning-modelprof", "torch", "lightning", "torchmetrics", "numpy")

_PATH: Final = re.compile(
    r"(?:[A-Za-z]:)?(?:[\\/][^\s\\/:,;'\"()<>|]+){2,}[\\/]?|~[\\/]\S+|\b\w+\.(?:pyc?|so|json|gz|pt)\b"
)
"""Of any system, and names of files."""


def facts(asked: str | None) -> dict[str, Any]:
    """Which device is used, and what the numbers depend on.

    Args:
        asked: a kind of device; ``None`` for the best one that torch finds.
    """
    import torch  # noqa: PLC0415 -- the parent process does without

    kinds = [kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()]
    kinds += ["mps"] if torch.backends.mps.is_available() else []
    kind = asked or [*kinds, "cpu"][0]
    found: dict[str, Any] = {"device": kind, "available": kind in [*kinds, "cpu"], "devices": 1}
    if kind in kinds and kind != "mps":
        one = getattr(torch, kind).get_device_properties(0)
        found |= {"card": one.name, "memory_bytes": one.total_memory}
        found["devices"] = getattr(torch, kind).device_count()
    if kind == "cuda":
        found |= {"capability": ".".join(map(str, torch.cuda.get_device_capability(0)))}
        found |= {"driver": _driver(), "cuda": torch.version.cuda, "hip": torch.version.hip}
    return found | {
        "system": platform.system(),
        "processor": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.strip().split("\n")[0]


def scrubbed(text: str) -> str:
    """A message without paths, file names and the names of the user and the machine."""
    text = printable(" ".join(text.split()))
    for folder in (str(Path.home()), str(Path.cwd()), tempfile.gettempdir(), sys.prefix):
        if len(folder) > 1:
            text = text.replace(folder, "/x/x")
    text = _PATH.sub("<path>", text)
    names = {socket.gethostname(), platform.node(), Path.home().name, _user()}
    names |= {name.partition(".")[0] for name in names}
    for name in sorted(names, key=len, reverse=True):
        if len(name) > 1:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", text, flags=re.IGNORECASE)
    return text[:300]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return ""
