"""Processes of our own, which run a module of this package and neither torch nor the user's program."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import subprocess

_GROUP: Final[dict[str, Any]] = {"process_group": 0} if sys.version_info >= (3, 11) else {}
"""Ctrl-C in a terminal goes to a whole group, and is not meant for them."""

OWN_PROCESSES: Final[set[int]] = set()
"""Numbers of those that this process has started: what they use is not the training's."""


def start_module(name: str, *arguments: str, **how: Any) -> subprocess.Popen[bytes]:
    """Start ``python -m name``: never multiprocessing, which would run the user's script once more.

    Args:
        name: of the module.
        arguments: of its command line.
        how: as of ``subprocess.Popen``; what is not said of standard output and errors goes nowhere.

    Raises:
        OSError: when there can be no other process, or nobody knows how to start a Python.
    """
    import subprocess  # noqa: PLC0415  # where one is needed

    if "python" not in Path(sys.executable or "").name.lower() or getattr(sys, "frozen", False):
        raise OSError(f"{sys.executable or 'nothing'} is no Python that could be started")
    package = str(Path(__file__).resolve().parents[1])
    environment = {
        **os.environ,
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH")))),
        "PYTHONSAFEPATH": "1",
        "PYTHONWARNINGS": "ignore",
    }
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(
        [sys.executable, "-m", name, *arguments], **{"env": environment, **nowhere, **_GROUP, **how}
    )
    OWN_PROCESSES.add(process.pid)
    return process
