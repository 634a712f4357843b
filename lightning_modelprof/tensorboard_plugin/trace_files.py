"""The traces that runs in the log directory have saved, which the dashboard serves by bare file name."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Final

from lightning_modelprof.errors import printable
from lightning_modelprof.report.model import Report

TRACES: Final = "traces"
"""Folder of traces in that of a run."""

_TRACE_NAME: Final = re.compile(r"\w[\w.-]*\.pt\.trace\.json(\.gz)?", re.ASCII)

_FOLDER_NAME: Final = re.compile(r"[^./\\:\0][^/\\:\0]*")
"""Of a run's directory, which the tags of its profiles start with."""


def find_trace(logdir: str, run: str, tag: str, name: str) -> Path | None:
    """A trace in the run's own directory; ``None`` where it has none of that name.

    Args:
        logdir: what TensorBoard was started with; ``""`` if that isn't known.
        run: TensorBoard's name of the run, its directory below ``logdir``.
        tag: of the window's profile.
        name: of the file alone. Anything with a separator is refused, and so is a link that leads elsewhere.
    """
    folder = tag.partition("/")[0]
    if not (logdir and _FOLDER_NAME.fullmatch(folder) and _TRACE_NAME.fullmatch(name)):
        return None
    try:
        root = Path(logdir).expanduser().resolve(strict=True)
        file = root / run / folder / TRACES / name
        is_own = file.resolve(strict=True) == file and file.is_relative_to(root) and file.is_file()
    except (OSError, RuntimeError, ValueError):  # no such directory, a loop of links, a null character
        return None
    return file if is_own else None


def named_trace(logdir: str, run: str, tag: str, report: Report) -> dict[str, str]:
    """The name of the file that has a window's trace, or in a sentence where that file is.

    Args:
        logdir, run, tag: as of :func:`find_trace`.
        report: of the window; what it calls its trace is never opened.

    Returns:
        ``file`` and ``where``, of which one is ``""``; nothing where the report names no trace.
    """
    source = next((one.source for one in report.summary.traces), "")
    saved = PurePosixPath(source).name
    if not saved:
        return {}
    for name in (saved, saved.removesuffix(".gz")):  # one that isn't packed yet has no .gz
        if find_trace(logdir, run, tag, name) is not None:
            return {"file": name, "where": ""}
    where = f"{source} in the run's directory" if source != saved else source
    return {"file": "", "where": f"The trace isn't in this log directory. It's {printable(where)}."}
