"""Choose, check and claim the folder for a loop's files, and keep to it."""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any, Final, TypeAlias
from uuid import uuid4

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.errors import ConfigError, describe_error
from lightning_modelprof.record import Record
from lightning_modelprof.run.archive import check_same_run
from lightning_modelprof.run.locate import DEFAULT_FOLDER, RUN_FILE
from lightning_modelprof.run.ranks import rank_file
from lightning_modelprof.run.records import Window

PAGE: Final = "report.html"
REPORT_FILES: Final = ("report.json", PAGE, "report.txt")

CLAIM_FILE: Final = ".run.json.claimed"
"""Marks a folder as a run's until its archive does."""

TRACES: Final = "traces"
"""Subfolder of a run's folder."""

Whereabouts: TypeAlias = tuple[str, tuple[int, int] | None]
"""Path with its links resolved, and the device and inode found there."""

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+:")
"""How Path writes a URL's scheme, such as ``s3://``; a Windows drive has one letter."""

_TRIED: Final[set[Path]] = set()
"""Folders known to be writable, which aren't checked again before each of many loops."""

_LOCAL_SCHEME: Final = re.compile(r"^(file|local):/+")


class RunFolder(Record, frozen=True, kw_only=True):
    """One rank's view of a run's folder.

    Attributes:
        path: ``None`` writes no files.
        created: when the loop started, as in the run.
        rank: of this process; it's in the names of traces, and of archives unless the rank is the first.
        claimed: where the folder was when it was claimed.
    """

    path: Path | None
    created: str
    rank: int = 0
    is_first: bool = True
    claimed: Whereabouts | None = None

    @staticmethod
    def claimed_now(path: Path | None, *, created: str, rank: int = 0, is_first: bool = True) -> RunFolder:
        """Return the folder as claimed at its current place."""
        claimed = None if path is None else _whereabouts(path)
        return RunFolder(path=path, created=created, rank=rank, is_first=is_first, claimed=claimed)

    @property
    def archive(self) -> Path | None:
        """File of the saved run."""
        name = RUN_FILE if self.is_first else rank_file(self.rank)
        return None if self.path is None else self.path / name

    @property
    def report_paths(self) -> list[Path]:
        """Files of the report, which the first rank writes."""
        path = self.path if self.is_first else None
        return [] if path is None else [path / name for name in REPORT_FILES]

    def trace_name(self, window: Window) -> str:
        """Return the path of a window's trace in the folder."""
        steps = window.recorded_steps
        return f"{TRACES}/rank{self.rank}_steps_{steps[0]}-{steps[-1]}.pt.trace.json.gz"

    def trace_path(self, window: Window) -> Path | None:
        """Return where a window's compressed trace is saved."""
        return None if self.path is None else self.path / self.trace_name(window)

    def check(self) -> None:
        """Refuse to write if another run is there, or a link now leads to another folder than at the start.

        Raises:
            OSError: in these cases.
        """
        if self.path is None or self.archive is None or self.claimed is None:
            return
        check_same_run(self.archive, self.created)
        real, number = _whereabouts(self.path)
        if real != self.claimed[0] and number != self.claimed[1]:
            raise OSError(f"{self.path} now points to another directory: {real}")


def _whereabouts(folder: Path) -> Whereabouts:
    try:
        found = folder.stat()
    except OSError:  # not made yet, or gone
        return os.path.realpath(folder), None
    return os.path.realpath(folder), (found.st_dev, found.st_ino)


def wanted_folder(config: ProfileConfig, trainer: Any) -> tuple[Path | None, str]:
    """Return the folder to claim when the loop starts, ``None`` without files; and why it's elsewhere.

    It's absolute, so a training that changes its working directory still writes to one place. Without
    ``dirpath``, it's next to the run's files if possible, otherwise elsewhere on this machine, with the
    reason.

    Args:
        trainer: on every rank; the first rank's counts.

    Raises:
        ConfigError: when ``dirpath`` can't be created or written to.
    """
    # Lightning leaves no files after a fast_dev_run, and neither do we unless dirpath requests them.
    if not config.report.files or (trainer.fast_dev_run and config.dirpath is None):
        return None, ""
    if config.dirpath is None:
        return _beside_the_run(trainer)
    folder = Path(os.path.expanduser(config.dirpath))  # noqa: PTH111 - without a home directory it's unchanged
    check_writeable(folder)
    return folder.absolute(), ""


def claim_directory(wanted: Path) -> Path:
    """Claim ``wanted``, or ``wanted_1``, ``wanted_2``, ... if it has a run or a report to protect.

    Making a file in a folder claims it, which only one of several runs can do; the first saved archive
    replaces that file. So a run that ends before leaves no archive, rather than an empty one.

    Raises:
        OSError: when none can be claimed; then nothing may be written, as the folder may be another run's.
    """
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        directory = wanted if number == 0 else wanted.with_name(f"{wanted.name}_{number}")
        if _is_taken(directory):
            continue
        try:
            directory.mkdir(exist_ok=True)
            claim = directory / CLAIM_FILE
            claim.touch(exist_ok=False)
        except FileExistsError:
            continue
        if not _is_taken(directory):
            break
        claim.unlink()  # a run that claimed it earlier has just saved its archive
    return directory


def _is_taken(directory: Path) -> bool:
    names = (RUN_FILE, *REPORT_FILES)
    ranks = directory.glob(rank_file("*"))  # of a job whose first rank saved nothing
    return any(os.path.lexists(directory / name) for name in names) or any(ranks)


def check_writeable(directory: Path) -> None:
    """Refuse a folder that can't be created or written to, without creating it yet.

    Raises:
        ConfigError: with the place that is in the way, or for a place that isn't on this machine.
    """
    if _is_address(directory):
        address = f"{directory.parts[0]}//{'/'.join(directory.parts[1:])}"
        raise ConfigError(
            f"ModelProfCallback: expected a local directory for files, got {address}. Set dirpath to a local"
            " directory, or report={'files': False}."
        )
    problem = _why_not_writable(directory)
    if problem:
        raise ConfigError(
            f"ModelProfCallback: can't write files to {directory}: {problem}. Set dirpath, change the"
            " logger's directory, or set report={'files': False}."
        )


def _why_not_writable(directory: Path) -> str:
    try:
        places = (directory, *directory.parents)
        existing = next((place for place in places if _exists(place)), directory)
        dangling = next((place for place in places if place.is_symlink() and not _exists(place)), None)
        if dangling is not None:  # don't create a folder behind a link, such as to an unmounted disk
            return f"{dangling} is a link to {dangling.readlink()}, which does not exist"
        if not existing.is_dir():
            return f"{existing} is a file"
    except OSError as error:  # a parent can't be entered, a link leads to itself, ...
        return f"can't read {error.filename or directory}: {error.strerror or error}"
    except ValueError as error:  # a zero byte, or half a surrogate pair
        return f"invalid directory name: {error}"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} isn't writable"
    return _refused(existing)


def _refused(folder: Path) -> str:
    """Why nothing can be created in a folder that seems writable, as ``/sys`` does for root."""
    try:
        place = folder.absolute()  # a relative one depends on the working directory
        if place in _TRIED:
            return ""
        trial = folder / f".{uuid4().hex}"
        trial.mkdir()
        trial.rmdir()
        _TRIED.add(place)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # a full disk must not prevent a fit
        return "" if is_full else f"can't create files in {folder}: {error.strerror or error}"
    return ""


def _exists(place: Path) -> bool:
    """Unlike ``Path.exists``, raises in every Python version if it's unknown."""
    try:
        place.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _beside_the_run(trainer: Any) -> tuple[Path | None, str]:
    """Find a folder on this machine as close to the run's own as possible, whatever Lightning's settings."""
    reasons: list[str] = []
    for look in (_folder_of_the_logger, lambda trainer: trainer.default_root_dir, lambda _: Path.cwd()):
        try:
            found = look(trainer)
            problem = "" if found is None else _why_not_here(found)
            if found is not None and not problem:
                folder = Path(_without_file_scheme(found), DEFAULT_FOLDER).absolute()
                reasons += filter(None, [_in_the_way(folder)])
                return folder, "; ".join(dict.fromkeys(reasons))
        except Exception as error:  # custom loggers may raise anything
            problem = f"the run's directory is unknown: {describe_error(error)}"
        reasons += [problem] * bool(problem)
    return _private_folder() / DEFAULT_FOLDER, "; ".join(dict.fromkeys(reasons))


def _private_folder() -> Path:
    """Return a temporary folder that other users can't write to or put links in."""
    if hasattr(os, "getuid"):  # where users share the temporary directory
        folder = Path(tempfile.gettempdir(), f"{DEFAULT_FOLDER}-{os.getuid()}")
        try:
            folder.mkdir(mode=stat.S_IRWXU, exist_ok=True)
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                folder.chmod(stat.S_IRWXU)
                return folder
        except OSError:  # another user's file or link
            pass
    return Path(tempfile.mkdtemp(prefix=f"{DEFAULT_FOLDER}-"))


def _in_the_way(folder: Path) -> str:
    """What occupies the folder's name, so that another is used; ``""`` if nothing does."""
    if folder.is_dir() or not os.path.lexists(folder):
        return ""
    if folder.is_symlink() and not folder.exists():
        return f"{folder} is a link to {folder.readlink()}, which does not exist"
    return f"{folder} is a file"


def _why_not_here(place: Any) -> str:
    # A MagicMock claims to be a path, and anything else.
    if not isinstance(place, str | os.PathLike) or type(place).__module__ == "unittest.mock":
        return f"the run's directory isn't a path but a {type(place).__name__}"
    path = _without_file_scheme(place)
    if _is_address(path):
        return f"the run's directory {os.fspath(place)} isn't on this machine"
    problem = _why_not_writable(path)
    return f"the run's directory isn't writable: {problem}" if problem else ""


def _without_file_scheme(place: str | os.PathLike[str]) -> Path:
    return Path(_LOCAL_SCHEME.sub("/", os.fspath(place)))


def _is_address(path: Path) -> bool:
    return _SCHEME.fullmatch(path.parts[0] if path.parts else "") is not None


def _folder_of_the_logger(trainer: Any) -> Any:
    """Return where the first logger keeps this run's own files, ``None`` if unknown.

    Loggers without such a folder share ``save_dir`` between runs, and MLflow takes every folder in it for an
    experiment. For these, it's the folder that ModelCheckpoint uses.
    """
    logger = trainer.loggers[0] if trainer.loggers else None
    if logger is None or not (logger.log_dir or logger.save_dir):
        return None
    if logger.log_dir:
        return logger.log_dir
    save_dir, problem = logger.save_dir, _why_not_here(logger.save_dir)
    if problem:
        return save_dir  # the caller reports the problem
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(save_dir, str(logger.name), version)
