"""Settings and fixtures for all tests."""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from lightning.fabric.utilities import registry

from lightning_modelprof.engine import budget, plan, process_loops, results, traces
from lightning_modelprof.engine.helper import Helper
from lightning_modelprof.engine.process_loops import PROCESS_LOOPS
from lightning_modelprof.engine.session import Session
from lightning_modelprof.lightning.trainer_loop import TrainerLoop
from lightning_modelprof.measure.setup.source_file import SourceFile
from tests.support.chromium import start_chromium

OURS = "lightning_modelprof"

MOST_FITS = 60
"""Most Trainer loops that plain ``pytest`` may measure. Tests that can use a stored run need none."""

# No deadline: on a busy machine, the time per example means nothing.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Tests start about a hundred interpreters that import the package. Bytecode lets only the first compile it.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# On a busy machine, threads that wait for each other make small models many times slower.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="the slow tests, too")


def is_plain(config):
    asked = {str(config.rootpath / path) for path in config.args}
    some = config.option.all or config.option.markexpr or config.option.keyword
    return not some and asked <= {str(config.rootpath / path) for path in config.getini("testpaths")}


FITS = Counter()
"""Number of measured fits per test file."""


@pytest.fixture(autouse=True, scope="session")
def _count_fits():
    begin = Session.__init__

    def counted(self, config, loop, **others):
        if isinstance(loop, TrainerLoop):
            FITS[os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]] += 1
        begin(self, config, loop, **others)

    Session.__init__ = counted


def pytest_sessionfinish(session):
    if is_plain(session.config) and FITS.total() > MOST_FITS:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if is_plain(config) and FITS.total() > MOST_FITS:
        most = ", ".join(f"{number} in {name}" for name, number in FITS.most_common(5))
        terminalreporter.line(
            f"{FITS.total()} loops of a Trainer are measured in plain pytest, and may be {MOST_FITS} at most:"
            f" {most}. Read a stored run, or mark the file slow.",
            red=True,
        )


def pytest_collection_modifyitems(config, items):
    """Keep plain ``pytest`` below three minutes. A file named by its path always runs."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")
    if is_plain(config):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.fixture(autouse=True, scope="module")
def _quick_collections():
    """Limit garbage collection to objects of the file's own tests, excluding imported modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _warnings_are_errors(request, caplog):
    """Fail the test if the profiler logs a message.

    With warnings as errors, our warnings become log lines so that training continues.
    """
    yield
    if request.node.get_closest_marker("logs_warnings") is None:
        said = [one.getMessage() for one in caplog.get_records("call") if one.name.startswith(OURS)]
        assert said == []


# Fits in tests are short. Unless a test is about short fits, measure them as closely as longer ones.
_SHORT = {
    (module, name): getattr(module, name)
    for module, name in (
        (process_loops, "SHORT_FIT"),
        (process_loops, "SHORT_EVALUATION"),
        (budget, "LEAST_NS"),
        (results, "REPORT_AFTER_NS"),
        (plan, "SKIPPED_SHARE"),
        (plan, "SHORT_LOOP"),
    )
}
process_loops.SHORT_FIT = process_loops.SHORT_EVALUATION = 0
budget.LEAST_NS = 10**18
results.REPORT_AFTER_NS = 0
plan.SKIPPED_SHARE, plan.SHORT_LOOP = math.inf, 0


# Every fit reads its test file, which is much longer than most training scripts.
_read_file = SourceFile.read


@lru_cache(maxsize=8)
def _read_once(path, state):
    return _read_file(path)


def _read(path):
    state = None
    with suppress(OSError, ValueError):
        info = Path(path).stat()
        state = info.st_mode, info.st_size, info.st_mtime_ns
    return _read_once(path, state)


SourceFile.read = staticmethod(_read)


# Every Trainer searches all installed packages for callbacks.
registry.entry_points = lru_cache(registry.entry_points)


@pytest.fixture(autouse=True)
def _a_process_of_its_own(request, monkeypatch):
    """Isolate tests from each other: loops in one process share state.

    The helper's work runs synchronously in this process, where tests can reach it immediately.
    """
    if request.node.get_closest_marker("short") is not None:
        for (module, name), value in _SHORT.items():
            monkeypatch.setattr(module, name, value)
    if request.node.get_closest_marker("helper") is None:
        monkeypatch.setattr(traces, "make_helper", Helper)
    PROCESS_LOOPS.forget()
    yield
    PROCESS_LOOPS.forget()


@pytest.fixture(autouse=True)
def _seeds_of_one_test_are_no_other_tests():
    """Remove the seed variables that ``seed_everything`` sets for later Trainers and workers."""
    yield
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def _ctrl_c_interrupts():
    """Restore Ctrl-C, which is ignored after an interrupted fit and in a shell's background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def browser():
    """One Chromium for all page tests."""
    driver = start_chromium()
    yield driver
    driver.quit()
