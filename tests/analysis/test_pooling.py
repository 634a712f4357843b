"""Pooling: by hand, and independent of the order in which records are combined."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modelprof.analysis.pooling import Key, Largest, OfAll, Smallest, pool, pool_alike
from lightning_modelprof.analysis.timeline.tally import NOTHING, Tally, add_up
from lightning_modelprof.analysis.trace.copies import Copies
from lightning_modelprof.analysis.trace.dataloader import DataloaderTime
from lightning_modelprof.analysis.trace.distributed import CollectiveTime
from lightning_modelprof.analysis.trace.kernels import Kernels
from lightning_modelprof.analysis.trace.launches import RuntimeCalls
from lightning_modelprof.analysis.trace.model_summary import ModelSummary
from lightning_modelprof.analysis.trace.operator_costs import Operator
from lightning_modelprof.analysis.trace.overview import Overview
from lightning_modelprof.analysis.trace.trace_checks import KernelLaunchCount
from lightning_modelprof.analysis.trace.user_ranges import UserRange
from lightning_modelprof.record import Record, field

POOLED = (
    *(CollectiveTime, Copies, DataloaderTime, KernelLaunchCount, Kernels, ModelSummary, Operator, Overview),
    *(RuntimeCalls, UserRange),
)


class Part(Record, frozen=True):
    name: Key[str]
    time_ns: int


class Whole(Record, frozen=True, kw_only=True):
    calls: int = 0
    mean: float = 0.0
    known_ns: int | None = None
    all_ns: OfAll[int] = 0
    max_ns: Largest[int] = None
    min_ns: Smallest[int] = None
    is_any: bool | None = None
    base: str = ""
    parts: tuple[Part, ...] = ()
    notes: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    by_name: Mapping[str, int] = field(default_factory=dict)
    words: frozenset[str] = frozenset()


def test_each_kind_of_field_is_pooled():
    one = Whole(
        calls=2,
        mean=0.5,
        known_ns=7,
        max_ns=3,
        min_ns=1,
        base="steps",
        parts=(Part("a", 1), Part("b", 2)),
        notes=("later", "first"),
        steps=(3, 9),
        by_name={"x": 1},
        words=frozenset({"u"}),
    )
    other = Whole(
        calls=3,
        mean=0.25,
        all_ns=None,
        max_ns=2,
        min_ns=2,
        is_any=False,
        base="device",
        parts=(Part("c", 4), Part("a", 8)),
        notes=("first", "last"),
        steps=(4, 3),
        by_name={"x": 2, "y": 5},
        words=frozenset({"v"}),
    )
    assert pool([one, other]) == Whole(
        calls=5,
        mean=0.75,
        known_ns=7,
        all_ns=None,
        max_ns=3,
        min_ns=1,
        is_any=False,
        base="steps",
        parts=(Part("a", 9), Part("b", 2), Part("c", 4)),
        notes=("later", "first", "last"),
        steps=(3, 4, 9),
        by_name={"x": 3, "y": 5},
        words=frozenset({"u", "v"}),
    )
    assert pool([one]) is one


def test_records_of_same_key_are_pooled():
    parts = (Part("b", 1), Part("a", 2), Part("b", 4))
    assert pool_alike(parts) == (Part("b", 5), Part("a", 2))
    assert pool_alike([]) == ()


def test_tallies_add_up():
    assert add_up([]) == add_up([NOTHING]) == NOTHING
    assert add_up([Tally(2, 30, 20, 10), NOTHING, Tally(1, 5, 5, 5)]) == Tally(3, 35, 20, 5)


def anything(hint):
    """Values of a type; whole numbers also for floats, because the order of rounding would show."""
    if get_origin(hint) is Annotated:
        return anything(get_args(hint)[0])
    simple = {
        int: st.integers(0, 2**40),
        float: st.integers(0, 2**40).map(float),
        bool: st.booleans(),
        str: st.sampled_from(["a", "b", "c"]),
        NoneType: st.none(),
    }
    if hint in simple:
        return simple[hint]
    members = get_args(hint)
    if get_origin(hint) is tuple:
        return st.lists(anything(members[0]), max_size=3).map(tuple)
    if get_origin(hint) is frozenset:
        return st.frozensets(anything(members[0]))
    if get_origin(hint) is Mapping:
        return st.dictionaries(anything(members[0]), anything(members[1]), max_size=3)
    if get_origin(hint) is Literal:
        return st.sampled_from(members)
    if members:
        return st.one_of(*map(anything, members))
    hints = get_type_hints(hint, include_extras=True)
    return st.builds(hint, **{name: anything(hints[name]) for name in hint.__struct_fields__})


@pytest.mark.parametrize("kind", POOLED)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_grouping_does_not_matter(kind, data):
    one, two, three = (data.draw(anything(kind)) for _ in range(3))
    whole = pool([one, two, three])
    assert pool([pool([one, two]), three]) == whole
    assert pool([one, pool([two, three])]) == whole
    assert pool([whole]) is whole
