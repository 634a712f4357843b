"""Training survives any other torch profiler around, during or before our windows."""

from __future__ import annotations

import json

import pytest

from lightning_modelprof.measure.window import other_profilers
from lightning_modelprof.measure.window.other_profilers import ProfilerWatch
from tests.support.fits import run_script

pytestmark = pytest.mark.slow

# torch can crash the process when two profilers meet, so each case runs in a process forked from one that has
# done the imports.
CASES = """
import json, os, sys
from contextlib import nullcontext
from pathlib import Path
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PyTorchProfiler
from torch.autograd.profiler import emit_itt, profile as autograd_profile
from torch.profiler import profile, schedule
from tests.support.fits import *

class Within(Callback):
    # From the beginning of one batch to that of another; several in one batch where the two are the same.
    def __init__(self, make, begin, end):
        self.make, self.begin, self.end = make, begin, end
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == self.begin:
            self.profiler = self.make()
            self.profiler.__enter__()
        if batch_idx == self.end:
            self.profiler.__exit__(None, None, None)
            if isinstance(self.profiler, profile):
                self.names = [event.name for event in self.profiler.events()]
            del self.profiler

class Stepping(Callback):
    def __init__(self, profiler):
        self.profiler = profiler
    def on_train_batch_end(self, *args):
        self.profiler.step()

class Own(PyTorchProfiler):
    pass

def scheduled(wait, warmup, active, repeat=1):
    traces = []
    made = profile(
        schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=repeat),
        on_trace_ready=lambda one: traces.append(len(one.events())),
    )
    made.traces = traces
    return made

def within(make, begin, end):
    return lambda: (nullcontext(), Within(make, begin, end), {})

def around(make, steps=False):
    def case():
        made = make()
        return made, Stepping(made) if steps else Callback(), {}
    return case

def of_lightning(make):
    return lambda: (nullcontext(), Callback(), {"profiler": make()})

# Ours: wait 0 to 1, warm-up 2 to 4, active 5 to 7, then the same again from step 8 on.
KINDS = {"torch": profile, "autograd": autograd_profile, "itt": emit_itt}
CASES = {}
for kind, make in KINDS.items():
    CASES[f"{kind} around"] = around(make)
    CASES[f"{kind} over before"] = within(make, 0, 1)
    CASES[f"{kind} within the warm-up"] = within(make, 3, 4)
    CASES[f"{kind} within one step of the warm-up"] = within(make, 4, 4)
    CASES[f"{kind} within one step of the window"] = within(make, 6, 6)
    CASES[f"{kind} from the window on"] = within(make, 6, 12)
    CASES[f"{kind} from one window to the next"] = within(make, 7, 14)
CASES["scheduled around"] = around(lambda: scheduled(1, 5, 3), steps=True)
CASES["scheduled around, waiting first"] = around(lambda: scheduled(6, 1, 9), steps=True)
CASES["scheduled around, warming up first"] = around(lambda: scheduled(0, 6, 3), steps=True)
CASES["Lightning's"] = of_lightning(lambda: "pytorch")
CASES["Lightning's, its subclass"] = of_lightning(lambda: Own(filename="theirs", dirpath="."))

def run(name):
    os.mkdir(name)
    os.chdir(name)
    theirs, callback, trainer = CASES[name]()
    with our_warnings() as messages, theirs:
        ours = run_fit(
            Path("."), others=[callback], trainer=trainer,
            wait=2, warmup=3, active=3, repeat=2, data=loader(40),
        )
    result = dict(
        windows=[[window.status.value, list(window.recorded_steps)] for window in windows_of(ours)],
        steps=len(steps_of(ours)),
        messages=messages,
        notes=ours.report.notes,
        is_profiling=is_profiling(),
        traces=getattr(theirs, "traces", None),
        ours_in_theirs=[name for name in getattr(callback, "names", ()) if name.startswith("modelprof: ")],
        is_restored=torch.autograd.profiler._prepare_profiler is torch._C._autograd._prepare_profiler,
    )
    Path("result.json").write_text(json.dumps(result))

for name in CASES:
    child = os.fork()
    if child == 0:
        try:
            run(name)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0 if Path("result.json").exists() else 3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    Path(name, "code").write_text(str(code))
"""

KINDS = ("torch", "autograd", "itt")
STATUSES = {
    "around": ["refused", "refused"],
    "over before": ["complete", "complete"],
    "within the warm-up": ["refused", "complete"],
    "within one step of the warm-up": ["refused", "complete"],
    "within one step of the window": ["refused", "complete"],
    "from the window on": ["refused", "refused"],
    "from one window to the next": ["refused", "refused"],
}
EXPECTED = {f"{kind} {when}": statuses for kind in KINDS for when, statuses in STATUSES.items()}
EXPECTED |= {
    "scheduled around": ["refused", "complete"],
    "scheduled around, waiting first": ["refused", "refused"],
    "scheduled around, warming up first": ["refused", "complete"],
    "Lightning's": [],
    "Lightning's, its subclass": [],
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("others")
    result = run_script(CASES, cwd=folder, timeout=300)
    found = {}
    for name in EXPECTED:
        path = folder / name / "result.json"
        code = folder / name / "code"
        found[name] = json.loads(path.read_text()) if path.exists() else result.stderr[-3000:]
        if code.exists() and int(code.read_text()):
            found[name] = f"exit code {code.read_text()}\n{result.stderr[-3000:]}"
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_training_survives_another_torch_profiler(outcomes, name):
    outcome = outcomes[name]
    assert isinstance(outcome, dict), outcome
    assert [status for status, _ in outcome["windows"]] == EXPECTED[name]
    assert all(steps for status, steps in outcome["windows"] if status == "complete")
    assert outcome["steps"] == 20
    assert not outcome["is_profiling"]
    assert outcome["is_restored"], "what is watched is left as it was"
    assert outcome["ours_in_theirs"] == [], "torch crashes on ranges that are open as one profiler takes over"
    has_said = "refused" in EXPECTED[name] or not EXPECTED[name]
    assert len(outcome["messages"]) == has_said, outcome["messages"]
    if not EXPECTED[name]:
        assert "already uses torch.profiler and a process can run only one" in outcome["messages"][0]
        assert any(
            "already uses torch.profiler and a process can run only one" in note for note in outcome["notes"]
        )
    elif has_said:
        assert "another torch profiler" in outcome["messages"][0]
    if outcome["traces"] is not None:
        assert len(outcome["traces"]) == 1
        assert outcome["traces"][0] > 20, "theirs has what it recorded"


def test_all_objects_are_searched_until_no_profiler_waits(monkeypatch):
    looks, answers = [], [True, False]
    monkeypatch.setattr(
        other_profilers, "_is_one_waiting", lambda: looks.append(None) or answers[len(looks) - 1]
    )
    watch = ProfilerWatch()
    watch.begin()
    try:
        assert [watch.is_one_waiting() for _ in range(4)] == [True, False, False, False]
        assert len(looks) == 2
        watch._on_prepare()
        assert watch.is_one_waiting()
    finally:
        watch.end()
