"""Model size: memory of parameters, gradients, optimizer state and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.report.model import Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.run.table import run_table
from lightning_modelprof.run.model_cost import ModelSize, TensorSize

_MOST_NAMES: Final = 5


MODEL_SIZE: Final = TableSpec(
    id="model_size",
    title="Model size",
    help=(
        "What this process holds after the last inspected step, by **kind** (trainable and frozen"
        " parameters, packed weights, gradients, optimizer state, buffers) and dtype. Each tensor counts"
        " once, and a note lists tied names. Bytes are whole storages; a shared storage counts once, with"
        " the first kind in this order. Sharded tensors count their shard, and sparse tensors their values"
        " (their bytes include the indices). **Packed weights** are the weights and biases of quantized"
        " modules (torch.ao), without scales and padding. Plain module attributes, torchmetrics states and"
        " activations aren't included. The last row is the total."
    ),
    columns=(
        ColumnSpec("kind", "Kind"),
        ColumnSpec(
            "dtype",
            "Type",
            help=(
                "dtype. Types such as `bfloat16 in Int8Tensor` are packed tensors: elements are those they"
                " represent, bytes those of their parts."
            ),
        ),
        ColumnSpec("tensors", "Tensors", Unit.COUNT, help="number of tensors."),
        ColumnSpec("elements", "Elements", Unit.COUNT, help="number of values."),
        ColumnSpec("bytes", "Size", Unit.BYTES, help="their bytes.", of=lambda size: size.num_bytes),
    ),
    place=170,
    views=("modules", "memory"),
    place_in_views=1,
    compared=CompareKey(keys=("bytes",), names=("kind", "dtype"), better=""),
)


@run_table(MODEL_SIZE, needs=Facts.cost)
def run_model_size(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    """Show the size of a run's model."""
    yield model_size_table(facts.cost.size, facts.cost.size_note)


def model_size_table(size: ModelSize | None, note: str) -> Table:
    """Show how much memory the model takes before it computes anything, by kind and dtype.

    Args:
        size: the counted sizes, if any.
        note: why there are none.
    """
    rows = () if size is None else size.sizes
    total = () if size is None or not rows else (total_size(size),)
    return MODEL_SIZE.table(
        (*rows, *total),
        notes=_notes(size),
        absent_reason=_absent_reason(size, note),
        is_detail=True,
    )


def _absent_reason(size: ModelSize | None, note: str) -> str | None:
    if size is None:
        return note or "model size wasn't counted"
    if size.sizes:
        return None
    return "no tensor has a size yet" if size.lazy else "the model has no parameters and no buffers"


def _notes(size: ModelSize | None) -> tuple[str, ...]:
    if size is None:
        return ()
    notes: list[str] = []
    if size.tied:
        notes.append(f"Tied to tensors above and not counted again: {_some(size.tied)}.")
    if size.lazy:
        notes.append(f"Not counted because they have no size yet: {_some(size.lazy)}.")
    notes += [f"{note[0].upper()}{note[1:]}." for note in size.notes if note]
    return tuple(notes)


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def total_size(size: ModelSize) -> TensorSize:
    """Sum the sizes of all kinds and dtypes; the sum's ``kind`` is ``total``.

    Bytes add up because a ``ModelSize`` counts each storage once.
    """
    return TensorSize(
        kind="total",
        dtype="",
        tensors=sum(row.tensors for row in size.sizes),
        elements=sum(row.elements for row in size.sizes),
        num_bytes=sum(row.num_bytes for row in size.sizes),
    )
