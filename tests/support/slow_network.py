"""A network with slow answers, and a page's requests over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_ASKED = """  // not what every page of a browser asks for
const [page] = performance.getEntriesByType("navigation");
const all = [page, ...performance.getEntriesByType("resource")]
  .filter(({ name }) => !name.endsWith("favicon.ico"));
return all.map(({ name, startTime, responseEnd }) => [name, startTime, responseEnd]);
"""


@contextmanager
def slow_network(browser: Any, latency_ms: float) -> Iterator[None]:
    """Delay each answer, until the end of the block."""

    def set_latency(latency: float) -> None:
        conditions = {"offline": False, "latency": latency, "downloadThroughput": -1, "uploadThroughput": -1}
        browser.execute_cdp_cmd("Network.emulateNetworkConditions", conditions)

    browser.execute_cdp_cmd("Network.enable", {})
    set_latency(latency_ms)
    try:
        yield
    finally:
        set_latency(0)


@dataclass(frozen=True)
class Asked:
    """Requests of a frame.

    Attributes:
        names: of all requests, in order, relative to the plugin's routes.
        depth: length of the longest chain of requests that each wait for the answer before.
        ended_ms: time of the last answer since the frame started to load.
    """

    names: tuple[str, ...]
    depth: int
    ended_ms: float


def first_view(browser: Any) -> Asked:
    """Requests of the browser's current frame since it was loaded."""
    asked = sorted(browser.execute_script(_ASKED), key=lambda one: one[1])
    depths: list[int] = []
    for _, begin, _ in asked:
        before = [depth for depth, (_, _, end) in zip(depths, asked, strict=False) if end <= begin]
        depths.append(1 + max(before, default=0))
    names = tuple(name.partition("?")[0].partition("/plugin/modelprof/")[2] or name for name, _, _ in asked)
    return Asked(names=names, depth=max(depths), ended_ms=max(end for _, _, end in asked))
