"""Split a file of several processes, as tools that merge ranks write it, into one trace per process."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.run.phases import TRACE_METADATA_KEY
from lightning_modelprof.trace.columns import read_only
from lightning_modelprof.trace.model import DEVICE_WORK, Category, Trace

_HOST: Final = (
    Category.CPU_OP,
    Category.USER_ANNOTATION,
    Category.RUNTIME,
    Category.PYTHON_FUNCTION,
)

_MOST: Final = 256
"""Maximum processes of a merged file."""

_MOST_RANKS: Final = 2**20

_NUMBER: Final = re.compile(r"\d+")

_PER_EVENT: Final = (
    *("begin_ns", "end_ns", "category", "name", "track", "correlation", "external_id"),
    *("shape", "stack", "collective"),
)


def split_processes(trace: Trace) -> tuple[Trace, ...]:
    """Split into one trace per process that wrote CPU events, as ranks in the order of their numbers.

    Correlation and External ids are unique only within a process, so device events are assigned to a process
    first: by the label that a tool put into each ``pid`` (``[TP01] 7``), else by the launches they match.
    """
    pids = [pid for pid, _ in trace.tracks]
    has_host = np.bincount(trace.track[trace.is_category(*_HOST)], minlength=len(pids)) > 0
    processes = sorted({pid for pid, has in zip(pids, has_host.tolist(), strict=True) if has}, key=_natural)
    if not 1 < len(processes) <= _MOST:
        return (trace,)
    on_device = np.bincount(trace.track[trace.device.event], minlength=len(pids)) > 0
    devices = sorted({pid for pid, has in zip(pids, on_device.tolist(), strict=True) if has}, key=_natural)
    labels = _labels(processes, devices)
    owner = _owners(trace, pids, (processes, devices), labels)
    ranks = _ranks(processes, labels)
    order = np.argsort(owner, kind="stable")
    ends = np.searchsorted(owner[order], np.arange(len(processes) + 1))
    world_size = max(len(processes), max(ranks) + 1)
    return tuple(
        _part(trace, order[ends[place] : ends[place + 1]], place, pid, (ranks[place], world_size))
        for place, pid in enumerate(processes)
    )


def _natural(pid: str) -> tuple[list[int], str]:
    return [int(number[:18]) for number in _NUMBER.findall(pid)], pid


_Labels = Mapping[str, tuple[str, ...]]


def _labels(processes: Sequence[str], devices: Sequence[str]) -> _Labels | None:
    """Numbers in each ``pid``, without the original one (the last or the first); ``None`` if none."""
    pids = (*processes, *devices)
    if len({_NUMBER.sub("#", pid) for pid in pids}) > 1:
        return None
    for cut in (slice(None, -1), slice(1, None)):
        labels = {pid: tuple(_NUMBER.findall(pid)[cut]) for pid in pids}
        of_processes = {labels[pid] for pid in processes}
        if len(of_processes) == len(processes) and all(labels[pid] in of_processes for pid in devices):
            return labels
    return None


def _ranks(processes: Sequence[str], labels: _Labels | None) -> list[int]:
    """Ranks from the one number in the labels that differs between processes, else by position."""
    columns = [] if labels is None else list(zip(*(labels[pid] for pid in processes), strict=True))
    varying = [[int(number[:9]) for number in column] for column in columns if len(set(column)) > 1]
    if len(varying) == 1 and len(set(varying[0])) == len(processes) and max(varying[0]) < _MOST_RANKS:
        return varying[0]
    return list(range(len(processes)))


def _owners(
    trace: Trace, pids: Sequence[str], which: tuple[list[str], list[str]], labels: _Labels | None
) -> NDArray[np.int64]:
    """Index of each event's process, shape (n,)."""
    processes, devices = which
    place_of = {pid: place for place, pid in enumerate(processes)}
    owner_of_pid = np.array([place_of.get(pid, -1) for pid in pids], np.int64)
    owner: NDArray[np.int64] = owner_of_pid[trace.track]
    if set(devices) <= set(processes):
        return np.maximum(owner, 0)
    launches = np.flatnonzero((trace.category == Category.RUNTIME) & (trace.correlation >= 0))
    is_on_device = trace.is_category(*DEVICE_WORK, Category.DEVICE_ANNOTATION, Category.DEVICE_SYNC)
    owner[is_on_device] = -1
    if labels is not None:
        place_of_label = {labels[pid]: place for place, pid in enumerate(processes)}
        owner_of_device = {pid: place_of_label[labels[pid]] for pid in devices}
    elif len(devices) >= len(np.unique(trace.track[launches])):
        owner_of_device = _by_launches(trace, pids, devices, launches, owner)
    else:  # processes on several machines share a device number
        _pair(trace, owner, launches)
        return np.maximum(owner, 0)
    given = np.array([owner_of_device.get(pid, -1) for pid in pids], np.int64)[trace.track]
    return np.maximum(np.where(is_on_device, given, owner), 0)


def _by_launches(
    trace: Trace,
    pids: Sequence[str],
    devices: Sequence[str],
    launches: NDArray[np.int64],
    owner: NDArray[np.int64],
) -> dict[str, int]:
    """Index of the process that launched most of each device's work, no later than the work started.

    With ranks in lockstep, several may fit; then devices are assigned in the order of their numbers.
    """
    work, owner_of_launch = trace.device.event, owner[launches]
    fits = np.zeros((len(devices), int(owner.max()) + 1), np.int64)
    number_of = {pid: number for number, pid in enumerate(devices)}
    device = np.array([number_of.get(pid, -1) for pid in pids], np.int64)[trace.track[work]]
    for place in range(fits.shape[1]):
        own = launches[owner_of_launch == place]
        own = own[np.argsort(trace.correlation[own], kind="stable")]
        found = np.searchsorted(trace.correlation[own], trace.correlation[work])
        known = np.flatnonzero((found < len(own)) & (device >= 0))
        launch = own[found[known]]
        is_fit = (trace.correlation[launch] == trace.correlation[work[known]]) & (
            trace.begin_ns[launch] <= trace.begin_ns[work[known]]
        )
        fits[:, place] = np.bincount(device[known[is_fit]], minlength=len(devices))
    owners: dict[str, int] = {}
    for number, pid in enumerate(devices):
        best = np.flatnonzero(fits[number] == fits[number].max()).tolist()
        free = [place for place in best if place not in owners.values()] or best
        owners[pid] = number if number in free else free[0]
    return owners


def _pair(trace: Trace, owner: NDArray[np.int64], launches: NDArray[np.int64]) -> None:
    """Assign events without an owner to launches with the same correlation id, in order of time."""
    events = np.flatnonzero((owner < 0) & (trace.correlation >= 0))
    events = events[np.argsort(trace.correlation[events], kind="stable")]
    order = np.argsort(trace.correlation[launches], kind="stable")
    ids, owners = trace.correlation[launches][order], owner[launches][order]
    own_ids = trace.correlation[events]
    first, last = np.searchsorted(ids, own_ids), np.searchsorted(ids, own_ids, side="right")
    begin = np.searchsorted(own_ids, own_ids)
    count = np.searchsorted(own_ids, own_ids, side="right") - begin
    place = first + (np.arange(len(events)) - begin) * (last - first) // np.maximum(count, 1)
    known = last > first
    owner[events[known]] = owners[place[known]]


def _part(trace: Trace, rows: NDArray[np.int64], place: int, pid: str, rank_of: tuple[int, int]) -> Trace:
    """The trace of some rows; notes on the whole file go to the first."""
    first_ns = int(trace.begin_ns[rows].min())
    columns: dict[str, Any] = {key: getattr(trace, key)[rows] for key in _PER_EVENT}
    columns["begin_ns"] = columns["begin_ns"] - first_ns
    columns["end_ns"] = columns["end_ns"] - first_ns
    for column in columns.values():
        read_only(column)
    new_row = np.full(len(trace), -1, np.int64)
    new_row[rows] = np.arange(len(rows))
    event = new_row[trace.device.event]
    is_own = event >= 0
    device: dict[str, Any] = {
        key: read_only(getattr(trace.device, key)[is_own])
        for key in ("device", "stream", "size_bytes", "blocks_per_sm", "occupancy")
    }
    is_own_track = np.array([one == pid for one, _ in trace.tracks], np.bool_)
    own_memory = is_own_track[trace.allocations.track]
    memory: dict[str, Any] = {
        key: getattr(trace.allocations, key)[own_memory] for key in trace.allocations.__struct_fields__
    }
    memory["time_ns"] = memory["time_ns"] - first_ns
    return replace(
        trace,
        source=f"{trace.source} (process {pid})",
        base_ns=trace.base_ns + first_ns,
        **columns,
        device=replace(trace.device, event=read_only(event[is_own]), **device),
        allocations=replace(trace.allocations, **{key: read_only(one) for key, one in memory.items()}),
        metadata={**trace.metadata, **_noted(trace, rank_of)},
        num_dropped=0 if place else trace.num_dropped,
        damage=() if place else trace.damage,
    )


def _noted(trace: Trace, rank_of: tuple[int, int]) -> dict[str, Any]:
    rank, world_size = rank_of
    noted: dict[str, Any] = {}
    for key in ("distributedInfo", TRACE_METADATA_KEY):
        of_file = trace.metadata.get(key)
        if key == "distributedInfo" or isinstance(of_file, dict):
            whole = of_file if isinstance(of_file, dict) else {}
            size = whole.get("world_size")
            size = max(size, world_size) if type(size) is int else world_size
            noted[key] = {**whole, "rank": rank, "world_size": size}
    return noted
