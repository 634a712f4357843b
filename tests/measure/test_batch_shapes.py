"""Batch size keys come from shapes alone, without reading values, and their number is bounded."""

from __future__ import annotations

from collections import Counter, UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lightning_modelprof.measure.steps import batch_shapes
from lightning_modelprof.measure.steps.batch_shapes import (
    MAX_EXACT,
    MAX_SIZES,
    UNKNOWN,
    BatchShapes,
    shapes_of,
)
from lightning_modelprof.run.steps import StepTag

Pair = namedtuple("Pair", "left right")


@dataclass(slots=True)
class Slotted:
    inputs: torch.Tensor
    name: str = "text"


class Tattling(torch.Tensor):
    """A tensor that raises if an operator runs on it."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


def ones(*shape):
    return torch.ones(shape)


@pytest.mark.parametrize(
    ("batch", "shapes"),
    [
        (ones(3, 4), ((3, 4),)),
        ([ones(3, 4), ones(3)], ((3, 4), (3,))),
        ({"ids": ones(3, 4), "more": {"mask": ones(3, 1)}, "text": ["a", "b"]}, ((3, 4), (3, 1))),
        (UserDict(ids=ones(2, 5)), ((2, 5),)),
        (Pair(ones(2), [ones(4), 7]), ((2,), (4,))),
        (Slotted(ones(2, 2)), ((2, 2),)),
        (SimpleNamespace(store=SimpleNamespace(x=ones(9, 2), edges=ones(2, 30))), ((9, 2), (2, 30))),
        (np.ones((6, 2)), ((6, 2),)),
        # Ten images that aren't stacked: count, total elements, largest size of each dimension.
        ([[ones(3, 8, n) for n in range(1, 11)], ones(10)], ((10, 3 * 8 * 55, 3, 8, 10), (10,))),
        ([{"boxes": ones(2, 4)}, {"boxes": ones(5, 4)}], ((2, 28, 5, 4),)),
        (pack_sequence([ones(5, 2), ones(3, 2)]), ((8, 2), (5,))),
        (torch.eye(4).to_sparse(), ((4, 4, 4),)),
        (torch.nested.nested_tensor([ones(3, 2), ones(5, 2)], layout=torch.jagged), ((2, 16),)),
        (torch.nested.nested_tensor([ones(3, 2), ones(5, 2)]), ((2, 16),)),
        ("text", ()),
        (["a", 3, None], ()),
        (iter([ones(2)]), ()),
    ],
    ids=range(17),
)
def test_shapes_of_batch(batch, shapes):
    assert shapes_of(batch) == shapes
    sizes = BatchShapes()
    size = sizes(batch)
    assert size == (1 if shapes else UNKNOWN)
    assert sizes(batch) == size
    assert sizes.shapes(size) == (shapes or None)


def test_equal_shapes_share_one_size():
    sizes = BatchShapes()
    first = sizes([ones(2, 3), ones(2)])
    assert sizes([ones(2, 3) * 7, ones(2)]) == first
    assert sizes([ones(2, 4), ones(2)]) != first
    assert sizes((ones(2, 4), ones(2))) == 2
    assert len(sizes) == 2


def test_element_count_distinguishes_nested_and_sparse_tensors():
    sizes = BatchShapes()
    nested = [
        torch.nested.nested_tensor([ones(3, 2), ones(length, 2)], layout=layout)
        for layout in (torch.jagged, torch.strided)
        for length in (5, 6, 5)
    ]
    assert [sizes([one]) for one in nested[:3]] == [1, 2, 1]
    assert [sizes([one]) for one in nested[3:]] == [1, 2, 1]
    assert sizes([torch.eye(4).to_sparse()]) == 3
    assert sizes([torch.ones(4, 4).to_sparse()]) == 4


def test_values_are_not_read():
    """The shape isn't read either if the tensor's class may compute it."""
    tensor = torch.Tensor._make_subclass(Tattling, torch.ones(2, 3))
    assert shapes_of({"x": tensor, "y": torch.ones(2)}) == ((2,),)


def test_batch_that_raises_has_unknown_size():
    class Odd(dict):
        def values(self):
            raise RuntimeError("not now")

        __class__ = property(lambda self: 1 / 0)

    assert BatchShapes()([Odd(x=1)]) == UNKNOWN


def test_clean_steps_are_counted_by_size():
    """Steps 0 to 2 have one size, 3 to 5 another, 6 and 7 the first; step 1 is not clean."""
    sizes = BatchShapes()
    small, large = sizes(ones(2)), sizes(ones(3))
    tags = np.zeros(8, np.int64)
    tags[1] = StepTag.INSPECTED
    sizes.begin(0, small)
    sizes.begin(3, large)
    sizes.end(0, tags[:5])
    before = sizes.clean_steps()
    assert before.tolist() == [0, 2, 2]
    sizes.begin(6, small)
    sizes.end(5, tags[5:])
    record = sizes.record()
    assert (record.shapes, record.clean_steps) == ((((2,),), ((3,),)), (4, 3))
    assert sizes.record(before).clean_steps == (2, 1)


def test_many_sizes_are_rounded_and_bounded():
    sizes = BatchShapes()
    generator = np.random.default_rng(0)
    seen = generator.integers(300, 1400, (20_000, 2))
    for step, (height, width) in enumerate(seen.tolist()):
        sizes.begin(step, sizes([torch.empty(0, height, width, 3000)]))
    sizes.end(0, np.zeros(len(seen), np.int64))
    record = sizes.record()
    assert len(record.shapes) - record.num_rounded == MAX_EXACT
    assert len(record.shapes) <= MAX_SIZES
    assert (sum(record.clean_steps), record.other_steps) == (len(seen), 0)
    table = np.array([shape for (shape,) in record.shapes])
    assert set(table[:, 3]) == {3000}, "what does not vary is exact"
    # Total pixels of all steps: rounding errors cancel out.
    pixels = (table[:, 1] * table[:, 2] * np.array(record.clean_steps)).sum()
    assert pixels == pytest.approx(seen.prod(axis=1).sum(), rel=2e-3)


def test_sizes_beyond_limit_count_as_other():
    sizes = BatchShapes()
    for step in range(2 * MAX_SIZES):
        sizes.begin(step, sizes([ones(1)] * (1 + step % 7) + [torch.empty(0, step), torch.empty(0, step**2)]))
    sizes.end(0, np.zeros(2 * MAX_SIZES, np.int64))
    record = sizes.record()
    assert len(record.shapes) <= MAX_SIZES
    assert sum(record.clean_steps) + record.other_steps == 2 * MAX_SIZES


def test_lists_of_numbers_add_no_cost():
    """Lists of token ids add neither time nor memory as they grow, and tensors still count."""
    sizes = BatchShapes()
    looked_at = Counter()

    class Counted(list):
        def __iter__(self):
            for one in super().__iter__():
                looked_at["numbers"] += 1
                yield one

    def batch(length, width=3):
        return {"ids": [Counted([7] * (length + row)) for row in range(32)], "label": ones(32, width)}

    assert [sizes(batch(length)) for length in range(100, 140)] == [1] * 40
    assert sizes(batch(100, width=4)) == 2
    assert looked_at["numbers"] <= 50 * 32, "the first one of each list, at most"
    assert len(sizes._known) == 2
    assert sum(map(len, map(repr, sizes._known))) < 1_000
    assert sizes([[1, ones(5), 2], 3]) != sizes([[1, ones(6), 2], 3])


def test_long_list_of_objects_is_sampled(monkeypatch):
    """The list's length doesn't matter; if samples are alike, the result is exact."""
    looked_at = set()
    read = batch_shapes.fields_of
    monkeypatch.setattr(batch_shapes, "fields_of", lambda part: looked_at.add(id(part)) or read(part))

    class Sample:
        def __init__(self, width):
            self.x, self.label = ones(width, 2), 3

    sizes = BatchShapes()
    first = [Sample(3) for _ in range(1_000)]
    assert sizes(first) == sizes([Sample(3) for _ in range(1_000)]) == 1
    assert sizes.shapes(1) == ((1_000, 6_000, 3, 2),)
    looked_at.clear()
    assert sizes(first) == 1
    assert 0 < len(looked_at & set(map(id, first))) <= 64
    assert sizes([Sample(3) for _ in range(999)]) == 2
    assert sizes([Sample(4) for _ in range(1_000)]) == 3
    assert shapes_of({"samples": first}) == sizes.shapes(1)
    assert shapes_of([ones(n) for n in range(1, 1_001)]) == ((1_000, 500_500, 1_000),), "tensors, all of them"


class Visit:
    """A user's object with nested lists and no tensor."""

    def __init__(self):
        self.id, self.events = "v", [[[1, 2], [3, 4]] for _ in range(50)]


def test_lists_without_tensors_are_not_walked_every_step(monkeypatch):
    walked = []
    children = batch_shapes._children
    sizes, visits = BatchShapes(), {"visits": [Visit() for _ in range(64)]}
    first = sizes(visits | {"x": torch.ones(64, 3)})
    monkeypatch.setattr(batch_shapes, "_children", lambda part: walked.append(part) or children(part))
    assert sizes(visits | {"x": torch.ones(64, 3)}) == first
    assert len(walked) <= 200, "of 64 x 150"
    assert sizes(visits | {"x": torch.ones(64, 4)}) != first


def test_differing_tensor_in_last_of_many_samples_counts():
    def targets(boxes):
        return {
            "targets": [{"id": [[0]], "boxes": torch.ones(2, 4)} for _ in range(63)]
            + [{"boxes": torch.ones(boxes, 4)}]
        }

    sizes = BatchShapes()
    assert sizes(targets(2)) != sizes(targets(3))
