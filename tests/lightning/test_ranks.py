"""What all tables of several ranks share: the ranks without the fact, and the order of the rows."""

from __future__ import annotations

import pytest

from lightning_modelprof.analysis.timeline.tally import Tally, share
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.options import SORT_KEYS, TableOptions
from lightning_modelprof.report.tables.rows import row_order, split_ranks
from lightning_modelprof.report.tables.run.all_tables import TRACE_TABLES
from tests.support.facts import ranks_with, table_of, why_not

NONE, LOST = "there is none", "its file is lost"


def split(by_rank):
    """By a fact of each rank, or a text why there's none."""
    return split_ranks(ranks_with("kernels", by_rank), TraceFacts.kernels)


def test_all_ranks_have_the_fact():
    ranks = split({3: ("c",), 0: ("a",)})
    assert list(ranks.found.items()) == [(0, ("a",)), (3, ("c",))]
    assert (ranks.notes, ranks.are_several) == ((), True)
    assert ranks.prefix(3) == "rank 3 "


def test_one_rank_is_not_named():
    ranks = split({5: ("a",)})
    assert (ranks.prefix(5), ranks.are_several) == ("", False)


def test_ranks_without_the_fact_stand_in_the_notes_by_reason():
    ranks = split({4: NONE, 2: LOST, 1: NONE, 0: ("a",)})
    assert list(ranks.found) == [0]
    assert ranks.notes == ("Without ranks 1, 4: there is none.", "Without rank 2: its file is lost.")
    assert ranks.prefix(0) == "rank 0 "  # there are several, though only one has the fact


def test_without_any_fact_every_reason_stands_once():
    assert why_not(split, {1: LOST, 0: NONE, 2: NONE}) == "there is none; its file is lost"
    assert why_not(split, {}) == "no trace"


@pytest.mark.parametrize("entry", TRACE_TABLES, ids=lambda entry: entry.build.__name__)
def test_every_table_gives_the_reason(entry):
    table = table_of(entry.kind, {0: NONE, 1: NONE})
    assert (table.rows, table.absent_reason, table.notes) == ((), NONE, ())


@pytest.mark.parametrize(
    ("part", "whole", "expected"), [(1, 4, 0.25), (0, 4, 0.0), (3, 0, None), (None, 4, None), (3, None, None)]
)
def test_share(part, whole, expected):
    assert share(part, whole) == expected


# Host and device have the opposite order in total, and the same in calls.
ROWS = {
    "long": (2, Tally(2, 60, 50, 10), Tally(2, 7, 6, 1)),
    "short": (3, Tally(3, 30, 12, 9), Tally(3, 90, 80, 2)),
    "without device": (9, Tally(9, 45, 5, 5), None),
}
ORDERS = {
    "cpu_total": ["long", "without device", "short"],
    "cpu_avg": ["long", "short", "without device"],  # 30, 10, 5
    "cpu_max": ["long", "short", "without device"],
    "cpu_min": ["without device", "short", "long"],  # smallest first
    "gpu_total": ["short", "long", "without device"],
    "gpu_avg": ["short", "long", "without device"],
    "gpu_max": ["short", "long", "without device"],
    "gpu_min": ["long", "short", "without device"],  # what has no minimum is last
    "calls": ["without device", "short", "long"],
}


def in_order(sorted_by, has_device=True):
    def key(name):
        calls, host, device = ROWS[name]
        return row_order(sorted_by, calls=calls, host=host, device=device, has_device=has_device)

    return sorted(ROWS, key=key)


@pytest.mark.parametrize("sorted_by", SORT_KEYS)
def test_row_order(sorted_by):
    # Neither own times nor memory are given: own times count as totals, and memory leaves the usual order.
    figure = "gpu_total" if sorted_by.endswith("memory") else sorted_by.replace("self", "total")
    assert in_order(sorted_by) == ORDERS[figure]


def test_default_row_order():
    assert in_order(TableOptions().sorted_by) == ORDERS["gpu_total"]
    assert in_order(None, has_device=False) == ORDERS["cpu_total"]


@pytest.mark.parametrize("figure", ["total", "avg", "max", "min"])
def test_without_host_times_a_cpu_key_counts_as_the_devices(figure):
    device = Tally(2, 30, 20, 10)
    keys = {
        row_order(key, calls=2, host=None, device=device, has_device=True)
        for key in SORT_KEYS
        if key.endswith(figure)
    }
    assert len(keys) == 1
    assert not keys & {(True, 0)}
