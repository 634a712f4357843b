"""Run programs in their own processes, forked from one that has imported torch and Lightning.

Those imports take longer than most of these programs. Otherwise a program runs and ends as in a new
interpreter.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]

# A program runs at the top level of this one, so that the interpreter handles its exit.
_SERVER: Final = """
import gc, json, os, random, sys, tempfile, types
import numpy, torch
import tests.support.fits

gc.collect()
gc.freeze()  # a collection in a fork would copy all the memory of what is imported

def serve():
    replies = os.dup(1)
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "wait" in request:
            status = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
            os.write(replies, f"{status}\\n".encode())
            continue
        child = os.fork()
        if child:
            os.write(replies, f"{child}\\n".encode())
            continue
        os.setsid()
        os.close(replies)
        for descriptor, path in enumerate((os.devnull, *request["outputs"])):
            opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.dup2(opened, descriptor)
            os.close(opened)
        return request
    os._exit(0)

request = serve()
os.chdir(request["cwd"])
os.environ.clear()
os.environ.update(request["env"])
tempfile.tempdir = None  # that of its own environment
random.seed()
numpy.random.seed()
sys.argv = request["argv"]
main = sys.modules["__main__"] = types.ModuleType("__main__")
main.__spec__ = None
if request["file"]:
    sys.path[0], main.__file__ = os.path.dirname(request["file"]), request["file"]
exec(compile(request["source"], request["file"] or "<string>", "exec"), main.__dict__)
"""


class Program:
    """A running program."""

    def __init__(self, server: subprocess.Popen[str], argv: Sequence[str], **request: Any) -> None:
        self.args = argv
        self._server = server
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        self.pid = self._ask(argv=argv, outputs=[str(path) for path in self._outputs], **request)

    def _ask(self, timeout_s: float = 60.0, **request: Any) -> int:
        requests, replies = _pipes(self._server)
        requests.write(json.dumps(request) + "\n")
        requests.flush()
        if not select.select([replies], [], [], timeout_s)[0]:
            raise TimeoutError
        return int(replies.readline())

    def wait(self, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Return its exit code and output; after the timeout, kill it with its children."""
        try:
            status = self._ask(timeout_s, wait=self.pid)
        except TimeoutError:
            os.killpg(self.pid, signal.SIGKILL)
            _pipes(self._server)[1].readline()
            raise subprocess.TimeoutExpired(list(self.args), timeout_s, *self._printed()) from None
        finally:
            printed = self._printed()
            self._folder.cleanup()
        return subprocess.CompletedProcess(list(self.args), status, *printed)

    def _printed(self) -> list[str]:
        return [path.read_text(errors="replace") if path.exists() else "" for path in self._outputs]


_SERVERS: Final[list[subprocess.Popen[str]]] = []


def start(
    source: str, *arguments: object, cwd: Path, env: Mapping[str, str] | None = None, file: Path | None = None
) -> Program:
    """Start a program like ``python -c SOURCE ARGUMENTS`` or, given its file, ``python FILE ARGUMENTS``."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **(env or {})}
    if not _SERVERS:
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        _SERVERS.append(server)
        atexit.register(_stop, os.getpid())
    name = str(file) if file else ""
    argv = [name or "-c", *map(str, arguments)]
    return Program(_SERVERS[0], argv, source=source, file=name, cwd=str(cwd), env=environment)


def _stop(owner: int) -> None:
    if os.getpid() == owner:  # not in a fork
        _SERVERS[0].kill()
        _SERVERS[0].wait()


def _pipes(server: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert server.stdin is not None
    assert server.stdout is not None
    return server.stdin, server.stdout
