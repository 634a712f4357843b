"""Describe the machine for an attachment: card, driver and versions, but nothing identifying."""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.errors import ModelProfError, describe_error, printable

_PACKAGES: Final = ("lightning-modelprof", "torch", "lightning", "torchmetrics", "numpy")

_PRIVATE: Final = re.compile(
    r"""
    (?<!\w)(["'])(?:(?!\1).)*[\\/@](?:(?!\1).)*\1     # in quotes: a path with its spaces
    | \S+@[\w.-]+                                     # mail
    | (?<![^\s(=])(?:[A-Z]:|~)?[\\/][^:;,'"()<>|]*    # a path has spaces, so to the next mark
    | [^\s'"(]*[\\/][^\s'"),;]*                       # a relative path
    | (?<![\w:])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?![\w:])  # IPv6, MAC
    | \b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?            # IPv4
    | (?<![\w.-])[\w-]+:\d{4,5}\b                     # a host and its port
    | (?!torch\.|lightning)\b[\w-]+(?:\.[\w-]+)*\.[a-z]\w+(?::\d+)?  # a host's full name, or a file's
    """,
    re.IGNORECASE | re.VERBOSE,
)

_KNOWN: Final = re.compile(
    r"CUDA out of memory|CUDA error: [a-z -]+|no kernel image is available|CU(?:BLAS|DNN)_STATUS_[A-Z_]+"
    r"|CUPTI_ERROR_[A-Z_]+|NCCL error|not permitted when stream is capturing|No working C\+\+ compiler found"
    r"|Failed to find C compiler|working triton installation|No module named '(?:torch|triton|lightning)'"
    r"|No space left on device|Address already in use|Permission denied|Too many open files"
)
"""Third-party error texts that are safe to share."""


def facts(asked: str | None) -> dict[str, Any]:
    """The device in use, and everything the numbers depend on.

    Args:
        asked: a kind of device; ``None`` for the best one that torch finds.
    """
    import torch  # noqa: PLC0415 -- not in the parent process

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


def told(error: BaseException) -> str:
    """The shareable part of an error: for third-party errors only the type and a known text."""
    text = describe_error(error)
    if isinstance(error, ModelProfError):
        return scrubbed(text)
    known = _KNOWN.search(text)
    return f"{type(error).__name__}: {known[0]}" if known else type(error).__name__


def scrubbed(text: str) -> str:
    """Remove paths, addresses, file names and the names of users and machines from a message."""
    text = printable(" ".join(text.split()))
    names = {socket.gethostname(), platform.node(), Path.home().name, _user()}
    names |= {name.partition(".")[0] for name in names}
    text = _PRIVATE.sub("<removed>", text)
    for name in sorted(names, key=len, reverse=True):
        if len(name) > 1:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<removed>", text, flags=re.IGNORECASE)
    return text[:300]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return ""
