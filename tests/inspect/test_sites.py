"""Operators of a counted step are attributed to source lines, which marks in this file identify."""

from __future__ import annotations

import functools
import gc
import importlib.util
import inspect
import itertools
import os
import site
import sys
import sysconfig
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from lightning_modelprof.engine import session
from lightning_modelprof.inspect.core.counter import FlopCounter
from lightning_modelprof.inspect.lines import site_sums
from lightning_modelprof.inspect.lines.site_sums import probe_of
from lightning_modelprof.inspect.lines.sites import BatchSites, SiteWatch
from lightning_modelprof.measure.user_code import UserCode, place_of
from lightning_modelprof.run.sites import (
    BATCH_END,
    BATCH_START,
    DEVICE_TO_HOST,
    HOST_TENSOR,
    HOST_TO_DEVICE,
    PRINT,
    SYNCHRONISATION,
    StepSites,
)
from tests.support.fits import (
    Fetching,
    Manual,
    Net,
    fit_quietly,
    loader,
    make_callback,
    make_trainer,
    run_fit,
)

HERE = __file__
SCALAR = "aten::_local_scalar_dense"


def line_of(mark, file=HERE):
    """The line that ends with a mark."""
    lines = Path(file).read_text().splitlines()
    found = [number for number, line in enumerate(lines, 1) if line.endswith(f"# @{mark}")]
    assert len(found) == 1, mark
    return found[0]


def watch_run(run, root=None, **kwargs):
    watch = SiteWatch(**kwargs)
    watch.begin()
    try:
        with FlopCounter(root or nn.Linear(1, 1), force_eager=False, watches=(watch,)):
            run()
    finally:
        watch.end()
    return watch.result()


def sites_at(result, mark, file=HERE):
    line = line_of(mark, file)
    return [one for one in result.sites if (one.file, one.line) == (file, line)]


def lines_at(result, mark, phase="forward"):
    line = line_of(mark)
    return [one for one in result.lines if (one.file, one.line, one.phase) == (HERE, line, phase)]


# ---- One operator on one line

X = torch.arange(12.0).reshape(4, 3)
MASK = X > 5
REPEATS = torch.tensor([1, 2, 0, 1])


def item():
    return X.sum().item()  # @item


def to_float():
    return float(X.sum())  # @float


def to_int():
    return int(X.sum())  # @int


def branch():
    if X.sum() > 0:  # @if
        return 1
    return 0


def text():
    return f"{X.sum():.3f}"  # @text


def show():
    print(X)  # @print


def find():
    return MASK.nonzero()  # @nonzero


def find_where():
    return torch.where(MASK)  # @where


def mask():
    return X[MASK]  # @mask


def select():
    return torch.masked_select(X, MASK)  # @masked_select


def different():
    return torch.unique(X)  # @unique


def same():
    return torch.equal(X, X)  # @equal


def repeat():
    return torch.repeat_interleave(X, REPEATS, dim=0)  # @repeat


def put():
    torch.zeros(4, 3)[MASK] = torch.ones(6)  # @put


def draw():
    return torch.multinomial(X[1], 1)  # @draw


def in_comprehension():
    return [row.sum().item() for row in X]  # @comprehension


def in_lambda():
    reads = lambda x: x.item()  # noqa: E731  # @lambda
    return reads(X[0, 0])


def without_gradients():
    with torch.no_grad():
        return X.max().item()  # @no_grad


def in_inference():
    with torch.inference_mode():
        return X.max().item()  # @inference


WAITING = [
    (item, "item", SCALAR, 1, 4),
    (to_float, "float", SCALAR, 1, 4),
    (to_int, "int", SCALAR, 1, 4),
    (branch, "if", SCALAR, 1, 1),
    (text, "text", SCALAR, 1, 4),
    (show, "print", PRINT, 1, None),
    (find, "nonzero", "aten::nonzero", 1, None),
    (find_where, "where", "aten::nonzero", 1, None),
    (mask, "mask", "aten::index", 1, None),
    (select, "masked_select", "aten::masked_select", 1, None),
    (different, "unique", "aten::_unique2", 1, None),
    (same, "equal", "aten::equal", 1, None),
    (repeat, "repeat", "aten::repeat_interleave", 1, None),
    (put, "put", "aten::index_put_", 1, None),
    (draw, "draw", "aten::multinomial", 1, None),
    (in_comprehension, "comprehension", SCALAR, 4, 16),
    (in_lambda, "lambda", SCALAR, 1, 4),
    (without_gradients, "no_grad", SCALAR, 1, 4),
    (in_inference, "inference", SCALAR, 1, 4),
]


@pytest.mark.parametrize(("run", "mark", "operator", "calls", "num_bytes"), WAITING)
def test_waiting_line_is_found(run, mark, operator, calls, num_bytes, capsys):
    result = watch_run(run)
    (found,) = [one for one in result.sites if one.kind == SYNCHRONISATION]
    assert (found.file, found.line) == (HERE, line_of(mark))
    assert (found.operator, found.calls, found.num_bytes) == (operator, calls, num_bytes)
    assert (found.phase, found.module, found.device) == ("forward", "", "cpu")
    assert (found.is_blocking, found.is_pinned, found.is_non_blocking) == (None, None, None)
    assert result.dropped == ()


def test_two_waits_on_one_line_are_one_site():
    def run():
        return X[0, 0].item() + X[0, 1].item()  # @twice

    (found,) = watch_run(run).sites
    assert (found.line, found.calls, found.num_bytes) == (line_of("twice"), 2, 8)


def test_function_is_named_like_in_torch_tracer():
    (found,) = watch_run(item).sites
    assert (found.function, found.function_line) == ("item", item.__code__.co_firstlineno)
    assert found.callers == ()
    assert found.caller == ""


HARMLESS = [
    lambda: X[REPEATS],
    lambda: X[1],
    lambda: X.clone().masked_fill_(MASK, 0.0),
    lambda: torch.repeat_interleave(X, 2, dim=0),
    lambda: torch.repeat_interleave(X, REPEATS, dim=0, output_size=4),
    lambda: X.to(torch.float64),
    lambda: X.cpu().numpy(),
    lambda: torch.where(MASK, X, 0.0),
]


@pytest.mark.parametrize("run", HARMLESS)
def test_operator_that_does_not_wait_is_not_site(run):
    assert watch_run(run).sites == ()


class Operators(TorchDispatchMode):
    """Records the names of operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_filling_by_mask_does_not_wait():
    """One mask and one value become a masked_fill; before torch 2.15 the value is created on the host."""

    def run():
        X.clone()[MASK] = 0.0  # @fill

    seen = Operators()
    with seen:
        run()
    expected = [HOST_TENSOR] if "lift_fresh" in seen.names else []
    assert [one.kind for one in sites_at(watch_run(run), "fill")] == expected
    assert {"masked_fill_", "index_put_"} & set(seen.names)


def test_tensors_made_on_host():
    def run():
        torch.tensor([1.0, 2.0, 3.0])  # @tensor
        torch.from_numpy(np.ones(4))  # @numpy
        torch.zeros(5).to("meta")  # @moved

    result = watch_run(run)
    (made,) = sites_at(result, "tensor")
    assert (made.kind, made.operator, made.num_bytes) == (HOST_TENSOR, "aten::lift_fresh", 12)
    assert [(one.kind, one.num_bytes) for one in sites_at(result, "numpy")] == [(HOST_TENSOR, 32)]
    (moved,) = sites_at(result, "moved")
    assert (moved.kind, moved.device, moved.num_bytes) == (HOST_TO_DEVICE, "meta", 20)
    assert (moved.is_blocking, moved.is_pinned, moved.is_non_blocking) == (True, False, False)


# ---- Devices this machine lacks: only the classifier


def fake(device, *, pinned=False, num_bytes=64):
    return SimpleNamespace(
        device=torch.device(device), is_pinned=lambda: pinned, nbytes=num_bytes, element_size=lambda: 4
    )


CONVERT, COPY = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default
COPIES = [
    # operator, args, kwargs, result → kind, is_blocking, is_pinned, is_non_blocking
    (CONVERT, [fake("cuda")], {}, fake("cpu"), (DEVICE_TO_HOST, True, False, False)),
    (
        CONVERT,
        [fake("cuda")],
        {"non_blocking": True},
        fake("cpu", pinned=True),
        (DEVICE_TO_HOST, False, True, True),
    ),
    (CONVERT, [fake("cpu")], {}, fake("cuda"), (HOST_TO_DEVICE, True, False, False)),
    (CONVERT, [fake("cpu")], {"non_blocking": True}, fake("cuda"), (HOST_TO_DEVICE, False, False, True)),
    (
        CONVERT,
        [fake("cpu", pinned=True)],
        {"non_blocking": True},
        fake("cuda"),
        (HOST_TO_DEVICE, False, True, True),
    ),
    (CONVERT, [fake("cuda:0")], {}, fake("cuda:1"), None),
    (CONVERT, [fake("cpu")], {}, fake("cpu"), None),
    # Into memory that isn't pinned, CUDA's copy returns when done, even if non_blocking is set.
    (COPY, [fake("cpu"), fake("cuda"), True], {}, fake("cpu"), (DEVICE_TO_HOST, True, False, True)),
    (COPY, [fake("cpu", pinned=True), fake("cuda"), True], {}, None, (DEVICE_TO_HOST, False, True, True)),
    (COPY, [fake("cuda"), fake("cpu")], {}, fake("cuda"), (HOST_TO_DEVICE, True, False, False)),
]


@pytest.mark.parametrize(("func", "args", "kwargs", "result", "expected"), COPIES)
def test_copies_between_host_and_device(func, args, kwargs, result, expected):
    found = probe_of(func)(tuple(args), kwargs, result)
    if expected is None:
        assert found is None
    else:
        assert (found.kind, found.is_blocking, found.is_pinned, found.is_non_blocking) == expected
        assert (found.device, found.num_bytes) == ("cuda", 64)


def test_host_waits_for_device():
    look = probe_of(torch.ops.aten._local_scalar_dense.default)
    assert look((fake("cuda"),), {}, None)[:4] == (SYNCHRONISATION, "cuda", 4, True)
    assert look((fake("cpu"),), {}, None).is_blocking is None
    made = probe_of(torch.ops.aten.lift_fresh.default)((fake("cuda"),), {}, None)
    assert (made.kind, made.is_blocking, made.is_pinned) == (HOST_TO_DEVICE, True, False)


# ---- Lines and their operators


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        out = []
        for row in x:  # @for
            out.append(row * self.weight)  # noqa: PERF401  # @row
        return torch.stack(out).sum()  # @stack


def test_loop_over_rows():
    """Five rows of eight floats: one view of the rows, and five products of 3 x 32 bytes."""
    result = watch_run(lambda: Rows()(torch.ones(5, 8)))
    (head,) = lines_at(result, "for")
    assert (head.calls, head.views, head.elements, head.num_bytes) == (1, 1, 0, 0)
    (body,) = lines_at(result, "row")
    assert (body.calls, body.views, body.operators) == (5, 0, 1)
    assert (body.elements, body.num_bytes, body.unsized) == (5 * 8, 5 * 3 * 32, 0)
    (end,) = lines_at(result, "stack")
    assert (end.calls, end.operators) == (2, 2)
    assert (end.elements, end.num_bytes) == (40 + 1, 2 * 160 + 160 + 4)


def test_gradients_belong_to_forward_line():
    model = nn.Sequential(Rows())
    result = watch_run(lambda: model(torch.ones(5, 8)).backward(), model)
    (backward,) = lines_at(result, "row", "backward")
    assert backward.module == "0"
    # For each row, its product and a sum with the previous rows' gradients.
    assert backward.calls >= 5 + 4
    assert not [
        line for line in result.lines if line.phase == "backward" and line.line is None and line.calls > 9
    ]


def test_wait_in_backward_belongs_to_forward_line():
    x = torch.ones(4, 3, requires_grad=True)

    def run():
        y = x[MASK]  # @masked
        y.sum().backward()

    found = sites_at(watch_run(run), "masked")
    assert {one.phase for one in found} == {"forward", "backward"}
    assert all(one.kind == SYNCHRONISATION for one in found)


def test_unknown_sizes_are_counted():
    sparse = torch.eye(3).to_sparse()

    def run():
        return sparse * 2  # @sparse

    (found,) = lines_at(watch_run(run), "sparse")
    assert found.unsized >= 1


def test_lines_are_sorted_by_operators_and_capped(monkeypatch):
    scope = {"X": X, "watch_run": watch_run}
    body = "\n".join(f"    X + {number}" for number in range(site_sums.MOST_LINES + 7))
    exec(compile(f"def run():\n{body}\n    X + 1; X + 1; X + 2\n", "/elsewhere/many.py", "exec"), scope)
    result = watch_run(scope["run"])
    assert (result.lines[0].calls, result.lines[0].line) == (3, site_sums.MOST_LINES + 9)
    assert len(result.lines) == site_sums.MOST_LINES
    assert result.dropped == ("8 lines with fewer operators",)


def test_places_are_capped(monkeypatch):
    monkeypatch.setattr(site_sums, "_MOST_PLACES", 1)
    monkeypatch.setattr(site_sums, "_MOST_SITES", 1)
    result = watch_run(lambda: (item(), to_float()))
    assert len(result.lines) == len(result.sites) == 1
    # The first line's two operators are at two instructions: one is dropped, and so are all three of float's.
    assert result.dropped == (f"{3 + 1} calls from too many different places",)


# ---- Real fits


@pytest.fixture
def inspections(monkeypatch):
    made = []
    make = session.make_inspection

    def recorded(*args, **kwargs):
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(session, "make_inspection", recorded)
    return made


@pytest.fixture
def fit(inspections, tmp_path):
    def run(module, **kwargs):
        arguments = {"data": loader(24), "active": 0, "skip_first": 10, "flops": True} | kwargs
        run_fit(tmp_path, module=module, **arguments)
        return None if inspections[-1] is None else inspections[-1].cost.sites

    return run


class Probe(nn.Module):
    def forward(self, x):
        x.detach().max().item()  # @module
        return Read.apply(x)


class Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient.sum().item()  # @function_backward
        return gradient


class Busy(Net):
    def __init__(self, helper=None):
        super().__init__()
        self.layers.append(Probe())
        self.helper = helper
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        x = batch[0]
        loss = self.loss(batch)
        loss.item()  # @step_item
        if loss > 0:  # @step_if
            print(loss)  # @step_print
        loss.register_hook(lambda gradient: print(gradient.item()))  # @hook
        if self.helper is not None:
            self.helper.read(loss)
        self.log("float", 0.5)  # @log_float
        self.log("loss", loss.detach(), prog_bar=True)
        self.mean.update(loss.detach())
        float(self.mean.compute())  # @metric
        scale = torch.tensor([2.0] * 8)  # @made
        return loss + sum((row * scale).sum() for row in x)  # @rows

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0, error_if_nonfinite=True)  # @clip


class Reads(Callback):
    """Runs both before and after our callback, which is in the middle of the list."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        batch[0].sum().item()  # @batch_start

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        next(pl_module.parameters()).sum().item()  # @zero_grad

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        outputs["loss"].item()  # @batch_end


@pytest.fixture
def helper(tmp_path):
    file = tmp_path / "helper.py"
    file.write_text("def read(loss):\n    return [\n        loss.item()  # @helper\n    ]\n")
    spec = importlib.util.spec_from_file_location("helper_of_a_test", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_sites_in_fit(fit, helper, capsys):
    result = fit(Busy(helper), others=[Reads()], trainer={"enable_progress_bar": True})
    expected = [  # mark, phase, module, function
        ("step_item", "forward", "", "training_step"),
        ("step_if", "forward", "", "training_step"),
        ("step_print", "forward", "", "training_step"),
        ("module", "forward", "layers.4", "forward"),
        ("function_backward", "backward", "layers.4", "backward"),
        ("hook", "backward", None, "<lambda>"),
        ("metric", "forward", "", "training_step"),
        ("clip", None, "", "configure_gradient_clipping"),
        ("zero_grad", None, "", "on_before_zero_grad"),
        ("batch_end", BATCH_END, "", "on_train_batch_end"),
    ]
    for mark, phase, module, function in expected:
        (found,) = [one for one in sites_at(result, mark) if one.kind == SYNCHRONISATION]
        assert (found.calls, found.function) == (1, function), mark
        assert phase is None or found.phase == phase, mark
        assert module is None or found.module == module, mark
    (found,) = sites_at(result, "helper", helper.__file__)
    assert (found.calls, found.operator, found.function) == (1, SCALAR, "read")
    made = {mark: [one.kind for one in sites_at(result, mark)] for mark in ("made", "log_float")}
    assert made == {"made": [HOST_TENSOR], "log_float": [HOST_TENSOR]}
    assert result.step == 6
    assert result.device == "cpu"
    assert result.dropped == ()


@pytest.mark.slow
def test_callers_name_library(fit, capsys):
    result = fit(Busy(), trainer={"enable_progress_bar": True})
    (clip,) = [one for one in sites_at(result, "clip") if one.kind == SYNCHRONISATION]
    assert "clip_grad_norm_" in " ".join(clip.callers)
    # self.log(prog_bar=True) costs time after the step, when no user line is running.
    bar = [one for one in result.sites if one.file is None and "progress_bar" in " ".join(one.callers)]
    assert bar
    assert {(one.phase, one.operator, one.kind) for one in bar} == {(BATCH_END, SCALAR, SYNCHRONISATION)}
    assert all(one.caller.startswith("lightning.") for one in bar)


@pytest.mark.slow
def test_no_wait_without_progress_bar(fit):
    result = fit(Net())
    assert [one for one in result.sites if one.kind == SYNCHRONISATION] == []


@pytest.mark.slow
def test_hooks_before_our_callback_are_seen(inspections, tmp_path):
    """A callback listed before ours runs before the batch is counted."""
    callback = make_callback(tmp_path, flops=True, active=0, skip_first=10)
    fit_quietly(make_trainer(tmp_path, Reads(), callback), Net(), loader())
    (found,) = sites_at(inspections[-1].cost.sites, "batch_start")
    assert (found.phase, found.function) == (BATCH_START, "on_train_batch_start")


@pytest.mark.slow
def test_rows_in_fit(fit, capsys):
    """Two samples have a product and a sum each, on the same line as the sum over them and the loss."""
    forward = lines_at(fit(Busy()), "rows")
    assert sum(line.calls for line in forward) >= 2 * 2 + 2 + 1
    assert {line.function for line in forward} == {"training_step", "<genexpr>"}


class FetchingReads(Fetching):
    def training_step(self, dataloader_iter):
        loss = super().training_step(dataloader_iter)
        loss.item()  # @iterator
        return loss


class ManualReads(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        float(loss)  # @manual
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize(("module", "mark"), [(FetchingReads, "iterator"), (ManualReads, "manual")])
def test_other_ways_to_train(fit, module, mark):
    (found,) = sites_at(fit(module()), mark)
    assert (found.calls, found.operator, found.phase) == (1, SCALAR, "forward")


@pytest.mark.slow
def test_optimizer_operators_form_one_line(fit):
    (found,) = [line for line in fit(Net()).lines if line.phase == "optimizer"]
    assert (found.file, found.line, found.function) == (None, None, "")
    assert found.calls > 0


@pytest.mark.slow
def test_step_with_validation_excludes_validation(fit):
    class Validated(Net):
        def validation_step(self, batch, batch_idx):
            self.loss(batch).item()  # @validation

    result = fit(Validated(), val=loader(4), trainer={"val_check_interval": 7, "num_sanity_val_steps": 0})
    assert result.step == 6  # the seventh batch, after which validation runs
    assert not sites_at(result, "validation")


@pytest.mark.slow
def test_sites_in_evaluation_loop(inspections, tmp_path):
    """In inference mode operators arrive as called, and the counter decomposes them."""

    class Validated(Net):
        def validation_step(self, batch, batch_idx):
            self.loss(batch).item()  # @evaluated

        def on_validation_batch_end(self, outputs, batch, batch_idx):
            batch[0].max().item()  # @evaluated_after

    callback = make_callback(tmp_path, flops=True, active=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?!ModelProfCallback)")
        make_trainer(tmp_path, callback).validate(Validated(), loader(), verbose=False)
    result = inspections[-1].cost.sites
    (found,) = sites_at(result, "evaluated")
    assert (found.calls, found.operator, found.phase) == (1, SCALAR, "forward")
    (after,) = sites_at(result, "evaluated_after")
    assert (after.calls, after.operator, after.phase) == (1, "aten::item", BATCH_END)


@pytest.mark.slow
def test_compiled_model_has_no_lines(fit):
    class Compiled(Net):
        def configure_model(self):
            self.compiled = torch.compile(nn.Linear(1, 1), backend="eager")

    assert fit(Compiled()) is None


@pytest.mark.slow
def test_workers_are_not_watched(fit):
    """Workers forked in the watched step leave their parent's mode."""

    class Forking(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 6:
                assert isinstance(_get_current_dispatch_mode(), BatchSites)
                reader, writer = os.pipe()
                child = os.fork()
                if child == 0:
                    os.write(writer, b"1" if _get_current_dispatch_mode() is None else b"0")
                    os._exit(0)
                os.waitpid(child, 0)
                self.is_free = os.read(reader, 1)

    forking = Forking()
    fit(Net(), others=[forking])
    assert forking.is_free == b"1"
    assert _get_current_dispatch_mode() is None


# ---- Nothing changes and nothing stays


@pytest.mark.slow
def test_watching_changes_no_bit_of_weights(tmp_path, fit, capsys):
    def weights(flops):
        torch.manual_seed(1)
        module = Busy()
        module.layers[2] = nn.Dropout(0.5)
        fit(module, others=[Reads()], flops=flops)
        return torch.cat([p.detach().flatten() for p in module.parameters()]), torch.get_rng_state()

    with_us, without = weights(True), weights(False)
    assert torch.equal(with_us[0], without[0])
    assert torch.equal(with_us[1], without[1])


@pytest.mark.slow
def test_patched_torch_function_is_restored(fit):
    before = torch._tensor_str._str
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, *args):
            seen.append(torch._tensor_str._str is before)

    fit(Net(), others=[Watch()])
    assert seen.count(False) == 1
    assert not seen[6]
    assert torch._tensor_str._str is before


@pytest.mark.slow
def test_patched_torch_function_is_restored_after_failure(inspections, tmp_path):
    before = torch._tensor_str._str

    def fail(batch_idx):
        if batch_idx == 6:
            raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        run_fit(tmp_path, module=Net(fail), active=0, skip_first=10, flops=True)
    assert torch._tensor_str._str is before
    assert _get_current_dispatch_mode() is None
    assert inspections[-1].cost.sites is None


def test_watch_keeps_no_tensor_alive():
    def run():
        made = torch.ones(1000)
        made.sum().item()
        gone = weakref.ref(made)
        del made
        assert gone() is None  # while watching, without garbage collection

    gc.disable()
    try:
        watch_run(run)
    finally:
        gc.enable()


def test_internal_error_is_contained(monkeypatch):
    monkeypatch.setattr(SiteWatch, "_spot", lambda self, phase: 1 / 0)
    result = watch_run(lambda: (X + 1, show()))
    assert result.lines == ()
    assert "ZeroDivisionError: division by zero (1 times)" in result.dropped


@pytest.mark.slow
def test_records_survive_json(fit, capsys):
    result = fit(Busy())
    assert msgspec.json.decode(msgspec.json.encode(result), type=StepSites) == result


def test_recomputed_forward_has_lines():
    def part(x):
        return ((x + 1) * x).sum()  # @recomputed

    def run():
        x = torch.ones(3, requires_grad=True)
        torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False).backward()

    result = watch_run(run)
    assert [len(lines_at(result, "recomputed", phase)) for phase in ("forward", "recompute", "backward")] == [
        1
    ] * 3


# ---- Owner of the code

PURELIB = Path(sysconfig.get_paths()["purelib"])
STDLIB = Path(sysconfig.get_paths()["stdlib"])


def frame_in(file, **names):
    """A frame of a function compiled under a file's name."""
    scope = {"sys": sys, **names}
    exec(compile("frame = sys._getframe()", str(file), "exec"), scope)
    return scope["frame"]


@pytest.mark.parametrize(
    ("file", "names", "expected"),
    [
        ("/home/me/train.py", {}, True),
        ("/home/me/venv/src/project/train.py", {}, True),  # pip install -e git+...
        ("<ipython-input-3-abc>", {}, True),
        ("/tmp/ipykernel_123/456.py", {}, True),
        ("<stdin>", {}, True),
        ("<python-input-0>", {}, True),
        ("<command-42>", {}, True),
        ("<string>", {"__name__": "__main__"}, True),  # python -c
        ("<string>", {"__name__": "attr", "__file__": "x"}, False),
        ("<eval_with_key>.1", {}, False),
        ("<frozen runpy>", {}, False),
        ("/tmp/torchinductor_me/ab/cab.py", {}, False),
        (PURELIB / "transformers" / "trainer.py", {}, False),
        ("/usr/lib/python3/dist-packages/some/thing.py", {}, False),
        (STDLIB / "json" / "decoder.py", {}, False),
        (Path(sysconfig.get_paths()["scripts"]) / "lightning-modelprof", {}, False),  # created by pip
        (Path(site.getusersitepackages()) / "thing.py", {}, False),
        (torch.nn.functional.__file__, {}, False),
        (session.__file__, {}, False),  # this package, installed from a checkout
        (HERE, {}, True),
    ],
)
def test_code_owner(file, names, expected):
    assert UserCode().is_users(frame_in(file, **names)) is expected


def test_pip_target_folder_counts_as_installed(tmp_path, monkeypatch):
    (tmp_path / "thing-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not UserCode().is_users_file(str(tmp_path / "thing" / "layers.py"))


def test_package_of_user_model_is_user_code(monkeypatch):
    owner = type("Mine", (nn.Module,), {"__module__": "mine.models"})
    folder = str(PURELIB / "mine")
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(__path__=[folder]))
    assert UserCode([owner]).is_users_file(f"{folder}/models.py")
    assert not UserCode().is_users_file(f"{folder}/models.py")
    assert not UserCode([nn.Linear]).is_users_file(nn.functional.__file__)


# ---- Places of functions


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


@decorated  # @decorator
def plain(batch):
    return batch


class Tool:
    def __call__(self, batch):  # @call
        return batch

    def method(self, batch):  # @method
        return batch

    @staticmethod
    def static(batch):
        return batch

    @torch.no_grad()  # @no_grad_method
    def without(self, batch):
        return batch


@pytest.mark.parametrize(
    ("function", "mark", "name"),
    [
        (plain, "decorator", "plain"),
        (functools.partial(plain, 1), "decorator", "plain"),
        (functools.partial(functools.partial(Tool().method)), "method", "Tool.method"),
        (Tool().method, "method", "Tool.method"),
        (Tool(), "call", "Tool.__call__"),
        (Tool().without, "no_grad_method", "Tool.without"),
    ],
)
def test_place_of(function, mark, name):
    found = place_of(function)
    assert (found.file, found.line, found.function) == (HERE, line_of(mark), name)


def test_places_of_other_things():
    assert place_of(Tool.static).function == "Tool.static"
    forward = inspect.unwrap(nn.Linear.forward).__code__
    assert place_of(nn.Linear(1, 1)).line == forward.co_firstlineno
    assert place_of(lambda x: x).function == "test_places_of_other_things.<locals>.<lambda>"
    for unknown in (len, torch.add, functools.partial(len)):
        assert (place_of(unknown).file, place_of(unknown).is_library) == (None, True)
    for unknown in (None, 3, SimpleNamespace()):
        assert place_of(unknown) is None


def test_time_of_operators_on_line(monkeypatch):
    """Each operator reads the clock twice, 1 ms apart; views and other lines don't count."""
    clock = itertools.count(step=1_000_000)
    monkeypatch.setattr("lightning_modelprof.inspect.core.counter.host_clock", lambda: next(clock))
    tensor = torch.ones(4, 3)

    def run():
        tensor.add(1).mul(2)  # @timed
        tensor.t()

    result = watch_run(run)
    assert {one.line: one.took_ns for one in result.lines if one.took_ns} == {line_of("timed"): 2_000_000}
