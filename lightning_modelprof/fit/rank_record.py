"""What one rank has measured until now, as a record."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

from lightning_modelprof.loop.parts import LoopParts
from lightning_modelprof.loop.step_timing import StepTiming
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.records import RankRecord
from lightning_modelprof.run.steps import NOT_MEASURED


def make_rank_record(
    rank: int, timing: StepTiming, parts: LoopParts, *, samples_note: str, notes: Iterable[str]
) -> RankRecord:
    """The record of a loop that runs or has ended.

    Args:
        rank: of this process.
        timing: of the loop's steps.
        parts: of the loop.
        samples_note: what is to be known of the counting of samples.
        notes: what else the report is to say.
    """
    device, inspection, sampling = timing.device, parts.inspection, parts.sampling
    notes = [*notes, *parts.results.notes]
    if device is not None:
        device.collect()
        if device.num_given_up:
            notes.append(f"The device time of {device.num_given_up} steps could not be read.")
    if timing.ledger.validation.has_given_up:
        notes.append("The device time of the parts of validation could not be read.")
    return RankRecord(
        rank=rank,
        steps=timing.recorder.steps(),
        totals=timing.recorder.totals(),
        outside_ns={
            phase.key: int(time)
            for phase, time in zip(PHASES, timing.ledger.outside_ns, strict=True)
            if time not in (0, NOT_MEASURED) and isfinite(time)  # a clock may fail
        },
        validation=timing.ledger.validation.times(),
        unfinished_steps=timing.ledger.unfinished_steps,
        callbacks=timing.delegate.callback_times(),
        windows=tuple(parts.results.windows),
        model_cost=None if inspection is None else inspection.collect(),
        setup=parts.setup,
        memory=parts.memory.record(None if inspection is None else inspection.followed),
        slow=timing.slow.record(),
        cpu=timing.ledger.cpu.record(),
        repeated=None if timing.repeated is None else timing.repeated.record(),
        stacks=None if sampling is None else sampling.stacks(),
        samples_note=samples_note,
        notes=tuple(notes),
    )
