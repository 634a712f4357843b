"""What to change about a DataLoader that is waited for, and where its batches are made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.hot_lines import HotLines
from lightning_modelprof.report.model import Evidence
from lightning_modelprof.report.rules.base import count, duration, milliseconds, ratio, text
from lightning_modelprof.run.training_setup import CodePlace, LoaderSetup

FEWER_ITEMS: Final = "Make the batch of fewer, larger tensors: Lightning walks through lists item by item."
"""For a slow transfer in which nothing of the user's runs and no memory is to be pinned."""

_NEXT_INDICES: Final = ("torch.utils.data.dataloader", "_next_index")
"""Where torch's DataLoader asks its sampler, or its batch sampler, for the next indices."""
_MOSTLY: Final = 0.5

CHEAP_SAMPLE_NS: Final = 50_000
"""A sample that takes less is only indexed and joined: reading, decoding or changing one takes more.

Source: measured with 20,000 rows of 32 numbers in batches of 64 on one CPU: 6.7 us a sample row by row and
1.9 us by slices of whole batches; with a worker the training thread took 16 us a sample to get its batches.
"""


def places_of_batches(loaders: Sequence[LoaderSetup]) -> list[CodePlace]:
    """Where batches are made: in the user's own code, else in the library's."""
    if not loaders:
        return []
    loader = loaders[0]
    places = [place for place in (loader.dataset, loader.collate) if place is not None]
    return [place for place in places if not place.is_library] or places


def is_row_by_row(loader: LoaderSetup, wait_ns: float) -> bool:
    """Whether what a batch takes is indexing and joining rows that are in memory, and no work on samples."""
    return (
        loader.num_workers == 0
        and loader.dataset is not None
        and loader.dataset.name.endswith(".__getitem__")
        and loader.batch_size is not None
        and loader.batch_size > 1
        and wait_ns < CHEAP_SAMPLE_NS * loader.batch_size
    )


def loader_advice(
    loaders: Sequence[LoaderSetup], cpus: int | None, wait_ns: float, wall_ns: float
) -> tuple[str, list[Evidence]]:
    """What to change about a loader that is waited for; arguments as of :func:`workers_advice`."""
    if not loaders or not is_row_by_row(loaders[0], wait_ns):
        return workers_advice(loaders, cpus, wait_ns, wall_ns)
    loader = loaders[0]
    size = loader.batch_size or 1
    sample_ns = wait_ns / size
    return (
        f"A sample takes {sample_ns / 1e3:.3g} us: that is indexing and joining rows. Fetch whole batches:"
        f" {loader.kind}(dataset, batch_size=None, sampler=BatchSampler(RandomSampler(dataset), {size},"
        " drop_last=False)), where dataset[indices] slices its tensors, or a __getitems__ that does. A worker"
        " would take longer to hand a batch over.",
        [count("batch_size", size), duration("one sample", sample_ns)],
    )


def sampler_advice(hot: HotLines | Absent) -> tuple[str, list[Evidence]] | None:
    """What to change where the training thread is mostly choosing indices; ``None`` where it is not."""
    share = 0.0 if isinstance(hot, Absent) else hot.share_in("dataloader", *_NEXT_INDICES)
    if share < _MOSTLY:
        return None
    return (
        "Make the sampler cheaper: it chooses the indices in the training process, whatever num_workers is."
        " Compute the order of a whole epoch at once, with operations on arrays, or ahead of the training.",
        [ratio("of it in the sampler", share)],
    )


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
