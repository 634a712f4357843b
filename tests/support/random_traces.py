"""Random training traces: steps, nested ranges, graphs, several devices and streams, lost kernels.

Times are whole nanoseconds. Every event means what it shows, so a slow reference implementation can count it.
"""

from __future__ import annotations

import random
from typing import Any

PID, MAIN, OTHER = 100, 1, 2
KERNELS = (
    "sm80_xmma_gemm_f16",
    "void at::native::vectorized_elementwise_kernel<4>",
    "triton_poi_fused_add_0",
    "flash_fwd_kernel",
    "my_kernel",
)
COLLECTIVES = ("ncclDevKernel_AllReduce_Sum_f32(x)", "ncclDevKernel_Broadcast", "deep_ep::internode::combine")
COPIES = (
    "Memcpy HtoD (Pageable -> Device)",
    "Memcpy HtoD (Pinned -> Device)",
    "Memcpy DtoH (Device -> Pinned)",
)
LAUNCH = {"kernel": "cudaLaunchKernel", "memcpy": "cudaMemcpyAsync", "memset": "cudaMemsetAsync",
          "graph": "cudaGraphLaunch"}  # fmt: skip


class RandomTrace:
    """One random trace.

    Args:
        chance: random source.

    Attributes:
        events: of the file, in random order.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.events: list[dict[str, Any]] = []
        self._correlation = 0
        self._num_devices = chance.choice((1, 1, 2, 3))
        self._other_until = 0
        self._free: dict[tuple[int, int], int] = {}
        self._lost_share = chance.choice((0.0, 0.0, 0.1, 0.9))
        self._ahead_ns = chance.choice((2_000, 30_000, 200_000))
        number, at = chance.randrange(5), chance.randrange(1, 50_000)
        has_steps = chance.random() < 0.85
        for _ in range(chance.randrange(1, 6)):
            end = at + chance.randrange(20_000, 300_000)
            if has_steps:
                self._add("user_annotation", f"ProfilerStep#{number}", MAIN, at, end)
            self._inside(MAIN, at + 500, end - 500, depth=0)
            if chance.random() < 0.4:  # autograd's thread
                until = end + chance.randrange(-900, 5_000)
                self._inside(OTHER, max(at + 700, self._other_until), until, depth=1)
                self._other_until = until
            number += chance.choice((1, 1, 1, 1, 1, 3))
            at = end + chance.choice((0, 50, 900, 4_000, 3_000_000))
        if chance.random() < 0.3:  # after the steps
            self._launch(MAIN, at + 10, at + 3_000)
        chance.shuffle(self.events)

    def _add(self, cat: str, name: str, tid: int, begin: int, end: int, pid: int = PID, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": begin / 1000,
             "dur": (end - begin) / 1000, "args": args}
        )  # fmt: skip

    def _inside(self, tid: int, begin: int, end: int, depth: int) -> None:
        """Add ranges, operators and launches in sequence, some of them nested."""
        at = begin
        while at < end - 3_000:
            until = min(end, at + self.chance.randrange(2_000, 60_000))
            what = self.chance.random()
            if what < 0.35 or depth > 3:
                self._launch(tid, at, until)
            else:
                cat, name = self.chance.choice(
                    (("cpu_op", "aten::mm"), ("cpu_op", "aten::add"), ("user_annotation", "block"),
                     ("user_annotation", "## forward ##"))
                )  # fmt: skip
                self._add(cat, name, tid, at, until)
                self._inside(tid, at + 100, until - 100, depth + 1)
            at = until + self.chance.randrange(0, 9_000)

    def _launch(self, tid: int, at: int, until: int) -> None:
        """Add one runtime call and the work it starts."""
        kind = self.chance.choice(("kernel",) * 6 + ("memcpy", "memset", "graph"))
        end = self.chance.randrange(at + 300, until + 1)
        self._correlation += 1
        known = {"correlation": self._correlation}
        self._add("cuda_runtime", LAUNCH[kind], tid, at, end, **known)
        if kind == "kernel" and end > at + 20 and self.chance.random() < 0.1:  # the driver's call inside
            self._correlation += 1
            inner = {"correlation": self._correlation}
            self._add("cuda_driver", "cuLaunchKernel", tid, at + 10, end - 10, **inner)
            known = self.chance.choice((known, inner))
        if kind in ("kernel", "graph") and self.chance.random() < self._lost_share:
            return
        if self.chance.random() < 0.05:  # its launch is unknown
            known = self.chance.choice(({}, {"correlation": 90_000 + self._correlation}))
        device = self.chance.randrange(self._num_devices)
        if kind != "graph":
            self._work(kind, device, at, known)
            return
        for _ in range(self.chance.randrange(1, 9)):
            self._work("kernel", device, at, known)

    def _work(self, kind: str, device: int, launched: int, known: dict[str, int]) -> None:
        stream = self.chance.choice((7, 7, 7, 20))
        begin = launched + self.chance.randrange(200, self._ahead_ns)
        begin = max(begin, self._free.get((device, stream), 0) + self.chance.choice((0, 1, 1_000)))
        end = begin + self.chance.choice((0, 700, 3_000, 5_000, 5_001, 10_000, 40_000))
        self._free[device, stream] = end
        args: dict[str, Any] = {"device": device, "stream": stream, **known}
        if kind == "kernel":
            name = self.chance.choice(COLLECTIVES if stream == 20 else KERNELS)
            self._add("kernel", name, stream, begin, end, device, **args)
            return
        if self.chance.random() < 0.8:
            args["bytes"] = self.chance.randrange(1_000_000)
        name = self.chance.choice(COPIES) if kind == "memcpy" else "Memset (Device)"
        self._add(f"gpu_{kind}", name, stream, begin, end, device, **args)


def random_trace(number: int) -> list[dict[str, Any]]:
    """The events of the trace with this number."""
    return RandomTrace(random.Random(number)).events
