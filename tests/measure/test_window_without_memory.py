"""If torch's profiler runs out of memory, training continues and no more windows are requested."""

from __future__ import annotations

import gc

import pytest
from torch.autograd import profiler as torch_profiler

from lightning_modelprof.measure.window.other_profilers import CLAIM
from lightning_modelprof.run.records import WindowStatus
from tests.support.fits import is_profiling, our_warnings, run_fit, steps_of, windows_of

pytestmark = pytest.mark.slow

CALLS = ("_prepare_profiler", "_enable_profiler", "_disable_profiler")


@pytest.fixture
def calls(monkeypatch):
    """Calls to torch's profiler; ``fails`` can make one fail."""
    made: list[str] = []
    fails: dict[str, tuple[BaseException, bool]] = {}
    monkeypatch.setattr(CLAIM, "is_broken", False)
    gc.collect()  # a profiler that failed earlier, with its error's traceback, looks like one that waits

    def watched(name):
        original = getattr(torch_profiler, name)

        def call(*args, **kwargs):
            made.append(name)
            error, after = fails.pop(name, (None, True))
            result = original(*args, **kwargs) if after else None
            if error is not None:
                raise error
            return result

        return call

    for name in CALLS:
        monkeypatch.setattr(torch_profiler, name, watched(name))
    yield made, fails
    if is_profiling():
        torch_profiler._disable_profiler()


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
@pytest.mark.parametrize("name", CALLS)
def test_no_window_after_memory_ran_out(tmp_path, calls, name, error, after):
    made, fails = calls
    fails[name] = error("std::bad_alloc"), after
    with our_warnings() as messages:
        callback = run_fit(tmp_path, active=2, repeat=3, wait=2, warmup=1)
    [message] = messages
    assert "memory ran out; no more windows are recorded" in message
    [window] = windows_of(callback)
    assert window.status is WindowStatus.REFUSED
    assert (callback.run.info.status, len(steps_of(callback))) == ("finished", 32)
    assert made.count("_prepare_profiler") == 1
    assert not is_profiling()
    assert not torch_profiler._is_profiler_enabled  # torch itself leaves it at True

    with our_warnings() as messages:
        later = run_fit(tmp_path / "later", active=2, repeat=3, wait=2, warmup=1)
    [message] = messages
    [window] = windows_of(later)
    assert window.note in message
    assert "ran out of memory earlier" in window.note
    assert made.count("_prepare_profiler") == 1


def test_other_torch_error_loses_one_window(tmp_path, calls):
    _, fails = calls
    fails["_prepare_profiler"] = RuntimeError("something else"), False
    with our_warnings() as messages:
        callback = run_fit(tmp_path, active=2, repeat=2, wait=2, warmup=1)
    [message] = messages
    assert "couldn't be prepared: something else" in message
    first, second = windows_of(callback)
    assert (first.status, second.status) == (WindowStatus.REFUSED, WindowStatus.COMPLETE)
