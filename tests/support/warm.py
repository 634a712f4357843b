"""Run programs in their own processes, forked from one that has imported torch and Lightning.

Those imports take longer than most of these programs. Otherwise a program runs and ends as in a new
interpreter, except for what it would notice while importing them.

There are two processes to fork from: one has also imported this package, and its parent hasn't. With
``spawn_from_here``, processes that a program starts by ``spawn`` don't import it all again.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import IO, Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]

# A program runs at the top level of this one, so that the interpreter handles its exit.
_SERVER: Final = """
import gc
gc.disable()  # while all that is imported stays
import json, os, random, sys, tempfile, types
import numpy, torch
import lightning.pytorch

gc.collect()
gc.freeze()  # a collection in a fork would copy all the memory of what is imported
requests, replies = map(int, sys.argv[1:])
if os.fork():
    os.close(requests)
    os.close(replies)
    requests, replies = os.dup(0), os.dup(1)
else:
    import tests.support.fits
    gc.collect()
    gc.freeze()

def serve():
    for line in os.fdopen(requests):
        request = json.loads(line)
        if "wait" in request:
            status = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
            os.write(replies, f"{status}\\n".encode())
            continue
        if os.fork():
            continue
        os.setsid()
        for descriptor, path in enumerate(request["files"]):
            opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOCTTY, 0o600)
            os.dup2(opened, descriptor)
            os.close(opened)
        os.write(replies, f"{os.getpid()}\\n".encode())
        os.close(replies)
        return request
    os._exit(0)

request = serve()
os.chdir(request["cwd"])
os.environ.clear()
os.environ.update(request["env"])
gc.enable()
tempfile.tempdir = None  # that of its own environment
random.seed()
numpy.random.seed()
sys.stdout.reconfigure(line_buffering=os.isatty(1))
sys.argv = request["argv"]
main = sys.modules["__main__"] = types.ModuleType("__main__")
main.__spec__ = None
if request["file"]:
    sys.path[0], main.__file__ = os.path.dirname(request["file"]), request["file"]
exec(compile(request["source"], request["file"] or "<string>", "exec"), main.__dict__)
"""


class Program:
    """A running program."""

    def __init__(self, server: _Server, argv: Sequence[str], terminal: str | None, **request: Any) -> None:
        self.args = argv
        self._server = server
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        files = [terminal] * 3 if terminal else [os.devnull, *map(str, self._outputs)]
        self.pid = server.ask(argv=argv, files=files, **request)

    def wait(self, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Return its exit code and output; after the timeout, kill it with its children."""
        try:
            status = self._server.ask(timeout_s, wait=self.pid)
        except TimeoutError:
            os.killpg(self.pid, signal.SIGKILL)
            self._server.replies.readline()
            raise subprocess.TimeoutExpired(list(self.args), timeout_s, *self._printed()) from None
        finally:
            printed = self._printed()
            self._folder.cleanup()
        return subprocess.CompletedProcess(list(self.args), status, *printed)

    def _printed(self) -> list[str]:
        return [path.read_text(errors="replace") if path.exists() else "" for path in self._outputs]


class _Server:
    """A process that forks programs."""

    def __init__(self, requests: IO[str], replies: IO[str]) -> None:
        self.requests, self.replies = requests, replies

    def ask(self, timeout_s: float = 60.0, **request: Any) -> int:
        self.requests.write(json.dumps(request) + "\n")
        self.requests.flush()
        if not select.select([self.replies], [], [], timeout_s)[0]:
            raise TimeoutError
        return int(self.replies.readline())


_SERVERS: Final[dict[bool, _Server]] = {}
"""Keys: whether this package is imported there."""


def start(
    source: str,
    *arguments: object,
    cwd: Path,
    env: Mapping[str, str | None] | None = None,
    file: Path | None = None,
    terminal: str | None = None,
    has_ours: bool = True,
) -> Program:
    """Start a program like ``python -c SOURCE ARGUMENTS`` or, given its file, ``python FILE ARGUMENTS``.

    Args:
        env: variables in addition to this process's; ``None`` removes one.
        terminal: where it reads and writes, instead of in files.
        has_ours: whether this package is already imported, too.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    wanted = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **(env or {})}
    environment = {name: value for name, value in wanted.items() if value is not None}
    if not _SERVERS:
        _start_servers(environment)
    name = str(file) if file else ""
    argv = [name or "-c", *map(str, arguments)]
    server = _SERVERS[has_ours]
    return Program(server, argv, terminal, source=source, file=name, cwd=str(cwd), env=environment)


def _start_servers(environment: Mapping[str, str]) -> None:
    (requests, asks), (tells, replies) = os.pipe(), os.pipe()
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(requests), str(replies)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(requests, replies),
        start_new_session=True,
    )
    os.close(requests)
    os.close(replies)
    assert server.stdin is not None
    assert server.stdout is not None
    _SERVERS[False] = _Server(server.stdin, server.stdout)
    _SERVERS[True] = _Server(os.fdopen(asks, "w"), os.fdopen(tells))
    atexit.register(_stop, os.getpid(), server)


def _stop(owner: int, server: subprocess.Popen[str]) -> None:
    if os.getpid() == owner:  # and no fork of it
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(60)
        for one in _SERVERS.values():
            one.requests.close()
            one.replies.close()


# What a program itself starts

_SUBREAPER: Final = 36
"""PR_SET_CHILD_SUBREAPER of Linux: orphans become children of the process that sets it."""


def spawn_from_here() -> None:
    """Let processes that ``spawn`` or loky starts reuse this program's imports.

    They are forked from a process that is forked here and does nothing else, so they contain
    nothing else of this one. Call it at the top of a program, before anything else; there they also end.
    """
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    if not os.fork():
        ours.close()
        _run_as_main(_serve_spawned(theirs))
        sys.exit()
    theirs.close()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    launch_fresh = util.spawnv_passfds

    def launch(command: Sequence[str | bytes], passed: Iterable[int], env: Any = None) -> int:
        words, numbers = list(map(os.fsdecode, command)), sorted(map(int, passed))
        request = {"command": words, "numbers": numbers, "env": {**os.environ, **(env or {})}}
        data = json.dumps(request).encode()
        ours.sendall(len(data).to_bytes(4, "big"))
        socket.send_fds(ours, [data[:1]], numbers)
        ours.sendall(data[1:])
        return int.from_bytes(ours.recv(4, socket.MSG_WAITALL), "big")

    def launch_spawned(path: bytes, command: Sequence[str | bytes], passed: Iterable[int]) -> int:
        is_worker = command[-1] in ("--multiprocessing-fork", b"--multiprocessing-fork")
        return launch(command, passed) if is_worker else launch_fresh(path, command, passed)

    util.spawnv_passfds = launch_spawned
    with suppress(ImportError):
        from joblib.externals.loky.backend import fork_exec  # noqa: PLC0415

        fork_exec.fork_exec = launch


def _serve_spawned(requests: socket.socket) -> list[str]:
    """Fork a process per request, and return the command in it."""
    while size := requests.recv(4, socket.MSG_WAITALL):
        first, descriptors, *_ = socket.recv_fds(requests, 1, 64)
        rest = requests.recv(int.from_bytes(size, "big") - 1, socket.MSG_WAITALL)
        request = json.loads(first + rest)
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            child = os.fork()
            if child:
                os.write(writing, child.to_bytes(4, "big"))
                os._exit(0)  # its child becomes one of the program
            requests.close()
            os.close(reading)
            os.close(writing)
            above = max(request["numbers"], default=2) + 1
            kept = [fcntl.fcntl(one, fcntl.F_DUPFD, above) for one in descriptors]
            for one in descriptors:
                os.close(one)
            for one, number in zip(kept, request["numbers"], strict=True):
                os.dup2(one, number)
                os.close(one)
            os.environ.clear()
            os.environ.update(request["env"])
            return list(request["command"])
        os.waitpid(between, 0)
        requests.sendall(os.read(reading, 4))
        for one in (*descriptors, reading, writing):
            os.close(one)
    os._exit(0)


def _run_as_main(command: list[str]) -> None:
    """Run ``-c SOURCE ...`` or ``-m MODULE ...`` like the interpreter."""
    at = next(place for place, word in enumerate(command) if word in ("-c", "-m"))
    option, what, *arguments = command[at:]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__spec__ = None
    sys.argv = [option, *arguments]
    if option == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), main.__dict__)
