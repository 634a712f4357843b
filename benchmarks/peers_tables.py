"""The tables of ``benchmarks/README.md``, from what the benchmarks wrote as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NOTHING = "–"
JUDGEMENTS = ("right", "cannot name it", "wrong", "silent", "failed")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; columns after the first are aligned to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])


def overhead_table(document: Mapping[str, Any]) -> str:
    """What a step costs over the bare Trainer."""
    header = ["", "µs per step", "95 % interval", "times an empty callback", "95 % interval"]
    header += ["a step takes", "µs, all threads", "once, ms"]
    has_command = "command_s" in document["variants"]["bare"]
    rows = []
    for name, result in document["variants"].items():
        if name == "bare" and not has_command:
            continue
        cost, times = result["over_bare_us"], result["cost_in_empty_callbacks"]
        row = [result["label"]]
        if name == "bare":
            row += [NOTHING] * 7
        else:
            row += [f"{cost['median']:+.1f}", f"{cost['interval_low']:+.1f} to {cost['interval_high']:+.1f}"]
            row += [
                f"{times['median']:.2f}",
                f"{times['interval_low']:.2f} to {times['interval_high']:.2f}",
                f"{result['step_ratio']['median']:.3f} ×",
                f"{result['threads_over_bare_us']['median']:+.1f}",
                f"{result['once_over_bare_ms']:+.0f}",
            ]
        if has_command:
            command = result["command_s"]
            row.append(f"{command['median']:.1f} ({command['min']:.1f} to {command['max']:.1f})")
        rows.append(row)
    if has_command:
        header.append("whole command, CPU s")
    bare = document["variants"]["bare"]["step_us"]
    settings = f"{document['rounds']} rounds"
    settings += f" of one process with {document['fits']} fits" if "fits" in document else ""
    first = f"A bare step takes {bare['median']:.0f} µs ({bare['min']:.0f} to {bare['max']:.0f})"
    return f"{first}; {settings} of {document['steps']} steps.\n\n" + table(header, rows)


def paddle_table(document: Mapping[str, Any]) -> str:
    """Paddle's timer beside its own loop."""
    rows = []
    for way, label in (
        ("plain again", "the loop without it, again"),
        ("timer", "`Profiler(timer_only=True)`"),
    ):
        cost, share = document[way]["over_plain_us"], document[way]["share"]
        rows.append(
            [
                label,
                f"{cost['median']:+.1f}",
                f"{cost['low']:+.1f} to {cost['high']:+.1f}",
                f"{share['median']:+.1%}",
                f"{share['low']:+.1%} to {share['high']:+.1%}",
            ]
        )
    first = f"paddlepaddle {document['paddle']}; a step without it takes"
    first += f" {document['plain_step_us']['median']:.0f} µs;"
    first += f" {document['rounds']} rounds of {document['steps']} steps."
    header = ["", "µs per step", "half of the rounds", "share of its own step", "half of the rounds"]
    return f"{first}\n\n" + table(header, rows)


def window_table(document: Mapping[str, Any]) -> str:
    """What closing a window costs."""
    header = ["", "", "trace, MB", "torch's stop and export, ms", "closing, ms", "min to max", "over torch's"]
    header += ["whole fit over bare, ms"]
    rows = []
    for case, contenders in document["cases"].items():
        for name, figures in contenders.items():
            close = figures["close_ms"]
            rows.append(
                [
                    case,
                    name,
                    f"{figures['trace_bytes'] / 1e6:.1f}",
                    f"{figures['torch_ms']['median']:.0f}",
                    f"{close['median']:.0f}",
                    f"{close['min']:.0f} to {close['max']:.0f}",
                    f"{figures['close_over_torch']['median']:.2f} ×",
                    f"{figures['fit_over_bare_ms']['median']:+.0f}",
                ]
            )
    return f"{document['rounds']} windows of {document['active']} steps each.\n\n" + table(header, rows)


def traces_table(document: Mapping[str, Any]) -> str:
    """CPU time from a file to the tables, and a window of torch's own."""
    header = [
        "trace",
        "MB",
        "who",
        "CPU s",
        "min to max",
        "MB/s",
        "times ours",
        "min to max",
        "peak memory, MB",
    ]
    labels = {
        "ours": "lightning-modelprof, all tables",
        "reader": "lightning-modelprof, reading alone",
        "json_loads": "`json.loads` alone",
        "torch_tb_profiler": "torch_tb_profiler, all views",
        "hta": "HolisticTraceAnalysis, 10 analyses",
    }
    rows = []
    for file in document["files"]:
        for name, label in labels.items():
            figures = file["contenders"][name]
            row = [file["file"].removesuffix(".gz"), f"{file['json_bytes'] / 1e6:.0f}", label]
            if "problem" in figures:
                rows.append([*row, figures["problem"], *[NOTHING] * 5])
                continue
            cpu, times = figures["cpu_s"], figures["times_ours"]
            rows.append(
                [
                    *row,
                    f"{cpu['median']:.2f}",
                    f"{cpu['min']:.2f} to {cpu['max']:.2f}",
                    f"{figures['mb_per_cpu_s']:.0f}",
                    f"{times['median']:.2f}",
                    f"{times['min']:.2f} to {times['max']:.2f}",
                    f"{figures['peak_bytes']['median'] / 1e6:.0f}",
                ]
            )
    return table(header, rows) + "\n\n" + key_averages_text(document["key_averages"])


def key_averages_text(document: Mapping[str, Any]) -> str:
    """Torch's own table of a recorded window."""
    if "problem" in document:
        return f"`key_averages().table()`: {document['problem']}"
    ratios = sorted(entry["torch_s"] / entry["ours_s"] for entry in document["rounds"])
    return (
        f"Of a recorded window of {document['num_events']:,} events, `key_averages().table()` of torch takes"
        f" {ratios[len(ratios) // 2]:.1f} times ({ratios[0]:.1f} to {ratios[-1]:.1f}) the CPU time of"
        " our export and all tables."
    )


def verdicts_table(document: Mapping[str, Any]) -> str:
    """Who said what of which training."""
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
    """The table of tools of what ``flops.py`` prints, with the number of models."""
    _, tools, models, *_ = printed.split("\n\n")
    return f"{len(models.splitlines()) - 2} models.\n\n{tools}"


def as_printed(printed: str) -> str:
    """What has no table."""
    return f"```\n{printed.rstrip()}\n```"


def run_table(run: Mapping[str, Any]) -> str:
    """The machine, the versions, and what ran when."""
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
    """Replace what is between the two markers of a name.

    Raises:
        ValueError: when the file does not have each marker once, in this order.
    """
    begin, end = f"<!-- peers.py: {name} begin -->", f"<!-- peers.py: {name} end -->"
    text = path.read_text()
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    if text.count(begin) != 1 or text.count(end) != 1 or end in before:
        raise ValueError(f"{path}: expected one {begin} and one {end} after it")
    path.write_text(f"{before}{begin}\n\n{generated}\n\n{end}{after}")
