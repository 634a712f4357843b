"""Tables of run comparisons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from lightning_modelprof.analysis.change import Change, Comparison
from lightning_modelprof.report.model import Finding, Report, Status, Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, TableSpec
from lightning_modelprof.run.loops import LoopKind
from lightning_modelprof.run.phases import PHASES

_INTERVAL: Final = "95% CI"

_STEP: Final = "step"
_LABELS: Final = {_STEP: "Step"} | {phase.key: phase.label for phase in PHASES}

_UNITS: Final = {
    "batch_cost": Unit.DURATION_NS,
    "reader_cost": Unit.DURATION_NS,
    "steps_per_s": Unit.RATE,
    "samples_per_s": Unit.RATE,
    "reader_ratio": Unit.RATIO,
}
_MORE_IS_BETTER: Final = ("steps_per_s", "samples_per_s")


SPEED: Final = TableSpec(
    id="comparison_figures",
    title="Speed",
    help="Perf Summary figures of both sides. Multiple runs are averaged.",
    columns=(
        ColumnSpec("figure", "Metric"),
        ColumnSpec("before", "before", Unit.BY_ROW, help="value before."),
        ColumnSpec("after", "after", Unit.BY_ROW, help="value after."),
        ColumnSpec(
            "change",
            "change",
            Unit.RATIO,
            help="percentage points for Reader Ratio, % of before otherwise.",
            change="bar",
        ),
        ColumnSpec(
            "low",
            "from",
            Unit.RATIO,
            _INTERVAL,
            help="95% confidence interval of the change.",
            change="bound",
        ),
        ColumnSpec(
            "high", "to", Unit.RATIO, _INTERVAL, help="95% confidence interval of the change.", change="bound"
        ),
    ),
    unit_of=lambda figure: _UNITS[figure.key],
    better_of=lambda figure: "more" if figure.key in _MORE_IS_BETTER else "less",
)


def figures_table(comparison: Comparison, loop: LoopKind, sample_unit: str) -> Table:
    names = {
        "steps_per_s": f"ips ({loop.steps}/s)",
        "samples_per_s": f"ips ({sample_unit}/s)",
        "reader_ratio": "Reader Ratio",
    }
    shown = [figure for figure in comparison.figures if figure.before is not None or figure.after is not None]
    return SPEED.table(
        shown,
        of={"figure": lambda figure: names.get(figure.key, figure.key)},
        notes=("Reader Ratio changes are in percentage points; all others are relative to before.",)
        if any(figure.key == "reader_ratio" for figure in shown)
        else (),
        absent_reason=None if shown else "one side has no clean steps",
    )


def _direction(change: Change) -> str | None:
    if change.low is None or change.high is None:
        return None
    return "more" if change.low > 0 else "less" if change.high < 0 else "uncertain"


PHASE_CHANGES: Final = TableSpec(
    id="comparison_phases",
    title="Phase changes per step",
    help=(
        "Time per clean step in each phase, largest difference first. Not corrected for multiple"
        " comparisons: about 1 in 20 unchanged phases is marked as changed."
    ),
    columns=(
        ColumnSpec("phase", "Phase", of=lambda one: _LABELS[one.key]),
        ColumnSpec("before", "before", Unit.DURATION_NS, help="time before."),
        ColumnSpec("after", "after", Unit.DURATION_NS, help="time after."),
        ColumnSpec("change", "difference", Unit.DURATION_NS, help="after minus before.", change="bar"),
        ColumnSpec(
            "low",
            "from",
            Unit.DURATION_NS,
            _INTERVAL,
            help="95% confidence interval of the difference.",
            change="bound",
        ),
        ColumnSpec(
            "high",
            "to",
            Unit.DURATION_NS,
            _INTERVAL,
            help="95% confidence interval of the difference.",
            change="bound",
        ),
        ColumnSpec(
            "direction", "changed", help="less or more, if the interval excludes no change.", of=_direction
        ),
    ),
    better_of=lambda _: "less",
    has_phases=True,
    heading="Phases, before and after",
)


def phases_table(comparison: Comparison) -> Table:
    """Show time per clean step in each phase, largest difference first."""
    step = next(figure for figure in comparison.figures if figure.key == "batch_cost")
    phases = sorted(comparison.phases, key=lambda phase: -abs(phase.change or 0.0))
    depths: tuple[int, ...] = ()
    if phases and step.before is not None and step.after is not None:
        depths = (0, *[1] * len(phases))
        whole = Change(
            key=_STEP,
            before=step.before,
            after=step.after,
            change=step.after - step.before,
            low=None if step.low is None else step.low * step.before,
            high=None if step.high is None else step.high * step.before,
        )
        phases.insert(0, whole)
    return PHASE_CHANGES.table(
        phases,
        depths=depths,
        notes=("Not corrected for multiple comparisons: about 1 in 20 unchanged rows will appear changed.",)
        if phases
        else (),
        absent_reason=None if phases else "one side has no clean steps",
    )


SETTINGS: Final = TableSpec(
    id="comparison_settings",
    title="Different settings",
    help="Other differences in configuration, environment and model.",
    columns=(
        ColumnSpec("setting", "Setting"),
        ColumnSpec("before", "before", help="value before."),
        ColumnSpec("after", "after", help="value after."),
    ),
)


def settings_table(differences: Sequence[tuple[str, str, str]]) -> Table:
    """Show other differences: configuration, environment, model."""
    return SETTINGS.table(
        ({"setting": name, "before": old, "after": new} for name, old, new in differences),
        absent_reason=None if differences else "no recorded setting differs",
    )


FINDING_CHANGES: Final = TableSpec(
    id="comparison_findings",
    title="Findings",
    help=(
        "Removed, new and unchanged findings, from the first run of each side. Findings match by"
        " rule, function and module."
    ),
    columns=(
        ColumnSpec("finding", "Finding"),
        ColumnSpec("state", "state", help="removed, new or unchanged."),
        ColumnSpec("before", "possible saving, before", Unit.DURATION_NS, help="per step."),
        ColumnSpec("after", "possible saving, after", Unit.DURATION_NS, help="per step."),
    ),
    heading="Findings before and after",
)


def findings_table(before: Report, after: Report) -> Table:
    """Show which findings are removed, new and unchanged."""
    counts = [Counter(finding.kind for finding in _all_found(report)) for report in (before, after)]
    several = frozenset(kind for one in counts for kind, number in one.items() if number > 1)
    found = [_found(report, several) for report in (before, after)]
    is_known = [bool(report.findings) for report in (before, after)]
    rows = []
    for label, keys in (
        ("removed", [key for key in found[0] if key not in found[1]]),
        ("new", [key for key in found[1] if key not in found[0]]),
        ("unchanged", [key for key in found[0] if key in found[1]]),
    ):
        for key in keys if all(is_known) else ():
            old, new = found[0].get(key), found[1].get(key)
            shown = old if new is None else new
            assert shown is not None
            rows.append(
                {
                    "finding": shown.title,
                    "state": label,
                    "before": None if old is None else old.saving_ns_per_step,
                    "after": None if new is None else new.saving_ns_per_step,
                }
            )
    reason = None
    if not rows:
        reason = "no findings on either side" if all(is_known) else "one side has no findings data"
    return FINDING_CHANGES.table(rows, absent_reason=reason)


def _found(report: Report, several: frozenset[str]) -> dict[tuple[str, ...], Finding]:
    """Return the findings by key; places move with the code, so they only tell apart findings of one kind."""
    found: dict[tuple[str, ...], Finding] = {}
    for finding in _all_found(report):
        place = finding.locations[0] if finding.locations else None
        function, module = (place.function, place.module) if place else (None, None)
        where = (function or "", module or "") if finding.kind in several else ()
        found.setdefault((finding.kind, *where), finding)
    return found


def _all_found(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.status is Status.FOUND]
