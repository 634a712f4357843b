"""Tests that training is unchanged if any of our hooks, actions or outputs fails with any kind of error.

The truth is training without the callback, with its state recorded after every batch. Training with a fault
must have the same states, and get equally far unless the user interrupts it.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.profilers import SimpleProfiler
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_modelprof.engine import outputs, session, step_times, trace_work, windows
from lightning_modelprof.engine.inspection import Inspection
from lightning_modelprof.engine.live_figures import LiveFigures
from lightning_modelprof.engine.memory import LoopMemory
from lightning_modelprof.engine.outputs import Outputs
from lightning_modelprof.engine.results import Results
from lightning_modelprof.engine.session import Session
from lightning_modelprof.inspect.core.counter import FlopCounter
from lightning_modelprof.inspect.lines.sites import SiteWatch
from lightning_modelprof.inspect.modules.module_times import ModuleTimer
from lightning_modelprof.lightning import callback as hooks
from lightning_modelprof.lightning import classify, in_validation, session_keeper, trainer_loop
from lightning_modelprof.lightning import classify as evaluation
from lightning_modelprof.lightning.phases import PhaseProfiler
from lightning_modelprof.measure.resources.memory import MemoryCurve
from lightning_modelprof.measure.sampling import sampler
from lightning_modelprof.measure.sampling.sampler import Sampler
from lightning_modelprof.measure.sampling.stack_probe import StackProbe
from lightning_modelprof.measure.steps import actions
from lightning_modelprof.measure.steps.batch_sizes import SampleCounter
from lightning_modelprof.measure.steps.ledger import PhaseLedger
from lightning_modelprof.measure.steps.validation_parts import ValidationParts
from lightning_modelprof.measure.window.capture import Capture
from lightning_modelprof.measure.window.torch_profiler import TraceRanges
from lightning_modelprof.run.archive import load_run
from tests.lightning.test_bit_identity import assert_same
from tests.support.fits import (
    Net,
    fit_quietly,
    is_profiling,
    loader,
    make_callback,
    make_trainer,
    our_warnings,
)

pytestmark = pytest.mark.slow

NUM_STEPS = 10
WINDOW = (5, 7)
"""Before it, step 1 is counted and modules are timed in steps 2, 3 and 4."""
EVERYTHING = {
    "steps": WINDOW,
    "flops": True,
    "peak_flops_per_s": 1e12,  # measuring this machine's peak is slow
    **dict.fromkeys(("sampling", "terminal", "tensorboard"), True),
}


class Fault(Exception):
    """Error raised inside the package."""


def fault() -> BaseException:
    return Fault("broken by a test")


def disk_full() -> BaseException:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


ERRORS: dict[str, Callable[[], BaseException]] = {
    "error": fault,
    "disk full": disk_full,
    "memory": MemoryError,
    "recursion": lambda: RecursionError("maximum recursion depth exceeded"),
    "ctrl-c": KeyboardInterrupt,
}

INTERNAL = "an internal error stopped the profiler"
OUTPUT = "couldn't write"


@dataclass(frozen=True)
class Place:
    """Where an error is raised, and its visible effects.

    Attributes:
        owner: class or module whose function ``name`` fails.
        call: call that fails, starting at 1.
        always: whether every later call fails too.
        warnings: number of our warnings.
        message: part of each warning.
        steps: steps in the archive; ``None`` if nothing was measured or written.
        status: status in the archive.
        arguments: arguments of the callback.
        errors: kinds of errors to raise.
        raises: error that the user's module raises in batch 8.
    """

    owner: Any
    name: str
    call: int = 1
    always: bool = False
    warnings: int = 1
    message: str = INTERNAL
    steps: int | None = NUM_STEPS
    status: str = "aborted"
    arguments: dict[str, Any] = field(default_factory=dict)
    errors: tuple[str, ...] = ("error",)
    raises: type[BaseException] | None = None


class Noisy(Net):
    """Uses every random generator in every step, and can fail."""

    def __init__(self, raises: type[BaseException] | None = None) -> None:
        super().__init__(dropout=0.5)
        self.raises = raises

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.raises is not None and batch_idx == 8:
            raise self.raises("of the user")
        loss = super().training_step(batch, batch_idx)
        noise = random.random() + float(np.random.rand())
        self.log("noise", noise)
        return loss * (1 + noise)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(batch[0]) + torch.rand(())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def random_states() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}


def state_of(trainer: Any, module: Any) -> dict[str, Any]:
    """Copy of the complete training state."""
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "gradients": [None if p.grad is None else p.grad.clone() for p in module.parameters()],
        "optimizers": [
            {
                index: {name: value.clone() for name, value in entry.items()}
                for index, entry in optimizer.state_dict()["state"].items()
            }
            for optimizer in trainer.optimizers
        ],
        "metrics": {name: value.clone() for name, value in trainer.callback_metrics.items()},
        "step": trainer.global_step,
        **random_states(),
    }


class States(Callback):
    """Stores the state after every batch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.seen.append(state_of(trainer, pl_module))


@dataclass
class Outcome:
    """Result of a training."""

    states: list[dict[str, Any]]
    error: BaseException | None
    scalars: dict[str, list[tuple[int, float]]]


class Scalars(TensorBoardLogger):
    """Stores the user's metrics, but not ours."""

    def __init__(self, folder: Any) -> None:
        super().__init__(folder, name="", version="")
        self.users: dict[str, list[tuple[int, float]]] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        for name, value in metrics.items():
            if not name.startswith("modelprof/"):
                self.users.setdefault(name, []).append((step or 0, float(value)))


def train(
    folder: Any,
    *callbacks: Any,
    raises: type[BaseException] | None = None,
    make_module: Any = None,
    data: Any = None,
) -> Outcome:
    """Fit with a fixed seed and check that we leave nothing behind; return the outcome."""
    seed_everything(11, verbose=False)
    module, states = make_module() if make_module else Noisy(raises), States()
    logger = Scalars(folder)
    trainer = make_trainer(
        folder,
        *callbacks,
        states,
        TQDMProgressBar(),
        logger=logger,
        num_sanity_val_steps=0,
        val_check_interval=5,
        enable_progress_bar=True,
        log_every_n_steps=2,
    )
    profiler, wanted, hooked = trainer.profiler, list(trainer.callbacks), attributes(module)
    interval, masks = sys.getswitchinterval(), umask()
    error: BaseException | None = None
    try:
        fit_quietly(trainer, module, data or loader(2 * NUM_STEPS), loader(4))
    except BaseException as caught:  # Ctrl-C ends in SystemExit
        error = caught
    states.seen.append(state_of(trainer, module))
    assert trainer.profiler is profiler
    assert trainer.callbacks == wanted
    assert attributes(module) == hooked
    assert "get_metrics" not in vars(trainer.progress_bar_callback)
    assert (sys.getswitchinterval(), umask()) == (interval, masks)
    nothing_stays()
    return Outcome(states.seen, error, logger.users)


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def attributes(module: Any) -> list[Any]:
    """Overridden methods and hook counts of every module."""
    counted = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
    )
    return [
        (sorted(set(vars(one)) & {"forward", "training_step"}), [len(getattr(one, name)) for name in counted])
        for one in module.modules()
    ]


def nothing_stays() -> None:
    """Check that nothing of ours still runs in the process."""
    assert not is_profiling()
    assert _get_current_dispatch_mode_stack() == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("modelprof")]
    assert (sys.getprofile(), threading.getprofile()) == (None, None)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: Any) -> Callable[[Any], Outcome]:
    """Outcome of a fit without the callback, per error that the user raises."""
    outcomes: dict[Any, Outcome] = {}

    def get(raises: Any) -> Outcome:
        if raises not in outcomes:
            outcomes[raises] = train(tmp_path_factory.mktemp("without"), raises=raises)
        return outcomes[raises]

    return get


@pytest.fixture(autouse=True)
def left_clean() -> Any:
    """Restore Ctrl-C, which Lightning ignores after the first, and keep a failure from spreading."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)
    sampler._pause_all()
    if is_profiling():
        torch.autograd._disable_profiler()


class Broken:
    """Makes a function fail at a given call, and counts the failures."""

    def __init__(self, monkeypatch: Any, place: Place, error: str) -> None:
        self.failures = 0
        original, calls = getattr(place.owner, place.name), 0

        def function(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == place.call or (place.always and calls > place.call):
                self.failures += 1
                raise ERRORS[error]()
            return original(*args, **kwargs)

        monkeypatch.setattr(place.owner, place.name, function)


ALL = ("error", "disk full", "memory", "recursion")
TWO = ("error", "ctrl-c")
TIMING_ONLY = {"flops": False, "steps": None, "active": 0}
"""All steps except the first are clean, so there are figures to log."""

PLACES = {
    # setup, after the arguments have been checked
    "setup: session": Place(Session, "__init__", steps=None, errors=ALL),
    "setup: delegate": Place(trainer_loop, "make_delegate", steps=None),
    "setup: device clock": Place(step_times, "device_clock", steps=None),
    "setup: counter": Place(session_keeper, "make_counter", steps=None),
    # on_train_start
    "on_train_start": Place(Session, "arm", steps=None, errors=(*ALL, "ctrl-c")),
    "on_train_start: training's setup": Place(session, "read_setup", steps=None),
    "on_train_start: first save": Place(Results, "save", steps=0),
    "on_train_start: sampling": Place(session, "Sampling", steps=0),
    # on_train_batch_start
    "on_train_batch_start: samples": Place(
        SampleCounter, "__call__", message="The report won't have", status="finished", errors=ALL
    ),
    "on_train_batch_start: inspection": Place(Inspection, "begin_batch", steps=1),
    "on_train_batch_start: timing": Place(Inspection, "begin_batch", 3, steps=3),
    # on_before_backward, on_train_batch_end
    "on_before_backward": Place(Inspection, "before_backward", steps=1),
    "on_before_backward: timing": Place(Inspection, "before_backward", 2, steps=2),
    "on_train_batch_end": Place(Inspection, "end_batch", steps=1, errors=ALL),
    "on_train_batch_end: timing": Place(ModuleTimer, "disarm", 1, steps=2),
    # on_train_epoch_end, on_train_end
    "on_train_epoch_end": Place(hooks, "check_epoch", errors=ALL),
    "on_train_end: stop": Place(Session, "stop", errors=TWO),
    "on_train_end: training's setup": Place(session, "finish_setup"),
    "on_train_end: finish": Place(Session, "finish", errors=(*ALL, "ctrl-c")),
    "on_train_end: analysis": Place(trace_work, "Facts", 2),
    # on_exception and teardown
    "on_exception: note": Place(LoopMemory, "on_exception", raises=ValueError, steps=8),
    "on_exception: stop": Place(Session, "stop", raises=ValueError, steps=8, errors=ALL),
    "on_exception: report": Place(Results, "_make_report", raises=ValueError, steps=8),
    "on_exception: close": Place(Session, "close", 2, raises=ValueError, steps=8, status="failed"),
    "teardown": Place(Session, "close", 2, status="finished", errors=ALL),
    # The delegate: actions and their effects
    "action: name": Place(classify.Classifier, "_make", 12, steps=0),
    "action: fetch begins": Place(actions.FetchAction, "__enter__", 4, steps=2, errors=TWO),
    "action: fetch ends": Place(actions.FetchAction, "__exit__", 4, steps=3),
    "action: batch ends": Place(actions.BatchEndAction, "__exit__", 3, steps=2),
    "action: epoch begins": Place(actions.EpochAction, "__enter__", steps=0),
    "action: epoch ends": Place(actions.EpochAction, "__exit__", steps=9),
    "action: validation begins": Place(in_validation.ValidationStartAction, "__enter__", steps=4),
    "action: validation ends": Place(PhaseLedger, "leave_validation", steps=4),
    "action: part of validation begins": Place(in_validation.PartAction, "__enter__", steps=4, errors=TWO),
    "action: part of validation ends": Place(in_validation.PartAction, "__exit__", 2, steps=4),
    "action: batch of validation ends": Place(in_validation.BatchEndPartAction, "__exit__", 2, steps=4),
    "action: end of validation begins": Place(in_validation.PartBeginAction, "__enter__", steps=4),
    "parts of validation": Place(ValidationParts, "begin", 5, steps=4),
    "parts of validation, saved": Place(ValidationParts, "times", 2, steps=7),
    "step ends": Place(PhaseLedger, "end_step", 3, steps=2, errors=ALL),
    "a step's boundary": Place(Session, "_on_boundary", 3, steps=2, errors=(*ALL, "ctrl-c")),
    "table": Place(PhaseProfiler, "choose_table", 4, steps=4),
    # Ranges of phases in a window
    "range opens": Place(TraceRanges, "push", 3, steps=5, errors=ALL),
    "range closes": Place(TraceRanges, "pop", 3, steps=5),
    "range of a step": Place(TraceRanges, "open", 1, steps=5),
    # Windows
    "window opens": Place(Capture, "_prepare", steps=4, errors=TWO),
    "window starts": Place(Capture, "_start", steps=5),
    "window closes": Place(Capture, "_close", steps=7, errors=(*ALL, "ctrl-c")),
    "window: cpu times": Place(Capture, "_noted", steps=7, errors=TWO),
    "window: export": Place(torch.profiler.profile, "export_chrome_trace", steps=7, errors=TWO),
    "window: path": Place(windows.Windows, "raw_path", steps=7),
    "window: trace is read": Place(
        trace_work, "parse_trace", message="couldn't be analyzed", status="finished"
    ),
    "window: trace is read, interrupted": Place(trace_work, "parse_trace", steps=7, errors=("ctrl-c",)),
    # Threads, memory and the inspection at boundaries
    "sampling: stack": Place(StackProbe, "look", warnings=0, status="finished", errors=ALL),
    "sampling: memory": Place(MemoryCurve, "look", warnings=0, status="finished"),
    "sampling: pause": Place(Sampler, "pause", steps=4),
    "memory without a thread": Place(MemoryCurve, "look", arguments={"sampling": False}, steps=0),
    "counting begins": Place(FlopCounter, "__enter__", warnings=0, status="finished"),
    "counting sees": Place(FlopCounter, "_count", 5, warnings=0, status="finished", errors=ALL),
    "lines are watched": Place(SiteWatch, "_spot", 5, warnings=0, status="finished"),
    "timing begins": Place(ModuleTimer, "arm", warnings=0, status="finished"),
    "inspection ends": Place(Inspection, "end_step", steps=2, errors=TWO),
    "live figures": Place(LiveFigures, "flush", 2, steps=4),
    # Outputs
    "report.json": Place(outputs, "render_json", message=OUTPUT, status="finished", always=True),
    "report.html": Place(outputs, "render_html", message=OUTPUT, status="finished", always=True),
    "report.txt": Place(outputs, "render_text", message=OUTPUT, status="finished", always=True),
    "run.json": Place(
        outputs, "save_run", 2, message=OUTPUT, status="running", steps=0, always=True, errors=ALL
    ),
    "trace": Place(outputs, "pack", message=OUTPUT, status="finished", errors=ALL),
    "TensorBoard: text": Place(outputs, "write_report", message=OUTPUT, status="finished", errors=ALL),
    "TensorBoard: layout": Place(
        outputs, "write_layout", message=OUTPUT, status="finished", arguments=TIMING_ONLY
    ),
    "TensorBoard: dashboard": Place(outputs, "write_summary", message=OUTPUT, status="finished", always=True),
    "dashboard": Place(trace_work, "profile_summary", message=OUTPUT, status="finished", always=True),
    "scalars": Place(Outputs, "log_scalars", steps=2, arguments=TIMING_ONLY, errors=("error", "disk full")),
    "terminal": Place(outputs, "print_report", message=OUTPUT, status="finished", errors=TWO),
}

CELLS = [
    pytest.param(place, error, id=f"{name}-{error}")
    for name, place in PLACES.items()
    for error in place.errors
]


@pytest.mark.parametrize(("place", "error"), CELLS)
def test_fault_does_not_change_fit(
    tmp_path: Any, monkeypatch: Any, truth: Any, place: Place, error: str
) -> None:
    monkeypatch.setattr(sampler, "MIN_INTERVAL_NS", 2_000_000)  # as the fit is short
    callback = make_callback(
        tmp_path,
        **(EVERYTHING | place.arguments),
    )
    expected = truth(place.raises)
    broken = Broken(monkeypatch, place, error)
    with our_warnings() as messages:
        outcome = train(tmp_path, callback, raises=place.raises)
    assert broken.failures

    if error == "ctrl-c":  # from the user: it ends training right there, as without us
        assert isinstance(outcome.error, SystemExit)
        assert messages == []
        assert_same(expected.states[: len(outcome.states) - 1], outcome.states[:-1])
        if place.steps is not None:
            run = load_run(tmp_path / "modelprof")
            is_saved = place.status == "finished"  # it came after everything was saved
            assert run.info.status == ("finished" if is_saved else "interrupted")
            assert len(run.ranks[0].steps) == place.steps
        return
    assert type(outcome.error) is type(expected.error)
    assert_same(expected.states, outcome.states)
    assert_same(expected.scalars, outcome.scalars)

    assert len(messages) == place.warnings, messages
    assert all(place.message in message for message in messages), messages
    if place.steps is None:
        assert callback.run is None
        return
    run = load_run(tmp_path / "modelprof")
    assert (run.info.status, len(run.ranks[0].steps)) == (place.status, place.steps)
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


# The other loops

LOOPS = ("validate", "test", "predict")

LOOP_PLACES = {
    "epoch start": Place(Session, "arm"),
    "batch start": Place(Inspection, "begin_batch", 2),
    "batch start: samples": Place(SampleCounter, "__call__", 3, message="The report won't have"),
    "batch end": Place(Inspection, "end_batch", 2),
    "action: fetch": Place(evaluation.EvaluationFetchAction, "__enter__", 3),
    "action: step ends": Place(PhaseLedger, "end_step", 3),
    "end: stop": Place(Session, "stop"),
    "end: finish": Place(Session, "finish"),
    "teardown": Place(Session, "close", 2),
}


def evaluate(folder: Any, loop: str, *callbacks: Any) -> tuple[Any, dict[str, Any]]:
    """Results of a loop, and the states of the random generators after it."""
    seed_everything(11, verbose=False)
    module = Noisy()
    trainer = make_trainer(folder, *callbacks)
    profiler, hooked = trainer.profiler, attributes(module)
    arguments = {} if loop == "predict" else {"verbose": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?!ModelProfCallback)")
        results = getattr(trainer, loop)(module, loader(2 * NUM_STEPS), **arguments)
    assert trainer.profiler is profiler
    assert attributes(module) == hooked
    nothing_stays()
    return results, random_states()


@pytest.fixture(scope="module")
def results(tmp_path_factory: Any) -> dict[str, Any]:
    """Outcome of each loop without the callback."""
    return {loop: evaluate(tmp_path_factory.mktemp(loop), loop) for loop in LOOPS}


# Each place in one loop, in turn, as all three loops share the same hooks.
LOOP_CELLS = [
    pytest.param(place, LOOPS[number % 3], id=f"{LOOPS[number % 3]}: {name}")
    for number, (name, place) in enumerate(LOOP_PLACES.items())
]


@pytest.mark.parametrize(("place", "loop"), LOOP_CELLS)
def test_fault_does_not_change_other_loops(
    tmp_path: Any, monkeypatch: Any, results: Any, place: Place, loop: str
) -> None:
    callback = make_callback(tmp_path, flops=True, sampling=True, active=0, peak_flops_per_s=1e12)
    broken = Broken(monkeypatch, place, "error")
    with our_warnings() as messages:
        outcome = evaluate(tmp_path, loop, callback)
    assert broken.failures
    assert_same(results[loop], outcome)
    assert len(messages) == 1, messages
    assert place.message in messages[0]


# Warnings that are errors


@pytest.mark.parametrize(
    "place", ["on_train_start", "step ends", "on_train_batch_start: samples", "report.json"]
)
@pytest.mark.logs_warnings
def test_warnings_as_errors_do_not_end_training(
    tmp_path: Any, monkeypatch: Any, caplog: Any, truth: Any, place: str
) -> None:
    callback = make_callback(tmp_path, **EVERYTHING)
    expected = truth(None)
    broken = Broken(monkeypatch, PLACES[place], "error")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ModelProfCallback")
        outcome = train(tmp_path, callback)
    assert broken.failures
    assert outcome.error is None
    assert_same(expected.states, outcome.states)
    (record,) = (one for one in caplog.records if one.name.startswith("lightning_modelprof"))
    assert PLACES[place].message in record.getMessage()


# With a user's profiler


def test_users_profiler_is_unaffected_by_our_fault(tmp_path: Any, monkeypatch: Any) -> None:
    """It receives every action, including the one in which ours failed and all later ones."""
    durations = []
    for is_measured in (False, True):
        trainer = make_trainer(
            tmp_path, *([make_callback(tmp_path, active=0)] if is_measured else []), profiler="simple"
        )
        if is_measured:
            broken = Broken(monkeypatch, PLACES["step ends"], "error")
        with our_warnings() as messages:
            fit_quietly(trainer, Net(), loader(2 * NUM_STEPS))
        assert len(messages) == is_measured
        recorded = trainer.profiler.recorded_durations
        durations.append({name: len(times) for name, times in recorded.items() if "ModelProf" not in name})
    assert broken.failures
    assert durations[0] == durations[1]


class Broke(SimpleProfiler):
    """A broken user profiler."""

    def stop(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            raise Fault("of the user")
        super().stop(action_name)


@pytest.mark.parametrize("is_measured", [False, True])
def test_error_in_users_profiler_reaches_user(tmp_path: Any, is_measured: bool) -> None:
    callbacks = [make_callback(tmp_path, active=0)] if is_measured else []
    with pytest.raises(Fault, match="of the user"):
        fit_quietly(make_trainer(tmp_path, *callbacks, profiler=Broke()), Net(), loader())
    if is_measured:
        assert load_run(tmp_path / "modelprof").info.status == "failed"
