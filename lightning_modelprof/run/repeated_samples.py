"""Measured facts about samples that came in several epochs: whether they were the same each time."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_modelprof.run.ranges import Count


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedSamples:
    """A few samples of a map-style data set, as they were in their batches.

    Attributes:
        num_indices: of the data set, that were watched and came again.
        num_compared: samples that were compared with what came before for the same index.
        num_equal: of those, how many had the same bytes.
        sample_bytes: of one sample in its batch.
        num_samples: length of the data set; ``None`` if it has none.
        note: why nothing could be seen, a clause; ``""`` otherwise.
    """

    num_indices: Count = 0
    num_compared: Count = 0
    num_equal: Count = 0
    sample_bytes: Count = 0
    num_samples: Count | None = None
    note: str = ""
