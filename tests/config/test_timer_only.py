"""``timer_only=True`` measures times and nothing else, however the profiler is started."""

from __future__ import annotations

import re
import threading

import lightning.pytorch
import pytest
import torch
from torch.profiler import schedule

from lightning_modelprof import ConfigError, LoopProfiler, ModelProfCallback, ModelProfiler
from lightning_modelprof.cli.main import main
from tests.support.fits import ROOT, Net, fit_quietly, loader, make_trainer

pytestmark = pytest.mark.slow

QUIET = {"report": {"terminal": False, "files": False}}


def from_environment(monkeypatch):
    monkeypatch.setenv("LIGHTNING_MODELPROF", "timer_only=true")
    trainer = lightning.pytorch.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    [callback] = [one for one in trainer.callbacks if isinstance(one, ModelProfCallback)]
    return callback


DOORS = {
    "callback": lambda _: ModelProfCallback(timer_only=True),
    "profiler": lambda _: ModelProfiler(timer_only=True).callback,
    "loop": lambda _: LoopProfiler(timer_only=True),
    "yaml": lambda _: ModelProfCallback.from_yaml(ROOT / "configs" / "timer_only.yaml"),
    "environment": from_environment,
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_every_entry_point_gives_same_config(monkeypatch, door):
    config = door(monkeypatch).config
    assert config == ModelProfCallback(timer_only=True).config
    assert (config.schedule.active, config.wants_flops, config.inspect.sampling) == (0, False, False)


def test_fit_records_only_phases(tmp_path):
    threads = set()
    net = Net(lambda _: threads.update(one.name for one in threading.enumerate()))
    callback = ModelProfCallback(timer_only=True, dirpath=tmp_path / "out", report={"terminal": False})
    before = {one.name for one in threading.enumerate()}
    data = loader(64, num_workers=1)
    fit_quietly(make_trainer(tmp_path, callback, max_epochs=4), net, data)
    [rank] = callback.run.ranks
    assert (data.worker_init_fn, rank.workers) == (None, None)
    assert rank.num_steps == 128
    assert (rank.windows, rank.stacks) == ((), None)
    assert rank.model_cost is None or rank.model_cost.counted is None
    assert threads - {"QueueFeederThread"} == before, "no thread looks on, but for the DataLoader's own"
    assert callback.report.table("phases").rows
    text = " ".join((tmp_path / "out" / "report.txt").read_text().split())
    refused = re.findall(
        r"[Ss]et (?:flops|inspect|active|profile_memory)=\S+",
        "\n".join((text, *(one.summary for one in callback.report.findings))),
    )
    assert refused == [], "beside timer_only these are refused"
    assert "Leave out timer_only=True to count one." in text
    assert "modules weren't timed (leave out timer_only=True)" in [
        one.summary for one in callback.report.findings
    ]
    assert not (tmp_path / "out" / "traces").exists()


def test_custom_loop_records_only_steps():
    model = torch.nn.Linear(8, 1)
    with LoopProfiler(model, timer_only=True, **QUIET) as profiler:
        for inputs, _ in profiler.fetch(loader(64)):
            with profiler.phase("forward"):
                model(inputs)
    [rank] = profiler.run.ranks
    assert (rank.num_steps, rank.windows, rank.stacks) == (32, (), None)


CONTRADICTIONS = {
    "active=10": {"active": 10},
    "steps=(3, 5)": {"steps": (3, 5)},
    "repeat=2": {"repeat": 2},
    "with_stack=True": {"with_stack": True},
    "profile_memory=True": {"profile_memory": True},
    "stop_after_profile=True": {"stop_after_profile": True},
    "flops=True": {"flops": True},
    "inspect={'fvcore': True}": {"inspect": {"fvcore": True}},
}


@pytest.mark.parametrize("kind", [ModelProfCallback, ModelProfiler, LoopProfiler])
@pytest.mark.parametrize("written", CONTRADICTIONS)
def test_conflicting_arguments_are_rejected(kind, written):
    with pytest.raises(ConfigError) as caught:
        kind(timer_only=True, **CONTRADICTIONS[written])
    told = f": expected timer_only=True or {written}, got both; remove one of them."
    assert str(caught.value).endswith(told)


def test_conflict_message_uses_source_notation(tmp_path, capsys):
    assert main(["run", "--timer_only", "true", "--active", "3", __file__]) == 1
    told = "run: expected --timer_only true or --active 3, got both; remove one of them."
    assert capsys.readouterr().err == f"lightning-modelprof: {told}\n"
    (tmp_path / "mine.yaml").write_text("timer_only: true\ninspect: {fvcore: true}\n")
    told = "mine.yaml: expected timer_only: true or inspect: {fvcore: true}, got both; remove one of them."
    with pytest.raises(ConfigError, match=re.escape(told)):
        ModelProfCallback.from_yaml(tmp_path / "mine.yaml")


def test_arguments_already_off_are_accepted():
    arguments = {"active": 0, "flops": False, "inspect": {"sampling": False}}
    assert ModelProfCallback(timer_only=True, **arguments).config.timer_only
    assert ModelProfCallback(timer_only=False, active=3).config.active == 3


def test_torch_schedule_is_rejected():
    windows = schedule(wait=1, warmup=1, active=2, repeat=1)
    with pytest.raises(ConfigError, match=re.escape("expected schedule or timer_only, got both. Remove one")):
        LoopProfiler(timer_only=True, schedule=windows)
    assert LoopProfiler(timer_only=False, schedule=windows).config.active == 2
