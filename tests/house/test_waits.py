"""Tests that every wait has a limit, as the training thread may reach any of them."""

from __future__ import annotations

import ast
from pathlib import Path

import lightning_modelprof

SOURCE = Path(lightning_modelprof.__file__).parent

WAITS = {"join", "wait", "acquire", "get", "recv", "communicate", "waitpid"}
"""Methods that wait without a limit if called without arguments."""

STARTS = {"Thread", "Timer", "ThreadPool", "ThreadPoolExecutor", "ProcessPoolExecutor"}
"""Classes whose ``start`` waits until a thread reports that it runs."""

ALLOWED = {
    "threads.py": {"threading.Thread(target=run, name=name, daemon=True)"},
    # A new lock that no other thread has yet.
    "measure/sampling/sampler.py": {"self._is_over.acquire()"},
    # A thread without other work, and processes that were killed or have closed their end of the pipe.
    "engine/helper.py": {"self._tasks.get()", "self._process.wait()", "process.wait()"},
    # Our own method, which waits for the helper.
    "engine/session.py": {"results.traces.wait()"},
    # Used by the command line only, not during training.
    "cli/run.py": {"running[0].wait()"},
    "reading_traces.py": {"self._process.wait()"},
}


def endless_waits(source: str) -> set[str]:
    calls = [one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.Call)]
    return {ast.unparse(one) for one in calls if _may_be_endless(one)}


def _may_be_endless(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    is_bare = isinstance(call.func, ast.Attribute) and not call.args and not call.keywords
    return name in STARTS or (name in WAITS and is_bare)


def test_only_unlimited_waits_are_found():
    endless = ["thread.join()", "event.wait()", "queue.get()", "lock.acquire()", "Timer(1, f)", "t.Thread(f)"]
    limited = ["thread.join(5)", "lock.acquire(timeout=1)", "', '.join(words)", "known.get(1)", "get()"]
    assert endless_waits("\n".join(endless + limited)) == set(endless)


def test_every_wait_has_a_limit():
    found = {str(path.relative_to(SOURCE)): endless_waits(path.read_text()) for path in SOURCE.rglob("*.py")}
    assert sum(map(len, found.values())) > 3
    assert {name: new for name, calls in found.items() if (new := calls - ALLOWED.get(name, set()))} == {}
