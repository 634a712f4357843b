"""The profiles in a log directory, read through TensorBoard's data provider."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any, Final

from tensorboard.data.provider import RunTagFilter

from lightning_modelprof.errors import ArchiveError, printable
from lightning_modelprof.record import Record
from lightning_modelprof.report.model import Report
from lightning_modelprof.show.tensorboard.event_file import PLUGIN_NAME
from lightning_modelprof.show.tensorboard.profile_blob import (
    ColumnsBlob,
    EntryHead,
    StoredEntry,
    unpack_head,
    unpack_profile,
)

TRACES: Final = "traces"

_TRACE_NAME: Final = re.compile(r"\w[\w.-]*\.pt\.trace\.json(\.gz)?", re.ASCII)

_FOLDER_NAME: Final = re.compile(r"[^./\\:\0][^/\\:\0]*")
"""Name of a run's directory, which the tags of its profiles start with."""


def find_trace(logdir: str, run: str, tag: str, name: str) -> Path | None:
    """Find a trace in the run's own directory; ``None`` if it has none of that name.

    Args:
        logdir: TensorBoard's log directory; ``""`` if unknown.
        run: TensorBoard's name of the run, its directory below ``logdir``.
        tag: tag of the window's profile.
        name: bare file name. Anything with a separator is refused, and so are links that lead elsewhere.
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
    """Return the file name of a window's trace, or a sentence on where that file is.

    Args:
        logdir, run, tag: as in :func:`find_trace`.
        report: the window's report; what it calls its trace is never opened.

    Returns:
        ``file`` and ``where``, one of which is ``""``; nothing if the report names no trace.
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


_MOST_KEPT: Final = 16
"""Maximum decoded profiles in the cache, for readers who switch between some."""


_MOST_WRITTEN: Final = 1_000
"""Maximum values of one tag to find the newest among; there is one, unless two fits share a folder."""


class Entry(Record, frozen=True, kw_only=True):
    """One profile of a list.

    Attributes:
        tag: its name within the run.
        wall_time: when it was written, seconds since 1970.
        head: what it is; ``None`` if it can't be read.
        problem: why it can't be read; ``""`` if it can.
    """

    tag: str
    wall_time: float
    head: EntryHead | None
    problem: str = ""


class StoredProfiles:
    """Lists and reads profiles, with a cache of decoded ones.

    Args:
        provider: TensorBoard's ``DataProvider``.
    """

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._kept: OrderedDict[tuple[str, ...], StoredEntry] = OrderedDict()
        self._lock = Lock()  # TensorBoard answers each request in its own thread

    def list(self, context: Any, experiment: str) -> dict[str, list[Entry]]:
        """Return each run's profiles in order of time, without reading any blob."""
        series = self._provider.list_blob_sequences(
            context, experiment_id=experiment, plugin_name=PLUGIN_NAME
        )
        return {
            run: sorted((_entry(tag, one) for tag, one in tags.items()), key=lambda entry: entry.wall_time)
            for run, tags in sorted(series.items(), key=lambda named: _natural_order(named[0]))
            if tags
        }

    def read(self, context: Any, experiment: str, run: str, tag: str) -> StoredEntry:
        """Read one profile.

        Raises:
            ArchiveError: if there is none of this name, or if it can't be read.
        """
        datum = self._newest(context, experiment, run, tag)
        key = (experiment, run, tag, str(datum.step), str(datum.wall_time))
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        profile = unpack_profile(self._blob(context, datum, 0))
        with self._lock:
            self._kept[key] = profile
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return profile

    def read_columns(self, context: Any, experiment: str, run: str, tag: str, wanted: ColumnsBlob) -> bytes:
        """Read a profile's packed columns, as stored.

        Raises:
            ArchiveError: if the profile has none of that kind.
        """
        columns = self.read(context, experiment, run, tag).columns
        if wanted not in columns:
            rank = "" if wanted.rank is None else f" of rank {wanted.rank}"
            raise ArchiveError(f"{run}, {tag}: expected {wanted.kind}{rank} in this profile, got none.")
        return self._blob(context, self._newest(context, experiment, run, tag), 1 + columns.index(wanted))

    def _newest(self, context: Any, experiment: str, run: str, tag: str) -> Any:
        found = self._provider.read_blob_sequences(
            context,
            experiment_id=experiment,
            plugin_name=PLUGIN_NAME,
            downsample=_MOST_WRITTEN,
            run_tag_filter=RunTagFilter([run], [tag]),
        )
        data = found.get(run, {}).get(tag)
        if not data:
            raise ArchiveError(
                f"expected a profile {tag!r} in the run {run!r}, got none. It may have been deleted; reload"
                " the page."
            )
        return max(data, key=lambda datum: datum.wall_time)

    def _blob(self, context: Any, datum: Any, number: int) -> bytes:
        if number >= len(datum.values):
            raise ArchiveError(f"expected {number + 1} parts in this profile, got {len(datum.values)}.")
        blob: bytes = self._provider.read_blob(context, blob_key=datum.values[number].blob_key)
        return blob


def _entry(tag: str, series: Any) -> Entry:
    try:
        head, problem = unpack_head(series.plugin_content), ""
    except ArchiveError as error:
        head, problem = None, str(error)
    return Entry(tag=tag, wall_time=series.max_wall_time, head=head, problem=problem)


def _natural_order(name: str) -> list[tuple[int, str]]:
    """As TensorBoard sorts: version_2 before version_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
