"""The tables of ``benchmarks/README.md``, from the benchmarks' JSON files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NOTHING = "–"
JUDGEMENTS = ("right", "cannot name it", "wrong", "silent", "failed")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Make a Markdown table whose columns after the first are right-aligned."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])


def within(figures: Mapping[str, float], digits: str, sign: str = "") -> str:
    """Format the median with its interval, else with its minimum and maximum."""
    low, high = (
        figures[name]
        for name in (("interval_low", "interval_high") if "interval_low" in figures else ("min", "max"))
    )
    return f"{figures['median']:{sign}{digits}} ({low:{sign}{digits}} to {high:{sign}{digits}})"


def overhead_table(document: Mapping[str, Any]) -> str:
    """Cost per step and per fit, over the bare Trainer and over the logger alone."""
    variants = document["variants"]
    bare = variants["bare"]["step_us"]
    settings = f"{document['rounds']} rounds of"
    settings += f" one process with {document['fits']} later fits of" if "fits" in document else ""
    first = f"A bare step takes {bare['median']:.0f} µs ({bare['min']:.0f} to {bare['max']:.0f}); {settings}"
    parts = [f"{first} {document['steps']:,} steps. In brackets 95 % intervals."]
    for base, unit, targets in (
        ("bare", "an empty callback", ("at most 1.5", "at most 2.0")),
        ("logger", "ThroughputMonitor", ("at most 1.0", "at most 1.0")),
    ):
        rows = [one for name, one in variants.items() if one["base"] == base and name != base]
        if rows:
            parts.append(_overhead_rows(rows, variants[base]["label"], unit, targets))
    return "\n\n".join(parts)


def _overhead_rows(rows: Sequence[Mapping[str, Any]], base: str, unit: str, targets: tuple[str, str]) -> str:
    header = [f"over {base}", "µs a step, training thread", f"times {unit}", "µs a step, all threads"]
    header += [f"times {unit}", "once, ms, training thread", "once, ms, all processes"]
    goals = ["*target of ours*", "", targets[0], "", targets[1], "at most 60", ""]
    more = {"first_ms_over": "once, ms, first fit", "command_s": "whole command, CPU s"}
    more = {key: title for key, title in more.items() if key in rows[0]}
    lines = [
        [
            one["label"],
            within(one["step_us_over"], ".1f", "+"),
            within(one["step_us_times"], ".2f"),
            within(one["threads_us_over"], ".1f", "+"),
            within(one["threads_us_times"], ".2f"),
            within(one["once_ms_over"], ".0f", "+"),
            within(one["once_all_ms_over"], ".0f", "+"),
            *(within(one[key], ".1f" if key == "command_s" else "+.0f") for key in more),
        ]
        for one in rows
    ]
    return table([*header, *more.values()], [*lines, [*goals, *[""] * len(more)]])


def window_table(document: Mapping[str, Any]) -> str:
    """Cost of closing a window."""
    header = ["", "", "trace, MB", "windows", "torch's share, ms", "closing, ms", "closing over torch's"]
    header += ["all processes over torch's", "whole fit over bare, ms"]
    rows = [
        [
            case,
            name,
            f"{figures['trace_bytes'] / 1e6:.1f}",
            f"{figures['windows']}",
            f"{figures['torch_ms']['median']:.0f}",
            f"{figures['close_ms']['median']:.0f}",
            within(figures["close_over_torch"], ".2f"),
            within(figures["all_over_torch"], ".2f"),
            f"{figures['fit_over_bare_ms']['median']:+.0f}",
        ]
        for case, contenders in document["cases"].items()
        for name, figures in contenders.items()
    ]
    goals = ["*target*", "ours", "1 to 60", "", "", "", "at most 1.10", "", ""]
    return "In brackets the least and the most.\n\n" + table(header, [*rows, goals])


def many_windows_table(document: Mapping[str, Any]) -> str:
    """Cost of many windows in a long fit."""
    figures, plan = document["figures"], document["plan"]
    asked = ", ".join(f"{name}={value}" for name, value in plan.items())
    first = f"`{asked}`: {figures['windows']['median']:.0f} windows in {document['steps']:,} steps;"
    first += f" {document['rounds']} rounds. In brackets 95 % intervals."
    rows = [
        ["outside of recording steps and torch's share", within(figures["share"], ".1%"), "at most 3 %"],
        ["the same without preparing and starting", within(figures["share_without_starting"], ".1%"), ""],
        ["a window, outside of these, ms", within(figures["ms_a_window"], ".2f"), ""],
        ["of it torch's preparing and starting, ms", within(figures["starting_ms"], ".2f"), ""],
        ["torch's share of a window, ms", within(figures["torch_ms"], ".2f"), ""],
        ["recording steps of a window, ms", within(figures["recording_ms"], ".2f"), ""],
        ["a window, all of it on all threads and processes, ms", within(figures["all_ms"], ".2f"), ""],
    ]
    return f"{first}\n\n" + table(["CPU time over the run without windows", "ours", "target"], rows)


def startup_table(document: Mapping[str, Any]) -> str:
    """Times of imports and commands."""
    imports = document["imports"]
    rows = [
        ["`import lightning`, Python's start included", within(imports["lightning"], ".2f"), ""],
        ["then `import lightning_modelprof`", within(imports["package"], ".3f"), "at most 0.15"],
        ["and `ModelProfCallback` from it, together", within(imports["callback"], ".3f"), "at most 0.15"],
    ]
    first = table(["CPU s of a new process", "median (least to most)", "target"], rows)
    commands = [
        [
            label,
            f"{1e3 * one['median']:.0f}",
            f"{1e3 * one['min']:.0f} to {1e3 * one['max']:.0f}",
            f"{one['ours']}, {one['all']}",
        ]
        for label, one in document["commands"].items()
    ]
    header = ["command", "CPU ms, median", "least to most", "modules imported: ours, all"]
    return f"{document['rounds']} processes of each.\n\n{first}\n\n" + table(header, commands)


def traces_table(document: Mapping[str, Any]) -> str:
    """CPU time and memory from a file to the tables, and for one of torch's own windows."""
    header = ["trace", "MB", "who", "process, CPU s", "target", "process, MB of memory", "target"]
    header += ["without imports, CPU s", "times ours", "MB of memory"]
    labels = {
        "ours": "lightning-modelprof, all tables",
        "json_loads": "`json.loads` alone",
        "torch_tb_profiler": "torch_tb_profiler, all views",
        "hta": "HolisticTraceAnalysis, 10 analyses",
    }
    rows = []
    for file in document["files"]:
        megabytes = file["json_bytes"] / 1e6
        for name, label in labels.items():
            figures = file["contenders"][name]
            row = [file["file"].removesuffix(".gz"), f"{megabytes:.0f}", label]
            if "problem" in figures:
                rows.append([*row, figures["problem"], *[NOTHING] * 6])
                continue
            is_ours = name == "ours"
            rows.append(
                [
                    *row,
                    within(figures["process_s"], ".2f"),
                    f"{0.2 + megabytes / 120:.2f}" if is_ours else "",
                    f"{figures['process_bytes']['median'] / 1e6:.0f}",
                    f"{megabytes:.0f}" if is_ours and megabytes >= 50 else "",
                    within(figures["cpu_s"], ".2f"),
                    within(figures["times_ours"], ".2f"),
                    f"{figures['peak_bytes']['median'] / 1e6:.0f}",
                ]
            )
    first = "In brackets the least and the most.\n\n" + table(header, rows)
    averages = document["key_averages"]
    return first if averages is None else f"{first}\n\n{key_averages_text(averages)}"


def key_averages_text(document: Mapping[str, Any]) -> str:
    """Compare with torch's own table of a recorded window."""
    if "problem" in document:
        return f"`key_averages().table()`: {document['problem']}"
    ratios = sorted(entry["torch_s"] / entry["ours_s"] for entry in document["rounds"])
    return (
        f"Of a recorded window of {document['num_events']:,} events, `key_averages().table()` of torch takes"
        f" {ratios[len(ratios) // 2]:.1f} times ({ratios[0]:.1f} to {ratios[-1]:.1f}) the CPU time of"
        " our export and all tables."
    )


def verdicts_table(document: Mapping[str, Any]) -> str:
    """Judgments per tool and training."""
    tools, rows = list(document["versions"]), document["rows"]
    names = list(dict.fromkeys(row["scenario"] for row in rows))
    said = {(row["scenario"], row["tool"]): row.get("judgement", "failed") for row in rows}
    injected = {row["scenario"]: ", ".join(row["injected"]) or "none" for row in rows}
    header = ["scenario", "injected", *(f"{tool} {document['versions'][tool]}" for tool in tools)]
    lines = [[name, injected[name], *(said[name, tool] for tool in tools)] for name in names]
    counts = {tool: Counter(said[name, tool] for name in names) for tool in tools}
    sums = [
        [f"**{kind}**", "", *(f"{counts[tool][kind]} of {len(names)}" for tool in tools)]
        for kind in JUDGEMENTS
        if any(counts[tool][kind] for tool in tools)
    ]
    return table(header, [*lines, *sums])


def flops_table(printed: str) -> str:
    """The tools table printed by ``flops.py``, with the number of models."""
    _, tools, models, *_ = printed.split("\n\n")
    return f"{len(models.splitlines()) - 2} models.\n\n{tools}"


def as_printed(printed: str) -> str:
    """Output that has no table."""
    return f"```\n{printed.rstrip()}\n```"


def run_table(run: Mapping[str, Any]) -> str:
    """The machine, the versions, and the parts with their times."""
    lines = [f"- {key}: {value}" for key, value in run["about"].items()]
    header = ["part", "began", "took, s", "load before", "load after"]
    rows = [
        [
            part["name"] + ("" if not part["problem"] else f" ({part['problem']})"),
            part["began"],
            f"{part['seconds']:.0f}",
            f"{part['load_before']:.2f}",
            f"{part['load_after']:.2f}",
        ]
        for part in run["parts"]
    ]
    return "\n".join(lines) + "\n\n" + table(header, rows)


def put_between_markers(path: Path, name: str, generated: str) -> None:
    """Replace the text between a name's two markers.

    Raises:
        ValueError: If the file doesn't contain each marker once, in this order.
    """
    begin, end = f"<!-- peers.py: {name} begin -->", f"<!-- peers.py: {name} end -->"
    text = path.read_text()
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    if text.count(begin) != 1 or text.count(end) != 1 or end in before:
        raise ValueError(f"{path}: expected one {begin} and one {end} after it")
    path.write_text(f"{before}{begin}\n\n{generated}\n\n{end}{after}")
