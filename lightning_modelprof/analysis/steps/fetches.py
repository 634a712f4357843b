"""Fetches of the training thread: their time in clean steps, and how much isn't work on samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from lightning_modelprof.analysis.source.hot_lines import HotLines
from lightning_modelprof.run.setup import LoaderSetup
from lightning_modelprof.run.stacks import StackFrame

CHEAP_SAMPLE_NS: Final = 50_000
"""A sample below this time is only indexed and collated: reading, decoding or transforming takes longer.

Source: measured with 20,000 rows of 32 numbers in batches of 64 on one CPU: 6.7 µs per sample row by row and
1.9 µs by slices of whole batches; with a worker, the training thread took 16 µs per sample to get its
batches.
"""

HANDOVER_NS: Final = 500_000
"""Time for the training thread to get a batch from a worker, if none was observed.

Source: less than measured on a virtual machine with two CPUs: 1.3 ms of CPU time for a batch of one tensor,
1.8 for two and 4.6 for eight. No other machine was tried.
"""


_NEXT_INDICES: Final = ("torch.utils.data.dataloader", "_next_index")
"""Where torch's DataLoader asks its sampler or batch sampler for the next indices."""

_SHUFFLES: Final = "random"
"""The standard library module that draws one index at a time."""

_MOSTLY: Final = 0.5


def sampler_share(hot: HotLines | None) -> float:
    """Share of the training thread's Dataloader time spent choosing indices."""
    return 0.0 if hot is None else hot.share_in("dataloader", *_NEXT_INDICES)


def is_of_sampler(hot: HotLines | None) -> bool:
    return sampler_share(hot) >= _MOSTLY


class SamplerCode(NamedTuple):
    """The code that chooses indices.

    Attributes:
        function: the user's or a library's function that takes most of the time; ``""`` for torch's samplers.
        shuffles: whether Python's ``random`` takes most of the time.
    """

    function: str
    shuffles: bool


def sampler_code(hot: HotLines | None) -> SamplerCode:
    """Find the code that chooses indices, from samples of the training thread in Dataloader."""
    if hot is None:
        return SamplerCode("", shuffles=False)
    every = hot.found_by(_next_indices_position, ("dataloader",))
    own = hot.found_by(lambda path: _below(path, own=True), ("dataloader",))
    if not every.share or own.share < _MOSTLY * every.share:
        return SamplerCode("", shuffles=False)
    line = own.lines[0] if own.lines else None
    shuffling = hot.found_by(lambda path: _below(path, own=False), ("dataloader",))
    return SamplerCode(
        own.functions[0] if line is None else (line.inner or line).function,
        shuffles=shuffling.share >= _MOSTLY * every.share,
    )


def _next_indices_position(path: Sequence[StackFrame]) -> int | None:
    module, function = _NEXT_INDICES
    for number, one in enumerate(path):
        if one.python_module == module and one.function.rpartition(".")[2] == function:
            return number
    return None


def _below(path: Sequence[StackFrame], *, own: bool) -> int | None:
    """Position of the first user or library frame below that call, or else of Python's ``random``."""
    begin = _next_indices_position(path)
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
    """Whether a batch only takes indexing and collating rows in memory, without work on samples."""
    return (
        loader.num_workers == 0
        and loader.dataset is not None
        and loader.dataset.function.endswith(".__getitem__")
        and loader.batch_size is not None
        and loader.batch_size > 1
        and wait_ns < CHEAP_SAMPLE_NS * loader.batch_size
    )
