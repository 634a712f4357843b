"""A profile as the blobs of a TensorBoard summary, and back.

The first blob is a zlib-compressed JSON document: the reports and what the other blobs are. Those hold packed
columns (``show/tensorboard/columns.py``), which a browser gets as they are. The head, a few words, stands beside the
blobs in the summary's metadata, so that a list of profiles needs no blob.
"""

from __future__ import annotations

import zlib
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, TypeVar

import msgspec

from lightning_modelprof.errors import ArchiveError, told, without_surrogates
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.profile import Profile, ProfileKind
from lightning_modelprof.show.step_columns import pack_steps
from lightning_modelprof.show.tensorboard.columns import inflate
from lightning_modelprof.show.tensorboard.timeline_columns import pack_timeline

T = TypeVar("T")

PROFILE_SCHEMA_VERSION: Final = 1
"""Raised when a reader of the old one would go wrong."""

_LEVEL: Final = 6

STEPS: Final = "steps"
TIMELINE: Final = "timeline"


class ProfileHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a list of profiles shows of one; attributes as of ``Profile``.

    Attributes:
        ranks: those that the reader can choose from; empty when there is only one.
    """

    schema_version: int
    kind: ProfileKind
    loop: str
    window: int | None
    label: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnsBlob:
    """What a blob of packed columns holds.

    Attributes:
        kind: ``steps`` or ``timeline``.
        rank: of a timeline.
    """

    kind: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProfile:
    """The first blob of a profile.

    Attributes:
        head: as in the summary's metadata.
        report: of all ranks together.
        rank_reports: rank → its report, when there are several.
        columns: what blobs 1, 2, ... hold.
    """

    head: ProfileHead
    report: Report
    rank_reports: dict[int, Report]
    columns: tuple[ColumnsBlob, ...]


class _Statistics(msgspec.Struct):
    avg: float | None = None
    p50: float | None = None
    p99: float | None = None


class _Rate(msgspec.Struct):
    unit: str
    avg: float | None = None


class _Benchmark(msgspec.Struct):
    steps: int = 0
    batch_cost_ns: _Statistics | None = None
    reader_cost_ns: _Statistics | None = None
    ips: _Rate | None = None
    samples_per_s: _Rate | None = None
    reader_ratio: float | None = None


class _Flops(msgspec.Struct):
    flops_per_s: float | None = None
    mfu: float | None = None


class _RunSection(msgspec.Struct):
    loop: str = ""
    num_steps: int | None = None
    sample_unit: str = ""
    world_size: int = 1
    created: str = ""
    status: str = ""


class _WindowSection(msgspec.Struct):
    index: int | None = None
    trace_file: str | None = None


class _TraceSection(msgspec.Struct):
    source: str = ""
    tables_suffix: str = ""
    steps: tuple[int, ...] = ()


class _Sections(msgspec.Struct):
    """What is shown of ``Report.sections``; the rest is passed on as it is."""

    run: _RunSection | msgspec.UnsetType = msgspec.UNSET
    settings: dict[str, str] | None = None
    benchmark: _Benchmark | None = None
    flops: _Flops | None = None
    windows: tuple[_WindowSection, ...] = ()
    traces: tuple[_TraceSection, ...] = ()


def _head(profile: Profile) -> ProfileHead:
    return ProfileHead(
        schema_version=PROFILE_SCHEMA_VERSION,
        kind=profile.kind,
        loop=profile.loop,
        window=profile.window,
        label=profile.label,
        ranks=tuple(sorted(profile.rank_reports)),
    )


def pack_head(profile: Profile) -> bytes:
    """The head of a profile as JSON."""
    return _encode(_head(profile))


def unpack_head(packed: bytes) -> ProfileHead:
    """The head of a stored profile.

    Raises:
        ArchiveError: when it is none, or of a newer version.
    """
    _check_version(packed, "head")
    return _decode(packed, ProfileHead)


def pack_profile(profile: Profile) -> list[bytes]:
    """The blobs of a profile, the document first."""
    columns = [(ColumnsBlob(kind=STEPS), pack_steps(profile.steps))] if profile.steps is not None else []
    for rank, timeline in profile.timelines.items():
        with suppress(ValueError):  # of years, as of two clocks in one trace: the report is worth more
            columns.append((ColumnsBlob(kind=TIMELINE, rank=rank), pack_timeline(timeline)))
    stored = StoredProfile(
        head=_head(profile),
        report=profile.report,
        rank_reports=dict(profile.rank_reports),
        columns=tuple(blob for blob, _ in columns),
    )
    return [zlib.compress(_encode(stored), _LEVEL), *(packed for _, packed in columns)]


def unpack_profile(packed: bytes) -> StoredProfile:
    """What the first blob says.

    Raises:
        ArchiveError: when it is damaged, no profile, or of a newer version.
    """
    try:
        raw = inflate(packed)
    except ValueError as error:
        raise ArchiveError(f"expected a profile of lightning-modelprof, got {error}.") from error
    _check_version(raw, "profile")
    stored = _decode(raw, StoredProfile)
    try:
        for report in (stored.report, *stored.rank_reports.values()):
            msgspec.convert(report.sections, _Sections)
            _check_charts(report)
    except (msgspec.ValidationError, RecursionError, ValueError) as error:
        raise _refusal(error) from error
    return stored


def _check_charts(report: Report) -> None:
    """Refuse charts that no axis can show.

    Raises:
        ValueError: with the chart's id.
    """
    for chart in report.charts:
        if any(not before < after for before, after in pairwise(chart.x)):
            raise ValueError(f"the points of the chart {chart.id!r} are not in order")


class _Versioned(msgspec.Struct):
    schema_version: int


class _WithHead(msgspec.Struct):
    head: _Versioned


def _check_version(raw: bytes, what: str) -> None:
    """The version is read first: what else there is, only that version knows."""
    version = (_decode(raw, _Versioned) if what == "head" else _decode(raw, _WithHead).head).schema_version
    if version > PROFILE_SCHEMA_VERSION:
        raise ArchiveError(
            f"expected a profile of version {PROFILE_SCHEMA_VERSION} or lower, got {version}: it was written"
            " by a newer lightning-modelprof. Update the one that TensorBoard runs with."
        )


def _decode(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> ArchiveError:
    return ArchiveError(f"expected a profile of lightning-modelprof, got: {told(error)}.")


def _encode(value: Any) -> bytes:
    """JSON; what is not finite becomes ``null``."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # half a surrogate pair, as in some file names, has no UTF-8
        return msgspec.json.encode(without_surrogates(msgspec.to_builtins(value)))
