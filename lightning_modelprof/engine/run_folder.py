"""The folder that the files of a loop go to: chosen, checked before training starts, claimed, and kept to."""

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
"""Says that a folder is a run's until its archive does."""

TRACES: Final = "traces"
"""Folder in that of a run."""

Whereabouts: TypeAlias = tuple[str, tuple[int, int] | None]
"""Where the links of a path lead, and the device and number of what is there."""

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+:")
"""What a Path has made of the ``s3://`` of an address; a drive of Windows has one letter."""

_TRIED: Final[set[Path]] = set()
"""Folders in which something could be made; that is not tried again before each of many loops."""

_LOCAL_SCHEME: Final = re.compile(r"^(file|local):/+")


class RunFolder(Record, frozen=True, kw_only=True):
    """The folder of one run, as one rank writes to it.

    Attributes:
        path: ``None`` writes no files.
        created: when the loop began, as in the run.
        rank: of this process; traces carry it in their name, and so does the archive of a rank that is not
            the first.
        claimed: where the folder was when it was claimed.
    """

    path: Path | None
    created: str
    rank: int = 0
    is_first: bool = True
    claimed: Whereabouts | None = None

    @staticmethod
    def claimed_now(path: Path | None, *, created: str, rank: int = 0, is_first: bool = True) -> RunFolder:
        """The folder that is claimed where it is now."""
        claimed = None if path is None else _whereabouts(path)
        return RunFolder(path=path, created=created, rank=rank, is_first=is_first, claimed=claimed)

    @property
    def archive(self) -> Path | None:
        """Where runs are saved."""
        name = RUN_FILE if self.is_first else rank_file(self.rank)
        return None if self.path is None else self.path / name

    @property
    def report_paths(self) -> list[Path]:
        """Files of the report, which the first rank writes."""
        path = self.path if self.is_first else None
        return [] if path is None else [path / name for name in REPORT_FILES]

    def trace_name(self, window: Window) -> str:
        """Where a window's trace lies in the folder."""
        steps = window.recorded_steps
        return f"{TRACES}/rank{self.rank}_steps_{steps[0]}-{steps[-1]}.pt.trace.json.gz"

    def trace_path(self, window: Window) -> Path | None:
        """Where a window's trace is saved, packed."""
        return None if self.path is None else self.path / self.trace_name(window)

    def check(self) -> None:
        """Refuse to write where another run is, or through a link to another folder than at the start.

        Raises:
            OSError: then.
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
    """The folder to claim when the loop begins, ``None`` when no files are wanted; and why it is another one.

    It is absolute: a training that changes its working folder still writes to one place. Where no ``dirpath``
    was given, it is beside the run's files if it can be, and else somewhere on this machine for a reason.

    Args:
        trainer: on every rank; that of the first rank counts.

    Raises:
        ConfigError: when a ``dirpath`` cannot be made or written to.
    """
    # A fast_dev_run leaves no files of Lightning's behind, and none of ours unless they are asked for.
    if not config.report.files or (trainer.fast_dev_run and config.dirpath is None):
        return None, ""
    if config.dirpath is None:
        return _beside_the_run(trainer)
    folder = Path(os.path.expanduser(config.dirpath))  # noqa: PTH111 - without a home it stays as it is
    check_writeable(folder)
    return folder.absolute(), ""


def claim_directory(wanted: Path) -> Path:
    """``wanted``, or ``wanted_1``, ``wanted_2``, ... if it holds a run or a report: nothing is overwritten.

    The folder is claimed by making a file in it, which only one of several runs can do; the first archive
    that is saved takes its place. So a run that ends in between leaves no archive, rather than an empty one.

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
        claim.unlink()  # a run that claimed it before us has saved its archive in between
    return directory


def _is_taken(directory: Path) -> bool:
    names = (RUN_FILE, *REPORT_FILES)
    ranks = directory.glob(rank_file("*"))  # of a job whose first rank saved nothing
    return any(os.path.lexists(directory / name) for name in names) or any(ranks)


def check_writeable(directory: Path) -> None:
    """Refuse a folder that cannot be made or written to, without making it yet.

    Raises:
        ConfigError: with the place that is in the way, or for a place that is not on this machine.
    """
    if _is_address(directory):
        address = f"{directory.parts[0]}//{'/'.join(directory.parts[1:])}"
        raise ConfigError(
            f"ModelProfCallback: expected a local directory for files, got {address}. Set dirpath to a local"
            " directory, or report={'files': False}."
        )
    problem = _problem(directory)
    if problem:
        raise ConfigError(
            f"ModelProfCallback: can't write files to {directory}: {problem}. Set dirpath, change the"
            " logger's directory, or set report={'files': False}."
        )


def _problem(directory: Path) -> str:
    """Why a folder cannot be made or written to, ``""`` when it can."""
    try:
        places = (directory, *directory.parents)
        existing = next((place for place in places if _exists(place)), directory)
        dangling = next((place for place in places if place.is_symlink() and not _exists(place)), None)
        if dangling is not None:  # no folder is made behind a link, such as to a disk that is not mounted
            return f"{dangling} is a link to {dangling.readlink()}, which does not exist"
        if not existing.is_dir():
            return f"{existing} is a file"
    except OSError as error:  # a folder on the way may not be entered, a link leads to itself, ...
        return f"can't read {error.filename or directory}: {error.strerror or error}"
    except ValueError as error:  # a zero byte, or half a surrogate pair
        return f"invalid directory name: {error}"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} isn't writable"
    return _refused(existing)


def _refused(folder: Path) -> str:
    """Why nothing can be made in a folder that claims to be writeable, as root is told of ``/sys``."""
    try:
        place = folder.absolute()  # a relative one is elsewhere when the working folder is
        if place in _TRIED:
            return ""
        trial = folder / f".{uuid4().hex}"
        trial.mkdir()
        trial.rmdir()
        _TRIED.add(place)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # a fit is worth having without its files
        return "" if is_full else f"can't create files in {folder}: {error.strerror or error}"
    return ""


def _exists(place: Path) -> bool:
    """Unlike ``Path.exists``, the same in every Python: raises when it cannot be told."""
    try:
        place.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _beside_the_run(trainer: Any) -> tuple[Path | None, str]:
    """A folder on this machine, whatever Lightning has been given: as near to the run's own as can be."""
    reasons: list[str] = []
    for look in (_folder_of_the_logger, lambda trainer: trainer.default_root_dir, lambda _: Path.cwd()):
        try:
            found = look(trainer)
            problem = "" if found is None else _why_not_here(found)
            if found is not None and not problem:
                folder = Path(_local(found), DEFAULT_FOLDER).absolute()
                reasons += filter(None, [_in_the_way(folder)])
                return folder, "; ".join(dict.fromkeys(reasons))
        except Exception as error:  # loggers are anybody's code
            problem = f"the run's directory is unknown: {describe_error(error)}"
        reasons += [problem] * bool(problem)
    return _private_folder() / DEFAULT_FOLDER, "; ".join(dict.fromkeys(reasons))


def _private_folder() -> Path:
    """A folder for temporary files that nobody else can write to or put links in."""
    if hasattr(os, "getuid"):  # where others have the same folder for temporary files
        folder = Path(tempfile.gettempdir(), f"{DEFAULT_FOLDER}-{os.getuid()}")
        try:
            folder.mkdir(mode=stat.S_IRWXU, exist_ok=True)
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                folder.chmod(stat.S_IRWXU)
                return folder
        except OSError:  # a file or a link of another user
            pass
    return Path(tempfile.mkdtemp(prefix=f"{DEFAULT_FOLDER}-"))


def _in_the_way(folder: Path) -> str:
    """What has the name of the folder and is none, so that another name is taken; ``""`` if nothing has."""
    if folder.is_dir() or not os.path.lexists(folder):
        return ""
    if folder.is_symlink() and not folder.exists():
        return f"{folder} is a link to {folder.readlink()}, which does not exist"
    return f"{folder} is a file"


def _why_not_here(place: Any) -> str:
    """Why files of ours cannot lie there, ``""`` if they can."""
    # A MagicMock says that it is a path, and of anything else.
    if not isinstance(place, str | os.PathLike) or type(place).__module__ == "unittest.mock":
        return f"the run's directory isn't a path but a {type(place).__name__}"
    path = _local(place)
    if _is_address(path):
        return f"the run's directory {os.fspath(place)} isn't on this machine"
    problem = _problem(path)
    return f"the run's directory isn't writable: {problem}" if problem else ""


def _local(place: str | os.PathLike[str]) -> Path:
    """The path of a place, without the ``file://`` that Lightning allows."""
    return Path(_LOCAL_SCHEME.sub("/", os.fspath(place)))


def _is_address(path: Path) -> bool:
    return _SCHEME.fullmatch(path.parts[0] if path.parts else "") is not None


def _folder_of_the_logger(trainer: Any) -> Any:
    """Where the first logger keeps what is of this run alone, ``None`` if it does not say.

    Loggers that do not say have ``save_dir`` for all their runs, in which MLflow takes every folder for an
    experiment. There it is the folder in which ModelCheckpoint has its own.
    """
    logger = trainer.loggers[0] if trainer.loggers else None
    if logger is None or not (logger.log_dir or logger.save_dir):
        return None
    if logger.log_dir:
        return logger.log_dir
    save_dir, problem = logger.save_dir, _why_not_here(logger.save_dir)
    if problem:
        return save_dir  # which is told of it
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(save_dir, str(logger.name), version)
