"""What to change about a DataLoader that is waited for, and where its batches are made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from lightning_modelprof.report.model import Evidence
from lightning_modelprof.report.rules.base import count, duration, milliseconds, text
from lightning_modelprof.run.training_setup import CodePlace, LoaderSetup

FEWER_ITEMS: Final = "Make the batch of fewer, larger tensors: Lightning walks through lists item by item."
"""For a slow transfer in which nothing of the user's runs and no memory is to be pinned."""


def places_of_batches(loaders: Sequence[LoaderSetup]) -> list[CodePlace]:
    """Where batches are made: in the user's own code, else in the library's."""
    if not loaders:
        return []
    loader = loaders[0]
    places = [place for place in (loader.dataset, loader.collate) if place is not None]
    return [place for place in places if not place.is_library] or places


def workers_advice(
    loaders: Sequence[LoaderSetup], cpus: int | None, wait_ns: float, wall_ns: float
) -> tuple[str, list[Evidence]]:
    """What to change about a loader that is waited for, and the numbers behind it.

    Args:
        loaders: of the loop; the first one is spoken of.
        cpus: that this process may use; ``None`` if unknown.
        wait_ns: for one batch.
        wall_ns: from one batch to the next, with the wait.
    """
    loader = loaders[0] if loaders else None
    if loader is None or loader.num_workers is None:
        kind = "the loader" if loader is None else loader.kind
        return f"Make batches faster, or beside the training: {kind} is not torch's DataLoader.", []
    workers = loader.num_workers
    rest_ns = max(wall_ns - wait_ns, 1.0)
    batch_ns = wait_ns if workers == 0 else workers * wall_ns
    needed = max(workers + 1, math.ceil(batch_ns / rest_ns))
    evidence = [
        count("num_workers", workers),
        count("workers needed", needed),
        duration("one worker's time for a batch at most", batch_ns),
        duration("rest of the step", rest_ns),
    ]
    if cpus is not None:
        evidence.append(count("usable CPUs", cpus))
    if loader.start_method is not None:
        evidence.append(text("start method", loader.start_method))
    free = needed if cpus is None else max(cpus - 1, 1)
    # One CPU stays for the training process; whoever waits for a disk or a network needs none.
    advised = min(needed, max(free, workers))
    left_ns = max(0.0, batch_ns / max(advised, 1) - rest_ns)
    parts = []
    if advised > workers:
        evidence.append(duration("wait with these workers, if a CPU is free for each", left_ns))
        parts.append(
            f"{_call(loader, advised)}: num_workers is {workers} now."
            " Measure it, as workers need CPUs that are free."
        )
    if needed > free:
        parts.append(
            f"It would take {needed} workers to hide {milliseconds(batch_ns)} a batch behind"
            f" {milliseconds(rest_ns)} of work, and this process may use {cpus} CPUs: more workers than that"
            " only help if they wait for a disk or a network. Make a batch cheaper: decode and transform"
            " ahead of the training, or do less per sample."
        )
    return " ".join(parts), evidence


def _call(loader: LoaderSetup, workers: int) -> str:
    """The constructor as it should be called."""
    arguments = [f"num_workers={workers}"]
    if not loader.persistent_workers:
        arguments.append("persistent_workers=True")
    return f"{loader.kind}({', '.join(arguments)})"
