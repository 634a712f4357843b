"""Save and load a Run, and write files so that a crash never leaves half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from isal import igzip
from numpy.typing import NDArray

from lightning_modelprof.errors import ArchiveError
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.records import NOT_MEASURED, RUN_SCHEMA_VERSION, Run, StepTimings

RUN_FILE: Final = "run.json"
DEFAULT_FOLDER: Final = "modelprof"
"""Name of a run's folder beside the logger's files."""

_FLAT_COLUMNS: Final = ("step", "duration_ns", "samples", "tags")
# Phase matrix → the value that every step has in a phase that is not saved.
_PHASE_COLUMNS: Final = {"phases_ns": 0, "device_phases_ns": NOT_MEASURED}


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file completely or not at all: a temporary file beside it, then a rename.

    Raises:
        OSError: when the directory is not writeable or the disk is full; an older file stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp makes files private to the user; a report is as readable as any other file of the run.
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def pack(data: bytes) -> bytes:
    """Gzip at the fastest level: a trace of 35 MB takes hundredths of a second, not most of one."""
    packed: bytes = igzip.compress(data, compresslevel=1)
    return packed


def save_run(run: Run, path: Path) -> None:
    """Write a run as JSON, atomically.

    Raises:
        OSError: when it cannot be written.
    """
    write_atomically(path, msgspec.json.encode(run, enc_hook=_encode_steps))


def find_run(path: str | Path) -> Path:
    """The archive that is meant: a file, the folder that holds it, or a logger's folder above that."""
    path = Path(path)
    if path.is_dir():
        inside = path / DEFAULT_FOLDER / RUN_FILE
        return inside if inside.exists() and not (path / RUN_FILE).exists() else path / RUN_FILE
    return path.with_name(RUN_FILE) if path.name == "report.json" else path


def load_run(path: str | Path) -> Run:
    """Read a run from its file, or from a folder (see :func:`find_run`).

    Raises:
        ArchiveError: when there is no such file, or it is no saved run of a known version.
    """
    file = find_run(path)
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise ArchiveError(
            f"{file}: expected a run saved by this package, got {error.strerror or error}."
            f" Give the folder that holds {RUN_FILE}, for example lightning_logs/version_0/modelprof."
        ) from error
    try:
        version = msgspec.json.decode(raw, type=_Versioned).schema_version
        if version > RUN_SCHEMA_VERSION:
            raise ArchiveError(
                f"{file}: expected schema_version {RUN_SCHEMA_VERSION} or lower, got {version}."
                " It was saved by a newer lightning-modelprof: update this one."
            )
        run = msgspec.json.decode(raw, type=Run, dec_hook=_decode_steps)
        if not run.ranks:
            raise ValueError("a run without any rank")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ArchiveError(
            f"{file}: expected a run saved by this package, got: {error}."
            f" Give the folder that holds {RUN_FILE}."
        ) from error
    return run


class _Versioned(msgspec.Struct):
    schema_version: int


_Column = list[Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]]


class _SavedSteps(msgspec.Struct):
    step: _Column
    duration_ns: _Column
    samples: _Column
    tags: _Column
    phases_ns: dict[str, _Column]
    device_phases_ns: dict[str, _Column]


def _encode_steps(value: Any) -> dict[str, Any]:
    """Columns as lists; of the phases only those that some step has a time for."""
    if not isinstance(value, StepTimings):
        raise TypeError(f"cannot save a {type(value).__name__}")
    saved: dict[str, Any] = {name: getattr(value, name).tolist() for name in _FLAT_COLUMNS}
    for name, unused in _PHASE_COLUMNS.items():
        matrix = getattr(value, name)
        saved[name] = {
            phase.key: matrix[:, index].tolist()
            for index, phase in enumerate(PHASES)
            if (matrix[:, index] != unused).any()
        }
    return saved


def _decode_steps(kind: type, value: Any) -> Any:
    if kind is not StepTimings:
        raise TypeError(f"cannot load a {kind.__name__}")
    saved = msgspec.convert(value, _SavedSteps)
    num_steps = len(saved.step)
    columns = {name: _column(name, getattr(saved, name), num_steps) for name in _FLAT_COLUMNS}
    for name, unused in _PHASE_COLUMNS.items():
        matrix: NDArray[np.int64] = np.full((num_steps, len(PHASES)), unused, np.int64)
        for key, values in getattr(saved, name).items():
            if key not in PHASE_INDEX:
                raise ValueError(f"the unknown phase {key!r}")
            matrix[:, PHASE_INDEX[key]] = _column(f"{name} of {key}", values, num_steps)
        columns[name] = matrix
    return StepTimings(**columns)


def _column(name: str, values: list[int], num_steps: int) -> NDArray[np.int64]:
    if len(values) != num_steps:
        raise ValueError(f"{len(values)} values of {name} for {num_steps} steps")
    return np.array(values, np.int64)
