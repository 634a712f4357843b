"""Multiply-adds of torch.einsum, exact for the order in which torch contracts the operands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from math import prod


def einsum_macs(equation: str, shapes: Sequence[Sequence[int]], path: Sequence[int] | None = None) -> int:
    """Multiply-adds of all products of two operands that sum over something.

    A product that sums over nothing is element-wise, such as an outer product, and no contraction. What only
    one operand has and the result lacks is summed before, without products.

    Args:
        equation: as torch.einsum takes it.
        shapes: of the operands.
        path: positions of the two operands of each product, flat; their result goes to the end. ``None``
            contracts from left to right.

    Source: ``einsum`` and ``sumproduct_pair`` in torch's aten/src/ATen/native/Linear.cpp.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = [_labels(term, len(shape)) for term, shape in zip(left.split(","), shapes, strict=True)]
    sizes: dict[Hashable, int] = {}
    for labels, shape in zip(terms, shapes, strict=True):
        for label, size in zip(labels, shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1)) if size else 0
    if not all(sizes.values()):
        return 0
    # A dimension of size 1 is as good as none.
    operands = [
        {label for label, size in zip(labels, shape, strict=True) if size > 1}
        for labels, shape in zip(terms, shapes, strict=True)
    ]
    kept = _result_labels(terms, right if arrow else None)
    macs = 0
    while len(operands) > 1:
        if path is None:
            one, other = operands.pop(0), operands.pop(0)
        else:
            low, high = sorted(path[:2])
            path = path[2:]
            other, one = operands.pop(high), operands.pop(low)
        needed = kept.union(*operands)
        summed = (one & other) - needed
        result = (one | other) & needed
        if summed:
            macs += prod(sizes[label] for label in result | summed)
        operands.insert(0 if path is None else len(operands), result)
    return macs


def _labels(term: str, dimensions: int) -> list[Hashable]:
    """A label for each dimension; those of an ellipsis are numbered from the right."""
    before, dots, after = term.partition("...")
    hidden = range(dimensions - len(before) - len(after), 0, -1) if dots else range(0)
    return [*before, *hidden, *after]


def _result_labels(terms: Sequence[Sequence[Hashable]], right: str | None) -> set[Hashable]:
    """The labels of the result; without an arrow, the ellipsis' and those that stand there once."""
    times = Counter(label for labels in terms for label in labels)
    if right is None:
        return {label for label, found in times.items() if found == 1 or isinstance(label, int)}
    hidden = {label for label in times if isinstance(label, int)} if "..." in right else set()
    return {*right.replace("...", ""), *hidden}
