"""Lazy facts: computed on demand, at most once, or not measured for a reason."""

from __future__ import annotations

import pickle

import pytest

from lightning_modelprof.analysis.lazy import LazyFacts, NotMeasured, fact
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from tests.support.traces import load


class Numbers(LazyFacts):
    """Facts that record which of them were computed."""

    def __init__(self, number=8):
        self.number = number
        self.computed = []

    @fact
    def half(self) -> float:
        """Half of it."""
        self.computed.append("half")
        return self.number / 2

    @fact
    def quarter(self) -> float:
        self.computed.append("quarter")
        return self.half / 2

    @fact
    def root(self) -> float:
        self.computed.append("root")
        raise NotMeasured("nobody took it")

    @fact
    def sum(self) -> float:
        self.computed.append("sum")
        return self.half + self.root

    @fact
    def broken(self) -> float:
        self.computed.append("broken")
        raise RuntimeError("oops")


class More(Numbers):
    @fact
    def root(self) -> float:
        return 3.0

    @fact
    def own(self) -> str:
        return "own"


def test_fact_is_computed_on_demand_and_once():
    numbers = Numbers()
    assert numbers.computed == []
    assert numbers.quarter == 2
    assert numbers.half == 4
    assert numbers.quarter == 2
    assert numbers.computed == ["quarter", "half"]


def test_fact_of_zero_is_computed_once():
    numbers = Numbers(0)
    assert numbers.half == numbers.half == 0
    assert numbers.computed == ["half"]


def test_reason_for_not_measured_is_remembered():
    numbers, raised = Numbers(), []
    for _ in range(3):
        with pytest.raises(NotMeasured, match=r"^nobody took it$") as why:
            _ = numbers.root
        raised.append(why.value)
    assert numbers.computed == ["root"]
    assert {one.reason for one in raised} == {"nobody took it"}
    assert len(set(map(id, raised))) == 3, "one that was raised thrice would have three tracebacks"


def test_reason_passes_to_dependent_facts():
    numbers = Numbers()
    assert numbers.why_not(Numbers.sum) == "nobody took it"
    assert numbers.why_not(Numbers.root) == "nobody took it"
    assert numbers.computed == ["sum", "half", "root"]


def test_get_returns_none_if_not_measured():
    numbers = Numbers()
    assert numbers.get(Numbers.half) == 4
    assert numbers.get(Numbers.root) is None
    assert numbers.get(Numbers.sum) is None
    assert numbers.why_not(Numbers.half) == ""


def test_bug_is_not_a_reason():
    """It isn't cached, and neither ``get`` nor ``why_not`` catches it."""
    numbers = Numbers()
    for ask in (lambda: numbers.broken, lambda: numbers.get(Numbers.broken)):
        with pytest.raises(RuntimeError, match="oops"):
            ask()
    with pytest.raises(RuntimeError, match="oops"):
        numbers.why_not(Numbers.broken)
    assert numbers.computed == ["broken"] * 3


def test_subclass_overrides_fact():
    more = More()
    assert more.get(Numbers.root) == 3.0
    assert more.why_not(Numbers.root) == ""
    assert more.sum == 7.0
    assert sorted(More.names()) == sorted([*Numbers.names(), "own", "root"])
    assert set(Numbers.names()) == {"half", "quarter", "root", "sum", "broken"}


def test_copy_replaces_facts():
    numbers = Numbers()
    other = numbers.replaced(half=100.0)
    assert (other.half, other.quarter) == (100.0, 50.0)
    assert (numbers.half, numbers.quarter) == (4.0, 2.0)
    assert other.replaced(root=1.0).sum == 101.0
    lacking = numbers.replaced(half=NotMeasured("it's gone"))
    assert lacking.why_not(Numbers.half) == "it's gone"
    assert lacking.get(Numbers.half) is None


def test_copy_replaces_attributes():
    numbers = Numbers()
    assert numbers.replaced(number=20).half == 10
    assert numbers.half == 4


def test_fact_of_class_has_name_and_docstring():
    assert (Numbers.half.name, Numbers.half.__doc__) == ("half", "Half of it.")


def test_pickle_of_trace_facts_omits_trace():
    facts = TraceFacts(load("sampled_2rank_rank0"))
    assert facts.timeline is not None
    twin = pickle.loads(pickle.dumps(facts))
    with pytest.raises(AssertionError, match="all facts were computed"):
        _ = twin.timeline
    reasons = {name: twin.why_not(getattr(TraceFacts, name)) for name in TraceFacts.names()}
    assert reasons == {name: facts.why_not(getattr(TraceFacts, name)) for name in TraceFacts.names()}
    assert "" in reasons.values()
    assert any(reasons.values()), "one that isn't in this trace keeps its reason"
    assert (twin.rank, twin.num_events, twin.step_numbers) == (
        facts.rank,
        facts.num_events,
        facts.step_numbers,
    )
    assert twin.operators.device_ns == facts.operators.device_ns > 0


@fact
def longest_name(facts: TraceFacts) -> int:
    """A fact outside a class, like one in the file of its table."""
    return max(map(len, facts.timeline.trace.names))


def test_fact_outside_class_works_the_same(monkeypatch):
    monkeypatch.setattr("lightning_modelprof.analysis.trace.trace_facts.OUTSIDE", [longest_name])
    monkeypatch.setattr("lightning_modelprof.analysis.lazy.OUTSIDE", [longest_name])
    facts = TraceFacts(load("a100_alexnet"))
    expected = max(map(len, facts.timeline.trace.names))
    assert facts.get(longest_name) == expected
    assert pickle.loads(pickle.dumps(facts)).get(longest_name) == expected
    assert facts.replaced(longest_name=NotMeasured("no")).why_not(longest_name) == "no"


def test_facts_outside_class_may_share_name():
    def named(value):
        def kernels(_: TraceFacts) -> int:
            return value

        kernels.__qualname__ = f"of_{value}.kernels"
        return fact(kernels)

    first, second = named(1), named(2)
    facts = TraceFacts(load("a100_alexnet"))
    assert (facts.get(first), facts.get(second)) == (1, 2)
    assert [facts.replaced({second: 3}).read(one) for one in (first, second)] == [1, 3]
    assert facts.replaced({second: NotMeasured("no")}).why_not(second) == "no"
    assert facts.kernels.by_name
