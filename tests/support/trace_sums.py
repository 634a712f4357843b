"""Sum over the JSON of a trace with only the standard library, to compare tables with.

    python tests/support/trace_sums.py TRACE...

Times are nanoseconds. It uses nothing from the package, and is simple rather than fast.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

WORK = {"kernel": "kernel", "concurrent_kernel": "kernel", "gpu_memcpy": "memcpy", "memcpy": "memcpy",
        "gpu_memset": "memset", "memset": "memset", "mtia_ccp_events": "kernel"}  # fmt: skip
OF_MTIA = {"dma_request": "memcpy", "event_wait": "", "event_record": ""}
COMMUNICATES = re.compile(r"nccl|rccl|oneccl|nvshmem|deep_ep|::ep::|all_?reduce|all_?gather", re.IGNORECASE)
LAUNCHES = re.compile(r"LaunchKernel|LaunchCooperativeKernel|KernelLaunch|GraphLaunch")
Spans = list[tuple[int, int]]


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file, compressed or not."""
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    return document["traceEvents"] if isinstance(document, dict) else document


def kind_of(event: dict[str, Any]) -> str:
    """Kind of device work of a timed event, ``runtime`` for runtime calls, else ""."""
    cat = str(event.get("cat", "")).lower()
    if event.get("ph") != "X":
        return ""
    if cat.endswith(("_runtime", "_driver")) or cat == "runtime":
        return "runtime"
    return OF_MTIA.get(event["name"], "kernel") if cat == "mtia_ccp_events" else WORK.get(cat, "")


def span_of(event: dict[str, Any]) -> tuple[int, int]:
    """Start and end, as integers."""
    whole, _, part = f"{event['ts']:.3f}".partition(".")
    begin = int(whole) * 1000 + int(part)
    return begin, begin + round(event["dur"] * 1000)


def covered(spans: Spans) -> int:
    """Total time within any of the spans."""
    total, reached = 0, -(10**30)
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def device_of(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("device", event["pid"])


def sums(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Kernels, copies, communication, busy time and launches of the whole trace."""
    work = [event for event in events if kind_of(event) not in ("", "runtime")]
    ids = {event.get("args", {}).get("correlation") for event in work} - {None}
    calls = [event for event in events if kind_of(event) == "runtime"]
    launches = [one for one in calls if LAUNCHES.search(one["name"]) and "correlation" in one.get("args", {})]
    by_name: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    by_device: dict[Any, Spans] = defaultdict(list)
    for event in work:
        begin, end = span_of(event)
        by_name[kind_of(event)][event["name"]].append(end - begin)
        by_device[device_of(event)].append((begin, end))
    sizes: dict[str, int] = defaultdict(int)
    for event in work:
        known = event.get("args", {})
        if kind_of(event) != "kernel" and ("bytes" in known or "size" in known):
            sizes[event["name"]] += known.get("bytes", known.get("size"))
    talks = [one for one in work if kind_of(one) == "kernel" and COMMUNICATES.search(one["name"])]
    figures = {kind: {name: (len(each), sum(each)) for name, each in names.items()}
               for kind, names in by_name.items()}  # fmt: skip
    return {
        "work": figures,
        "bytes": dict(sizes),
        "busy": {device: covered(spans) for device, spans in by_device.items()},
        "communication": (len(talks), covered([span_of(one) for one in talks])),
        "calls": {name: sum(one["name"] == name for one in calls) for name in {one["name"] for one in calls}},
        "launches": (len(launches), sum(one["args"]["correlation"] not in ids for one in launches)),
    }  # fmt: skip


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(argument, json.dumps(sums(read(Path(argument))), indent=1))
