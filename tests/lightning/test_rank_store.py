"""Tests how ranks exchange data, and that training works if one rank doesn't take part."""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from lightning_modelprof.lightning import rank_store as module
from lightning_modelprof.lightning.rank_store import TOO_SHORT, RankStore
from lightning_modelprof.run.archive import load_run
from tests.support.documents import raw_rows
from tests.support.fits import run_script

pytestmark = pytest.mark.slow


@pytest.fixture
def store(monkeypatch):
    """The store that three ranks share."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(module, "_store", lambda: store)
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    monkeypatch.setattr(RankStore, "_old_keys", ())
    return store


def new_store(rank, world_size=3):
    return RankStore(SimpleNamespace(global_rank=rank, world_size=world_size))


def join(*ranks):
    """Stores of these ranks, which all join before the loop starts."""
    stores = [new_store(rank) for rank in ranks]
    for one in stores:
        one.join()
    return stores


def together(*calls):
    """Results of the calls, which run in parallel."""
    told = {}
    threads = [
        threading.Thread(target=lambda place=place, call=call: told.setdefault(place, call()))
        for place, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return [told[place] for place in range(len(calls))]


def test_all_ranks_get_first_ranks_directory(store):
    ranks = join(0, 1, 2)
    assert [one.is_first for one in ranks] == [True, False, False]
    assert (
        together(*(lambda one=one: one.agree_on_folder(f"of {one._rank}") for one in ranks)) == ["of 0"] * 3
    )
    assert list(ranks[0].find_absent()) == []


@pytest.mark.parametrize("here", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_ranks_do_not_wait_for_missing_ones(store, monkeypatch, here):
    asleep = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("it waits"))
    monkeypatch.setattr(module, "time", asleep)
    ranks = join(*here)
    assert [one.is_first for one in ranks] == [one is ranks[0] for one in ranks]
    assert [one.agree_on_folder(f"of {one._rank}") for one in ranks] == [f"of {here[0]}"] * len(here)
    assert set(ranks[0].find_absent()) == {0, 1, 2} - set(here)
    for one in ranks[1:]:
        one.send(b"of %d" % one._rank)
    assert ranks[0].receive() == {rank: b"of %d" % rank for rank in here[1:]}
    assert set(ranks[0].absent) == {0, 1, 2} - set(here)


def test_silent_rank_is_absent_with_reason(store):
    ranks = join(0, 1, 2)
    ranks[0].find_absent()
    ranks[2].send(None, "an internal error")
    assert ranks[0].receive() == {}
    assert ranks[0].absent == {1: "sent nothing within 0.2 s", 2: "an internal error"}


def test_rank_that_leaves_is_not_waited_for(store, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 3600.0)
    ranks = join(0, 1, 2)
    ranks[0].find_absent()
    ranks[1].send(b"all I know")
    for one in ranks[1:]:
        one.leave()
    assert ranks[0].receive() == {1: b"all I know"}
    assert ranks[0].absent == {2: "left the loop early"}


def test_oversized_message_is_not_sent(store):
    ranks = join(0, 1)
    ranks[1].send(bytes(module.MOST_BYTES + 1))
    ranks[0].find_absent()
    assert ranks[0].receive() == {}
    assert ranks[0].absent[1] == "its data exceeded 1 MiB"


def test_messages_of_other_loops_are_ignored(store):
    """Ranks may have taken part in different loops, as they don't count them."""
    one = join(0)
    one[0].agree_on_folder("the first folder")
    one[0].leave()
    both = join(1)
    assert both[0].is_first
    both[0].leave()
    again = join(0, 1)
    assert again[1].agree_on_folder("") is None, "the first has not said it yet"
    assert again[0].agree_on_folder("the second folder") == "the second folder"
    assert again[1].agree_on_folder("") == "the second folder"


def test_announcing_step_blocks_no_rank(store):
    first, second, third = join(0, 1, 2)
    assert first.announced("window") is None
    assert second.announced("window") is None
    first.announce("window", 40)
    assert [one.announced("window") for one in (first, second, third)] == [40] * 3
    assert third.announced("count") is None


def test_first_rank_decides_that_loop_is_too_short(store):
    first, second = join(0, 1)
    told = together(lambda: first.agree_on_folder(TOO_SHORT), lambda: second.agree_on_folder("mine"))
    assert told == [TOO_SHORT] * 2


def test_thousand_loops_leave_few_keys(store):
    for _ in range(1000):
        ranks = join(0, 1)
        ranks[0].agree_on_folder("folder")
        ranks[1].send(b"steps")
        for one in ranks:
            one.leave()
    assert store.num_keys() <= 12


def test_nested_loop_has_separate_messages(store):
    outer = join(0, 1)
    outer[0].agree_on_folder("outer")
    assert outer[1].agree_on_folder("") == "outer"
    inner = join(0, 1)
    inner[0].agree_on_folder("inner")
    assert inner[1].agree_on_folder("") == "inner"
    inner[1].send(b"inner")
    assert inner[0].receive()[1] == b"inner"
    for one in inner:
        one.leave()
    outer[1].send(b"outer")
    assert outer[0].receive()[1] == b"outer"


def test_stop_needs_all_ranks(store):
    ranks = join(0, 1, 2)
    for one in ranks:
        one.propose_stop(6)
    assert [one.agrees_on_stop(6) for one in ranks] == [True] * 3
    assert [one.agrees_on_stop(7) for one in ranks] == [False] * 3
    some = join(0, 1)
    for one in some:
        one.propose_stop(6)
    assert [one.agrees_on_stop(6) for one in some] == [False] * 2


class Connection:
    """One rank's connection to a store that handles its requests in order, but ``set`` without an answer.

    The store gets to those only when the rank waits for an answer.
    """

    def __init__(self, store):
        self.store, self.waiting = store, []

    def set(self, key, value):
        self.waiting.append((key, value))

    def __getattr__(self, name):
        while self.waiting:
            self.store.set(*self.waiting.pop(0))
        return getattr(self.store, name)


def test_slow_store_has_all_keys_before_they_are_read(monkeypatch):
    """After the wait between two hooks, all ranks agree though the store is slow."""
    store = torch.distributed.HashStore()
    connections = [Connection(store) for _ in range(3)]
    ranks = [new_store(rank) for rank in range(3)]
    for one, connection in zip(ranks, connections, strict=True):
        monkeypatch.setattr(module, "_store", lambda connection=connection: connection)
        one.join()
    assert [one.is_first for one in reversed(ranks)] == [False, False, True]
    for one in ranks:
        one.propose_stop(6)
    assert [one.agrees_on_stop(6) for one in reversed(ranks)] == [True] * 3


def test_process_group_timeout_limits_wait(store, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 3600.0)
    store.set_timeout(timedelta(seconds=0.4))
    ranks = join(0, 1)
    assert ranks[1].agree_on_folder("") is None


def test_single_rank_uses_no_store(monkeypatch):
    monkeypatch.setattr(module, "_store", lambda: pytest.fail("there is nobody to meet"))
    alone = new_store(0, world_size=1)
    alone.join()
    assert (alone.is_first, alone.agree_on_folder("here")) == (True, "here")
    assert (list(alone.find_absent()), alone.receive()) == ([], {})
    alone.leave()


def test_first_rank_reports_alone_without_store(monkeypatch):
    monkeypatch.setattr(module, "_store", lambda: None)
    first, second = new_store(0, 2), new_store(1, 2)
    for one in (first, second):
        one.join()
    assert (first.is_first, second.is_first) == (True, False)
    assert not first.agrees_on_stop(6)
    assert (first.agree_on_folder("here"), second.agree_on_folder("")) == ("here", None)
    first.find_absent()
    assert (first.receive(), first.absent) == ({}, {1: "the process group has no store to reach it through"})


def test_leaving_tolerates_lost_first_rank(store):
    (one,) = join(1)
    one._store = SimpleNamespace(get=broken, set=broken, check=broken)
    one.leave()
    assert one._store is None


def broken(*args):
    raise torch.distributed.DistNetworkError("the connection was closed")


@pytest.mark.parametrize("private", [True, False])
def test_store_is_found_in_different_torch_versions(tmp_path, monkeypatch, private):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=timedelta(seconds=30)
    )
    try:
        if not private:
            monkeypatch.delattr(torch.distributed.distributed_c10d, "_get_default_store")
        found = module._store()
        if private or hasattr(torch.distributed.ProcessGroup, "get_group_store"):
            found.set("key", "value")
            assert found.get("key") == b"value"
        else:
            assert found is None
    finally:
        torch.distributed.destroy_process_group()


# Real training, in which a collective of ours would hang

JOB = """
import json, os, signal, sys, time, traceback
from datetime import timedelta
from pathlib import Path
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.strategies import DDPStrategy
from lightning_modelprof import ModelProfCallback
from lightning_modelprof.engine import process_loops, session
from lightning_modelprof.lightning.rank_store import RankStore
from lightning_modelprof.measure.window.capture import Capture
from tests.support.fits import *

RANK = lambda: torch.distributed.get_rank()

class Uneven(LightningDataModule):
    # Rank 1 has no batch, so that Lightning skips its loop.
    def __init__(self):
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def val_dataloader(self):
        return loader(0 if self.trainer.global_rank else 16)

def trainer_of(callback, *others, **options):
    strategy = DDPStrategy(process_group_backend="gloo", start_method="fork", timeout=timedelta(seconds=60))
    callbacks = [callback, Note(callback), *others]
    return make_trainer(".", *callbacks, strategy=strategy, devices=2, enable_progress_bar=False, **options)

class OnOneRank(ModelProfCallback):
    # As good as not there on the other ones.
    ranks_with = (0,)

    def __getattribute__(self, name):
        is_hook = name == "setup" or name.startswith("on_")
        if is_hook and torch.distributed.is_initialized() and RANK() not in self.ranks_with:
            return getattr(Callback(), name)
        return super().__getattribute__(name)

class Note(Callback):
    # Forked ranks end with the loop.
    def __init__(self, callback):
        self.callback = callback

    def teardown(self, trainer, module, stage):
        status = None if self.callback.run is None else self.callback.run.info.status
        weights = float(sum(p.double().sum() for p in module.parameters()))
        found = [trainer.global_step, status, weights]
        Path(f"{trainer.global_rank}.json").write_text(json.dumps(found))

class Sums(Callback):
    # The user's own collective after the loop, which took one of ours for its partner.
    def teardown(self, trainer, module, stage):
        figures = torch.ones(1)
        torch.distributed.all_reduce(figures)
        assert float(figures) == 2

class Dies(Callback):
    def on_train_end(self, trainer, module):
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

WINDOWS = {"skip_first": 2, "wait": 1, "warmup": 0, "active": 2}

def callback_of(kind=ModelProfCallback, **options):
    quiet = {"dirpath": "modelprof", "active": 0, "flops": False}
    quiet |= {"inspect": {"sampling": False}, "report": {"terminal": False}}
    return kind(**(quiet | options))

def fit(callback, *others):
    trainer_of(callback, *others, Sums()).fit(Net(), loader(64))

def breaks_on(rank, owner, name):
    whole = getattr(owner, name)
    def broken(*args, **kwargs):
        if RANK() == rank:
            raise RuntimeError("injected")
        return whole(*args, **kwargs)
    setattr(owner, name, broken)

def fails_at_step_4(capture, step, begin_step=Capture.begin_step):
    if step == 4 and RANK() == 1:
        raise RuntimeError("injected")
    return begin_step(capture, step)

def run(case, *arguments):
    if case == "some ranks":
        stops = {"stop_after_profile": True, **WINDOWS} if "stop" in arguments else {}
        callback = callback_of(OnOneRank, **stops)
        callback.ranks_with = tuple(int(one) for one in arguments[0])
        fit(callback)
    elif case == "stops on one":
        class StopsOnOne(ModelProfCallback):
            def setup(self, trainer, module, stage):
                self.config = callback_of(stop_after_profile=trainer.global_rank == 0, **WINDOWS).config
                super().setup(trainer, module, stage)
        fit(callback_of(StopsOnOne))
    elif case == "one stops early":
        Capture.begin_step = fails_at_step_4
        fit(callback_of(stop_after_profile=True, **WINDOWS))
    elif case == "all stop":
        fit(callback_of(stop_after_profile=True, **WINDOWS))
    elif case == "breaks":
        rank, name = arguments
        here = sys.modules[RankStore.__module__]
        owner = {"claim_directory": process_loops, "pack_rank_steps": session, "_store": here}
        breaks_on(int(rank), owner.get(name, RankStore), name)
        fit(callback_of(stop_after_profile=True, **WINDOWS))
    elif case == "dies":
        strategy = DDPStrategy(process_group_backend="gloo", start_method="fork")
        trainer = make_trainer(".", Dies(), callback_of(), strategy=strategy, devices=2)
        trainer.fit(Net(), loader(64))
    elif case == "uneven":
        process_loops.SHORT_EVALUATION = 0
        trainer = trainer_of(callback_of(), Sums(), use_distributed_sampler=False)
        trainer.validate(Net(), datamodule=Uneven(), verbose=False)

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.modules[RankStore.__module__].PATIENCE_S = 5.0  # for who does not come, here
    waiting, running = list(enumerate(json.loads(sys.argv[1]))), {}
    while waiting or running:
        while waiting and len(running) < 3:  # most of them wait for a rank
            number, case = waiting.pop(0)
            os.mkdir(str(number))
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                os.chdir(str(number))
                log = os.open("log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                os.dup2(log, 1), os.dup2(log, 2)
                try:
                    run(*case)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            running[pid] = number, time.monotonic() + 50  # less than the process group's time-out
        for pid, (number, until) in tuple(running.items()):
            done, code = os.waitpid(pid, os.WNOHANG)
            if not done and time.monotonic() > until:
                os.killpg(pid, signal.SIGKILL)
                done, code = os.waitpid(pid, 0)
            if done:
                del running[pid]
                print(json.dumps([number, os.waitstatus_to_exitcode(code)]), flush=True)
        time.sleep(0.01)
"""


BROKEN = [
    (1, "_store", 16),
    (0, "_store", 16),
    (1, "join", 16),
    (0, "agree_on_folder", 6),
    (1, "_find_first", 16),
    (1, "propose_stop", 16),
    (0, "claim_directory", 6),
    (1, "send", 6),
    (0, "receive", 6),
    (1, "pack_rank_steps", 6),
]
"""Rank, failing function and number of training steps: all 16 if a rank can't agree to end training."""

CASES = [
    ("some ranks", "01"),
    *(("some ranks", str(rank), *stop) for rank in (0, 1) for stop in ([], ["stop"])),
    ("uneven",),
    ("one stops early",),
    ("all stop",),
    ("stops on one",),
    *(("breaks", str(rank), name) for rank, name, _ in BROKEN),
    ("dies",),
]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Directory and exit status of each case, all run by one program."""
    folder = tmp_path_factory.mktemp("jobs")
    result = run_script(JOB, json.dumps(CASES), cwd=folder, timeout=60 * len(CASES))
    assert result.returncode == 0, result.stderr[-5000:]
    statuses = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    return {CASES[number]: (folder / str(number), status) for number, status in statuses}


def outcome(jobs, *case):
    """Directory; each rank's optimizer steps, status and sum of weights; and the log."""
    folder, status = jobs[tuple(map(str, case))]
    said = (folder / "log").read_text()
    assert status == 0, said[-5000:]
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)], said


def rows_of(folder):
    """Rank names and reasons in the report's table."""
    report = json.loads((folder / "modelprof" / "report.json").read_text())
    return [row["rank"] for row in raw_rows(report["tables"]["rank_phases"])]


on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="gloo on the loopback interface is tried on Linux"
)

JOINED_NOT = "no ModelProfCallback joined there"


@on_linux
def test_callback_on_all_ranks(jobs):
    folder, found, said = outcome(jobs, "some ranks", "01")
    assert [one[:2] for one in found] == [[16, "finished"]] * 2
    assert "ModelProfCallback" not in said
    assert rows_of(folder) == ["rank 0", "rank 1"]
    run = load_run(folder / "modelprof")
    assert [(one.rank, one.num_steps) for one in run.rank_steps] == [(0, 16), (1, 16)]
    assert load_run(folder / "modelprof" / "run_rank1.json").rank_steps == ()


@on_linux
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stop", [[], ["stop"]], ids=["", "stop_after_profile"])
def test_callback_on_only_one_rank(jobs, rank, stop):
    folder, found, said = outcome(jobs, "some ranks", rank, *stop)
    assert found[rank][:2] == [16, "finished"]
    assert found[1 - rank][:2] == [16, None]
    assert found[0][2] == found[1][2]
    assert said.count("1 of 2 ranks don't profile training") == 1
    assert said.count("stop_after_profile: not every rank has this callback") == len(stop)
    run = load_run(folder / "modelprof")
    assert (run.info.status, run.ranks[0].rank, run.ranks[0].num_steps) == ("finished", rank, 16)
    assert rows_of(folder) == [f"rank {1 - rank}: {JOINED_NOT}"]


@on_linux
def test_rank_without_batches_is_listed_as_absent(jobs):
    folder, found, said = outcome(jobs, "uneven")
    assert [status for _, status, _ in found] == ["finished", None]
    assert said.count("internal error") == 0
    assert rows_of(folder) in (["rank 1: left the loop early"], [f"rank 1: {JOINED_NOT}"])


@on_linux
def test_windows_also_end_training_on_aborted_rank(jobs):
    folder, found, said = outcome(jobs, "one stops early")
    # the last window has steps 3 and 4 and closes in step 5
    assert [steps for steps, *_ in found] == [6, 6]
    assert [status for _, status, _ in found] == ["finished", "aborted"]
    assert found[0][2] == found[1][2]
    assert said.count("an internal error stopped the profiler") == 1
    assert rows_of(folder) == ["rank 1: an internal error stopped the profiler there"]


@on_linux
def test_windows_end_training_on_all_ranks_together(jobs):
    _, found, said = outcome(jobs, "all stop")
    assert [one[:2] for one in found] == [[6, "finished"]] * 2
    assert "ModelProfCallback" not in said


@on_linux
def test_windows_do_not_end_training_on_one_rank_only(jobs):
    """If only one rank stopped, the other would hang in its next collective."""
    _, found, said = outcome(jobs, "stops on one")
    assert [one[:2] for one in found] == [[16, "finished"]] * 2
    assert said.count("stop_after_profile: not every rank has this callback with the same windows") == 1


@on_linux
@pytest.mark.parametrize(("rank", "name", "num_steps"), BROKEN)
def test_failing_rank_exchange_keeps_ranks_in_step(jobs, rank, name, num_steps):
    """If a rank can't agree to end training after the windows, no rank ends it."""
    _, found, said = outcome(jobs, "breaks", rank, name)
    assert [steps for steps, *_ in found] == [num_steps] * 2
    assert found[1 - rank][1] == "finished"
    assert found[0][2] == found[1][2]
    assert "injected" in said
    assert said.count("couldn't reach the other ranks") + said.count("an internal error stopped") <= 2


@on_linux
def test_rank_killed_before_sending_anything(jobs):
    folder, status = jobs["dies",]
    assert status != 0, "the launcher says that a rank was killed"
    assert "SIGKILL" in (folder / "log").read_text()
    run = load_run(folder / "modelprof")
    assert run.ranks[0].rank == 0
    if run.info.status == "finished":  # unless the launcher ended the other ranks first
        assert rows_of(folder) in (["rank 1: sent nothing within 5 s"], ["rank 1: could not be reached"])
