"""Reports of stored runs and traces still have the stored values (see ``oracle.py``)."""

from __future__ import annotations

import pytest

from tests.oracle import oracle
from tests.oracle.oracle import current_facts, differences, expected_facts, expected_file, facts, inputs

INPUTS = inputs()


@pytest.mark.slow
@pytest.mark.parametrize("source", INPUTS, ids=lambda source: source.name.partition(".")[0])
def test_report_has_stored_values(source):
    expected = expected_facts(source)
    assert len(expected) > 500
    lines = differences(expected, current_facts(source))
    assert not lines, "\n".join(
        [f"{len(lines)} values differ. If intended: python tests/oracle/oracle.py freeze", *lines[:40]]
    )


def test_every_input_has_stored_values_and_no_file_is_extra():
    assert len(INPUTS) == 34
    assert sorted(map(expected_file, INPUTS)) == sorted((oracle.HERE / "expected").iterdir())


REPORT = {
    "schema": 1,
    "title": "not compared",
    "verdict": {"share": 0.25, "bound": "input", "says": "a sentence"},
    "rows": [{"name": "a", "ns": 10}, {"name": "b", "ns": None}, {"name": "a", "ns": 30}],
    "flags": [True, 2],
}
STORED = {
    "/schema": 1,
    "/verdict/share": 0.25,
    "/verdict/bound": "input",
    "/rows/a/name": "a",
    "/rows/a/ns": 10,
    "/rows/b/name": "b",
    "/rows/b/ns": None,
    "/rows/a#2/name": "a",
    "/rows/a#2/ns": 30,
    "/flags/0": True,
    "/flags/1": 2,
}


def test_leaves_are_keyed_by_place():
    assert facts(REPORT) == STORED
    assert differences(STORED, facts(REPORT)) == []


@pytest.mark.parametrize(
    ("place", "value", "line"),
    [
        ("/verdict/share", 0.25 * (1 + 1e-8), "different  /verdict/share: 0.25 → 0.2500000025"),
        ("/rows/a/ns", 11, "different  /rows/a/ns: 10 → 11"),
        ("/rows/a/ns", None, "different  /rows/a/ns: 10 → None"),
        ("/rows/b/ns", 0, "different  /rows/b/ns: None → 0"),
        ("/verdict/bound", "device", "different  /verdict/bound: 'input' → 'device'"),
        ("/flags/0", 1, "different  /flags/0: True → 1"),
        ("/rows/c/ns", 5, "new        /rows/c/ns = 5"),
    ],
)
def test_each_difference_is_found(place, value, line):
    assert differences(STORED, STORED | {place: value}) == [line]


def test_missing_value_is_found_and_rounding_is_ignored():
    less = {place: value for place, value in STORED.items() if place != "/rows/b/ns"}
    assert differences(STORED, less) == ["gone       /rows/b/ns = None"]
    assert differences(STORED, STORED | {"/verdict/share": 0.25 * (1 + 1e-10), "/rows/a/ns": 10.0}) == []


def test_renamed_and_dropped_places_do_not_differ(monkeypatch):
    now = {place.replace("/rows", "/lines"): value for place, value in STORED.items() if "flags" not in place}
    assert len(differences(STORED, now)) == 14
    monkeypatch.setattr(oracle, "RENAMED", {"/rows": "/lines"})
    monkeypatch.setattr(oracle, "DROPPED", {"/flags": "for this test"})
    assert differences(STORED, now) == []
    assert differences(STORED, now | {"/lines/a/ns": 9}) == ["different  /lines/a/ns: 10 → 9"]
