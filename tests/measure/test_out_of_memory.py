"""Out-of-memory errors are reported, and the user's exception stays unchanged."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.engine import memory as loop_memory
from lightning_modelprof.engine.memory import LoopMemory
from lightning_modelprof.inspect.modules.live_tensors import storages_of
from lightning_modelprof.measure.resources import out_of_memory
from lightning_modelprof.measure.resources.memory import DeviceBytes
from lightning_modelprof.measure.resources.out_of_memory import (
    Named,
    describe,
    holders_of,
    out_of_memory_error,
)
from lightning_modelprof.place import Place
from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.rules import memory as rules
from lightning_modelprof.report.rules.engine import judge
from lightning_modelprof.run.memory import Holder, MemoryRecord, OutOfMemory
from lightning_modelprof.run.records import RankRecord, Run, RunInfo
from tests.support.diagnosed import only, steps_of
from tests.support.fits import Net, fit_quietly, loader, make_callback, make_trainer, report_of

MIB, GIB = 2**20, 2**30
TORCH_ERROR = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
CUDA = torch.device("cuda", 0)

NEW = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.50 GiB of which 1.25"
    " GiB is free. Process 4711 has 22.24 GiB memory in use. Of the allocated memory 18.00 GiB is allocated"
    " by PyTorch, and 4.00 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory"
    " is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
OLD = (
    "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.75 GiB total capacity; 9.50 GiB already"
    " allocated; 5.56 MiB free; 10.00 GiB reserved in total by PyTorch) If reserved memory is >> allocated"
)
MPS = (
    "MPS backend out of memory (MPS allocated: 17.50 GB, other allocations: 64.00 KB, max allowed: 18.25 GB)."
    " Tried to allocate 512.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable it."
)
HOST = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
    " allocate 4503599627370496 bytes. Error code 12 (Cannot allocate memory)"
)
WINDOWS = "[enforce fail] data. DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes."
NUMPY = "Unable to allocate 7.50 TiB for an array with shape (1000000, 1000000) and data type float64"


def described(error, device=CUDA, counters=None, named=None, **kwargs):
    return describe(
        error,
        error,
        step=4,
        device=device,
        read_device=lambda one: counters or DeviceBytes(),
        total_bytes=lambda: 80 * GIB,
        named=named or Named({}, {}, ()),
        storages_of=storages_of,
        **kwargs,
    )


@pytest.mark.parametrize(
    ("error", "device", "requested", "total", "allocated", "reserved"),
    [
        (TORCH_ERROR(NEW), "cuda", 2.5 * GIB, 23.5 * GIB, 18 * GIB, 22 * GIB),
        (RuntimeError(OLD), "cuda", 20 * MIB, 10.75 * GIB, 9.5 * GIB, 10 * GIB),
        (RuntimeError(MPS), "mps", 512 * MIB, 18.25 * GIB, 17.5 * GIB, 4 * GIB),
        (RuntimeError("CUDA error: out of memory"), "cuda", None, 80 * GIB, 3 * GIB, 4 * GIB),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
            "cuda",
            None,
            80 * GIB,
            3 * GIB,
            4 * GIB,
        ),
        (RuntimeError(HOST), "cpu", 2**52, None, None, None),
        (RuntimeError(WINDOWS), "cpu", 64, None, None, None),
        (MemoryError(NUMPY), "cpu", 7.5 * 2**40, None, None, None),
        (MemoryError(), "cpu", None, None, None, None),
    ],
    ids=["torch", "old", "mps", "driver", "cublas", "host", "windows", "numpy", "python"],
)
def test_sizes_are_parsed_from_message(error, device, requested, total, allocated, reserved):
    """The message describes the moment of failure; counters, read later, fill in what it leaves out."""
    assert out_of_memory_error(error) is error
    on = torch.device("mps" if device == "mps" else "cuda", 0)
    event = described(error, on, DeviceBytes(allocated=3 * GIB, reserved=4 * GIB))
    assert event.device == device
    sizes = (event.requested_bytes, event.total_bytes, event.allocated_bytes, event.reserved_bytes)
    assert sizes == (requested, total, allocated, reserved)
    assert event.message
    assert "\n" not in event.message


def test_other_errors_are_not_out_of_memory():
    for error in (
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("out of memory"),
        KeyboardInterrupt(),
    ):
        assert out_of_memory_error(error) is None


def test_error_is_found_behind_another_exception():
    """Found as a cause and as the exception being handled; a cycle of causes ends the search."""
    inner = TORCH_ERROR(NEW)

    def raise_from(cause):
        try:
            raise inner
        except RuntimeError as error:
            if cause:
                raise ValueError("step failed") from error
            raise ValueError("step failed")  # noqa: B904 - as users write it

    for cause in (True, False):
        with pytest.raises(ValueError, match="step failed") as caught:
            raise_from(cause)
        assert out_of_memory_error(caught.value) is inner
    one, other = ValueError(), ValueError()
    one.__cause__, other.__cause__ = other, one
    assert out_of_memory_error(one) is None


def test_holders_worked_out_by_hand():
    """Two layers with 64 + 16 bytes, the first's gradients, Adam's state of both, buffers, a tied weight."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model[0](torch.ones(3, 4)).sum().backward()
    named = Named(dict(model.named_parameters()), dict(model.named_buffers()), (optimizer,))
    by_category, holders = holders_of(named, storages_of)
    assert by_category == {
        "parameters": 160,
        "gradients": 80,
        "optimizer state": 2 * 160 + 4 * 4,
        "buffers": 4 * 4 + 4 * 4 + 8,
    }
    assert holders == (
        Holder(name="0", category="optimizer state", num_bytes=168),
        Holder(name="1", category="optimizer state", num_bytes=168),
        Holder(name="0", category="parameters", num_bytes=80),
        Holder(name="1", category="parameters", num_bytes=80),
        Holder(name="0", category="gradients", num_bytes=80),
        Holder(name="2", category="buffers", num_bytes=40),
    )
    model[1].weight = model[0].weight
    tied = holders_of(Named(dict(model.named_parameters()), {}, ()), storages_of)
    assert tied[0]["parameters"] == 160 - 64


def test_odd_optimizer_state_loses_only_holders():
    event = described(TORCH_ERROR(NEW), named=Named({}, {}, (SimpleNamespace(state=[1, 2]),)))
    assert (event.by_category, event.holders) == ({}, ())
    assert event.requested_bytes == 2.5 * GIB


# The finding


def finding_of(event, host_total=None, **info):
    record = RankRecord(
        rank=0, steps=steps_of(1), memory=MemoryRecord(out_of_memory=event, host_total_bytes=host_total)
    )
    return only(judge(rules.out_of_memory, Facts(Run(info=RunInfo(created="now", **info), ranks=(record,)))))


def event_of(**changes):
    values = {
        "step": 7,
        "phase": "forward",
        "device": "cuda",
        "message": "CUDA out of memory.",
        "requested_bytes": 2 * GIB,
        "total_bytes": 80 * GIB,
        "allocated_bytes": 78 * GIB,
        "reserved_bytes": 79 * GIB,
        "by_category": {"parameters": 4 * GIB, "gradients": 4 * GIB, "optimizer state": 8 * GIB},
        "holders": (
            Holder(name="layers.3", category="optimizer state", num_bytes=GIB),
            Holder(name="layers.3", category="parameters", num_bytes=MIB),
            Holder(name="", category="parameters", num_bytes=1),
        ),
    }
    return OutOfMemory(**(values | changes))


def test_finding_if_activations_dominate():
    """78 GiB minus 16 known leaves 62 GiB of activations and others."""
    found = finding_of(event_of())
    assert (found.status, found.severity) == (Status.FOUND, Severity.CRITICAL)
    assert found.summary == (
        "GPU memory ran out at step 7 in Forward when allocating 2 GiB. In use:"
        " activations and other 62 GiB, optimizer state 8 GiB, parameters 4 GiB, gradients 4 GiB."
    )
    order = [found.action.index(word) for word in ("smaller batch", "checkpointing", "bf16-mixed", "8-bit")]
    assert order == sorted(order)
    assert "expandable_segments" not in found.action
    assert found.locations == ()
    assert {one.label: one.value for one in found.evidence}["largest modules"] == "layers.3"
    asked = finding_of(event_of(file="/home/me/net.py", line=12, function="Net.forward"))
    assert asked.locations == (Place(file="/home/me/net.py", line=12, function="Net.forward", is_exact=True),)


def test_finding_if_optimizer_state_dominates():
    held = {"parameters": 15 * GIB, "gradients": 15 * GIB, "optimizer state": 40 * GIB}
    action = finding_of(event_of(by_category=held), precision="bf16-true").action
    assert action.index("8-bit") < action.index("FSDP), or a smaller model") < action.index("smaller batch")
    assert "bf16-mixed" not in action  # it's used already


def test_finding_if_fragmentation_dominates():
    action = finding_of(event_of(allocated_bytes=20 * GIB, reserved_bytes=70 * GIB)).action
    assert action.startswith("Try PYTORCH_CUDA_ALLOC_CONF=expandable_segments")


def test_finding_if_one_tensor_exceeds_all_memory():
    event = event_of(
        device="cpu", requested_bytes=2**52, total_bytes=None, allocated_bytes=None, reserved_bytes=None
    )
    found = finding_of(event, host_total=64 * GIB)
    assert "exceeds all memory" in found.action.partition(", or ")[0]
    assert "CPU memory ran out" in found.summary
    assert "bf16" not in found.action


def test_no_error_is_clean():
    assert finding_of(None).status is Status.CLEAN


# In a fit


class Failing(Net):
    """Fails at batch 3, in the given phase."""

    def __init__(self, error, where="forward"):
        super().__init__()
        self.error, self.where = error, where
        self.big = None

    def fail(self):
        big = torch.ones(1000)
        self.big = weakref.ref(big)
        raise self.error

    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.where == "forward":
            self.fail()
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3 and self.where == "backward":
            loss.register_hook(lambda gradient: self.fail())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters())
        if self.where == "optimizer":
            model = self

            class Stepping(torch.optim.Adam):
                steps = 0

                def _init_group(self, *args):
                    self.steps += 1
                    if self.steps == 4:
                        model.fail()
                    return super()._init_group(*args)

            optimizer = Stepping(self.parameters())
        return optimizer

    def on_before_zero_grad(self, optimizer):
        if self.where == "module hook" and self.trainer.global_step == 3:
            self.fail()


def fail_in(folder, model, **kwargs):
    callback = make_callback(folder, active=0, **kwargs)
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - the caller checks which
        fit_quietly(make_trainer(folder, callback), model, loader())
    return callback, caught.value


def finding_in(report):
    return next(one for one in report["findings"] if one["kind"] == "out_of_memory")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_report_is_written_before_exception_propagates(tmp_path, where):
    """Net has 161 parameters; Adam keeps two averages of each and 4 step counts."""
    error = TORCH_ERROR(NEW)
    callback, raised = fail_in(tmp_path, Failing(error, where))
    assert raised is error
    report = report_of(tmp_path)
    finding = finding_in(report)
    assert finding["status"] == "found"
    event = report["summary"]["memory"]["out_of_memory"]
    assert (event["step"], event["phase"], event["device"]) == (3, where, "cpu")
    assert event["requested_bytes"] == 2.5 * GIB
    assert event["by_category"]["parameters"] == 4 * 161
    assert event["by_category"]["optimizer state"] == 2 * 4 * 161 + 4 * 4
    assert callback.run.info.status == "failed"
    assert {holder["name"] for holder in event["holders"]} == {"layers.0", "layers.3"}


@pytest.mark.slow
def test_out_of_memory_is_first_finding(tmp_path):
    fail_in(tmp_path, Failing(TORCH_ERROR(NEW)))
    first = report_of(tmp_path)["findings"][0]
    assert (first["kind"], first["severity"]) == ("out_of_memory", "critical")


@pytest.mark.slow
def test_allocation_that_really_fails(tmp_path):
    class Greedy(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                torch.empty(2**50)
            return super().training_step(batch, batch_idx)

    _, raised = fail_in(tmp_path, Greedy())
    assert isinstance(raised, RuntimeError)
    report = report_of(tmp_path)
    event = report["summary"]["memory"]["out_of_memory"]
    assert (event["step"], event["phase"], event["requested_bytes"]) == (2, "forward", 4 * 2**50)
    lines = Path(__file__).read_text().split("\n")
    assert (event["file"], lines[event["line"] - 1].strip()) == (__file__, "torch.empty(2**50)")
    assert report["verdict"]["kind"] == "out_of_memory"
    assert report["verdict"]["summary"].startswith("CPU memory ran out at step 2 in Forward")
    assert "exceeds all memory" in finding_in(report)["action"]


@pytest.mark.slow
def test_user_exception_that_wraps_error_is_reported(tmp_path):
    class Wrapping(Failing):
        def training_step(self, batch, batch_idx):
            try:
                return super().training_step(batch, batch_idx)
            except RuntimeError as error:
                raise ValueError("the step failed") from error

    error = TORCH_ERROR(NEW)
    _, raised = fail_in(tmp_path, Wrapping(error))
    assert isinstance(raised, ValueError)
    assert raised.__cause__ is error
    assert finding_in(report_of(tmp_path))["status"] == "found"


@pytest.mark.slow
def test_other_exception_is_clean(tmp_path):
    fail_in(tmp_path, Failing(ValueError("something else")))
    assert finding_in(report_of(tmp_path))["status"] == "clean"


@pytest.mark.slow
def test_callback_keeps_no_exception_alive(tmp_path):
    """Once the user drops the exception, tensors in its frames die, though the callback lives."""
    model = Failing(TORCH_ERROR(NEW))
    callback, raised = fail_in(tmp_path, model)
    assert model.big() is not None
    model.error = raised = raised.with_traceback(None)
    gc.collect()
    assert model.big() is None
    assert callback.report is not None


@pytest.mark.slow
def test_callback_keeps_no_model_alive(tmp_path):
    """Lightning calls no teardown after an exception."""
    model = Failing(TORCH_ERROR(NEW))
    callback, raised = fail_in(tmp_path, model)
    alive = weakref.ref(model)
    del model, raised
    gc.collect()
    assert alive() is None
    assert callback.report is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["describe", "out_of_memory_error"])
def test_user_exception_propagates_if_profiler_fails(tmp_path, monkeypatch, name):
    def fail(*args, **kwargs):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(loop_memory, name, fail)
    error = TORCH_ERROR(NEW)
    _, raised = fail_in(tmp_path, Failing(error))
    assert raised is error
    report = report_of(tmp_path)
    assert report["summary"]["memory"]["out_of_memory"] is None
    assert any("ZeroDivisionError: ours" in note for note in report["summary"]["memory"]["notes"])


def test_finding_holders_allocates_nothing():
    """No operator runs: a dispatch mode that rejects all of them sees none."""

    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    loop = SimpleNamespace(device=torch.device("cpu"), optimizers=[optimizer], module=model)
    memory = LoopMemory(loop)
    with Refuse():
        memory.on_exception(TORCH_ERROR(NEW), 3)
    assert memory.out_of_memory.by_category["optimizer state"] == 2 * 80 + 2 * 4
    assert out_of_memory.MOST_HOLDERS == 20
