"""Waits of ranks for each other: the same communication call on several ranks, compared by its durations.

The calls of one collective end at about the same time on all ranks, because none has its result before all
have come. So the rank with the shortest call came last and did not wait; what the others' calls took longer
is their wait. Only durations are compared, so the ranks' clocks need not agree.

Source: "Synchronizing" and "Data transfer" of torch_tb_profiler (pytorch/kineto, ``tb_plugin``, removed in
2026). Three of its faults are mended: it knew five names of collectives, wanted the same number of calls of
all ranks, and took the host's requests to NCCL for communication.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, lgamma, log, log1p
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.matched_calls import LeftOut, MatchedCall, MatchedGroup, match_calls
from lightning_modelprof.analysis.trace.communication_calls import CommunicationCalls

_ONE_RANK: Final = Absent("only one rank's communication is here")
_LEVEL: Final = 0.05
"""Who came last so often that chance does it less often than this is a straggler."""
_LEAST_COST: Final = 0.05
"""But not if the others waited for it in less than this share of their communication: it is always a little
earlier or later for somebody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """The compared calls of one rank, or those of one collective among them.

    Attributes:
        calls: how many.
        total_ns: their time.
        transfer_ns: of that the shortest of each call over the ranks.
        caused_ns: how long the others waited on average in the calls to which this rank came last.
        last: number of these. Where several ranks have the shortest time nobody came last.
        waited_per_step_ns, caused_per_step_ns: means over the compared steps; ``None`` without steps.
    """

    calls: int
    total_ns: int
    transfer_ns: int
    caused_ns: float
    last: int
    waited_per_step_ns: float | None
    caused_per_step_ns: float | None

    @property
    def waited_ns(self) -> int:
        """Time in which this rank waited for others."""
        return self.total_ns - self.transfer_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWaits:
    """One rank.

    Attributes:
        whole: all its compared calls.
        by_collective: (name, process group) → those of one collective, longest wait first.
    """

    whole: Waits
    by_collective: Mapping[tuple[str, str | None], Waits]


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that came last more often than chance explains, in one process group.

    Attributes:
        rank: which.
        group: the process group; ``None`` is not recorded.
        last: calls to which it came last.
        calls: calls to which one rank came last.
        num_ranks: ranks of the group that are here.
        waited_ns: how long the others waited on average for it, in a step or else over all calls.
        is_per_step: whether ``waited_ns`` is in a step.
    """

    rank: int
    group: str | None
    last: int
    calls: int
    num_ranks: int
    waited_ns: float
    is_per_step: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitsOfRanks:
    """What the ranks of a job waited for each other.

    Attributes:
        ranks: rank → its waits, those with compared calls.
        stragglers: most waited for first.
        num_steps: steps that all ranks have; ``None`` when the calls were compared without steps.
        left_out: what was not compared. A call of several ranks is one.
        world_size: ranks of the job; ``None`` if not noted.
        on_host: whether the calls are ranges on the host.
        other_source: ranks that are left out because theirs are ranges on the host, unlike the others'.
    """

    ranks: Mapping[int, RankWaits]
    stragglers: tuple[Straggler, ...]
    num_steps: int | None
    left_out: LeftOut
    world_size: int | None
    on_host: bool
    other_source: tuple[int, ...]


def compare_ranks(by_rank: Mapping[int, CommunicationCalls]) -> WaitsOfRanks | Absent:
    """Match the calls of the ranks, and split each into the transfer and the wait for others.

    Args:
        by_rank: the ranks of one job.

    Returns:
        Absent when fewer than two ranks have communication, or no call could be compared.
    """
    has_kernels = any(fact.source == "device" for fact in by_rank.values())
    ranks = {
        rank: fact
        for rank, fact in sorted(by_rank.items())
        if fact.source == ("device" if has_kernels else "host")
    }
    if len(ranks) < 2:
        return _ONE_RANK
    world_size = _world_size(list(ranks.values()))
    matched = match_calls(ranks, world_size)
    groups = matched.groups
    if not groups:
        reasons = "; ".join(f"{number}: {reason}" for reason, number in matched.left_out.items())
        return Absent(f"none of the ranks' calls could be compared ({reasons})")
    stragglers = [one for group in groups for one in _stragglers(group)]
    return WaitsOfRanks(
        ranks={rank: waits for rank in ranks if (waits := _of_rank(rank, groups)) is not None},
        stragglers=tuple(sorted(stragglers, key=lambda one: -one.waited_ns)),
        num_steps=None if matched.steps is None else len(matched.steps),
        left_out=matched.left_out,
        world_size=world_size,
        on_host=not has_kernels,
        other_source=tuple(sorted(set(by_rank) - set(ranks))),
    )


def _world_size(facts: Sequence[CommunicationCalls]) -> int | None:
    """Ranks of the job: as noted, else those of its largest process group."""
    noted = [fact.world_size for fact in facts if fact.world_size is not None]
    sizes = [call.kind.group_size for fact in facts for call in fact.calls]
    return max(noted or [size for size in sizes if size is not None], default=None)


def _of_rank(rank: int, groups: Sequence[MatchedGroup]) -> RankWaits | None:
    """The waits of one rank, ``None`` without a compared call."""
    own = [group for group in groups if rank in group.ranks]
    whole = _waits(rank, [(group.calls, group.num_steps) for group in own])
    if not whole.calls:
        return None
    parts: defaultdict[tuple[str, str | None], list[tuple[Sequence[MatchedCall], int | None]]]
    parts = defaultdict(list)
    for group in own:
        for name in dict.fromkeys(call.name for call in group.calls):
            same = [call for call in group.calls if call.name == name]
            parts[name, group.label].append((same, group.num_steps))
    by_collective = {key: _waits(rank, some) for key, some in parts.items()}
    longest_first = sorted(by_collective.items(), key=lambda item: (-item[1].waited_ns, item[0][0]))
    return RankWaits(whole=whole, by_collective=dict(longest_first))


def _waits(rank: int, parts: Sequence[tuple[Sequence[MatchedCall], int | None]]) -> Waits:
    """Sums of one rank over calls, each lot with the number of steps that it is of."""
    calls = total_ns = transfer_ns = last = 0
    caused_ns = waited_per_step_ns = caused_per_step_ns = 0.0
    for some, num_steps in parts:
        some_total_ns = sum(call.durations_ns[rank] for call in some)
        some_transfer_ns = sum(min(call.durations_ns.values()) for call in some)
        late = [call for call in some if call.last == rank]
        some_caused_ns = sum(map(_wait_of_others, late))
        calls += len(some)
        total_ns += some_total_ns
        transfer_ns += some_transfer_ns
        last += len(late)
        caused_ns += some_caused_ns
        waited_per_step_ns += (some_total_ns - some_transfer_ns) / (num_steps or 1)
        caused_per_step_ns += some_caused_ns / (num_steps or 1)
    has_steps = all(num_steps is not None for _, num_steps in parts)
    return Waits(
        calls=calls,
        total_ns=total_ns,
        transfer_ns=transfer_ns,
        caused_ns=caused_ns,
        last=last,
        waited_per_step_ns=waited_per_step_ns if has_steps else None,
        caused_per_step_ns=caused_per_step_ns if has_steps else None,
    )


def _wait_of_others(call: MatchedCall) -> float:
    """Mean wait of the ranks that did not come last."""
    durations_ns = call.durations_ns.values()
    shortest_ns = min(durations_ns)
    return sum(ns - shortest_ns for ns in durations_ns) / (len(durations_ns) - 1)


def _stragglers(group: MatchedGroup) -> list[Straggler]:
    """The ranks of a group that came last more often than chance explains, and that cost the others time.

    A plain binomial test: by chance each rank is last in one of as many calls as there are ranks. The level
    is divided by the number of ranks, since each is tested.
    """
    lasts = Counter(call.last for call in group.calls if call.last is not None)
    calls, num_ranks = lasts.total(), len(group.ranks)
    found = []
    for rank, last in lasts.items():
        caused_ns = sum(_wait_of_others(call) for call in group.calls if call.last == rank)
        others_ns = sum(sum(call.durations_ns.values()) - call.durations_ns[rank] for call in group.calls)
        is_costly = caused_ns * (num_ranks - 1) >= _LEAST_COST * others_ns
        if is_costly and chance_of_at_least(last, calls, 1 / num_ranks) < _LEVEL / num_ranks:
            found.append(
                Straggler(
                    rank=rank,
                    group=group.label,
                    last=last,
                    calls=calls,
                    num_ranks=num_ranks,
                    waited_ns=caused_ns / (group.num_steps or 1),
                    is_per_step=group.num_steps is not None,
                )
            )
    return found


def chance_of_at_least(hits: int, tries: int, probability: float) -> float:
    """Chance of so many hits or more in independent tries, each with the same probability below 1."""
    logs = (
        lgamma(tries + 1)
        - lgamma(number + 1)
        - lgamma(tries - number + 1)
        + number * log(probability)
        + (tries - number) * log1p(-probability)
        for number in range(hits, tries + 1)
    )
    return min(1.0, sum(map(exp, logs)))
