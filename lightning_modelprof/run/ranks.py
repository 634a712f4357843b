"""The ranks of a job: the messages they exchange, and the file that each writes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from lightning_modelprof.errors import ArchiveError
from lightning_modelprof.run.archive import decode_record, encode_record, load_run
from lightning_modelprof.run.locate import RUN_FILE
from lightning_modelprof.run.records import AbsentRank, RankSteps, Run
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import few

MAX_SHARED: Final = 2**16
"""Steps compared over all ranks: 9 MB of times, and about as much in ``run.json``."""

_MOST, _LEAST = 1_024, 64


def rank_file(rank: int | str) -> str:
    """Name of a rank's file in the run's directory; ``"*"`` stands for all but the first."""
    return RUN_FILE if rank == 0 else f"run_rank{rank}.json"


def rank_steps(run: Run) -> RankSteps:
    """The message for the other ranks about the rank that measured ``run``."""
    record = run.ranks[0]
    clean = record.steps.clean()
    most = max(_LEAST, min(_MOST, MAX_SHARED // max(run.info.world_size, 1)))
    totals = StepTotals.of(record.steps) if record.totals is None else record.totals
    return RankSteps(
        rank=record.rank,
        host=run.info.host,
        num_steps=record.num_steps,
        totals=totals.clean(),
        steps=clean.select(few(clean.step, most)),
    )


def pack_rank_steps(steps: RankSteps) -> bytes:
    return zlib.compress(encode_record(steps), 1)


def unpack_rank_steps(message: bytes) -> RankSteps:
    """Raise :class:`ArchiveError` for a damaged message."""
    try:
        return decode_record(zlib.decompress(message), RankSteps)
    except (zlib.error, ValueError) as error:
        raise ArchiveError(f"expected a rank's step record, got something else: {error}") from None


def side_by_side(run: Run, messages: Mapping[int, bytes], absent: Mapping[int, str]) -> Run:
    """Add the other ranks' messages to the run, or the reasons why they're missing.

    Args:
        run: of the rank that reports for all.
        messages: rank → its message.
        absent: rank → why there is none.
    """
    found = [run.ranks[0].rank, *messages]
    steps = {rank: _unpacked(messages[rank]) if rank in messages else rank_steps(run) for rank in found}
    missing = {rank: "its message was damaged" for rank in found if steps[rank] is None} | dict(absent)
    return replace(
        run,
        rank_steps=tuple(known for rank in sorted(steps) if (known := steps[rank]) is not None),
        absent_ranks=tuple(AbsentRank(rank=rank, reason=missing[rank]) for rank in sorted(missing)),
    )


def _unpacked(message: bytes) -> RankSteps | None:
    try:
        return unpack_rank_steps(message)
    except ArchiveError:
        return None


def with_other_ranks(run: Run, file: Path) -> Run:
    """Add all ranks' steps from the files next to ``file``, if the run doesn't have them.

    A job that was killed, or of which one rank failed, hasn't gathered them. Missing and damaged files are
    skipped.
    """
    known = {one.rank for one in run.rank_steps}
    if run.info.world_size < 2 or (known and not run.absent_ranks):
        return run
    found = {one.rank: one for one in run.rank_steps} or {run.ranks[0].rank: rank_steps(run)}
    taken = {rank_file(rank) for rank in found}
    for other in (file.with_name(RUN_FILE), *sorted(file.parent.glob(rank_file("*")))):
        if other.name in taken:
            continue
        try:
            steps = rank_steps(load_run(other))
        except ArchiveError:
            continue
        if steps.rank < run.info.world_size:
            found.setdefault(steps.rank, steps)  # the first rank's file has one name, whatever its rank
    if len(found) < 2:
        return run
    return replace(
        run,
        rank_steps=tuple(steps for _, steps in sorted(found.items())),
        absent_ranks=tuple(one for one in run.absent_ranks if one.rank not in found),
    )
