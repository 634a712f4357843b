"""Damage small traces at random and read them: only a TraceError may result.

    python tests/support/fuzz_traces.py --seconds 60 --seed 1

Each damaged trace goes through reader, analysis, report, text and JSON. One that raises anything else is
saved and its number is printed; ``--only NUMBER`` makes it again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.errors import TraceError
from lightning_modelprof.report.build_trace import build_trace_report
from lightning_modelprof.show.document import render_json
from lightning_modelprof.show.text import render_text
from lightning_modelprof.trace import damaged
from lightning_modelprof.trace.reader import parse_trace, read_trace

PID, MAIN, BACKWARD = 100, 101, 102
HOSTILE_TOKENS = (
    b"NaN", b"Infinity", b"-Infinity", b"null", b"true", b"false", b"0", b"-0", b"-1", b"1", b"0.5", b"-7.25",
    b"1e5", b"1e18", b"1e308", b"1e999", b"-1e18", b"1E-400", b"4e15", b"9999999999999999.999", b"9.3e15",
    b"2147483648", b"9223372036854775807", b"9223372036854775808", b"-9223372036854775808",
    b"18446744073709551616", b"9" * 400, b"9" * 5000, b"0." + b"1" * 50, b"1712195495502094.567",
    b'""', b'"x"', b'"7"', b'"stream 7"', b'"stream ' + b"8" * 5000 + b'"', b'"ProfilerStep#2"',
    b'"ProfilerStep#' + b"9" * 30 + b'"', b'"ProfilerStep#' + b"9" * 5000 + b'"', b'"ProfilerStep#\xc2\xbd"',
    b'"\\ud800"', b'"\\u0000"', b'"\xff\xfe"', b'"\\u001b[31m\\r\\n\\t"', b'"' + b"n" * 3000 + b'"',
    b'"kernel"', b'"cuda_runtime"', b'"cpu_op"', b'"gpu_memcpy"', b'"overhead"', b'"user_annotation"',
    b"[]", b"{}", b"[[]]", b"[1, 2]", b"[[1, 2], [3]]", b"[[-1, 0], [9223372036854775807, 99999999999]]",
    b'[{"a": 1}, {"b": 2}]', b'{"a": [{"b": 1}, {"c": 2}]}', b'["", "[1, 1]", "x"]', b"[" * 60 + b"]" * 60,
    b"[" * 3000 + b"]" * 3000, b'{"a":' * 500 + b"1" + b"}" * 500,
)  # fmt: skip
"""Replacements of values."""

NUMBERS = (
    "ts", "dur", "correlation", "External id", "bytes", "Bytes", "In msg nelems", "Group size", "stream",
    "device", "Total Allocated", "Total Reserved", "Device Id", "Device Type", "pid", "tid", "Input Dims",
)  # fmt: skip
"""Fields set to extreme values."""

FRAGMENTS = (
    b"}", b"{", b"[", b"]", b",", b":", b'"', b"\\", b"\x00", b"\xff", b"}, {", b'}, {"', b'}, {"ph": "X"',
    b"]}", b'"traceEvents": [', b"\xef\xbb\xbf", b"NaN", b" " * 50, b'"ts": 5, ', b"\n",
)  # fmt: skip
"""Insertions between two bytes."""


def _timed(cat: str, name: str, tid: int | str, begin: float, duration: float, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X", "cat": cat, "name": name, "pid": args.pop("pid", PID), "tid": tid, "ts": begin,
        "dur": duration, "args": args,
    }  # fmt: skip


def _memory(begin: float, size: int, allocated: int) -> dict[str, Any]:
    args = {"Total Reserved": 1 << 20, "Total Allocated": allocated, "Bytes": size, "Device Id": 0}
    args |= {"Device Type": 1, "Addr": 140000000}
    return {"ph": "i", "s": "t", "name": "[memory]", "pid": PID, "tid": MAIN, "ts": begin, "args": args}


_ALLREDUCE = {
    "Collective name": "allreduce", "dtype": "Float", "In msg nelems": 1000, "Out msg nelems": 1000,
    "Group size": 2, "Process Group Name": "0", "Process Group Description": "default_pg",
}  # fmt: skip
_SHAPES = {
    "Input Dims": [[2, 3, 8, 8], [4, 3, 3, 3], [], [], [], [], []],
    "Concrete Inputs": ["", "", "", "[1, 1]", "[0, 0]", "[1, 1]", "1"],
}


def _step(number: int, at: float) -> list[dict[str, Any]]:
    """One training step with every kind of event."""
    one, two, three, four, five = range(100 * number + 1, 100 * number + 6)
    compute = {"pid": 0, "device": 0, "stream": 7}
    communicate = {"pid": 0, "device": 0, "stream": 20, "correlation": four}
    backward = "autograd::engine::evaluate_function: ConvolutionBackward0"
    kernel = {"External id": one, "blocks per SM": 4.5, "est. achieved occupancy %": 75}
    return [
        _timed("user_annotation", f"ProfilerStep#{number}", MAIN, at, 1000.5, **{"External id": one - 1}),
        _timed("user_annotation", "enumerate(DataLoader)#_SingleProcess.__next__", MAIN, at + 1, 99.125),
        _timed("python_function", "train.py(10): step", MAIN, at + 100, 800, **{"Python id": 1}),
        _timed("user_annotation", "modelprof::forward", MAIN, at + 101, 300),
        _timed("cpu_op", "aten::conv2d", MAIN, at + 110, 200.25, **{"External id": one}, **_SHAPES),
        _timed("cuda_runtime", "cudaLaunchKernel", MAIN, at + 120, 10, correlation=one),
        _timed("kernel", "sm80_xmma_gemm_f16", 7, at + 140, 150, correlation=one, **compute, **kernel),
        _timed("cuda_runtime", "cudaMemcpyAsync", MAIN, at + 320, 9, correlation=two),
        _timed("gpu_memcpy", "Memcpy HtoD", 7, at + 330, 20, correlation=two, bytes=4096, **compute),
        _timed("gpu_memset", "Memset (Device)", 7, at + 351, 2, correlation=three, bytes=64, **compute),
        _timed("cpu_op", backward, BACKWARD, at + 420, 200),
        _timed("cpu_op", "c10d::allreduce_", BACKWARD, at + 430, 50, **{"External id": four}, **_ALLREDUCE),
        _timed("user_annotation", "nccl:all_reduce", BACKWARD, at + 435, 40),
        _timed("cuda_runtime", "cudaLaunchKernelExC", BACKWARD, at + 440, 10, correlation=four),
        _timed("kernel", "ncclDevKernel_AllReduce", 20, at + 460, 300.75, **communicate, **_ALLREDUCE),
        _timed("gpu_user_annotation", "nccl:all_reduce", 20, at + 460, 301, pid=0),
        _timed("user_annotation", "Optimizer.step#SGD.step", MAIN, at + 700, 100),
        _timed("cuda_runtime", "cudaDeviceSynchronize", MAIN, at + 810, 50, correlation=five),
        _timed("cuda_sync", "Context Sync", -1, at + 811, 40, pid=0),
        _timed("overhead", "Activity Buffer Request", 0, at + 900, 3, pid=-1),
        _memory(at + 115, 4096, 8192),
        _memory(at + 650, -4096, 4096),
        {"ph": "s", "id": one, "pid": PID, "tid": MAIN, "ts": at + 120, "cat": "ac2g", "name": "ac2g"},
    ]


def _new_trace() -> dict[str, Any]:
    names = [
        {"ph": "M", "name": "process_name", "ts": 0, "pid": PID, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "ts": 0, "pid": PID, "tid": MAIN, "args": {"name": "thread 101"}},
    ]
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA A100", "numSms": 108, "totalGlobalMem": 42297524224}],
        "distributedInfo": {"backend": "nccl", "rank": 1, "world_size": 2},
        "modelprof": {"rank": 1, "recorded_steps": [3, 4]},
        "baseTimeNanoseconds": 1_711_964_646_000_000_000,
        "traceEvents": [*names, *_step(3, 4458676388.125), *_step(4, 4458677388.75), *_step(5, 4458678400.5)],
        "WARNING": ["WARNING: 3 activity records were dropped"],
        "displayTimeUnit": "ms",
    }


def _old_trace() -> list[dict[str, Any]]:
    """As torch 1.9 wrote it: other categories, threads as text, time since 1970, only the list."""
    old = {
        "cpu_op": "Operator", "user_annotation": "Operator", "kernel": "Kernel", "gpu_memcpy": "Memcpy",
        "gpu_memset": "Memset", "cuda_runtime": "Runtime",
    }  # fmt: skip
    events = [*_step(1, 1623142623460111), *_step(2, 1623142623461200)]
    for event in events:
        event["cat"] = old.get(event.get("cat", ""), event.get("cat"))
        event["tid"] = f"stream {event['tid']}" if event["pid"] == 0 else str(event["tid"])
        args = event.get("args", {})
        args["external id"] = args.pop("External id", 0)
        if event["cat"] == "Operator":
            args["Call stack"] = "a.py(1): f;b.py(2): g"
    return events


def base_traces() -> list[bytes]:
    """Small valid traces in all supported forms."""
    new, old = _new_trace(), _old_trace()
    epoch = json.dumps({**new, "baseTimeNanoseconds": 0}).replace("44586", "17121954955")
    rocm = json.dumps(new).replace('"stream": 7', '"stream": "7"').replace("cudaLaunch", "hipLaunch")
    few = {**new, "traceEvents": new["traceEvents"][:12]}
    return [
        json.dumps(new).encode(),
        json.dumps(new, indent=2).encode(),
        json.dumps(new, separators=(",", ":")).encode(),
        epoch.encode(),
        rocm.encode(),
        json.dumps(old).encode(),
        json.dumps({"traceEvents": old}).encode(),
        json.dumps(few).encode(),
    ]


Mutation = Callable[[random.Random, bytes], bytes]


def _flip_bytes(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5, 50))):
        if changed:
            changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def _span(chance: random.Random, data: bytes) -> tuple[int, int]:
    begin = chance.randrange(len(data) + 1)
    return begin, min(len(data), begin + int(2 ** chance.uniform(0, 13)))


def _cut_span(chance: random.Random, data: bytes) -> bytes:
    begin, end = _span(chance, data)
    return data[:begin] + data[end:]


def _double_span(chance: random.Random, data: bytes) -> bytes:
    begin, end = _span(chance, data)
    at = chance.choice((begin, chance.randrange(len(data) + 1)))
    return data[:at] + data[begin:end] + data[at:]


def _cut_end(chance: random.Random, data: bytes) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _insert(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.choice(FRAGMENTS) + data[at:]


def _replace_token(chance: random.Random, data: bytes) -> bytes:
    """Replace the value after one of the colons."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        colon = data.find(b":", chance.randrange(len(data) + 1))
        if colon < 0:
            continue
        ends = [end for mark in (b",", b"}", b"]") if (end := data.find(mark, colon)) > 0]
        data = data[: colon + 1] + chance.choice(HOSTILE_TOKENS) + data[min(ends, default=len(data)) :]
    return data


def _decoded(data: bytes) -> tuple[Any, list[dict[str, Any]]]:
    """A valid JSON text and its events; none if invalid, or if not all events are objects."""
    try:
        document = json.loads(data)
        json.dumps(document)  # a number may have too many digits for that
    except (ValueError, RecursionError):
        return None, []
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        return None, []
    return document, events


def _change_values(chance: random.Random, data: bytes) -> bytes:
    """Well-formed JSON with values that are swapped, shuffled, missing or of other types."""
    document, events = _decoded(data)
    if not events:
        return _replace_token(chance, data)
    marks: dict[str, bytes] = {}
    share = chance.choice((0.02, 0.2, 1.0))
    field = chance.choice(("ts", "dur", "name", "cat", "pid", "tid", "ph", "args", "", "", ""))
    for event in events:
        if chance.random() > share:
            continue
        inside = event.get("args")
        owner = inside if isinstance(inside, dict) and inside and not field else event
        key = field or chance.choice(list(owner) or [""])
        action = chance.randrange(4)
        if action == 0:
            owner.pop(key, None)
        elif action == 1:
            mark = f"@{len(marks)}@"
            owner[key] = mark
            marks[f'"{mark}"'] = chance.choice(HOSTILE_TOKENS)
        elif action == 2:
            owner[key] = chance.choice(events).get(key)
        else:
            value = owner.get(key)
            is_number = isinstance(value, int | float)
            owner[key] = str(value) if is_number else chance.choice((0, 1e15, -5, 2**62, 0.25))
    if chance.random() < 0.2:
        chance.shuffle(events)
    if isinstance(document, dict) and chance.random() < 0.2:
        marks['"@metadata@"'] = chance.choice(HOSTILE_TOKENS)
        document[chance.choice(("modelprof", "distributedInfo", "baseTimeNanoseconds", "WARNING"))] = (
            "@metadata@"
        )
    changed = json.dumps(document).encode()
    for text, token in marks.items():
        changed = changed.replace(text.encode(), token)
    return changed


def _extreme_numbers(chance: random.Random, data: bytes) -> bytes:
    """Well-formed JSON with extreme numbers: equal stamps, equal ids, huge sizes."""
    document, events = _decoded(data)
    if not events:
        return _flip_bytes(chance, data)
    key = chance.choice(NUMBERS)
    values = (0, 1, -1, 2**31, 2**62, 2**63 - 1, -(2**63), 1e15, 3.9e15, -3.9e15, 0.001, [[2**62, 2**62]])
    fixed = chance.choice(values)
    for event in events:
        for owner in (event, event.get("args")):
            if isinstance(owner, dict) and key in owner:
                owner[key] = fixed if chance.random() < 0.8 else chance.choice(values)
    return json.dumps(document).encode()


MUTATIONS: tuple[Mutation, ...] = (
    _flip_bytes,
    _cut_span,
    _double_span,
    _cut_end,
    _insert,
    _replace_token,
    _replace_token,
    _change_values,
    _change_values,
    _extreme_numbers,
)


def damaged_trace(bases: list[bytes], seed: int, number: int) -> bytes:
    """One damaged file, plain or gzip-compressed, reproducible by seed and number."""
    chance = random.Random(f"{seed}/{number}")
    data = chance.choice(bases)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        data = chance.choice(MUTATIONS)(chance, data)
    if chance.random() < 0.1:
        data = gzip.compress(data, 1)
        data = chance.choice((_flip_bytes, _cut_span, _cut_end, _double_span))(chance, data)
    return data


def read_all(data: bytes, folder: Path) -> str:
    """Process a file completely; return its outcome: ``whole``, ``damaged`` or ``refused``.

    Args:
        data: of the file.
        folder: for gzip files, which are read from disk.
    """
    try:
        if data[:2] == b"\x1f\x8b":
            path = folder / "trace.json.gz"
            path.write_bytes(data)
            trace = read_trace(path)
        else:
            trace = parse_trace(data, "fuzz.json")
    except TraceError:
        return "refused"
    report = build_trace_report([TraceFacts(trace)])
    render_text(report)
    json.loads(render_json(report))
    return "damaged" if trace.damage or trace.num_dropped else "whole"


def _place(error: Exception) -> str:
    """The error, and this package's last line in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = [one for one in frames if "lightning_modelprof" in one.filename or one is frames[0]][-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {str(error)[:80]}"


def main() -> int:
    """Fuzz until the time is up; return 1 after a failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="number of the one trace to make again")
    parser.add_argument("--save", type=Path, default=Path(tempfile.gettempdir()) / "fuzzed_traces")
    options = parser.parse_args()
    warnings.simplefilter("error")  # an overflow warns, and its figure is wrong
    bases = base_traces()
    outcomes: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    end = time.monotonic() + options.seconds
    number = options.only or 0
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            data = damaged_trace(bases, options.seed, number)
            # A single bad event exceeds a small trace's limit, so raise the limit every other time.
            share = 0.01 if number % 2 else 1.0
            try:
                with patch.object(damaged, "_MAX_BAD_SHARE", share):
                    outcomes[read_all(data, Path(folder))] += 1
            except Exception as error:
                where = _place(error)
                failures[where] += 1
                if failures[where] == 1:
                    options.save.mkdir(parents=True, exist_ok=True)
                    path = options.save / f"{options.seed}_{number}.json"
                    path.write_bytes(data)
                    print(
                        f"FAILURE seed {options.seed} number {number}, saved as {path}: {where}", flush=True
                    )
                    traceback.print_exc()
            number += 1
            if options.only is not None:
                break
    print(f"{(outcomes + failures).total():,} traces: {dict(outcomes)}, {failures.total()} failures")
    for where, count in failures.most_common():
        print(f"  {count:6} {where}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
