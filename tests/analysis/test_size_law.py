"""FLOPs fitted by batch size: exact for known laws, and no result where no law fits."""

from __future__ import annotations

import itertools
import json
import random

import msgspec
import pytest

from lightning_modelprof.analysis.modules.size_law import FlopsBySize, mean_step, size_laws
from lightning_modelprof.run.batches import BatchSizes, PhaseFlops, SizeCount
from tests.support.facts import fact_or_why, why_not

PARTS = (("backward", "float32"), ("forward", "bfloat16"))


def counted(shapes, flops, step=0):
    """Forward in one dtype; backward, three times as much, in another."""
    return SizeCount(
        shapes=shapes,
        step=step,
        flops=(
            PhaseFlops(phase="forward", dtype="bfloat16", flops=flops),
            PhaseFlops(phase="backward", dtype="float32", flops=3 * flops),
        ),
    )


def law_of(sizes, flops):
    found = size_laws([counted(size, flops(size)) for size in sizes], PARTS)
    assert len(found) <= 1
    return found[0] if found else None


def text(size):
    """Tokens, their mask, and a label for every token except the first."""
    batch, length = size
    return ((batch, length), (batch, length), (batch, length - 1))


LAWS = {
    "length, 3": ([(4, 10), (4, 20), (4, 33)], lambda b, n: 7 * b * n + 2 * b * n * n),
    "length with a constant": ([(4, 10), (4, 20), (4, 33), (4, 50)], lambda b, n: 999 + 7 * n + 5 * n * n),
    "batch": ([(4, 10), (7, 10), (9, 10)], lambda b, n: 12 * b),
    "batch with a constant": ([(4, 10), (7, 10), (9, 10)], lambda b, n: 12 * b + 10_000),
    "both": ([(4, 10), (7, 20), (9, 33), (2, 70)], lambda b, n: 7 * b * n + 2 * b * n * n),
}


@pytest.mark.parametrize("name", LAWS)
def test_law_is_found_exactly(name):
    sizes, flops = LAWS[name]
    law = law_of([text(size) for size in sizes], lambda shapes: flops(*shapes[0]))
    assert law.miss < 1e-9
    assert law.is_sure
    batches = (3, 8) if len({b for b, _ in sizes}) > 1 else (sizes[0][0],)
    lengths = (8, 40) if len({n for _, n in sizes}) > 1 else (sizes[0][1],)
    for batch, length in itertools.product(batches, lengths):
        shapes = text((batch, length))
        assert law.covers(shapes)
        true = flops(batch, length)
        assert law.flops(shapes) == pytest.approx([3 * true, true], rel=1e-9)


def test_two_sizes_give_no_fit():
    assert law_of([text((4, 10)), text((4, 20))], lambda shapes: shapes[0][1]) is None


def test_law_covers_only_sizes_like_those_counted():
    law = law_of([text((4, n)) for n in (10, 20, 40)], lambda shapes: shapes[0][1])
    assert law.covers(text((4, 160)))
    assert not law.covers(text((4, 161)))
    assert not law.covers(text((4, 2)))
    assert not law.covers(text((5, 20))), "the batch dimension did not vary"
    assert not law.covers((*text((4, 20))[:2], (4, 7))), "as many labels as tokens, but one"
    assert not law.covers(text((4, 20))[:2])
    assert law.covers(text((4, 60)), reach=1.5)
    assert not law.covers(text((4, 61)), reach=1.5)


def test_random_flops_give_no_law():
    chance = random.Random(0)
    sizes = [((4, n, n * 37 % 101, n * 61 % 97),) for n in range(10, 70, 4)]
    assert law_of(sizes, lambda shapes: chance.randrange(10**6, 10**8)) is None


def sizes_of(steps, others=0):
    return BatchSizes(shapes=tuple(steps), clean_steps=tuple(steps.values()), other_steps=others)


def test_mean_step_by_hand():
    """Counted sizes of 10 and 40 forward FLOPs, in 3 steps and 1: 17.5, and three times that backward."""
    by_size = FlopsBySize([counted(((1,),), 10, 5), counted(((4,),), 40, 9)])
    mean = mean_step(by_size, sizes_of({((1,),): 3, ((4,),): 1, ((9,),): 0}))
    assert mean.flops == {PARTS[0]: 52.5, PARTS[1]: 17.5}
    assert (mean.error, mean.num_fitted, mean.num_counted) == (0, 0, 2)
    assert [(row.shapes, row.clean_steps, row.flops, row.counted_step) for row in mean.rows] == [
        (((1,),), 3, 40, 5),
        (((4,),), 1, 160, 9),
    ]


def test_size_is_counted_or_fitted():
    by_size = FlopsBySize([counted(((n,),), 10 * n) for n in (1, 2, 4)])
    mean = mean_step(by_size, sizes_of({((1,),): 1, ((3,),): 1}))
    assert mean.flops[PARTS[1]] == pytest.approx(20)
    assert (mean.num_fitted, mean.num_counted) == (1, 3)
    assert mean.error < 1e-9


@pytest.mark.parametrize(
    ("counts", "steps", "others", "reason"),
    [
        ([], {((1,),): 1, ((2,),): 2}, 0, "no sizes were counted, and 3 of 3 clean steps have other sizes"),
        ([1], {((1,),): 1, ((2,),): 2}, 0, "1 size was counted, and 2 of 3 clean steps have other sizes"),
        ([1, 2, 3], {((1,),): 4, ((13,),): 2}, 0, "those of 2 of 6 clean steps are unlike the 3 counted"),
        ([1, 2, 3], {((1,),): 4}, 1, "the batch size is unknown in 1 of 5 clean steps"),
    ],
)
def test_reason_for_missing_mean_step(counts, steps, others, reason):
    by_size = FlopsBySize([counted(((n,),), 10 * n) for n in counts])
    assert reason in why_not(mean_step, by_size, sizes_of(steps, others))


@pytest.mark.parametrize("value", [-1, 2**63, 10**400, 0.5, "8"])
def test_file_with_impossible_sizes_is_rejected(value):
    raw = {"shapes": [[[3]]], "clean_steps": [1]}
    assert msgspec.json.decode(json.dumps(raw), type=BatchSizes).clean_steps == (1,)
    for changed in (raw | {"shapes": [[[value]]]}, raw | {"clean_steps": [value]}):
        with pytest.raises(msgspec.MsgspecError):
            msgspec.json.decode(json.dumps(changed), type=BatchSizes)


def test_largest_numbers_of_file_raise_no_error():
    most = 2**63 - 1
    counts = [counted(((n, most // 2 + n),), most - n) for n in (1, most // 3, most)]
    for some in (counts, [counted(((n,),), 0) for n in (0, 1, 2, 3)]):
        sizes = sizes_of({((5, most),): most, ((5,),): most})
        found = fact_or_why(mean_step, FlopsBySize(some), sizes)
        assert isinstance(found, str) or found.error >= 0


def test_standard_error_covers_true_mean():
    """FLOPs deviate from a law by a few percent; the true mean is within three standard errors."""
    off = []
    for seed in range(30):
        chance = random.Random(seed)
        flops = {((n,),): round(1000 * n * n * (1 + chance.gauss(0, 0.02))) for n in range(20, 100)}
        some = chance.sample(sorted(flops), 8)
        by_size = FlopsBySize([counted(size, flops[size]) for size in some])
        found = fact_or_why(mean_step, by_size, sizes_of(dict.fromkeys(flops, 1)))
        if isinstance(found, str):
            continue
        true = sum(flops.values()) / len(flops)
        off.append((found.flops[PARTS[1]] / true - 1) / found.error)
    assert len(off) > 20
    assert max(map(abs, off)) < 3
    assert sum(map(abs, off)) / len(off) > 0.1, "the error is no gross exaggeration"
