"""Writes a trace of any size in torch.profiler's format, and describes its contents.

    python benchmarks/generate_trace.py /tmp/big.pt.trace.json --mb 1000
    python benchmarks/generate_trace.py /tmp/big.pt.trace.json.gz --mb 50 --seed 7

The trace shows distributed training of a transformer on one GPU. Its steps contain data loading, a forward
pass on the main thread, a backward pass on autograd's thread, all-reduces on their own stream, an optimizer
and a wait for the loss. The layout matches torch 2.13 character by character, with recorded shapes and
memory. Operators come first, then memory, then runtime calls and device work (these as in Kineto's source).
The same seed gives the same bytes. The generator counts its output and prints the counts as JSON, for
checking a reader. It streams, so its memory use doesn't grow with the file size.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from generated_model import (
    BLOCKS,
    BUCKET_BLOCKS,
    FETCH,
    ITEM,
    LOSS,
    OPTIMIZER_STEP,
    TO_DEVICE,
    ZERO_GRAD,
    Allocation,
    Launch,
    Op,
    Work,
    all_reduce,
    forward_pass,
)
from kineto_json import (
    BACKWARD_THREAD,
    BASE_NS,
    BEGIN_NS,
    COMMUNICATION_STREAM,
    COMPUTE_STREAM,
    DEVICE,
    HEADER_EVENTS,
    MAIN_THREAD,
    PID,
    flow_row,
    header,
    ids,
    mark_row,
    memory_row,
    metadata_row,
    timed_row,
)

FIRST_STEP = 10
"""Number of the file's first step."""


@dataclass(slots=True)
class Truth:
    """Contents of a generated trace.

    Attributes:
        num_bytes: size of the uncompressed JSON.
        num_events: all entries of ``traceEvents``.
        num_timed_events: those with a duration.
        num_steps: complete steps.
        step_ns: length of every step.
        begin_ns, end_ns: first start and last end of a timed event, since 1970.
        events, total_ns: by category.
        by_name: calls and total nanoseconds by category and name.
        device_busy_ns: length of the union of all device work.
        copied_bytes, set_bytes: of all copies and sets.
        num_allocations, allocated_bytes, released_bytes: totals of device and CPU.
        num_collectives: communication kernels.
        flows: flow events by name.
    """

    num_bytes: int = 0
    num_events: int = 0
    num_timed_events: int = 0
    num_steps: int = 0
    step_ns: list[int] = field(default_factory=list)
    begin_ns: int = 0
    end_ns: int = 0
    events: dict[str, int] = field(default_factory=dict)
    total_ns: dict[str, int] = field(default_factory=dict)
    by_name: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    device_busy_ns: int = 0
    copied_bytes: int = 0
    set_bytes: int = 0
    num_allocations: int = 0
    allocated_bytes: int = 0
    released_bytes: int = 0
    num_collectives: int = 0
    flows: dict[str, int] = field(default_factory=dict)

    def count(self, category: str, name: str, begin_ns: int, duration_ns: int) -> None:
        self.events[category] = self.events.get(category, 0) + 1
        self.total_ns[category] = self.total_ns.get(category, 0) + duration_ns
        tally = self.by_name.setdefault(category, {}).setdefault(name, [0, 0])
        tally[0] += 1
        tally[1] += duration_ns
        self.begin_ns = min(self.begin_ns or begin_ns, begin_ns)
        self.end_ns = max(self.end_ns, begin_ns + duration_ns)

    def count_flows(self, name: str, number: int) -> None:
        self.flows[name] = self.flows.get(name, 0) + number


def generate_trace(
    path: str | Path, num_bytes: int, *, seed: int = 0, rank: int = 0, world_size: int = 2
) -> Truth:
    """Write whole steps until the JSON has at least ``num_bytes`` and one step.

    Args:
        path: the file; compressed if its name ends in ``.gz``.
        num_bytes: size of the uncompressed JSON.
        seed: for all durations.
        rank: of the process.
        world_size: number of processes.
    """
    path = Path(path)
    truth = Truth()
    training = _Training(truth, random.Random(seed), world_size)
    # In the file, operators, memory and device work follow each other, but each step produces all three.
    with _open(path) as file, _spool(path) as memory, _spool(path) as device:
        written = _write(file, header(rank, world_size))
        while not truth.num_steps or written < num_bytes:
            training.step()
            written += _write(file, "".join(training.host_rows))
            written += _write(memory, "".join(training.memory_rows))
            written += _write(device, "".join(training.device_rows))
        for spool in (memory, device):
            spool.seek(0)
            shutil.copyfileobj(spool, file, 2**20)
        written += _write(file, training.footer())
    truth.num_bytes = written
    truth.num_timed_events = sum(truth.events.values())
    truth.num_events = (
        truth.num_timed_events + sum(truth.flows.values()) + truth.num_allocations + training.num_other_events
    )
    truth.begin_ns += BASE_NS
    truth.end_ns += BASE_NS
    return truth


class _Training:
    """Generates one step at a time. The rows are those of the latest step."""

    def __init__(self, truth: Truth, rng: random.Random, world_size: int) -> None:
        self.truth = truth
        self.random = rng.random
        self.host_rows: list[str] = []
        self.memory_rows: list[str] = []
        self.device_rows: list[str] = []
        self.num_other_events = HEADER_EVENTS
        self.blocks = tuple(forward_pass())
        self.reduction = all_reduce(world_size)
        self.now_ns = BEGIN_NS
        self.stream_free_ns = {COMPUTE_STREAM: 0, COMMUNICATION_STREAM: 0}
        self.busy: list[tuple[int, int]] = []
        self.pending: list[tuple[tuple[Op, ...], int]] = []
        self.external_id = 0
        self.event_index = 0
        self.correlation = 1000
        self.sequence = 100
        self.allocated = {True: 2**30, False: 2**20}

    def step(self) -> None:
        """Generate one training step, from fetching its data to waiting for the loss."""
        self.host_rows, self.memory_rows, self.device_rows, self.busy = [], [], [], []
        name = f"ProfilerStep#{FIRST_STEP + self.truth.num_steps}"
        begin_ns = self.now_ns
        place, number = len(self.host_rows), self._next_id()
        self.host_rows.append("")  # its length isn't known yet
        index = self._next_index()
        now_ns = self._run_all((FETCH, *TO_DEVICE, ZERO_GRAD), begin_ns + 2_000, MAIN_THREAD)
        now_ns = self._run_all(self.blocks, now_ns, MAIN_THREAD)
        now_ns = self._run_all(LOSS, now_ns, MAIN_THREAD)
        now_ns = self._backward(now_ns + 15_000)
        now_ns = self._run_all((OPTIMIZER_STEP, ITEM), now_ns + 20_000, MAIN_THREAD)
        self.host_rows[place] = timed_row(
            "user_annotation", name, (PID, MAIN_THREAD), (begin_ns, now_ns - begin_ns), ids(number, index)
        )
        self.truth.count("user_annotation", name, begin_ns, now_ns - begin_ns)
        first_ns, last_ns = min(self.busy)[0], max(end for _, end in self.busy)
        self._annotate_device(name, COMPUTE_STREAM, first_ns, last_ns, number)
        self.truth.step_ns.append(now_ns - begin_ns)
        self.truth.num_steps += 1
        self.truth.device_busy_ns += _union_ns(self.busy)
        self.now_ns = now_ns + 3_000 + int(self.random() * 2_000)

    def footer(self) -> str:
        """Return the text after the last measured event."""
        begin_ns, end_ns = BEGIN_NS - 96_044, self.now_ns
        self.truth.count("Trace", "PyTorch Profiler (0)", begin_ns, end_ns - begin_ns)
        self.num_other_events += 3
        span = timed_row(
            *("Trace", "PyTorch Profiler (0)", ('"Spans"', '"PyTorch Profiler"')),
            *((begin_ns, end_ns - begin_ns), '"Op count": 0'),
        )
        sort = metadata_row("process_sort_index", '"Spans"', "0", '"sort_index": 536870912')
        start = mark_row(
            "Iteration Start: PyTorch Profiler", '"Traces"', '"Trace PyTorch Profiler"', begin_ns
        )
        end = mark_row("Record Window End", '""', '""', end_ns + 40_000)
        return f'{span}{sort}{start},{end}\n  ],"traceName": "generated.pt.trace.json" }}'

    def _backward(self, now_ns: int) -> int:
        """Run the nodes that autograd recorded, last first, with a reduction after each bucket."""
        per_bucket = -(-len(self.pending) * BUCKET_BLOCKS // BLOCKS)
        for number, (operators, sequence) in enumerate(reversed(self.pending), 1):
            now_ns = self._run(operators[0], now_ns, BACKWARD_THREAD, sequence=sequence)
            now_ns = self._run_all(operators[1:], now_ns, BACKWARD_THREAD)
            if number % per_bucket == 0 or number == len(self.pending):
                now_ns = self._run(self.reduction, now_ns, BACKWARD_THREAD)
        self.pending.clear()
        return now_ns

    def _run_all(self, operators: tuple[Op, ...], now_ns: int, thread: int) -> int:
        for operator in operators:
            now_ns = self._run(operator, now_ns, thread) + 500 + int(self.random() * 1_500)
        return now_ns

    def _run(
        self, operator: Op, begin_ns: int, thread: int, sequence: int | None = None, is_inner: bool = False
    ) -> int:
        """Write an operator and its contents; returns its end.

        Args:
            operator: the operator.
            begin_ns: its start.
            thread: its thread.
            sequence: of the forward operator, for a graph node that autograd runs.
            is_inner: whether it's the node itself, where the arrow from the forward operator ends.
        """
        number, index, place = self._next_id(), self._next_index(), len(self.host_rows)
        self.host_rows.append("")
        args = '"Record function id": 0'
        if sequence is not None:
            args = f'"Record function id": 0, "Sequence number": {sequence}, "Fwd thread id": 1'
        elif operator.backward:
            self.sequence += 1
            args = f'"Sequence number": {self.sequence}, "Fwd thread id": 0, "Record function id": 0'
            self.pending.append((operator.backward, self.sequence))
        if operator.backward or is_inner:
            kind, flow = ("f", sequence) if is_inner else ("s", self.sequence)
            self.host_rows.append(flow_row(kind, flow, (PID, thread), begin_ns, "fwdbwd"))
            self.truth.count_flows("fwdbwd", 1)
        now_ns = begin_ns + 400 + int(self.random() * 1_600)
        for part in operator.parts:
            if isinstance(part, Op):
                is_node = sequence is not None and not is_inner
                now_ns = self._run(part, now_ns, thread, sequence if is_node else None, is_inner=is_node)
            elif isinstance(part, Launch):
                now_ns = self._launch(part, now_ns, thread, number)
            else:
                self._allocate(part, now_ns, thread)
            now_ns += 200 + int(self.random() * 800)
        duration_ns = now_ns - begin_ns
        inputs = f"{operator.inputs}, " if operator.inputs else ""
        self.host_rows[place] = timed_row(
            *(operator.category, operator.name, (PID, thread), (begin_ns, duration_ns)),
            f'"External id": {number},{args}, {inputs}"Ev Idx": {index}',
        )
        self.truth.count(operator.category, operator.name, begin_ns, duration_ns)
        return now_ns

    def _launch(self, launch: Launch, begin_ns: int, thread: int, number: int) -> int:
        """Write a runtime call and the work it starts; returns the call's end."""
        self.correlation += 1
        correlation = self.correlation
        end_ns = begin_ns + 2_500 + int(self.random() * 4_000)
        if launch.work is None:  # waits for everything on the device
            end_ns = max(end_ns, *self.stream_free_ns.values()) + 1_500
        self.device_rows.append(
            timed_row(
                *(launch.category, launch.name, (PID, thread), (begin_ns, end_ns - begin_ns)),
                f'"External id": {number},      "cbid": {launch.cbid}, "correlation": {correlation}',
            )
        )
        self.truth.count(launch.category, launch.name, begin_ns, end_ns - begin_ns)
        if launch.work is not None:
            self.device_rows.append(flow_row("s", correlation, (PID, thread), begin_ns, "ac2g"))
            self._work(launch.work, end_ns, correlation, number)
            self.truth.count_flows("ac2g", 2)
        return end_ns

    def _work(self, work: Work, launched_ns: int, correlation: int, number: int) -> None:
        """Write device work, which starts after all earlier work on its stream."""
        stream = work.stream
        begin_ns = max(launched_ns + 1_000, self.stream_free_ns[stream] + 600) + int(self.random() * 500)
        duration_ns = int(work.about_ns * (0.9 + 0.2 * self.random()))
        self.stream_free_ns[stream] = begin_ns + duration_ns
        self.busy.append((begin_ns, begin_ns + duration_ns))
        queued = '"queued": 0, ' if work.category == "kernel" else ""
        place = (
            f'{queued}"device": {DEVICE}, "context": 1,      "stream": {stream}, "correlation": {correlation}'
        )
        rest = work.args
        if work.size_bytes:
            rest = (
                f',      "bytes": {work.size_bytes},'
                f' "memory bandwidth (GB/s)": {work.size_bytes / duration_ns}{rest}'
            )
        self.device_rows.append(
            timed_row(
                *(work.category, work.name, (DEVICE, stream), (begin_ns, duration_ns)),
                f'"External id": {number},      {place}{rest}',
            )
        )
        self.device_rows.append(flow_row("f", correlation, (DEVICE, stream), begin_ns, "ac2g"))
        self.truth.count(work.category, work.name, begin_ns, duration_ns)
        if work.category == "gpu_memcpy":
            self.truth.copied_bytes += work.size_bytes
        elif work.category == "gpu_memset":
            self.truth.set_bytes += work.size_bytes
        elif stream == COMMUNICATION_STREAM:
            self.truth.num_collectives += 1
            self._annotate_device("nccl:all_reduce", stream, begin_ns, begin_ns + duration_ns, number)

    def _annotate_device(self, name: str, stream: int, begin_ns: int, end_ns: int, number: int) -> None:
        """Write an annotation's copy on the device, which Kineto starts 1 ns early and ends 1 ns late."""
        begin_ns, duration_ns = begin_ns - 1, end_ns - begin_ns + 2
        self.device_rows.append(
            timed_row(
                *("gpu_user_annotation", name, (DEVICE, stream), (begin_ns, duration_ns)),
                f'"External id": {number}',
            )
        )
        self.truth.count("gpu_user_annotation", name, begin_ns, duration_ns)

    def _allocate(self, allocation: Allocation, now_ns: int, thread: int) -> None:
        size_bytes, on_device = allocation.size_bytes, allocation.on_device
        self.allocated[on_device] += size_bytes
        reserved, device, kind = (2**34, DEVICE, 1) if on_device else (0, -1, 0)
        address = 140_000_000_000_000 + (self.event_index % 4096) * 2**21
        args = (
            f'"Total Reserved": {reserved}, "Total Allocated": {self.allocated[on_device]},'
            f' "Bytes": {size_bytes}, "Device Id": {device}, "Device Type": {kind}, "Addr": {address},'
            f' "finished": false, "Ev Idx": {self._next_index()}'
        )
        self.memory_rows.append(memory_row((PID, thread), now_ns, args))
        self.truth.num_allocations += 1
        if size_bytes > 0:
            self.truth.allocated_bytes += size_bytes
        else:
            self.truth.released_bytes -= size_bytes

    def _next_id(self) -> int:
        self.external_id += 1
        return self.external_id

    def _next_index(self) -> int:
        self.event_index += 1
        return self.event_index - 1


def _union_ns(intervals: list[tuple[int, int]]) -> int:
    total, reached = 0, 0
    for begin, end in sorted(intervals):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _write(file: IO[bytes], text: str) -> int:
    return file.write(text.encode())


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    if path.suffix == ".gz":
        with gzip.open(path, "wb", compresslevel=1) as file:
            yield file  # type: ignore[misc]
    else:
        with path.open("wb") as file:
            yield file


@contextmanager
def _spool(path: Path) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile(dir=path.parent) as file:
        yield file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("path", type=Path, help="the file to write; compressed if it ends in .gz")
    parser.add_argument("--mb", type=float, default=50.0, help="megabytes of JSON (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the durations (default: 0)")
    parser.add_argument("--rank", type=int, default=0, help="rank in distributedInfo (default: 0)")
    options = parser.parse_args()
    truth = generate_trace(options.path, int(options.mb * 1e6), seed=options.seed, rank=options.rank)
    print(json.dumps({**asdict(truth), "step_ns": sum(truth.step_ns)}, indent=1))


if __name__ == "__main__":
    main()
