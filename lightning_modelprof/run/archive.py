"""Save and load a Run, and write files atomically."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy as np
from isal import igzip
from numpy.typing import NDArray

from lightning_modelprof.errors import ArchiveError, without_surrogates
from lightning_modelprof.record import LARGEST, Count
from lightning_modelprof.run.locate import RUN_FILE, find_run, no_run
from lightning_modelprof.run.opening import is_inside, read_archive, write_atomically
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.records import RUN_SCHEMA_VERSION, Run
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import NOT_MEASURED, StepTimings
from lightning_modelprof.upgrade import upgrade

RecordT = TypeVar("RecordT")


_BEGIN: Final = b'{"info":{"created":'
"""Every archive starts with it."""


_FLAT_COLUMNS: Final = ("step", "duration_ns", "samples", "tags")


# Value of every step in a phase that isn't saved.
_PHASE_COLUMNS: Final = {"phases_ns": 0, "device_phases_ns": NOT_MEASURED}


_MAKING: Final = threading.Lock()


_DECODERS: Final[dict[type[Any], msgspec.json.Decoder[Any]]] = {}


def pack(data: bytes) -> bytes:
    """Gzip at the fastest level: 35 MB of trace take hundredths of a second instead of most of one."""
    packed: bytes = igzip.compress(data, compresslevel=1)
    return packed


def save_run(run: Run, path: Path) -> None:
    """Write a run as JSON, atomically.

    Raises:
        OSError: when it can't be written.
        ValueError: when the result couldn't be read back; an older file stays unchanged.
    """
    raw = encode_record(run)
    _decode_run(raw)
    write_atomically(path, raw)


def check_same_run(path: Path, created: str) -> None:
    """Refuse to replace another run's archive.

    Args:
        path: the archive, which may not exist.
        created: start time of the run to write, with which its archive starts.

    Raises:
        OSError: when the existing archive is another run's or can't be read.
    """
    begin = _BEGIN + msgspec.json.encode(created)
    try:
        with path.open("rb") as file:
            found = file.read(len(begin))
    except FileNotFoundError:
        return
    if found != begin:
        raise FileExistsError(errno.EEXIST, "another run has been saved there", str(path))


def encode_record(record: Any) -> bytes:
    try:
        return msgspec.json.encode(record, enc_hook=_encode)
    except UnicodeEncodeError:  # half a surrogate pair, as in some names
        return msgspec.json.encode(without_surrogates(msgspec.to_builtins(record, enc_hook=_encode)))


def decode_record(raw: bytes, kind: type[RecordT]) -> RecordT:
    """Raise ``ValueError`` when the JSON isn't such a record."""
    try:
        decoded: RecordT = _decoder(kind).decode(raw)
    except (msgspec.MsgspecError, KeyError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return decoded


def record_of(value: Any, kind: type[RecordT]) -> RecordT:
    """Convert decoded JSON to a record; raise ``ValueError`` if it isn't one."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _decoder(kind: type[RecordT]) -> msgspec.json.Decoder[RecordT]:
    """Make each once, under a lock: msgspec crashes if two threads inspect the same dataclasses."""
    with _MAKING:
        if kind not in _DECODERS:
            _DECODERS[kind] = msgspec.json.Decoder(kind, dec_hook=_decode)
        return _DECODERS[kind]


def load_run(path: str | Path) -> Run:
    """Read a run from its file or directory (see :func:`find_run`).

    Raises:
        ArchiveError: when the file is missing or isn't a saved run of a known version.
    """
    file = find_run(path)
    try:
        raw = read_archive(file)
    except (OSError, ValueError) as error:  # a zero byte in the path is a ValueError
        raise no_run(file, Path(path), error) from error
    try:
        version = msgspec.json.decode(raw, type=_VersionedRun).schema_version
        if version > RUN_SCHEMA_VERSION:
            raise ArchiveError(
                f"{file}: expected schema_version {RUN_SCHEMA_VERSION} or lower, got {version}, from a newer"
                " lightning-modelprof. Upgrade lightning-modelprof to read it."
            )
        if version < RUN_SCHEMA_VERSION:
            raw = msgspec.json.encode(upgrade(msgspec.json.decode(raw)))
        return _decode_run(raw)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise ArchiveError(
            f"{file} isn't a saved run, or is damaged: {error}. Give the directory that contains {RUN_FILE}."
        ) from error


def _decode_run(raw: bytes) -> Run:
    run = decode_record(raw, Run)
    for window in (window for record in run.ranks for window in record.windows):
        if window.trace_file is not None and not is_inside(window.trace_file):
            raise ValueError(f"window {window.index} has a trace outside the run's directory")
    return run


class _VersionedRun(msgspec.Struct):
    schema_version: int


_Column = list[Annotated[int, msgspec.Meta(ge=-3 * LARGEST // 2, le=3 * LARGEST // 2)]]
"""Clock changes during a step must not make the run unreadable; sums stay within 64 bits."""

_Counts = list[Count]
_Tags = list[Annotated[int, msgspec.Meta(ge=0, le=2**16 - 1)]]
"""Room for newer versions' tags."""


class _SavedTotals(msgspec.Struct):
    tags: _Tags
    columns: dict[str, _Column | dict[str, _Column]]


class _SavedSteps(msgspec.Struct):
    step: _Counts
    duration_ns: _Column
    samples: list[Annotated[int, msgspec.Meta(ge=NOT_MEASURED, le=LARGEST)]]
    tags: _Tags
    phases_ns: dict[str, _Column]
    device_phases_ns: dict[str, _Column]


def _encode(value: Any) -> dict[str, Any]:
    if isinstance(value, StepTotals):
        return _encode_totals(value)
    if isinstance(value, StepTimings):
        return _encode_steps(value)
    raise TypeError(f"can't save a {type(value).__name__}")


def _encode_steps(steps: StepTimings) -> dict[str, Any]:
    """Save only phases with a time in some step."""
    saved: dict[str, Any] = {name: getattr(steps, name).tolist() for name in _FLAT_COLUMNS}
    for name, unused in _PHASE_COLUMNS.items():
        matrix = getattr(steps, name)
        saved[name] = {
            phase.key: matrix[:, index].tolist()
            for index, phase in enumerate(PHASES)
            if (matrix[:, index] != unused).any()
        }
    return saved


def _encode_totals(totals: StepTotals) -> dict[str, Any]:
    """Save only phases with a non-zero sum."""
    columns = totals.columns()
    return {
        "tags": columns.pop("tags").tolist(),
        "columns": {
            name: column.tolist()
            if column.ndim == 1
            else {
                phase.key: column[:, index].tolist()
                for index, phase in enumerate(PHASES)
                if column[:, index].any()
            }
            for name, column in columns.items()
        },
    }


def _decode(kind: type, value: Any) -> Any:
    if kind is StepTotals:
        return _decode_totals(msgspec.convert(value, _SavedTotals))
    if kind is StepTimings:
        return _decode_steps(msgspec.convert(value, _SavedSteps))
    raise TypeError(f"can't load a {kind.__name__}")


def _decode_steps(saved: _SavedSteps) -> StepTimings:
    num_steps = len(saved.step)
    columns = {name: _column(name, getattr(saved, name), num_steps) for name in _FLAT_COLUMNS}
    for name, unused in _PHASE_COLUMNS.items():
        columns[name] = _phase_columns(name, getattr(saved, name), num_steps, unused)
    return StepTimings(**columns)


def _decode_totals(saved: _SavedTotals) -> StepTotals:
    num_sets = len(saved.tags)
    columns = {"tags": _column("tags", saved.tags, num_sets)}
    for name in StepTotals.__slots__:
        if name == "tags":
            continue
        values = saved.columns[name]
        columns[name] = (
            _phase_columns(name, values, num_sets, 0)
            if isinstance(values, dict)
            else _column(name, values, num_sets)
        )
    return StepTotals(**columns)


def _phase_columns(name: str, saved: dict[str, list[int]], num_rows: int, unused: int) -> NDArray[np.int64]:
    """Build one column per phase; unsaved phases are all ``unused``."""
    matrix: NDArray[np.int64] = np.full((num_rows, len(PHASES)), unused, np.int64)
    for key, values in saved.items():
        if key not in PHASE_INDEX:
            raise ValueError(f"unknown phase {key!r}")
        matrix[:, PHASE_INDEX[key]] = _column(f"{name} of {key}", values, num_rows)
    return matrix


def _column(name: str, values: list[int], num_rows: int) -> NDArray[np.int64]:
    if len(values) != num_rows:
        raise ValueError(f"{len(values)} values of {name} for {num_rows} steps")
    return np.array(values, np.int64)
