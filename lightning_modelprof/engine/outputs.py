"""Write reports to files, terminal and loggers; one that fails warns once and doesn't affect the others."""

from __future__ import annotations

import contextlib
import copy
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.config.options import ReportOptions
from lightning_modelprof.engine.run_folder import CLAIM_FILE, PAGE, RunFolder
from lightning_modelprof.errors import describe_error, printable
from lightning_modelprof.report.model import Report
from lightning_modelprof.run.archive import pack, save_run
from lightning_modelprof.run.locate import RUN_FILE
from lightning_modelprof.run.loops import FIT, LOOPS, loop_of
from lightning_modelprof.run.opening import write_atomically
from lightning_modelprof.run.records import Run, Window
from lightning_modelprof.show.document import render_json
from lightning_modelprof.show.findings import brief_line
from lightning_modelprof.show.html.page import render_html
from lightning_modelprof.show.notebook import show_in_notebook
from lightning_modelprof.show.tensorboard.event_file import write_scalars, write_summary
from lightning_modelprof.show.tensorboard.scalars import TAG_PREFIX, write_layout, write_report
from lightning_modelprof.show.terminal.terminal import print_lines, print_report
from lightning_modelprof.show.text import render_text

LAYOUT: Final = {
    "Phases (ms per step)": [
        f"modelprof/phase_ms/{key}"
        for key in ("dataloader", "transfer", "forward", "backward", "optimizer", "callbacks", "other")
    ],
    "Steps per second": ["modelprof/ips"],
    "Samples per second": ["modelprof/samples_per_s"],
    "Reader ratio": ["modelprof/reader_ratio"],
    "Memory (MiB)": [f"modelprof/memory_mib/{name}" for name in ("process", "allocated", "reserved")],
    "FLOP/s": ["modelprof/flops_per_s"],
    "MFU": ["modelprof/mfu"],
}

TEXTS_BYTES: Final = 2**20
"""Maximum size of a report's texts."""

SPARE_BYTES: Final = 2**26
"""Disk space to leave free for others."""


FILES: Final = "files"
"""Name of the run's files in warnings about failed outputs."""

NOWHERE: Final = ReportOptions(terminal=False, tensorboard=False)
"""For files only."""


class Outputs:
    """Writes the results of one rank in one fit.

    Args:
        folder: of the run.
        loggers: the trainer's loggers; empty on all ranks but the first.
        warn: called with one sentence when an output fails.
    """

    def __init__(
        self,
        folder: RunFolder,
        loggers: Sequence[Any],
        report: ReportOptions,
        warn: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self._loggers = loggers
        self._options = report if folder.is_first else NOWHERE
        self._warn = warn
        self._work_folder = _work_folder()
        self._failed: set[str] = set()
        self._has_files = False
        self._charts: dict[str, list[str]] = {}
        self._unprinted: tuple[Report, bool] | None = None

    def without_loggers(self) -> Outputs:
        """Return a copy for files only, which keeps no logger alive."""
        files = copy.copy(self)
        files._loggers = []
        return files

    @property
    def has_loggers(self) -> bool:
        return bool(self._loggers)

    def save_run(self, run: Run) -> bool:
        """Save the measurements so far; return ``False`` if that failed."""
        path = self.folder.archive
        if path is None:
            return True
        is_saved = self._try_file(path, lambda: save_run(run, path))
        if is_saved and self.folder.is_first:
            with contextlib.suppress(OSError):
                path.with_name(CLAIM_FILE).unlink(missing_ok=True)
        return is_saved

    def save_trace(self, window: Window, raw: bytes) -> bool:
        """Save a window's trace, compressed; return ``False`` if that failed."""
        path = self.folder.trace_path(window)
        return path is not None and self._try_file(path, lambda: write_atomically(path, pack(raw)))

    @property
    def has_terminal(self) -> bool:
        """Whether to print this rank's report in the terminal."""
        return bool(self._options.terminal)

    def may_write(self, path: Path) -> bool:
        """Whether a file may be written to the folder, which may now be another run's."""
        return self._try_file(path, lambda: None)

    def remove_trace(self, trace_file: str) -> bool:
        """Remove a saved trace; return whether it's gone."""
        if self.folder.path is None:
            return False
        path = self.folder.path / trace_file
        return self._try_file(path, lambda: path.unlink(missing_ok=True))

    def save_report(self, report: Report) -> None:
        """Write report.json, report.html and report.txt."""
        renderings = (render_json, render_html, _render_text)
        for path, render in zip(self.folder.report_paths, renderings, strict=False):
            self._try_file(path, partial(_write_rendered, path, render, report))

    def show_report(self, report: Report, step: int, *, is_brief: bool = False) -> None:
        """Write the report to TensorBoard as text; :meth:`print_report` prints it.

        Args:
            step: its position in loggers.
            is_brief: whether to print one line instead, as many such loops run.
        """
        loop = loop_of("" if report.summary.run is None else report.summary.run.loop)
        prefix = TAG_PREFIX if loop.is_fit else f"{TAG_PREFIX}/{loop.key}"
        self._to_tensorboard(lambda writer: write_report(writer, report, step, prefix))
        if self._options.terminal:
            self._unprinted = report, is_brief

    def print_report(self, bar: Any) -> None:
        """Print the report once, after the progress bar is closed, as it would be drawn again below.

        Args:
            bar: the Trainer's progress bar; ``None`` if it has none.
        """
        unprinted, self._unprinted = self._unprinted, None
        if unprinted is None:
            return
        report, is_brief = unprinted
        self._try("terminal", partial(_close_live_display, bar))
        if is_brief:
            self._try("terminal", lambda: print_lines([brief_line(report, self._place)]))
        else:
            last_words = self._last_words()
            self._try("terminal", lambda: self._print(report, last_words))

    def _print(self, report: Report, last_words: list[str]) -> None:
        wants_all = self._options.terminal == "full"
        if wants_all or not show_in_notebook(report, page=self._page_path):
            print_report(
                report,
                full=wants_all,
                last_words=last_words,
                is_below_a_bar=True,
                has_colours=self._options.colours,
            )

    def write_profile(self, packed: bytes, step: int) -> None:
        """Write the dashboard's entry for a run or a window.

        Args:
            packed: TensorBoard's ``Summary`` of the profile.
            step: the x-coordinate.
        """
        self._to_tensorboard(partial(write_summary, packed=packed, step=step), len(packed))

    @property
    def tag_folder(self) -> str:
        """Name of profiles in TensorBoard, which differs for a second fit with the same logger.

        ``""`` if no logger has an event file for them.
        """
        if not (self._options.tensorboard and any(map(_is_tensorboard, self._loggers))):
            return ""
        if self.folder.path is not None:
            return _name_of(self.folder.path)
        return re.sub(r"\W+", "_", f"{TAG_PREFIX}_{self.folder.created}")

    @property
    def all_ranks_command(self) -> str:
        """Command that adds the traces of all ranks to TensorBoard; ``""`` without it or a folder."""
        folders = [logger.save_dir for logger in self._loggers if _is_tensorboard(logger) and logger.save_dir]
        if not (self._options.tensorboard and self.folder.path is not None and folders):
            return ""
        paths = (
            _short_path(self.folder.path, self._work_folder),
            _short_path(Path(folders[0]), self._work_folder),
        )
        return printable("lightning-modelprof tensorboard {} --logdir {}".format(*map(shlex.quote, paths)))

    @property
    def _place(self) -> str:
        """Folder of the files; ``""`` without files."""
        return str(self.folder.path) if self.folder.path is not None and self._has_files else ""

    @property
    def _page_path(self) -> str:
        if self.folder.path is None or not self._has_file(PAGE):
            return ""
        return f"{_short_path(self.folder.path, self._work_folder)}/{PAGE}"

    def _has_file(self, name: str) -> bool:
        if self.folder.path is None or not self._has_files:
            return False
        try:
            return (self.folder.path / name).is_file()
        except OSError:
            return False

    def _last_words(self) -> list[str]:
        places = []
        if self._page_path:
            places.append(f"page: {self._page_path}")
        archive = self.folder.archive
        if archive is not None and self._has_file(archive.name):
            folder = shlex.quote(_short_path(archive.parent, self._work_folder))
            places.append(f"all tables: lightning-modelprof report {folder} --full")
        loggers = filter(_is_tensorboard, self._loggers if self._options.tensorboard else ())
        folders = {str(logger.save_dir): None for logger in loggers if logger.save_dir}
        places += [
            f"dashboard: tensorboard --logdir {shlex.quote(_short_path(Path(folder), self._work_folder))}"
            for folder in folders
        ]
        return [printable(place) for place in places] or ["all tables: callback.report"]

    def log_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        charts = {
            title: tags
            for title, tags in LAYOUT.items()
            if title in self._charts or not scalars.keys().isdisjoint(tags)
        }
        if charts != self._charts:  # the MFU chart needs a device with a known peak
            self._charts = charts
            self._to_tensorboard(partial(write_layout, charts=charts))
        for logger in self._loggers:
            self._try(type(logger).__name__, partial(_log, logger, scalars, step))

    def _to_tensorboard(self, write: Callable[[Any], object], size: int = TEXTS_BYTES) -> None:
        """Call ``write`` with each SummaryWriter, which a logger makes on demand and may fail to.

        Args:
            size: bytes that it writes.
        """
        for logger in self._loggers if self._options.tensorboard else ():
            if _is_tensorboard(logger):
                self._try("TensorBoard", partial(_write_with, logger, write, size))

    def _try_file(self, path: Path, write: Callable[[], object]) -> bool:
        """Write a file; warn once per folder, about the first file that fails."""
        try:
            self.folder.check()
            write()
        except Exception as error:  # as in _try
            self.warn_once(
                FILES,
                f"couldn't write {path}: {describe_error(error)}."
                " The results are in callback.report and callback.run",
            )
            return False
        self._has_files = True
        return True

    def warn_once(self, what: str, sentence: str) -> None:
        """Warn about an output or another failure, unless that was done before."""
        if what not in self._failed:
            self._failed.add(what)
            self._warn(sentence)

    def _try(self, what: str, write: Callable[[], object]) -> bool:
        try:
            write()
        except Exception as error:  # a failing output must not affect training or other outputs
            self.warn_once(what, f"couldn't write to {what}: {describe_error(error)}")
            return False
        return True


def _close_live_display(bar: Any) -> None:
    """Stop a RichProgressBar's drawing, as its own teardown comes after ours."""
    progress: Any = getattr(bar, "progress", None)
    if hasattr(progress, "live"):
        progress.stop()  # does nothing when the bar calls it again


def _name_of(directory: Path) -> str:
    """Name a folder's run in TensorBoard; in another run's folder, it has the names of both."""
    root = directory.parent
    if not any((root / name).exists() for name in (RUN_FILE, CLAIM_FILE)):
        return directory.name
    return (
        root.name
        if directory.name in LOOPS and directory.name != FIT.key
        else f"{root.name}_{directory.name}"
    )


def _render_text(report: Report) -> bytes:
    return render_text(report).encode()


def _write_rendered(path: Path, render: Callable[[Report], bytes], report: Report) -> None:
    write_atomically(path, render(report))


def _work_folder() -> Path:
    """Base of relative paths; training may change the working directory."""
    try:
        return Path.cwd()
    except OSError:  # it was removed
        return Path()


def _short_path(folder: Path, work_folder: Path) -> str:
    try:
        return str(folder.relative_to(work_folder))
    except ValueError:
        return str(folder)


def _is_tensorboard(logger: Any) -> bool:
    """Check by name, as lightning and pytorch_lightning each have a TensorBoardLogger."""
    return any(kind.__name__ == "TensorBoardLogger" for kind in type(logger).__mro__)


def _adds_scalars(logger: Any) -> bool:
    """Whether a logger only passes scalars to its writer: Lightning's own, without a prefix."""
    method = type(logger).log_metrics
    if not method.__module__.endswith("fabric.loggers.tensorboard") or "log_metrics" in vars(logger):
        return False
    return not logger._prefix and type(logger.experiment).__module__.startswith("torch.")  # not tensorboardX


def _log(logger: Any, scalars: Mapping[str, float], step: int) -> None:
    if _adds_scalars(logger):
        write_scalars(logger.experiment, scalars, step)
    else:
        logger.log_metrics(metrics=dict(scalars), step=step)


def _write_with(logger: Any, write: Callable[[Any], object], size: int) -> None:
    writer = logger.experiment
    _check_room(logger.log_dir, size)
    write(writer)


def _check_room(folder: str | None, size: int) -> None:
    """Check free space first: a failed write would end the user's own writer, and then the training."""
    if folder is None:  # the logger doesn't say where it writes
        return
    try:
        free = shutil.disk_usage(folder).free
    except OSError:  # not made yet, or not on this machine
        return
    if free < size + SPARE_BYTES:
        raise OSError(f"only {free:,} bytes are free in {folder}, which the logger needs")
