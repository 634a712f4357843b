"""Add saved runs and any torch.profiler traces to a TensorBoard log directory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.errors import ArchiveError, TraceError, printable, quoted, remedy
from lightning_modelprof.reading import load_with_options, refuse_damaged
from lightning_modelprof.reading_traces import read_with_progress, trace_files, window_traces
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.build_dashboard_entry import run_profile, window_profile
from lightning_modelprof.report.build_trace import group_ranks
from lightning_modelprof.report.dashboard_entry import DashboardEntry
from lightning_modelprof.report.options import SHOWN_WINDOWS
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.locate import DEFAULT_FOLDER, RUN_FILE, find_run
from lightning_modelprof.run.records import Window
from lightning_modelprof.show.tensorboard.event_file import tag_of, write_event_file
from lightning_modelprof.trace.merged import split_processes
from lightning_modelprof.trace.model import Trace

_TRACE_ENDINGS = (".gz", ".zip", ".tar", ".tgz", ".json", ".trace", ".pt")


def import_into(paths: Sequence[Path], logdir: Path, max_bytes: int) -> list[tuple[str, int]]:
    """Write profiles of saved runs and traces to event files.

    Args:
        paths: directories of saved runs, traces, or directories of traces; each run, and each directory with
            traces, becomes a TensorBoard run.
        logdir: TensorBoard's log directory.
        max_bytes: maximum uncompressed trace size to read.

    Returns:
        Name of each written run, and its number of profiles.

    Raises:
        ArchiveError: when a saved run is damaged, or TensorBoard can't write to the log directory.
        TraceError: when a path holds neither a run nor traces.
        OSError: when the log directory can't be written.
    """
    try:
        str(logdir).encode()
    except UnicodeEncodeError:
        raise ArchiveError(
            f"{quoted(str(logdir))}: TensorBoard needs a log directory whose name is valid UTF-8. Choose"
            " another one."
        ) from None
    written = []
    for path in paths:
        runs = _runs(path)
        sources = ((_run_name(run, path), _profiles_of_run(run)) for run in runs)
        for wanted, profiles in sources if runs else _trace_folders(path, max_bytes):
            folder = _free_folder(logdir / printable(wanted))  # the name is a label in TensorBoard
            number = write_event_file(folder, ((tag_of(profile), profile) for profile in profiles))
            written.append((folder.relative_to(logdir).as_posix(), number))
    return written


def _runs(path: Path) -> list[Path]:
    """The archives of saved runs for a path: one, or all below a directory."""
    named = find_run(path)
    try:
        if named.name == RUN_FILE and named.is_file():
            return [named]
        return sorted(path.rglob(RUN_FILE)) if path.is_dir() else []
    except OSError as error:
        raise ArchiveError(f"can't read {path}: {error.strerror or error}. {remedy(error)}") from None


def _run_name(file: Path, below: Path) -> str:
    """``net/version_0`` of ``logs/net/version_0/modelprof/run.json`` below ``logs``."""
    folder, top = file.resolve().parent, below.resolve()
    if folder.name.startswith(DEFAULT_FOLDER):
        folder = folder.parent
    return folder.relative_to(top).as_posix() if top in folder.parents else folder.name


def _free_folder(wanted: Path) -> Path:
    """An unused directory, to keep earlier imports."""
    folder, number = wanted, 1
    while folder.exists():
        folder, number = wanted.with_name(f"{wanted.name}_{number}"), number + 1
    return folder


def _profiles_of_run(path: Path) -> Iterator[DashboardEntry]:
    (run, options), folder = load_with_options(path), path.parent
    others = _windows_of_other_ranks(folder)
    newest: dict[int, TraceFacts] = {}
    notes: dict[int, str] = {}
    for window, trace, note in window_traces(run.ranks[0].windows, folder):
        if trace is None:
            notes |= {window.index: note} if note else {}
            continue
        traces = [(trace, TraceFacts(trace).complete())]
        newest[window.index] = traces[0][1]
        if len(newest) > SHOWN_WINDOWS:  # no more are shown in a run's report
            del newest[next(iter(newest))]
        same = [other for other in others if other.index == window.index]
        found = (other for _, other, _ in window_traces(same, folder) if other is not None)
        traces += [(other, TraceFacts(other).complete()) for other in found]
        yield window_profile(traces, window=window.index, loop=run.info.loop, options=options)
    with refuse_damaged(path):
        profile = run_profile(run, build_report(Facts(run, newest, notes), options))
    yield profile


def _windows_of_other_ranks(folder: Path) -> list[Window]:
    runs = [load_run(file) for file in sorted(folder.glob("run_rank*.json"))]
    return [window for run in runs for record in run.ranks for window in record.windows]


def _trace_folders(path: Path, max_bytes: int) -> Iterator[tuple[str, Iterator[DashboardEntry]]]:
    """Each directory with traces becomes a run named after it, as in torch_tb_profiler."""
    by_folder: dict[Path, list[Path]] = defaultdict(list)
    for file in trace_files(path):
        by_folder[file.parent].append(file)
    for folder, files in by_folder.items():
        name = _trace_name(path) if path.is_file() else folder.resolve().name
        yield name, _profiles_of_traces(files, max_bytes)


def _trace_name(file: Path) -> str:
    """A file's name without its endings: ``v100`` of ``v100.pt.trace.json.gz``."""
    name = file.name
    while Path(name).suffix in _TRACE_ENDINGS:
        name = Path(name).stem
    return name


def _profiles_of_traces(files: Sequence[Path], max_bytes: int) -> Iterator[DashboardEntry]:
    """Yield one window for traces of one job's ranks, else a window per trace, ordered by step."""
    if len(files) == 1:
        trace = _read(files[0], max_bytes)
        yield window_profile([(one, TraceFacts(one).complete()) for one in split_processes(trace)], window=0)
        return
    facts: list[TraceFacts] = []
    skipped: list[str] = []
    for file in files:
        try:
            facts.append(TraceFacts(_read(file, max_bytes)).complete())
        except TraceError as error:  # noqa: PERF203 - report a file that isn't a trace, and read the others
            skipped.append(str(error))
    if not facts:
        raise TraceError(f"no traces in {files[0].parent}. {' '.join(skipped)}")
    folder = files[0].parent
    for number, group in enumerate(group_ranks(facts)):
        # Read again instead of keeping them: a directory's traces may exceed the memory.
        traces = [(_read(folder / one.source, max_bytes), one) for one in group.values()]
        yield window_profile(traces, window=number)


def _read(file: Path, max_bytes: int) -> Trace:
    return replace(read_with_progress(file, max_bytes), source=file.name)
