"""Which operators the time goes to: one bar."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.trace.operator_costs import Operator, pool_operators
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.charts.layers import MAX_LAYERS
from lightning_modelprof.report.model import Chart, Series, Unit


def operator_shares(by_rank: Mapping[int, TraceFacts]) -> Chart | None:
    """The operators with the most time of their own, and the rest; ``None`` with fewer than two.

    Definition: the column Self of the Operator Summary, on the device if the trace has device events, else on
    the host; that of all threads and ranks added up.
    """
    ranks = [facts.operators for facts in by_rank.values() if not isinstance(facts.operators, Absent)]
    has_device = any(rank.device_ns is not None for rank in ranks)
    threads = [thread for rank in ranks for thread in rank.threads]
    pooled = pool_operators(operator for thread in threads for operator in thread.operators)
    time_ns = {operator.name: _own_ns(operator, has_device=has_device) for operator in pooled}
    names = sorted((name for name, ns in time_ns.items() if ns), key=lambda name: (-time_ns[name], name))
    if len(names) < 2:
        return None
    layers = {name: time_ns[name] for name in names[:MAX_LAYERS]}
    rest_ns = sum(time_ns[name] for name in names[MAX_LAYERS:])
    series = [Series(key=f"operator {name}", label=name, values=(float(ns),)) for name, ns in layers.items()]
    if rest_ns:
        series.append(Series(key="rest", label="Other operators", values=(float(rest_ns),)))
    where = "on the device" if has_device else "on the host"
    return Chart(
        id="operator_shares",
        title="Operators by their own time",
        kind="stacked",
        x_label="trace",
        x=(0.0,),
        unit=Unit.DURATION_NS,
        series=tuple(series),
        notes=(f"Self {where}, as in the Operator Summary.",),
    )


def _own_ns(operator: Operator, *, has_device: bool) -> int:
    return (operator.device_self_ns or 0) if has_device else operator.host_self_ns
