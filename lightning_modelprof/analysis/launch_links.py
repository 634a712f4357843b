"""What on the host launched each device event."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.nesting import nearest_ancestor
from lightning_modelprof.trace.model import Category, Trace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaunchLinks:
    """What launched each of the m device events, in the order of ``Trace.device``.

    Attributes:
        runtime: int64, shape (m,): row of the runtime call with the same correlation id, -1 without one.
        operator: int64, shape (m,): row of the innermost operator around that call on its thread; without
            a call the operator of the same external id; -1 without one.
        begin_ns: int64, shape (m,): begin of the call, without one of the operator, -1 without either.
    """

    runtime: NDArray[np.int64]
    operator: NDArray[np.int64]
    begin_ns: NDArray[np.int64]


def link_launches(trace: Trace, parent: NDArray[np.int64], is_operator: NDArray[np.bool_]) -> LaunchLinks:
    """Join device events with the host.

    Args:
        trace: the trace, n events.
        parent: row of the event around each host event, shape (n,).
        is_operator: shape (n,).
    """
    work = trace.device.event
    runtime = _match(trace.correlation, np.flatnonzero(trace.category == Category.RUNTIME), work)
    operator = np.where(runtime >= 0, nearest_ancestor(parent, is_operator)[runtime], -1)
    lost = np.flatnonzero(runtime < 0)
    # Torch 1.12 to 2.0 wrote the correlation as the external id: that number belongs to another operator.
    with_id = work[trace.external_id[work] >= 0]
    if len(lost) and (trace.external_id[with_id] != trace.correlation[with_id]).any():
        operator[lost] = _match(trace.external_id, np.flatnonzero(is_operator), work[lost])
    known = np.where(runtime >= 0, runtime, operator)
    return LaunchLinks(
        runtime=runtime,
        operator=operator,
        begin_ns=np.where(known >= 0, trace.begin_ns[known] if len(trace) else -1, -1),
    )


def _match(ids: NDArray[np.int64], hosts: NDArray[np.int64], work: NDArray[np.int64]) -> NDArray[np.int64]:
    """Row of the first of ``hosts`` with the same id as each of ``work``, -1 without one.

    Args:
        ids: an id of every event, -1 for none.
        hosts: rows of host events.
        work: rows of device events, shape (m,).

    Returns:
        Shape (m,).
    """
    hosts = hosts[ids[hosts] >= 0]
    hosts = hosts[np.argsort(ids[hosts], kind="stable")]
    place = np.searchsorted(ids[hosts], ids[work])
    known = np.flatnonzero(place < len(hosts))
    known = known[ids[hosts[place[known]]] == ids[work[known]]]
    found = np.full(len(work), -1, np.int64)
    found[known] = hosts[place[known]]
    return found
