"""The rows of a Chrome trace, exactly as Kineto writes them for torch 2.13 (``output_json.cpp``)."""

from __future__ import annotations

BASE_NS = 1790857026000000000
"""Kineto subtracts this from all timestamps. It changes every three months, so they are about 10^12 us."""

BEGIN_NS = 4318281830690189
MAIN_THREAD, BACKWARD_THREAD, PID = 10050, 10121, 10050
DEVICE, COMPUTE_STREAM, COMMUNICATION_STREAM = 0, 7, 20
Track = tuple[int | str, int | str]

HEADER_EVENTS = 14
"""Events in :func:`header`."""


def microseconds(time_ns: int) -> str:
    """Format a time in Kineto's format, without loss."""
    return f"{time_ns // 1000}.{time_ns % 1000:03}"


def ids(number: int, index: int) -> str:
    """Return Kineto's fields for an annotation."""
    return f'"External id": {number},"Record function id": 0, "Ev Idx": {index}'


def timed_row(category: str, name: str, track: Track, span_ns: tuple[int, int], args: str) -> str:
    """Format an event on a (pid, tid), with its start and duration."""
    (pid, tid), (begin_ns, duration_ns) = track, span_ns
    return (
        f'\n  {{\n    "ph": "X",\n    "cat": "{category}",\n    "name": "{name}",\n    "pid": {pid},\n'
        f'    "tid": {tid},\n    "ts": {microseconds(begin_ns)},\n'
        f'    "dur": {microseconds(duration_ns)}\n    ,\n    "args": {{\n      {args}\n    }}\n  }},'
    )


def flow_row(kind: str, number: int | None, track: Track, time_ns: int, name: str) -> str:
    """Format one end of an arrow: its start (s) or its finish (f)."""
    pid, tid = track
    binding = ', "bp": "e"' if kind == "f" else ""
    return (
        f'\n  {{\n    "ph": "{kind}",\n    "id": {number},\n    "pid": {pid},\n    "tid": {tid},\n'
        f'    "ts": {microseconds(time_ns)},\n    "cat": "{name}",\n    "name": "{name}"\n'
        f"    {binding}\n  }},"
    )


def memory_row(track: Track, time_ns: int, args: str) -> str:
    """Format an allocation or a release."""
    pid, tid = track
    return (
        f'\n  {{\n    "ph": "i",\n    \n    "cat": "cpu_instant_event",\n    "s": "t",\n'
        f'    "name": "[memory]",\n    "pid": {pid},\n    "tid": {tid},\n    "ts": {microseconds(time_ns)}\n'
        f'    ,\n    "args": {{\n      {args}\n    }}\n  }},'
    )


def metadata_row(name: str, pid: int | str, tid: int | str, arg: str) -> str:
    """Format a process's or thread's name, or its position in viewers."""
    return (
        f'\n  {{\n    "ph": "M",\n    "name": "{name}",\n    "ts": {microseconds(BEGIN_NS - 97_000)},\n'
        f'    "pid": {pid},\n    "tid": {tid},\n    "args": {{\n      {arg}\n    }}\n  }},'
    )


def mark_row(name: str, pid: str, tid: str, time_ns: int) -> str:
    """Format a trace-wide instant; it has no trailing comma, because it can be the last row."""
    return (
        f'\n  {{\n    "ph": "i",\n    \n    "s": "g",\n    "name": "{name}",\n    "pid": {pid},\n'
        f'    "tid": {tid},\n    "ts": {microseconds(time_ns)}\n    \n  }}'
    )


def header(rank: int, world_size: int) -> str:
    """Return the text before the first measured event."""
    processes = ((PID, "CPU", PID), (DEVICE, "GPU 0", 5_000_000))
    threads = (
        (PID, MAIN_THREAD, f"thread {MAIN_THREAD} (python)", MAIN_THREAD),
        (PID, BACKWARD_THREAD, f"thread {BACKWARD_THREAD} (pt_autograd_0)", BACKWARD_THREAD),
        (DEVICE, COMPUTE_STREAM, f"stream {COMPUTE_STREAM} ", COMPUTE_STREAM),
        (DEVICE, COMMUNICATION_STREAM, f"stream {COMMUNICATION_STREAM} ", COMMUNICATION_STREAM),
    )
    rows = [
        row
        for pid, label, order in processes
        for row in (
            metadata_row("process_name", pid, 0, '"name": "python"'),
            metadata_row("process_labels", pid, 0, f'"labels": "{label}"'),
            metadata_row("process_sort_index", pid, 0, f'"sort_index": {order}'),
        )
    ]
    for pid, tid, name, order in threads:
        rows.append(metadata_row("thread_name", pid, tid, f'"name": "{name}"'))
        rows.append(metadata_row("thread_sort_index", pid, tid, f'"sort_index": {order}'))
    assert len(rows) == HEADER_EVENTS
    ranks = list(range(world_size))
    distributed = (
        f'{{"backend": "nccl", "rank": {rank}, "world_size": {world_size}, "pg_count": 1, "pg_config":'
        f' [{{"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl",'
        f' "pg_size": {world_size}, "ranks": {ranks}}}], "nccl_version": "2.27.5"}}'
    )
    return (
        f' {{\n    "schemaVersion": 1,\n    "deviceProperties": [{_DEVICE_PROPERTIES}],\n    '
        f'\n      "trace_id": "845F151AF8E44E32BD23447C7D84EF92",\n      "profile_memory": 1,'
        f'\n      "record_shapes": 1,\n      "distributedInfo": {distributed},\n      "host_name": "node0",'
        f'\n    "displayTimeUnit": "ms",\n    "baseTimeNanoseconds": {BASE_NS},\n    "traceEvents": [\n    '
        + "".join(rows)
    )


_DEVICE_PROPERTIES = """
    {
      "id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85094825984,
      "computeMajor": 8, "computeMinor": 0,
      "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048,
      "regsPerBlock": 65536, "warpSize": 32,
      "sharedMemPerBlock": 49152, "numSms": 108
    , "regsPerMultiprocessor": 65536, "sharedMemPerBlockOptin": 166912, "sharedMemPerMultiprocessor": 167936
    }"""
