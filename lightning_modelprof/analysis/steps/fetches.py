"""Fetches of the training thread: what they take in clean steps, and where that isn't work on samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from lightning_modelprof.analysis.source.hot_lines import HotLines
from lightning_modelprof.run.setup import LoaderSetup
from lightning_modelprof.run.stacks import StackFrame

CHEAP_SAMPLE_NS: Final = 50_000
"""A sample that takes less is only indexed and joined: reading, decoding or changing one takes more.

Source: measured with 20,000 rows of 32 numbers in batches of 64 on one CPU: 6.7 us a sample row by row and
1.9 us by slices of whole batches; with a worker the training thread took 16 us a sample to get its batches.
"""

HANDOVER_NS: Final = 500_000
"""What the training thread takes to get a batch from a worker, where none was seen yet.

Source: less than was measured on a virtual machine with two CPUs, 1.3 ms of CPU time for a batch of one
tensor, 1.8 for two and 4.6 for eight. No other machine was tried.
"""


_NEXT_INDICES: Final = ("torch.utils.data.dataloader", "_next_index")
"""Where torch's DataLoader asks its sampler, or its batch sampler, for the next indices."""

_SHUFFLES: Final = "random"
"""Python's own module, which draws an index at a time."""

_MOSTLY: Final = 0.5


def sampler_share(hot: HotLines | None) -> float:
    """Share of the training thread's time in Dataloader that goes to choosing indices."""
    return 0.0 if hot is None else hot.share_in("dataloader", *_NEXT_INDICES)


def is_of_sampler(hot: HotLines | None) -> bool:
    return sampler_share(hot) >= _MOSTLY


class SamplerCode(NamedTuple):
    """What takes the time of choosing indices.

    Attributes:
        function: of the user's or of a library that takes most of it; ``""`` where torch's own samplers do.
        shuffles: whether most of it goes to Python's ``random``.
    """

    function: str
    shuffles: bool


def sampler_code(hot: HotLines | None) -> SamplerCode:
    """Whose code chooses the indices, from samples of the training thread in Dataloader."""
    if hot is None:
        return SamplerCode("", shuffles=False)
    every = hot.found_by(_next_indices, ("dataloader",))
    own = hot.found_by(lambda path: _below(path, own=True), ("dataloader",))
    if not every.share or own.share < _MOSTLY * every.share:
        return SamplerCode("", shuffles=False)
    line = own.lines[0] if own.lines else None
    shuffling = hot.found_by(lambda path: _below(path, own=False), ("dataloader",))
    return SamplerCode(
        own.functions[0] if line is None else (line.inner or line).function,
        shuffles=shuffling.share >= _MOSTLY * every.share,
    )


def _next_indices(path: Sequence[StackFrame]) -> int | None:
    """Where on a stack the DataLoader asks for indices."""
    module, function = _NEXT_INDICES
    for number, one in enumerate(path):
        if one.python_module == module and one.function.rpartition(".")[2] == function:
            return number
    return None


def _below(path: Sequence[StackFrame], *, own: bool) -> int | None:
    """Where below that the first frame is of the user's or of a library, or else of Python's ``random``."""
    begin = _next_indices(path)
    if begin is None:
        return None
    return next(
        (
            number
            for number, one in enumerate(path[begin:], begin)
            if (one.is_users or one.package if own else one.python_module == _SHUFFLES)
        ),
        None,
    )


def is_row_by_row(loader: LoaderSetup, wait_ns: float) -> bool:
    """Whether what a batch takes is indexing and joining rows that are in memory, and no work on samples."""
    return (
        loader.num_workers == 0
        and loader.dataset is not None
        and loader.dataset.function.endswith(".__getitem__")
        and loader.batch_size is not None
        and loader.batch_size > 1
        and wait_ns < CHEAP_SAMPLE_NS * loader.batch_size
    )
