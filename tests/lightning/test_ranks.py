"""Tests code shared by all multi-rank tables: ranks without the fact, and the row order."""

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
    """Split ranks by their fact, or by the reason why it is missing."""
    return split_ranks(ranks_with("kernels", by_rank), TraceFacts.kernels)


def test_all_ranks_with_fact_are_found():
    ranks = split({3: ("c",), 0: ("a",)})
    assert list(ranks.found.items()) == [(0, ("a",)), (3, ("c",))]
    assert (ranks.notes, ranks.are_several) == ((), True)
    assert ranks.prefix(3) == "rank 3 "


def test_single_rank_is_not_named():
    ranks = split({5: ("a",)})
    assert (ranks.prefix(5), ranks.are_several) == ("", False)


def test_notes_group_ranks_without_fact_by_reason():
    ranks = split({4: NONE, 2: LOST, 1: NONE, 0: ("a",)})
    assert list(ranks.found) == [0]
    assert ranks.notes == ("Without ranks 1, 4: there is none.", "Without rank 2: its file is lost.")
    assert ranks.prefix(0) == "rank 0 "  # there are several ranks, though only one has the fact


def test_each_reason_appears_once_without_any_fact():
    assert why_not(split, {1: LOST, 0: NONE, 2: NONE}) == "there is none; its file is lost"
    assert why_not(split, {}) == "no trace"


@pytest.mark.parametrize("entry", TRACE_TABLES, ids=lambda entry: entry.build.__name__)
def test_every_table_shows_reason(entry):
    table = table_of(entry.kind, {0: NONE, 1: NONE})
    assert (table.rows, table.absent_reason, table.notes) == ((), NONE, ())


@pytest.mark.parametrize(
    ("part", "whole", "expected"), [(1, 4, 0.25), (0, 4, 0.0), (3, 0, None), (None, 4, None), (3, None, None)]
)
def test_share_of_whole(part, whole, expected):
    assert share(part, whole) == expected


# Host and device totals have opposite orders; their calls are equal.
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
    "gpu_min": ["long", "short", "without device"],  # rows without a minimum come last
    "calls": ["without device", "short", "long"],
}


def in_order(sorted_by, has_device=True):
    def key(name):
        calls, host, device = ROWS[name]
        return row_order(sorted_by, calls=calls, host=host, device=device, has_device=has_device)

    return sorted(ROWS, key=key)


@pytest.mark.parametrize("sorted_by", SORT_KEYS)
def test_row_order(sorted_by):
    # Without self times and memory, self times count as totals, and memory keeps the default order.
    figure = "gpu_total" if sorted_by.endswith("memory") else sorted_by.replace("self", "total")
    assert in_order(sorted_by) == ORDERS[figure]


def test_default_row_order():
    assert in_order(TableOptions().sorted_by) == ORDERS["gpu_total"]
    assert in_order(None, has_device=False) == ORDERS["cpu_total"]


@pytest.mark.parametrize("figure", ["total", "avg", "max", "min"])
def test_cpu_key_sorts_by_device_times_without_host_times(figure):
    device = Tally(2, 30, 20, 10)
    keys = {
        row_order(key, calls=2, host=None, device=device, has_device=True)
        for key in SORT_KEYS
        if key.endswith(figure)
    }
    assert len(keys) == 1
    assert not keys & {(True, 0)}
