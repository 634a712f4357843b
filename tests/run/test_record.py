"""Records act as dataclasses on demand, and otherwise cost no more than a class."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict, fields, is_dataclass, replace

import pytest

from lightning_modelprof.place import Place
from lightning_modelprof.report.model import Evidence, Finding, Status, Table, Unit
from lightning_modelprof.run.records import RunInfo

INNER = Place(file="train.py", line=3)
OUTER = Finding(
    kind="one",
    status=Status.FOUND,
    title="One",
    summary="It is.",
    locations=(INNER, Place(inner=INNER)),
    evidence=(Evidence(label="of it", value=2, unit=Unit.COUNT),),
)


def test_record_acts_as_dataclass():
    assert is_dataclass(OUTER)
    assert [field.name for field in fields(OUTER)] == list(OUTER.__struct_fields__)
    assert {field.name: field.type for field in fields(Place)}["inner"] == "Place | None"
    changed = replace(OUTER, title="Two")
    assert changed == Finding(**{name: getattr(changed, name) for name in OUTER.__struct_fields__})
    assert (changed.title, OUTER.title) == ("Two", "One")
    assert asdict(OUTER)["locations"][1]["inner"] == asdict(INNER)
    with pytest.raises(TypeError, match="no_such"):
        replace(OUTER, no_such=1)


def test_record_is_immutable_and_copyable():
    with pytest.raises(AttributeError, match="immutable"):
        OUTER.title = "Two"
    assert copy.deepcopy(OUTER) == OUTER == pickle.loads(pickle.dumps(OUTER))
    assert len({OUTER, copy.deepcopy(OUTER)}) == 1


def test_record_validates_itself():
    with pytest.raises(ValueError, match="absent_reason"):
        Table(id="none", title="None", columns=(), rows=())
    with pytest.raises(TypeError, match="required"):
        RunInfo()
