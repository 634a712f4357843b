"""Samples of DataLoader workers: their hot lines and call tree."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured, fact
from lightning_modelprof.analysis.source.call_tree import CallTree, call_tree
from lightning_modelprof.analysis.source.hot_lines import HotLines, hot_lines
from lightning_modelprof.record import Record
from lightning_modelprof.run.workers import LoaderWorkers


class WorkerStacks(Record, frozen=True, kw_only=True):
    """Samples of one loader's workers."""

    loader: int
    hot_lines: HotLines
    call_tree: CallTree


def busiest(loaders: Sequence[LoaderWorkers]) -> LoaderWorkers | None:
    """Loader with the busiest workers; the loop waits for that one first."""
    return max(loaders, key=_each_ns, default=None)


def _each_ns(loader: LoaderWorkers) -> float:
    return sum(one.fetch_ns + one.collate_ns for one in loader.workers) / max(loader.num_workers, 1)


@fact
def worker_stacks(facts: Facts) -> WorkerStacks:
    """Samples of the busiest loader's workers."""
    loader = busiest(facts.record.workers or ())
    if loader is None or loader.stacks is None:
        raise NotMeasured("the workers weren't sampled")
    try:
        lines, tree = hot_lines(loader.stacks), call_tree(loader.stacks)
    except NotMeasured:
        raise NotMeasured("the workers ended before the first sample") from None
    return WorkerStacks(loader=loader.loader, hot_lines=lines, call_tree=tree)
