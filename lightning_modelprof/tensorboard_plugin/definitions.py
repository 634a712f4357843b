"""What every figure means: docs/report.md in pieces, so that the dashboard can show each beside its figure.

Sections define tables, their terms columns and rows; rows of the page's own tables define phases, verdicts
and findings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from lightning_modelprof.tensorboard_plugin.report_page import (
    Definition,
    Render,
    Section,
    anchor_of,
    as_list,
    blocks_of,
    key_of,
    read_page,
    renderer,
    sections_of,
)

_COMMON: Final = "Columns of many tables"

SECTIONS: Final[dict[str, dict[str, str]]] = {
    "table": {
        "perf_summary": "Perf Summary",
        "all_ranks": "All ranks",
        "rank_phases": "Ranks",
        "rank_spread": "Ranks#Phases over the ranks",
        "phases": "Phases",
        "validation": "Validation",
        "slow_steps": "Slow steps",
        "worst_step": "Slow steps#A typical step and the worst",
        "callbacks": "Callbacks",
        "around": "Around the loop",
        "loops": "Loops",
        "short_loops": "Loops",
        "source_lines": "Source lines",
        "flops": "FLOPs",
        "flops_by_operator": "FLOPs by operator",
        "flops_by_size": "FLOPs by batch size",
        "model_size": "Model size",
        "memory_peaks": "Memory",
        "memory_by_phase": "Memory by phase",
        "module_tree": "Modules",
        "slowest_modules": "Modules#Slowest modules",
        "top_modules": "Modules#Top modules by depth",
        "forward_modules": "Forward pass by module and by operator (fvcore)",
        "forward_operators": "Forward pass by module and by operator (fvcore)",
        "device_usage": "Device Summary",
        "overview": "Overview Summary",
        "model_summary": "Model Summary",
        "distributed": "Distributed Summary",
        "rank_waits": "Waiting for other ranks",
        "collectives": "Collectives",
        "operators": "Operator Summary",
        "operators_by_shape": "Operator Summary#Operator Summary by input shapes",
        "kernels": "Kernel Summary",
        "copies": "Memory Manipulation Summary",
        "user_ranges": "UserDefined Summary",
        "memory": "Memory Summary",
        "step_breakdown": "Step time breakdown",
        "idle": "Idle Summary",
        "host_waits": "Host Wait Summary",
        "launches": "Launch Summary",
        "runtime_calls": "Launch Summary#Runtime Calls",
        "dataloader": "Dataloader",
        "comparison_figures": "Compare#Speed",
        "comparison_phases": "Compare#Phase by phase",
        "comparison_settings": "Compare#Different settings",
        "comparison_findings": "Compare#Findings",
        "comparison_tables": "Compare#Table by table",
        "comparison_steps": "Changes in a step",
        "stages": "Stages",
        "changes": "Changes row by row",
    },
    "chart": {
        "phase_shares": "Charts (report.html)#Where the steps spend their time",
        "validation_shares": "Charts (report.html)#Where validation spends its time",
        "phases_per_step": "Charts (report.html)#Phases of each step",
        "step_time": "Charts (report.html)#Step times",
        "throughput": "Charts (report.html)#Throughput",
        "flops_by_phase": "Charts (report.html)#FLOPs of a step",
        "memory_curve": "Charts (report.html)#Memory over the steps",
        "step_breakdown": "Charts (report.html)#What each step of the trace waited for",
        "kernel_types": "Charts (report.html)#Time of the kernels",
        "operator_shares": "Charts (report.html)#Operators by their own time",
        "rank_shares": "Charts (report.html)#Ranks side by side",
        "rank_phases": "Charts (report.html)#Phases of each rank",
    },
    "flame": {
        "call_stacks": "Flame graphs (report.html)#Where the training thread was",
        "modules": "Flame graphs (report.html)#Modules, forward and backward",
    },
    "figure": {
        "batch_cost": "Perf Summary#batch_cost",
        "ips": "Perf Summary#ips",
        "reader_ratio": "Perf Summary#Reader Ratio",
        "flop_s": "FLOPs#FLOP/s",
        "mfu": "FLOPs#MFU",
    },
}
"""Kind → id → heading of its section, and after # the term in it."""

_COLUMNS: Final = {
    "runtime_calls:ratio": "Launch Summary#Runtime Calls",
    "slowest_modules:ratio": "Modules#Slowest modules",
    "slowest_modules:forward": "Modules#Forward latency",
    "slowest_modules:backward": "Modules#Backward latency",
}
"""Columns that their table's section does not name by their labels, or names for another table of its own."""

_FIXED_ROWS: Final = frozenset(
    {"perf_summary", "all_ranks", "flops", "memory_peaks", "overview", "model_summary", "distributed", "idle"}
    | {"host_waits", "launches", "dataloader", "comparison_figures"}
)
"""Tables whose rows are figures with names of ours, not names of the user's."""

_PHASE_ROWS: Final = frozenset(("phases", "rank_spread", "worst_step", "model_summary", "comparison_phases"))
"""Tables whose rows are phases, where nothing else is said of them."""


@cache
def definitions_document() -> dict[str, Any]:
    """All definitions as plain JSON values.

    Returns:
        ``sections``: anchor → ``heading`` and ``html``, whole sections in the order of the page first, then
        terms (their anchors have a #). ``figures``: ``table:kernels``, ``column:kernels:blocks_per_sm``,
        ``phase:forward``, ... → anchor. Both are empty if the page is not installed.
    """
    page = read_page()
    if page is None:
        return {"sections": {}, "figures": {}}
    render = renderer()
    sections = {section.heading: section for section in sections_of(page, render)}
    whole = {
        heading: Definition(heading, render("\n".join(section.lines)), section.anchor)
        for heading, section in sections.items()
        if any(section.lines)
    }
    listed = dict(_listed(sections, render))
    defined = _phase_rows(listed) | _of_tables(sections, render) | listed | dict(_mapped(sections, whole))
    shown = (*whole.values(), *defined.values())
    return {
        "sections": {one.anchor: {"heading": one.heading, "html": one.html} for one in shown},
        "figures": {key: one.anchor for key, one in defined.items()},
    }


def _phase_rows(listed: dict[str, Definition]) -> dict[str, Definition]:
    """The phases as rows of the tables that have them."""
    phases = {key.removeprefix("phase:"): one for key, one in listed.items() if key.startswith("phase:")}
    return {f"row:{table}:{name}": one for table in _PHASE_ROWS for name, one in phases.items()}


def _of_tables(sections: dict[str, Section], render: Render) -> dict[str, Definition]:
    """Columns and rows of every table; ``*`` for those of many tables."""
    headings = {table: place.partition("#")[0] for table, place in SECTIONS["table"].items()}
    found: dict[str, Definition] = {}
    for table, heading in (headings | {"*": _COMMON}).items():
        found |= _of_table(table, sections.get(heading), render)
    return found


def _mapped(sections: dict[str, Section], whole: dict[str, Definition]) -> Iterator[tuple[str, Definition]]:
    """What has its section, or the term in it, by name: ``SECTIONS`` and ``_COLUMNS``."""
    places = {f"{kind}:{name}": place for kind, named in SECTIONS.items() for name, place in named.items()}
    places |= {f"column:{name}": place for name, place in _COLUMNS.items()}
    for key, place in places.items():
        heading, _, term = place.partition("#")
        if heading in whole and not term:
            yield key, whole[heading]
        elif heading in sections and key_of(term) in sections[heading].terms:
            yield key, sections[heading].terms[key_of(term)]


def _of_table(table: str, section: Section | None, render: Render) -> dict[str, Definition]:
    """Columns by the terms of the table's section; rows by these, and by rows of the page's own tables."""
    if section is None:
        return {}
    found = {f"column:{table}:{key}": definition for key, definition in section.terms.items()}
    if table in _FIXED_ROWS:
        for header, row in section.rows:
            for name in row[0].split(", "):
                body = as_list(header[1:], row[1:], render)
                anchor = anchor_of(section.heading, f"row {name}")
                found[f"row:{table}:{key_of(name)}"] = Definition(name, body, anchor)
        found |= {f"row:{table}:{key}": definition for key, definition in section.terms.items()}
    return found


def _listed(sections: dict[str, Section], render: Render) -> Iterator[tuple[str, Definition]]:
    """What stands in a row of a table of the page: phases, verdicts, rules; and verdicts in its list."""
    for _, (_, label, text) in _rows(sections, "Words"):
        yield f"phase:{key_of(label)}", Definition(label, render(text), anchor_of("Words", label))
    for header, row in _rows(sections, "Verdict"):
        body = as_list(header[1:], row[1:], render)
        yield f"verdict:{key_of(row[0])}", Definition(row[0], body, anchor_of("Verdict", row[0]))
    for header, row in _rows(sections, "Findings"):
        body = as_list(header[1:], row[1:], render)
        for kind in re.findall(r"`(\w+)`", row[0]):
            yield f"rule:{kind}", Definition(kind, body, anchor_of("Findings", kind))
    if "Verdict" in sections:
        blocks = [" ".join(block) for block in blocks_of(sections["Verdict"].lines)]
        for word in ("OUT OF MEMORY", "DEVICE-BOUND", "BALANCED", "CANNOT TELL"):
            items = [re.sub(r"^\d+\. ", "", block) for block in blocks if re.match(rf"\d+\. .*{word}", block)]
            body = render("\n\n".join(items))
            yield f"verdict:{key_of(word)}", Definition(word, body, anchor_of("Verdict", word))


def _rows(sections: dict[str, Section], heading: str) -> list[tuple[list[str], list[str]]]:
    return sections[heading].rows if heading in sections else []
