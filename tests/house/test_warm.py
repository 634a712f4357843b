"""Tests that programs forked from a warm process end like those in a new interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import warm
from tests.support.fits import run_script

pytestmark = pytest.mark.slow

PROGRAM = """
import atexit, os, signal, sys
atexit.register(print, "at exit")
print(__name__, sys.argv, os.getcwd(), os.environ["OWN"])
exec(sys.argv[1])
"""


@pytest.mark.parametrize("how", [{}, {"has_ours": False}, {"fresh": True}], ids=str)
@pytest.mark.parametrize(
    ("end", "status", "last", "error"),
    [
        ("pass", 0, "at exit", ""),
        ("sys.exit(7)", 7, "at exit", ""),
        ("raise OSError('of the program')", 1, "at exit", "OSError: of the program"),
        ("sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)", -9, None, ""),
    ],
    ids=["end", "exit", "error", "killed"],
)
def test_forked_program_ends_like_started_one(tmp_path, how, end, status, last, error):
    done = run_script(PROGRAM, end, cwd=tmp_path, env={"OWN": "value"}, **how)
    first = f"__main__ {['-c', end]} {tmp_path} value"
    assert done.returncode == status
    assert done.stdout.splitlines() == [first] + [last] * (last is not None)
    assert done.stderr.rstrip().split("\n")[-1] == error


def test_program_that_does_not_end_times_out(tmp_path):
    with pytest.raises(subprocess.TimeoutExpired):
        run_script("import time\nprint('begun', flush=True)\ntime.sleep(600)", cwd=tmp_path, timeout=1)
    assert run_script("print('the next one')", cwd=tmp_path).stdout == "the next one\n"


@pytest.mark.parametrize("has_ours", [True, False])
def test_program_finds_imports(tmp_path, has_ours):
    source = "import sys\nprint(*(name in sys.modules for name in sys.argv[1:]))"
    done = run_script(source, "lightning.pytorch", "lightning_modelprof", cwd=tmp_path, has_ours=has_ours)
    assert done.stdout == f"True {has_ours}\n"


SPAWNS = """
import atexit, json, multiprocessing, os, sys
from tests.support.warm import spawn_from_here

def tell(queue, number):
    atexit.register(print, "at exit", flush=True)
    queue.put([number, getattr(json, "known", None), __name__, os.getppid()])
    if number == 7:
        sys.exit(5)

if __name__ == "__main__":
    json.known = "imported"
    if sys.argv[1] == "warm":
        spawn_from_here()
    json.known = "changed later"
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    for number in (3, 7):
        child = context.Process(target=tell, args=(queue, number))
        child.start()
        *told, parent = queue.get()
        child.join(60)
        print(*told, parent == os.getpid(), child.exitcode, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="who has lost its parent is adopted on Linux")
@pytest.mark.parametrize(("how", "known"), [("warm", "imported"), ("fresh", "None")])
def test_spawned_processes_find_imports(tmp_path, how, known):
    """Run in a child that keeps only the imports and exits like an interpreter."""
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS)
    done = warm.start(SPAWNS, how, cwd=tmp_path, file=script).wait(120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "at exit",
        f"3 {known} __mp_main__ True 0",
        "at exit",
        f"7 {known} __mp_main__ True 5",
    ]
