"""Matched calls: which communication calls of several ranks are the same one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_modelprof.analysis.trace.communication_calls import Call, CommunicationCalls

_TOGETHER: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "allreduce", "barrier")
"""Parts of the names of collectives in which every rank needs something of every other one."""
_PAIRWISE: Final = ("send", "recv", "isend", "irecv", "coalesced")
"""Begins of the names of calls that not all ranks of a group need to take part in."""

LeftOut = Mapping[str, int]
"""Reason → number of calls that are not compared."""

PAIRWISE: Final = "not every rank takes part in them"
ONE_SIDED: Final = "a rank may leave them before the others come"
ALONE: Final = "only one rank of their process group is here"
UNCLEAR_GROUP: Final = "several process groups have their name"
LACKING: Final = "the ranks do not have the same number of them"
DISAGREEING: Final = "their names, sizes or order are not the same on all ranks"
NOT_IN_SHARED_STEPS: Final = "they are in no step that all ranks have"


@dataclass(frozen=True, slots=True)
class MatchedCall:
    """One call, and how long it took on each rank of its group that is here."""

    name: str
    durations_ns: Mapping[int, int]

    @property
    def last(self) -> int | None:
        """The rank that came last, ``None`` if the shortest time is that of several."""
        shortest_ns = min(self.durations_ns.values())
        found = [rank for rank, ns in self.durations_ns.items() if ns == shortest_ns]
        return found[0] if len(found) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedGroup:
    """The compared calls of one process group."""

    label: str | None
    ranks: tuple[int, ...]
    calls: tuple[MatchedCall, ...]
    num_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedCalls:
    """The calls of several ranks that can be compared.

    Attributes:
        groups: one for each process group with a call that can be compared.
        steps: the steps that all ranks have; ``None`` when a rank has none, and calls were matched without.
        left_out: what is in no group. A call of several ranks counts once.
    """

    groups: tuple[MatchedGroup, ...]
    steps: tuple[int, ...] | None
    left_out: LeftOut


def match_calls(ranks: Mapping[int, CommunicationCalls], world_size: int | None) -> MatchedCalls:
    """Find the calls that are the same one on all ranks of their process group.

    Inside one group the i-th call that begins in a step on one rank is the i-th on the others, since
    collectives of a group are called in the same order everywhere. Without steps on every rank it is the
    i-th of the trace. What cannot be matched for sure is left out and counted.

    Args:
        ranks: the ranks of one job, at least one.
        world_size: how many the job has; ``None`` is not known.
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
    """The steps that all have, ``None`` if one has no steps at all."""
    known = [set(fact.steps) for fact in facts if fact.steps is not None]
    return tuple(sorted(set.intersection(*known))) if len(known) == len(facts) else None


_Key = tuple[str | None, int | None, tuple[int, ...] | None]


def _by_group(
    ranks: Mapping[int, CommunicationCalls], world_size: int | None, left_out: Counter[str]
) -> list[tuple[str | None, dict[int, list[Call]]]]:
    """The calls of each process group that can be compared: its label, and rank → calls in order."""
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
    """Whether calls of one name of a group may be of several groups, such as all tensor-parallel ones.

    Args:
        size: ranks in the group.
        num_here: ranks that have calls of it.
        num_ranks: ranks that are here.
        world_size: ranks of the job.
    """
    if size is None or size == world_size:
        return False
    are_all_here = num_ranks == world_size
    return num_here > size or (world_size is not None and not are_all_here)


def _match(
    label: str | None, calls: Mapping[int, list[Call]], steps: tuple[int, ...] | None, left_out: Counter[str]
) -> MatchedGroup:
    """The calls of one group that are the same on all its ranks.

    With steps each one is matched whole or not at all: where those belong that a rank lacks, we cannot tell.
    Without, recording may have ended earlier on some rank, so the calls are matched as far as they agree.
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
    """The calls step by step, those outside of steps under ``None``; all of them without steps."""
    if steps is None:
        return [(None, dict(calls))]
    # Steps without a call are compared, too: there nobody waited.
    blocks: dict[int | None, dict[int, list[Call]]] = {step: {rank: [] for rank in calls} for step in steps}
    for rank, own in calls.items():
        for call in own:
            blocks.setdefault(call.step, {one: [] for one in calls})[rank].append(call)
    return list(blocks.items())


def _num_agreeing(block: Mapping[int, list[Call]]) -> int:
    """How many calls, from the first on, have the same name and size on all ranks."""
    number = 0
    for same in zip(*block.values(), strict=False):
        if len({_what(call) for call in same}) > 1:
            break
        number += 1
    return number


def _what(call: Call) -> tuple[str, int | None]:
    """What has to be the same on all ranks. Only of an all-reduce is the size so for sure."""
    name = call.kind.name
    return name, call.in_elements if name == "all_reduce" else None
