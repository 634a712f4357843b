"""Save and load a Run, and write files so that a crash never leaves half of one."""

from __future__ import annotations

import errno
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy as np
from isal import igzip
from numpy.typing import NDArray

from lightning_modelprof.errors import ArchiveError, without_surrogates
from lightning_modelprof.record import LARGEST
from lightning_modelprof.run.finding import RUN_FILE, find_run, no_run
from lightning_modelprof.run.older import upgrade
from lightning_modelprof.run.opening import read_archive, write_atomically
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.records import RUN_SCHEMA_VERSION, RankRecord, Run, Window
from lightning_modelprof.run.stacks import StackSamples
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag, StepTimings

RecordT = TypeVar("RecordT")


_BEGIN: Final = b'{"info":{"created":'
"""Of every archive."""


_FLAT_COLUMNS: Final = ("step", "duration_ns", "samples", "tags")


# Phase matrix → the value that every step has in a phase that is not saved.
_PHASE_COLUMNS: Final = {"phases_ns": 0, "device_phases_ns": NOT_MEASURED}


_MAKING: Final = threading.Lock()


_DECODERS: Final[dict[type[Any], msgspec.json.Decoder[Any]]] = {}


def pack(data: bytes) -> bytes:
    """Gzip at the fastest level: a trace of 35 MB takes hundredths of a second, not most of one."""
    packed: bytes = igzip.compress(data, compresslevel=1)
    return packed


def save_run(run: Run, path: Path) -> None:
    """Write a run as JSON, atomically.

    Raises:
        OSError: when it cannot be written.
        ValueError: when what would be written cannot be read back; an older file stays as it was.
    """
    raw = encode_record(run)
    check_run(decode_record(raw, Run))
    write_atomically(path, raw)


def check_same_run(path: Path, created: str) -> None:
    """Refuse to replace the archive of another run.

    Args:
        path: of the archive; there may be none.
        created: when the run began that wants to write: an archive begins with it.

    Raises:
        OSError: when the archive there is another run's, or it cannot be told.
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
    """A record as JSON."""
    try:
        return msgspec.json.encode(record, enc_hook=_encode)
    except UnicodeEncodeError:  # half a surrogate pair, as in some names
        return msgspec.json.encode(without_surrogates(msgspec.to_builtins(record, enc_hook=_encode)))


def decode_record(raw: bytes, kind: type[RecordT]) -> RecordT:
    """Back from JSON.

    Raises:
        ValueError: when it is no such record.
    """
    try:
        decoded: RecordT = _decoder(kind).decode(raw)
    except (msgspec.MsgspecError, KeyError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return decoded


def record_of(value: Any, kind: type[RecordT]) -> RecordT:
    """A record of the objects that its JSON was decoded to.

    Raises:
        ValueError: when they are no such record.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _decoder(kind: type[RecordT]) -> msgspec.json.Decoder[RecordT]:
    """Made once: two threads in which msgspec looks at the same dataclasses crash the process."""
    with _MAKING:
        if kind not in _DECODERS:
            _DECODERS[kind] = msgspec.json.Decoder(kind, dec_hook=_decode)
        return _DECODERS[kind]


def load_run(path: str | Path) -> Run:
    """Read a run from its file, or from a folder (see :func:`find_run`).

    Raises:
        ArchiveError: when there is no such file, or it is no saved run of a known version.
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
        run = decode_record(raw, Run)
        check_run(run)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ArchiveError(
            f"{file} isn't a saved run, or is damaged: {error}. Give the directory that contains {RUN_FILE}."
        ) from error
    return run


class _VersionedRun(msgspec.Struct):
    schema_version: int


_Column = list[Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]]


class _SavedTotals(msgspec.Struct):
    tags: _Column
    columns: dict[str, _Column | dict[str, _Column]]


class _SavedSteps(msgspec.Struct):
    step: _Column
    duration_ns: _Column
    samples: _Column
    tags: _Column
    phases_ns: dict[str, _Column]
    device_phases_ns: dict[str, _Column]


def _encode(value: Any) -> dict[str, Any]:
    """Columns as lists."""
    if isinstance(value, StepTotals):
        return _encode_totals(value)
    if isinstance(value, StepTimings):
        return _encode_steps(value)
    raise TypeError(f"can't save a {type(value).__name__}")


def _encode_steps(steps: StepTimings) -> dict[str, Any]:
    """Of the phases only those that some step has a time for."""
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
    """Of the phases only those that some sum has."""
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
    """One column for each phase; those that were not saved are all ``unused``."""
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


MAX_WINDOWS: Final = 10_000


_MAX_DEPTH: Final = 8


_MAX_SETTINGS: Final = 10_000


_TAGS: Final = int(sum(StepTag)) | 0xFFFF
"""Those of today, and room for more."""


def check_run(run: Run) -> None:
    """Refuse what no run can have measured.

    Raises:
        ValueError: with the first thing that cannot be.
    """
    if not run.ranks:
        raise ValueError("no rank")
    _check_distinct("rank", [record.rank for record in run.ranks])
    _check_distinct("rank", [steps.rank for steps in run.rank_steps])
    _check_configuration(run.info.config)
    for record in run.ranks:
        _check_record(record)
    for steps in run.rank_steps:
        _check_steps(steps.steps)
        _check_totals(steps.totals)


def _check_record(record: RankRecord) -> None:
    _check_steps(record.steps)
    if record.totals is not None:
        _check_totals(record.totals)
        if len(record.totals) < len(record.steps):
            raise ValueError(f"{len(record.steps)} steps kept out of {len(record.totals)}")
    _check_phases("outside_ns", record.outside_ns)
    if len(record.windows) > MAX_WINDOWS:
        raise ValueError(f"too many profiler windows ({len(record.windows):,})")
    _check_ascending("windows", [window.index for window in record.windows])
    for window in record.windows:
        _check_window(window)
    if record.model_cost is not None:
        _check_modules([module.path for module in record.model_cost.modules])
    if record.memory is not None:
        _check_ascending("steps of the memory curve", [point.step for point in record.memory.curve])
    if record.stacks is not None:
        _check_stacks(record.stacks)
    for slow in () if record.slow is None else record.slow.worst:
        _check_phases("phases_ns of a slow step", slow.phases_ns)
        if slow.first_watched > slow.last_watched:
            raise ValueError("a slow step whose watch ends before it starts")


def _check_steps(steps: StepTimings) -> None:
    """Step numbers ascend, the phases of each step make up its duration, and all of it can be added up."""
    if len(steps) == 0:
        return
    if steps.step[0] < 0 or (np.diff(steps.step) <= 0).any():
        raise ValueError("step numbers that don't increase")
    if steps.step[-1] > LARGEST:
        raise ValueError("a step number that is too large")
    _check_tags(steps.tags)
    for name, column in steps.columns().items():
        if name != "step":
            _check_sum(name, column)
    if (steps.samples < NOT_MEASURED).any():
        raise ValueError("a negative number of samples")
    sums = np.where(steps.phases_ns == NOT_MEASURED, 0, steps.phases_ns).sum(axis=1)
    if (sums != steps.duration_ns).any():
        raise ValueError("phases that don't add up to their step's duration")


def _check_totals(totals: StepTotals) -> None:
    _check_tags(totals.tags)
    _check_ascending("sets of tags", totals.tags.tolist())
    for name, column in totals.columns().items():
        _check_sum(name, column)
    counts = totals.num_steps
    if (counts <= 0).any():
        raise ValueError("a total over no steps")
    for name in ("num_counted", "num_in_phase", "num_measured", "num_on_device"):
        column = getattr(totals, name)
        most = counts if column.ndim == 1 else counts[:, None]
        if (column < 0).any() or (column > most).any():
            raise ValueError(f"{name} larger than the number of steps")


def _check_tags(tags: NDArray[np.int64]) -> None:
    if (tags < 0).any() or (tags > _TAGS).any():
        raise ValueError("unknown step tags")


def _check_sum(name: str, column: NDArray[np.int64]) -> None:
    """Floats, because whole numbers would go round."""
    if np.abs(column.astype(np.float64)).sum() > 1.5 * LARGEST:
        raise ValueError(f"{name} values that are too large to add up")


def _check_window(window: Window) -> None:
    steps = window.recorded_steps
    if window.first_step > window.last_step:
        raise ValueError(f"window {window.index} ends before it starts")
    _check_ascending("recorded steps", steps)
    if steps and not (window.first_step <= steps[0] and steps[-1] <= window.last_step):
        raise ValueError(f"window {window.index} has steps outside its range")
    if window.trace_file is not None and not _is_inside(window.trace_file):
        raise ValueError(f"window {window.index} has a trace outside the run's directory")


def _is_inside(name: str) -> bool:
    """Whether a path stays in the folder that it begins in."""
    return "\0" not in name and all(
        not path.is_absolute() and not path.drive and ".." not in path.parts
        for path in (PurePosixPath(name), PureWindowsPath(name))
    )


def _check_stacks(stacks: StackSamples) -> None:
    num_frames = len(stacks.frames)
    if any(number >= num_frames for number in stacks.hook_calls):
        raise ValueError("a hook call that refers to a missing frame")
    for stack in stacks.stacks:
        _check_phases("stacks", (stack.phase,))
        if any(frame >= num_frames for frame in stack.frames):
            raise ValueError("a sampled stack that refers to a missing frame")


def _check_modules(paths: Sequence[str]) -> None:
    """Each is there once, before those inside of it; the first is the model, whose path is empty."""
    _check_distinct("module", paths)
    if paths and paths[0]:
        raise ValueError("modules without their model")
    places = {path: place for place, path in enumerate(paths)}
    for place, path in enumerate(paths):
        outer = path.rpartition(".")[0]
        if path and places.get(outer, -1) > place:
            raise ValueError(f"module {path!r} comes before its parent")


def _check_phases(name: str, keys: Iterable[str]) -> None:
    unknown = [key for key in keys if key not in PHASE_INDEX]
    if unknown:
        raise ValueError(f"unknown phase {unknown[0]!r} in {name}")


def _check_configuration(config: dict[str, Any]) -> None:
    """Arguments of the callback: few of them, lists and mappings within each other a few deep."""
    for found, (depth, _) in enumerate(_values(config)):
        if depth > _MAX_DEPTH or found > _MAX_SETTINGS:
            raise ValueError("a configuration that is too deeply nested or too long")
    if not isinstance(config.get("rules"), dict | None):
        raise ValueError("a configuration whose rules aren't a mapping")
    ignored = config.get("ignore_modules")
    if not (ignored is None or (isinstance(ignored, list) and all(isinstance(one, str) for one in ignored))):
        raise ValueError("a configuration whose ignore_modules isn't a list of names")


def _values(config: Any) -> Iterator[tuple[int, Any]]:
    left = [(0, config)]
    while left:
        depth, value = left.pop()
        yield depth, value
        inner: Collection[Any] = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        )
        left += [(depth + 1, one) for one in inner]


def _check_ascending(name: str, numbers: Sequence[int]) -> None:
    if any(one >= other for one, other in pairwise(numbers)):
        raise ValueError(f"{name} that don't increase")


def _check_distinct(name: str, numbers: Sequence[int | str]) -> None:
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"a duplicate {name}")
