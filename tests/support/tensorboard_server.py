"""A real TensorBoard in its own process, for dashboard tests."""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

_URL = re.compile(r"http://localhost:\d+/")
_PATIENCE_S = 90
"""For the start and for reading files, on a busy test machine."""


class Server:
    """Access to a running TensorBoard."""

    def __init__(self, url: str) -> None:
        self.url = url

    def raw(self, path: str, **arguments: object) -> tuple[int, str, bytes]:
        """Status, media type and body of an answer."""
        query = urllib.parse.urlencode(arguments)
        request = f"{self.url}data/{path}" + (f"?{query}" if query else "")
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
                return answer.status, answer.headers["Content-Type"], answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers["Content-Type"], error.read()

    def ask(self, route: str, **arguments: object) -> dict:
        """A successful JSON answer of the dashboard's routes."""
        status, media_type, body = self.raw(f"plugin/modelprof/{route}", **arguments)
        assert (status, media_type) == (200, "application/json"), body
        return json.loads(body)

    def problem(self, route: str, **arguments: object) -> str:
        """The sentence that explains a missing answer."""
        status, media_type, body = self.raw(f"plugin/modelprof/{route}", **arguments)
        assert (status, media_type) == (404, "application/json"), body
        return json.loads(body)["error"]

    def columns(self, **arguments: object) -> bytes:
        status, media_type, body = self.raw("plugin/modelprof/columns", **arguments)
        assert (status, media_type) == (200, "application/octet-stream"), body
        return body

    def active(self) -> set[str]:
        """Names of the active tabs."""
        listing = json.loads(self.raw("plugins_listing")[2])
        return {name for name, plugin in listing.items() if plugin["enabled"]}

    def wait_for(self, *runs: str) -> Server:
        """Wait until TensorBoard, which answers before, has read these runs' profiles."""
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            known = {run["name"]: run["profiles"] for run in self.ask("profiles")["runs"]}
            if all(known.get(run) for run in runs):
                return self
            time.sleep(0.05)
        raise AssertionError(f"TensorBoard has not read {runs}")


@contextmanager
def tensorboard(logdir: object, *arguments: str, is_fast: bool = True) -> Iterator[Server]:
    """Run TensorBoard on a free local port until the end of the block."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", "0"]
    command += ["--reload_interval", "1", f"--load_fast={str(is_fast).lower()}", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ)
    )
    lines: queue.Queue[str] = queue.Queue()
    assert process.stdout is not None
    threading.Thread(target=lambda: [lines.put(line) for line in process.stdout or ()], daemon=True).start()
    said = []
    try:
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                said.append(lines.get(timeout=max(0.1, until - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"TensorBoard did not start: {''.join(said)}") from None
            if found := _URL.search(said[-1]):
                break
        yield Server(found.group())
    finally:
        process.terminate()
        process.wait(timeout=30)
