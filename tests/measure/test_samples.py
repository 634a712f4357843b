"""The number of samples per batch: how it's counted and which samples_fn results are rejected."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities import CombinedLoader
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset, default_collate
from transformers import BatchEncoding

from lightning_modelprof import LoopProfiler
from lightning_modelprof.run.steps import NOT_MEASURED
from tests.support.fits import (
    Net,
    fit_quietly,
    grouped,
    loader,
    make_callback,
    make_trainer,
    our_warnings,
    steps_of,
    table_of,
)

QUIET = grouped(
    dict.fromkeys(("terminal", "progress_bar", "files", "sampling", "flops"), False) | {"active": 0}
)

REASON = "the number of samples per batch couldn't be counted (pass samples_fn=...)"
SOME_DISAGREE = (
    "steps whose batches have parts of different lengths aren't counted (to count them, pass samples_fn=...)"
)

X = torch.zeros(3, 5)
Y = torch.zeros(3, dtype=torch.int64)


def counts(*batches, **arguments):
    """The count of each batch in a loop, and the note about it."""
    profiler = LoopProfiler(**QUIET, **arguments)
    with profiler:
        for _ in profiler.fetch(batches):
            pass
    [rank] = profiler.run.ranks
    return rank.steps.samples.tolist(), rank.samples_note


def image(height: int = 4, width: int = 5) -> torch.Tensor:
    return torch.zeros(3, height, width)


def boxes(number: int) -> dict[str, torch.Tensor]:
    return {"boxes": torch.zeros(number, 4), "labels": torch.zeros(number, dtype=torch.int64)}


@dataclass
class Fields:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "train"


class Named(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self) -> None:
        self.x, self.y = X, Y


IMAGES = [image(height) for height in range(4, 12)]  # 8 of them, of 3 channels
TARGETS = [boxes(number) for number in range(8)]


# Worked out by hand: the truth is the number of items that were collated.
COUNTED = {
    "a tensor": (X, 3),
    "nested": ({"b": {"c": (X,)}}, 3),
    "deep": ({"a": {"b": {"c": [X]}}}, 3),
    "a number and text beside": ({"number": 1, "text": "a", "x": X}, 3),
    "default collate": (default_collate([(torch.zeros(5), 1)] * 6), 6),
    "default collate of equal kinds": (default_collate([(torch.zeros(5), torch.zeros(1))] * 6), 6),
    "four fields of two kinds": ([X, X.long(), X, X.long()], 3),
    "one field": ([X], 3),
    "fields of one kind, three of them": ([torch.zeros(8, 3, 9, 9)] * 3, 8),
    "a batch of two, of two fields": ([torch.zeros(2, 5), torch.zeros(2, 5)], 2),
    "detection": ((tuple(IMAGES), tuple(TARGETS)), 8),
    "detection, a list": ([IMAGES, TARGETS], 8),
    "detection of two": (([image(4), image(5)], [boxes(4), boxes(7)]), 2),
    "detection of one": (([image()], [boxes(5)]), 1),
    "detection of one with as many boxes as channels": (([image()], [boxes(3)]), 1),
    "detection of one, a list": ([[image()], [boxes(1)]], 1),
    "detection of three": ((IMAGES[:3], TARGETS[:3]), 3),
    "detection, targets missing": ((IMAGES, [None, *TARGETS[1:]]), 8),
    "images of one size, boxes of one number": (([image()] * 8, [boxes(3)] * 8), 8),
    "stacked images, boxes in a list": ({"image": torch.zeros(8, 3, 9, 9), "target": TARGETS}, 8),
    "a mapping of lists": ({"x": IMAGES, "boxes": [one["boxes"] for one in TARGETS], "id": ["a"] * 8}, 8),
    "numbers as labels": (([image()] * 8, list(range(8))), 8),
    "two images, numbers as labels": (([image(), image()], [0, 1]), 2),
    "images in a list, labels stacked": (([image()] * 8, torch.zeros(8)), 8),
    "not collated": ([(image(), 1)] * 8, 8),
    "two not collated": ([{"image": image(), "label": 1}] * 2, 2),
    "sequences of several lengths": ([torch.zeros(length) for length in range(1, 9)], 8),
    "annotations of several lengths": ({"x": IMAGES[:2], "a": [[boxes(3), boxes(2)], [boxes(1)]]}, 2),
    "several views": (([X, X], Y), 3),
    "crops and labels": (([torch.zeros(16, 3, 9, 9)] * 2 + [torch.zeros(16, 3, 4, 4)] * 8, [0] * 16), 16),
    "two loaders": ([[X, Y], [X, Y]], 3),
    "loaders by name": ({"a": [X, Y], "b": [X, Y]}, 3),
    "a batch, its number and its loader's": (([X, Y], 5, 0), 3),
    "a scalar": ((X, torch.tensor(1.0), 2), 3),
    "nothing beside": (({"x": X}, None), 3),
    "an image's size": ({"x": X, "size": (224, 224)}, 3),
    "texts": (["a", "b", "c", "d", "e"], 5),
    "four lists": ([[image()] * 8, [image()] * 8, TARGETS, ["a"] * 8], 8),
    "pairs of several lengths": ([(torch.zeros(n, 5), torch.zeros(n)) for n in range(4, 9)], 5),
    "token ids that were not stacked": ({"ids": [[7] * 512 for _ in range(64)], "y": torch.zeros(64)}, 64),
    "deep lists before the images": (
        {"polygons": [[[[1.0] * 8] * 2] * 40] * 40, "images": torch.zeros(40, 3, 8, 8)},
        40,
    ),
    "texts beside": ((X, ("a", "b", "c")), 3),
    "tokens": (BatchEncoding({"input_ids": torch.zeros(8, 128), "attention_mask": torch.zeros(8, 128)}), 8),
    "a dataclass": (Fields(X, Y), 3),
    "a named tuple": (Named(X, Y), 3),
    "samples of a dataclass": ([Fields(torch.zeros(n), torch.zeros(2)) for n in (4, 5, 6, 7)], 4),
    "jagged": (torch.nested.nested_tensor([torch.zeros(5), torch.zeros(3)], layout=torch.jagged), 2),
    "a nested tensor": (torch.nested.nested_tensor([torch.zeros(5), torch.zeros(3)]), 2),
    "sparse": (X.to_sparse(), 3),
    "images alone": ([image()] * 8, 8),
    "pairs of images": ({"left": [image(), image()], "right": [image(), image()]}, 2),
    "an optional field is not there": ((X, X, X, None), 3),
    "an object beside": ((SimpleNamespace(num_graphs=4), X), 3),
    "NumPy": ((np.zeros((8, 3)), np.zeros(8)), 8),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("name", COUNTED)
def test_samples_are_counted(name):
    batch, truth = COUNTED[name]
    assert counts(batch, batch, batch) == ([truth] * 3, "")


NOT_COUNTED = {
    "nothing": None,
    "text": "text",
    "an empty list": [],
    "a scalar": torch.tensor(1),
    "a number beside nothing": (2, None),
    "token ids alone": [[7] * 512] * 64,
    "two sizes": (torch.zeros(8, 3), torch.zeros(16)),
    "class weights": (X, Y, torch.zeros(10)),
    "edges": {"x": torch.zeros(20, 3), "edges": torch.zeros(2, 50), "y": torch.zeros(20)},
    "labels and two views of each": {"views": torch.zeros(16, 3, 9, 9), "labels": torch.zeros(8)},
    "time first": (torch.zeros(50, 8, 3), torch.zeros(8)),
    "loaders of two sizes": [[X, Y], [torch.zeros(8, 5), torch.zeros(8, dtype=torch.int64)]],
    "loaders of two sizes by name": {"a": [X, Y], "b": [torch.zeros(8, 5), torch.zeros(8)]},
    "packed tokens": {"tokens": torch.zeros(1024), "lengths": torch.zeros(9)},
    "two sequences, or two fields": [torch.zeros(5), torch.zeros(7)],
    "four samples, or four fields": [X] * 4,
    "crops alone": [torch.zeros(16, 3, 9, 9)] * 2 + [torch.zeros(16, 3, 4, 4)] * 8,
    "lists of two lengths": (IMAGES, TARGETS[:5]),
    "packed sequences": pack_sequence([torch.zeros(5)]),
    "a class with slots": Slotted(),
    "another class": SimpleNamespace(x=X, num_graphs=3, batch_size=3),
    "a list of another class": [SimpleNamespace(x=X)] * 4,
}


@pytest.mark.parametrize("name", NOT_COUNTED)
def test_ambiguous_batch_is_not_counted(name):
    batch = NOT_COUNTED[name]
    assert counts(batch, batch, batch) == ([NOT_MEASURED] * 3, REASON)


def meanings(part: Any) -> set[int] | None:
    """Slow and simple: every sample count that nothing in the batch contradicts; ``None`` for any."""
    if isinstance(part, torch.Tensor):
        return {part.shape[0]} if part.ndim else None
    if not isinstance(part, (dict, list, tuple)):
        return None
    children = [meanings(child) for child in (part.values() if isinstance(part, dict) else part)]
    known = [child for child in children if child is not None]
    shared = set.intersection(*known) if known else None
    is_tensors = all(isinstance(child, torch.Tensor) and child.ndim for child in part)
    is_mappings = all(isinstance(child, dict) for child in part)
    if not isinstance(part, dict) and part and (is_tensors or is_mappings):
        kinds = (
            {(child.ndim, child.dtype) for child in part} if is_tensors else {tuple(child) for child in part}
        )
        if len(kinds) == 1:
            return {len(part)} | (shared or set())
    return shared


SIZES = st.integers(0, 9)


def stacked(number: int) -> st.SearchStrategy[Any]:
    return st.lists(SIZES, max_size=3).map(lambda rest: torch.zeros(number, *rest))


def unstacked(number: int) -> st.SearchStrategy[Any]:
    tensors = st.lists(SIZES, min_size=number, max_size=number).map(lambda all_: [image(5, n) for n in all_])
    mappings = st.lists(SIZES, min_size=number, max_size=number).map(lambda all_: [boxes(n) for n in all_])
    return st.one_of(tensors, mappings)


def batches(number: int) -> st.SearchStrategy[Any]:
    field = st.one_of(stacked(number), unstacked(number), st.none(), st.just(torch.tensor(1.0)), st.just(2))
    several = st.lists(field, min_size=1, max_size=4)
    named = several.map(lambda all_: dict(zip("abcd", all_, strict=False)))
    return st.one_of(several, several.map(tuple), named, named.map(lambda one: (one, None)))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9).flatmap(lambda number: st.tuples(st.just(number), batches(number))))
def test_count_agrees_with_slow_search(case):
    number, batch = case
    [found], _ = counts(batch)
    possible = meanings(batch)
    if possible is not None and len(possible) == 1 and number >= 4:
        assert found == number
    if possible is not None and found != NOT_MEASURED:
        assert found in possible


def test_later_batches_are_counted_like_first():
    images = [(IMAGES[:number], TARGETS[:number]) for number in (8, 8, 5)]
    assert counts(*images) == ([8, 8, 5], "")
    encoded = [BatchEncoding({"ids": torch.zeros(number, 9)}) for number in (4, 4, 1)]
    assert counts(*encoded) == ([4, 4, 1], "")


def test_parts_that_agreed_by_chance_are_not_counted_later():
    boxes_first = [(torch.zeros(number, 4), torch.zeros(8, 3)) for number in (8, 13, 9)]
    assert counts(*boxes_first) == ([8, NOT_MEASURED, NOT_MEASURED], SOME_DISAGREE)


def test_batches_may_change_type():
    kinds = (X, [X], {"a": X}, [torch.zeros(2)], (X, "a"), None, X)
    assert counts(*kinds) == ([3, 3, 3, 2, 3, NOT_MEASURED, 3], "")
    assert counts(None, X) == ([NOT_MEASURED, 3], "")
    assert counts((X, torch.zeros(8)), (X, Y)) == ([NOT_MEASURED] * 2, REASON)


class Detection(Net):
    """Takes images and targets as detection collates them."""

    def training_step(self, batch, batch_idx):
        images, targets = batch
        inputs = torch.stack([one.mean() * torch.ones(8) for one in images])
        return super().training_step((inputs, inputs[:, 0] * len(targets)), batch_idx)


@pytest.mark.slow
def test_detection_fit_counts_images(tmp_path):
    items = [(image(4 + n % 3), boxes(n % 5)) for n in range(64)]
    batches = DataLoader(items, batch_size=8, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))
    callback = make_callback(tmp_path, active=0)
    fit_quietly(make_trainer(tmp_path, callback), Detection(), batches)
    assert set(steps_of(callback).samples.tolist()) == {8}
    assert callback.run.ranks[0].samples_note == ""


@pytest.mark.slow
def test_reason_replaces_samples_per_second(tmp_path):
    class Two(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch[0], batch[1][:8]), batch_idx)

    batches = DataLoader([(torch.rand(8, 8), torch.zeros(16))] * 12, batch_size=None)
    callback = make_callback(tmp_path, active=0)
    fit_quietly(make_trainer(tmp_path, callback), Two(), batches)
    assert callback.report.summary.benchmark.samples_per_s is None
    said = [note for note in table_of(callback.report, "perf_summary").notes if "samples" in note]
    assert said == [f"samples/s is unknown: {REASON}."]


@pytest.mark.parametrize("count", [0, 5, 2**63 - 1, np.int32(5)])
def test_valid_samples_fn_result_is_accepted(count):
    assert counts(X, samples_fn=lambda batch: count) == ([count], "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "error", "problem"),
    [
        (-1, ValueError, "from 0 to 2**63 - 1, got -1"),
        (2**63, ValueError, "from 0 to 2**63 - 1, got 9223372036854775808"),
        (torch.tensor(5), TypeError, "would make every step wait for the device"),
        (2.5, TypeError, "float"),
        (None, TypeError, "NoneType"),
    ],
)
def test_invalid_samples_fn_result_is_rejected(tmp_path, count, error, problem):
    callback = make_callback(tmp_path, active=0, samples_fn=lambda batch: count, unit="tokens")
    with our_warnings() as messages:
        fit_quietly(make_trainer(tmp_path, callback), Net(), loader())
    assert len(messages) == 1, messages
    assert f"samples_fn raised {error.__name__}: " in messages[0]
    assert problem in messages[0]
    assert "The report won't have tokens/s" in messages[0]
    assert (steps_of(callback).samples == NOT_MEASURED).all()
    assert callback.report.summary.benchmark.samples_per_s is None


@pytest.mark.slow
def test_late_invalid_count_loses_only_rate(tmp_path):
    counts = iter([*[4] * 10, -4, *[4] * 100])
    callback = make_callback(tmp_path, active=0, samples_fn=lambda batch: next(counts))
    with our_warnings() as messages:
        fit_quietly(make_trainer(tmp_path, callback), Net(), loader())
    assert len(messages) == 1, messages
    assert steps_of(callback).samples.tolist() == [4] * 10 + [NOT_MEASURED] * 22


# A loader that doesn't batch

VECTOR, MATRIX = torch.zeros(8), torch.zeros(8, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (VECTOR, NOT_MEASURED),  # one sample of 8 features, or 8 samples of one
        ((VECTOR, torch.tensor(1.0)), NOT_MEASURED),
        ((torch.zeros(3, 8, 8), 1), NOT_MEASURED),  # an image with its label
        ({"ids": VECTOR, "mask": VECTOR}, NOT_MEASURED),
        (MATRIX, 8),
        ((MATRIX, VECTOR), 8),
        ({"x": MATRIX, "y": VECTOR, "epoch": 1}, 8),
        ((torch.zeros(8, 3, 4, 4), ["name"] * 8), 8),
        ([torch.zeros(length) for length in range(1, 9)], 8),
    ],
)
def test_single_sample_is_not_taken_for_batch(tmp_path, given, expected):
    class Anything(Net):
        def training_step(self, batch, batch_idx):
            return self.layers(torch.ones(2, 8)).mean()

    class Plain:
        def __iter__(self):
            return iter([given] * 6)

    for loaded in (DataLoader([given] * 6, batch_size=None), Plain()):
        callback = make_callback(tmp_path, active=0)
        fit_quietly(make_trainer(tmp_path, callback), Anything(), loaded)
        assert set(steps_of(callback).samples.tolist()) == {expected}
        assert callback.run.ranks[0].samples_note == (REASON if expected == NOT_MEASURED else "")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((2, 4, 3), NOT_MEASURED), ((4, 4, 4), 4), ((1, 1, 1), 1), ((1, 8, 4), NOT_MEASURED)],
)
def test_list_of_one_tensor_is_batch_in_combined_loaders(tmp_path, mode, sizes, expected):
    """A ``TensorDataset`` of one tensor makes such lists; each loader has three batches."""

    class First(Net):
        def training_step(self, batch, batch_idx):
            return self.layers(batch["a"][0]).mean()

    loaders = {
        name: DataLoader(TensorDataset(torch.zeros(3 * size, 8)), size)
        for name, size in zip("abc", sizes, strict=True)
    }
    callback = make_callback(tmp_path, active=0)
    fit_quietly(make_trainer(tmp_path, callback), First(), CombinedLoader(loaders, mode))
    assert steps_of(callback).samples.tolist() == [expected] * 3
    assert callback.run.ranks[0].samples_note == (REASON if expected == NOT_MEASURED else "")


@pytest.mark.slow
def test_list_of_one_sample_counts_one_in_sequential_loaders(tmp_path):
    class Anything(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            pass

    batch = {"images": [torch.zeros(3, 4, 4)], "boxes": [torch.zeros(5, 4)]}
    loaders = [DataLoader([0] * 3, collate_fn=lambda _: batch) for _ in range(2)]
    callback = make_callback(tmp_path, active=0)
    make_trainer(tmp_path, callback).validate(Anything(), loaders, verbose=False)
    assert steps_of(callback).samples.tolist() == [1] * 6


@pytest.mark.slow
def test_batching_loader_decides_sample_count(tmp_path):
    """This includes a loader whose sampler selects whole batches."""
    sampler = BatchSampler(SequentialSampler(range(24)), 4, drop_last=False)

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, indices):
            return torch.zeros(len(indices))

    class Anything(Net):
        def training_step(self, batch, batch_idx):
            return self.layers(torch.ones(2, 8)).mean()

    for loaded in (
        DataLoader(torch.zeros(24), batch_size=4),
        DataLoader(Rows(), batch_size=None, sampler=sampler),
    ):
        callback = make_callback(tmp_path, active=0)
        fit_quietly(make_trainer(tmp_path, callback), Anything(), loaded)
        assert set(steps_of(callback).samples.tolist()) == {4}
