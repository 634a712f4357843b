"""Validation: time of the validation loops inside a fit, by part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.steps.validation import NO_VALIDATION, ValidationSplit
from lightning_modelprof.report.model import Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.run.table import run_table
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.phases import PARTS
from lightning_modelprof.units import milliseconds

_COLUMNS: Final = (
    ColumnSpec("label", "Part"),
    ColumnSpec(
        "calls",
        "Calls",
        Unit.COUNT,
        adds_up=True,
        help=(
            "number of fetches, transfers with their hooks, batches, hooks or validations. A dash marks the"
            " remaining time between them."
        ),
    ),
    ColumnSpec("total_ns", "Total", Unit.DURATION_NS, adds_up=True, help="self time."),
    ColumnSpec(
        "per_batch_ns",
        "Per batch",
        Unit.DURATION_NS,
        adds_up=True,
        help="total divided by validation batches.",
    ),
    ColumnSpec(
        "per_run_ns", "Per validation", Unit.DURATION_NS, adds_up=True, help="total divided by validations."
    ),
    ColumnSpec("ratio", "Ratio(%)", Unit.RATIO, adds_up=True, help="share of all parts."),
    ColumnSpec(
        "device_ns",
        "Device total",
        Unit.DURATION_NS,
        adds_up=True,
        help=(
            "elapsed time on the device's stream during the part, including callbacks, up to where the"
            " device was when the report was made."
        ),
        is_optional=True,
    ),
)
VALIDATION: Final = TableSpec(
    id="validation",
    title="Validation",
    help=(
        "Time spent in validations during a fit, including those in unfinished steps. The parts add up to"
        " the phase Validation of the whole fit, exactly. Callbacks and checkpoints are separate phases; a"
        " note gives callback time during validations. The sanity check isn't included (see Outside the"
        " loop).\n\nWorker startup delays the first batch, and a note says by how much."
    ),
    columns=_COLUMNS,
    rows={part.label: part.definition for part in PARTS},
    place=60,
    views=("steps",),
    compared=CompareKey(keys=("per_batch_ns", "per_run_ns")),
)


@run_table(VALIDATION)
def validation_table(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    if not loop_of(facts.info.loop).is_fit or facts.why_not(Facts.validation) == NO_VALIDATION:
        return  # an evaluation loop's phases already show it
    split = facts.validation
    if not split.parts:
        raise NotMeasured("validations took no measurable time")
    yield VALIDATION.table(split.parts, notes=_notes(facts, split))


def _notes(facts: Facts, split: ValidationSplit) -> tuple[str, ...]:
    runs = "1 validation" if split.num_runs == 1 else f"{split.num_runs:,} validations"
    batches = "1 batch" if split.num_batches == 1 else f"{split.num_batches:,} batches"
    notes = [f"{runs} with {batches} in total."]
    if split.first_wait_ns:
        setup = facts.get(Facts.setup)
        loaders = () if setup is None else setup.val_loaders
        why = ", mostly for worker startup" if any(one.num_workers for one in loaders) else ""
        notes.append(
            f"First batches account for {milliseconds(split.first_wait_ns)} more waiting than others{why}."
        )
    if split.callbacks_ns:
        notes.append(
            f"Callbacks took {milliseconds(split.callbacks_ns)} during validations. No part includes it; see"
            " the table Callbacks."
        )
    return tuple(notes)
