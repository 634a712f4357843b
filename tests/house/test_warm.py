"""Tests that programs forked from a warm process end like those in a new interpreter."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.fits import run_script

pytestmark = pytest.mark.slow

PROGRAM = """
import atexit, os, signal, sys
atexit.register(print, "at exit")
print(__name__, sys.argv, os.getcwd(), os.environ["OWN"])
exec(sys.argv[1])
"""


@pytest.mark.parametrize("fresh", [False, True])
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
def test_forked_program_ends_like_started_one(tmp_path, fresh, end, status, last, error):
    done = run_script(PROGRAM, end, cwd=tmp_path, env={"OWN": "value"}, fresh=fresh)
    first = f"__main__ {['-c', end]} {tmp_path} value"
    assert done.returncode == status
    assert done.stdout.splitlines() == [first] + [last] * (last is not None)
    assert done.stderr.rstrip().split("\n")[-1] == error


def test_program_that_does_not_end_times_out(tmp_path):
    with pytest.raises(subprocess.TimeoutExpired):
        run_script("import time\nprint('begun', flush=True)\ntime.sleep(600)", cwd=tmp_path, timeout=1)
    assert run_script("print('the next one')", cwd=tmp_path).stdout == "the next one\n"
