"""Waits of ranks for each other, from the durations of the same communication call on several ranks.

The calls of one collective end at about the same time on all ranks, because none has its result before all
have arrived. So the rank with the shortest call arrived last and didn't wait; the others waited for as long
as their calls took longer. Only durations are compared, so the ranks' clocks needn't agree.

Source: "Synchronizing" and "Data transfer" of torch_tb_profiler (pytorch/kineto, ``tb_plugin``, removed in
2026), without three of its faults: it knew five names of collectives, required the same number of calls on
all ranks, and took the host's requests to NCCL for communication.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import exp, lgamma, log, log1p
from typing import Final

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.trace.communication_calls import Call, CommunicationCalls
from lightning_modelprof.record import Record

_ONE_RANK: Final = "only one rank's communication was recorded"


_LEVEL: Final = 0.05
"""Significance level for a straggler: a rank that arrives last more often than chance explains..."""


_LEAST_COST: Final = 0.05
"""... unless the others waited for it for less than this share of their communication: some rank is always
slightly early or late."""


class Waits(Record, frozen=True, kw_only=True):
    """The compared calls of one rank, or those of one collective among them.

    Attributes:
        transfer_ns: sum of each call's shortest time over the ranks.
        caused_ns: mean wait of the others, summed over the calls to which this rank arrived last.
        last: number of those calls. If several ranks share the shortest time, no rank arrived last.
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
        return self.total_ns - self.transfer_ns


class RankWaits(Record, frozen=True, kw_only=True):
    """One rank.

    Attributes:
        by_collective: waits of one collective by (name, process group), longest first.
    """

    whole: Waits
    by_collective: Mapping[tuple[str, str | None], Waits]


class LateRank(Record, frozen=True, kw_only=True):
    """A rank that arrived last more often than chance explains, in one process group.

    Attributes:
        group: the process group; ``None`` if not recorded.
        last: calls to which it arrived last.
        calls: calls with one rank that arrived last.
        num_ranks: loaded ranks of the group.
        waited_ns: mean wait of the others for it, per step or else over all calls.
        is_per_step: whether ``waited_ns`` is per step.
    """

    rank: int
    group: str | None
    last: int
    calls: int
    num_ranks: int
    waited_ns: float
    is_per_step: bool


class WaitsOfRanks(Record, frozen=True, kw_only=True):
    """Waits of a job's ranks for each other.

    Attributes:
        ranks: waits by rank, for ranks with compared calls.
        stragglers: largest wait first.
        num_steps: steps that all ranks have; ``None`` if the calls were compared without steps.
        left_out: calls that weren't compared; a call of several ranks counts once.
        world_size: ranks of the job; ``None`` if not recorded.
        on_host: whether the calls are ranges on the host.
        other_source: ranks left out because their calls are host ranges, unlike the others'.
    """

    ranks: Mapping[int, RankWaits]
    stragglers: tuple[LateRank, ...]
    num_steps: int | None
    left_out: LeftOut
    world_size: int | None
    on_host: bool
    other_source: tuple[int, ...]


def compare_ranks(by_rank: Mapping[int, CommunicationCalls]) -> WaitsOfRanks:
    """Match the ranks' calls, and split each into the transfer and the wait for others.

    Raises:
        NotMeasured: if fewer than two ranks have communication, or no call could be compared.
    """
    has_kernels = any(fact.source == "device" for fact in by_rank.values())
    ranks = {
        rank: fact
        for rank, fact in sorted(by_rank.items())
        if fact.source == ("device" if has_kernels else "host")
    }
    if len(ranks) < 2:
        raise NotMeasured(_ONE_RANK)
    world_size = _world_size(list(ranks.values()))
    matched = match_calls(ranks, world_size)
    groups = matched.groups
    if not groups:
        reasons = "; ".join(f"{number}: {reason}" for reason, number in matched.left_out.items())
        raise NotMeasured(f"none of the ranks' calls could be compared ({reasons})")
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
    """Ranks of the job: as recorded, else those of its largest process group."""
    noted = [fact.world_size for fact in facts if fact.world_size is not None]
    sizes = [call.kind.group_size for fact in facts for call in fact.calls]
    return max(noted or [size for size in sizes if size is not None], default=None)


def _of_rank(rank: int, groups: Sequence[MatchedGroup]) -> RankWaits | None:
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
    """Sum up one rank's calls; each lot comes with its number of steps."""
    calls = total_ns = transfer_ns = last = 0
    caused_ns = waited_per_step_ns = caused_per_step_ns = 0.0
    for some, num_steps in parts:
        some_total_ns = sum(call.durations_ns[rank] for call in some)
        some_transfer_ns = sum(min(call.durations_ns.values()) for call in some)
        late = [call for call in some if call.last == rank]
        some_caused_ns = sum(map(_mean_wait_of_others, late))
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


def _mean_wait_of_others(call: MatchedCall) -> float:
    durations_ns = call.durations_ns.values()
    shortest_ns = min(durations_ns)
    return sum(ns - shortest_ns for ns in durations_ns) / (len(durations_ns) - 1)


def _stragglers(group: MatchedGroup) -> list[LateRank]:
    """Ranks of a group that arrived last more often than chance explains, and cost the others time.

    A plain binomial test: by chance, each of n ranks is last in one of n calls. The level is divided by the
    number of ranks, since each is tested.
    """
    lasts = Counter(call.last for call in group.calls if call.last is not None)
    calls, num_ranks = lasts.total(), len(group.ranks)
    found = []
    for rank, last in lasts.items():
        caused_ns = sum(_mean_wait_of_others(call) for call in group.calls if call.last == rank)
        others_ns = sum(sum(call.durations_ns.values()) - call.durations_ns[rank] for call in group.calls)
        is_costly = caused_ns * (num_ranks - 1) >= _LEAST_COST * others_ns
        if is_costly and chance_of_at_least(last, calls, 1 / num_ranks) < _LEVEL / num_ranks:
            found.append(
                LateRank(
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


_MOST_OF_WAITS: Final = 2 / 3


def awaited_rank(waits: WaitsOfRanks) -> int | None:
    """The rank that the others wait for in the recorded steps; ``None`` if no rank causes most waits."""
    caused = {rank: one.whole.caused_ns for rank, one in waits.ranks.items()}
    if not any(caused.values()):
        return None
    rank = max(caused, key=lambda one: caused[one])
    whole = waits.ranks[rank].whole
    is_one = caused[rank] >= _MOST_OF_WAITS * sum(caused.values())
    return rank if is_one and 2 * whole.last > whole.calls else None


def chance_of_at_least(hits: int, tries: int, probability: float) -> float:
    """Probability of at least so many hits in independent tries, each with the same probability below 1."""
    logs = (
        lgamma(tries + 1)
        - lgamma(number + 1)
        - lgamma(tries - number + 1)
        + number * log(probability)
        + (tries - number) * log1p(-probability)
        for number in range(hits, tries + 1)
    )
    return min(1.0, sum(map(exp, logs)))


_TOGETHER: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "allreduce", "barrier")
"""Parts of the names of collectives in which every rank needs data from every other one."""


_PAIRWISE: Final = ("send", "recv", "isend", "irecv", "coalesced")
"""Prefixes of calls that may not involve all ranks of a group."""


LeftOut = Mapping[str, int]
"""Number of calls that weren't compared, by reason."""


PAIRWISE: Final = "not every rank takes part"


ONE_SIDED: Final = "a rank may leave before the others arrive"


ALONE: Final = "only one rank of their process group is loaded"


UNCLEAR_GROUP: Final = "multiple process groups share a name"


LACKING: Final = "the ranks have different numbers of them"


DISAGREEING: Final = "their names, sizes or order differ between ranks"


NOT_IN_SHARED_STEPS: Final = "they aren't in a step that all ranks have"


class MatchedCall(Record, frozen=True):
    """One call, and its duration on each loaded rank of its group."""

    name: str
    durations_ns: Mapping[int, int]

    @property
    def last(self) -> int | None:
        """The rank that arrived last, ``None`` if several share the shortest time."""
        shortest_ns = min(self.durations_ns.values())
        found = [rank for rank, ns in self.durations_ns.items() if ns == shortest_ns]
        return found[0] if len(found) == 1 else None


class MatchedGroup(Record, frozen=True, kw_only=True):
    """The compared calls of one process group."""

    label: str | None
    ranks: tuple[int, ...]
    calls: tuple[MatchedCall, ...]
    num_steps: int | None


class MatchedCalls(Record, frozen=True, kw_only=True):
    """Calls of several ranks that can be compared.

    Attributes:
        groups: one per process group with a comparable call.
        steps: steps that all ranks have; ``None`` if a rank has none, and calls were matched without them.
        left_out: calls in no group; a call of several ranks counts once.
    """

    groups: tuple[MatchedGroup, ...]
    steps: tuple[int, ...] | None
    left_out: LeftOut


def match_calls(ranks: Mapping[int, CommunicationCalls], world_size: int | None) -> MatchedCalls:
    """Match calls on all ranks of their process group.

    Within a group, the i-th call that starts in a step on one rank is the i-th on the others, since
    collectives of a group are called in the same order everywhere. If a rank has no steps, it's the i-th of
    the trace. Calls that can't be matched reliably are left out and counted.

    Args:
        ranks: of one job, at least one.
        world_size: ranks of the job; ``None`` if unknown.
    """
    steps = _shared_steps(list(ranks.values()))
    left_out: Counter[str] = Counter()
    groups = [
        _match(label, calls, steps, left_out) for label, calls in _by_group(ranks, world_size, left_out)
    ]
    return MatchedCalls(
        groups=tuple(group for group in groups if group.calls),
        steps=steps,
        left_out={reason: number for reason, number in left_out.items() if number},
    )


def _shared_steps(facts: Sequence[CommunicationCalls]) -> tuple[int, ...] | None:
    known = [set(fact.steps) for fact in facts if fact.steps is not None]
    return tuple(sorted(set.intersection(*known))) if len(known) == len(facts) else None


_Key = tuple[str | None, int | None, tuple[int, ...] | None]


def _by_group(
    ranks: Mapping[int, CommunicationCalls], world_size: int | None, left_out: Counter[str]
) -> list[tuple[str | None, dict[int, list[Call]]]]:
    """Comparable calls of each process group: its label, and the calls of each rank in order."""
    groups: defaultdict[_Key, dict[int, list[Call]]] = defaultdict(dict)
    for rank, fact in ranks.items():
        for call in fact.calls:
            kind = call.kind
            groups[kind.group, kind.group_size, kind.members].setdefault(rank, []).append(call)
    found = []
    for (label, size, members), every in groups.items():
        calls = {
            rank: [call for call in own if not call.kind.name.lower().startswith(_PAIRWISE)]
            for rank, own in every.items()
        }
        left_out[PAIRWISE] += max(len(every[rank]) - len(own) for rank, own in calls.items())
        calls = {rank: own for rank, own in calls.items() if own}
        most = max(map(len, calls.values()), default=0)
        if len(calls) < 2:
            left_out[ALONE] += most
        elif members is None and _may_be_several(size, len(calls), len(ranks), world_size):
            left_out[UNCLEAR_GROUP] += most
        else:
            found.append((label, calls))
    return found


def _may_be_several(size: int | None, num_here: int, num_ranks: int, world_size: int | None) -> bool:
    """Whether calls with one group name may be from several groups, e.g. all tensor-parallel ones.

    Args:
        num_here: ranks with such calls.
        num_ranks: all loaded ranks.
    """
    if size is None or size == world_size:
        return False
    are_all_here = num_ranks == world_size
    return num_here > size or (world_size is not None and not are_all_here)


def _match(
    label: str | None, calls: Mapping[int, list[Call]], steps: tuple[int, ...] | None, left_out: Counter[str]
) -> MatchedGroup:
    """Calls of one group that match on all its ranks.

    With steps, each step is matched entirely or not at all, since the position of a missing call is unknown.
    Without, recording may have ended earlier on some rank, so calls are matched up to the first difference.
    """
    compared: list[MatchedCall] = []
    num_steps = 0
    for step, block in _blocks(calls, steps):
        if steps is not None and step not in steps:
            left_out[NOT_IN_SHARED_STEPS] += max(map(len, block.values()))
            continue
        most, least = max(map(len, block.values())), min(map(len, block.values()))
        agreeing = _num_agreeing(block)
        if steps is not None and agreeing < most:
            left_out[LACKING if least < most else DISAGREEING] += most
            continue
        left_out[DISAGREEING] += least - agreeing
        left_out[LACKING] += most - least
        num_steps += 1
        for same in list(zip(*block.values(), strict=False))[:agreeing]:
            name = same[0].kind.name
            if any(word in name.lower() for word in _TOGETHER):
                durations_ns = {rank: call.duration_ns for rank, call in zip(block, same, strict=True)}
                compared.append(MatchedCall(name, durations_ns))
            else:
                left_out[ONE_SIDED] += 1
    return MatchedGroup(
        label=label,
        ranks=tuple(calls),
        calls=tuple(compared),
        num_steps=None if steps is None else num_steps,
    )


def _blocks(
    calls: Mapping[int, list[Call]], steps: tuple[int, ...] | None
) -> list[tuple[int | None, dict[int, list[Call]]]]:
    """Calls step by step, those outside steps under ``None``; without steps, all calls."""
    if steps is None:
        return [(None, dict(calls))]
    # Steps without a call are compared too: they have no waits.
    blocks: dict[int | None, dict[int, list[Call]]] = {step: {rank: [] for rank in calls} for step in steps}
    for rank, own in calls.items():
        for call in own:
            blocks.setdefault(call.step, {one: [] for one in calls})[rank].append(call)
    return list(blocks.items())


def _num_agreeing(block: Mapping[int, list[Call]]) -> int:
    """Number of leading calls with the same name and size on all ranks."""
    number = 0
    for same in zip(*block.values(), strict=False):
        if len({_what(call) for call in same}) > 1:
            break
        number += 1
    return number


def _what(call: Call) -> tuple[str, int | None]:
    """Properties that must match on all ranks; only all-reduces are sure to have the same size."""
    name = call.kind.name
    return name, call.in_elements if name == "all_reduce" else None
