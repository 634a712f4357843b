"""The HParams tab: rows of real fits, read back from a real TensorBoard; the user's rows stay as they are."""

from __future__ import annotations

import json
import time
import urllib.request

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_modelprof.report.hparams import hparams_of
from lightning_modelprof.report.model import Report
from lightning_modelprof.show.hparams import plain_hparams, write_hparams
from tests.fits import Net, fit_quietly, loader, make_callback, make_trainer, our_warnings
from tests.tensorboard_server import tensorboard

GIB = 2**30


class WithHparams(Net):
    """Keeps hyperparameters as Lightning users do."""

    def __init__(self, lr=0.1, name="plain"):
        super().__init__()
        self.save_hyperparameters()


def post(server, route, **body):
    """An answer of TensorBoard's HParams plugin."""
    request = urllib.request.Request(
        f"{server.url}data/plugin/hparams/{route}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def tab_of(folder, num_rows, *, is_fast=True):
    """What the tab shows: names of its columns, and name of the row → (hparams, metrics)."""
    with tensorboard(folder, is_fast=is_fast) as server:
        end = time.monotonic() + 60
        while True:
            columns = post(server, "experiment", experimentName="")
            statuses = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]
            groups = post(server, "session_groups", allowedStatuses=statuses, startIndex=0, sliceSize=100)
            if len(groups.get("sessionGroups", [])) >= num_rows or time.monotonic() > end:
                break
            time.sleep(0.2)
    rows = {
        group["name"]: (
            group["hparams"],
            {one["name"]["tag"]: one["value"] for one in group.get("metricValues", [])},
        )
        for group in groups["sessionGroups"]
    }
    return {one["name"] for one in columns["hparamInfos"]}, rows


def fit(folder, module, *, batch_size=2, logger=None, **kwargs):
    logger = TensorBoardLogger(folder, name="logs", **(logger or {}))
    callback = make_callback(folder, dirpath=None, active=0, **kwargs)
    trainer = make_trainer(folder, callback, logger=logger)
    fit_quietly(trainer, module, loader(batch_size=batch_size))
    return callback


@pytest.mark.parametrize("is_fast", [True, False])  # TensorBoard has two readers of event files
def test_rows_of_two_fits(tmp_path, is_fast):
    callbacks = [fit(tmp_path, Net(), batch_size=size) for size in (2, 4)]
    columns, rows = tab_of(tmp_path / "logs", 2, is_fast=is_fast)
    assert set(rows) == {"version_0/modelprof", "version_1/modelprof"}
    assert {"batch_size", "num_workers", "precision", "optimizer", "model"} <= columns
    for version, callback in enumerate(callbacks):
        hparams, metrics = rows[f"version_{version}/modelprof"]
        assert hparams["batch_size"] == (2, 4)[version]
        assert (hparams["num_workers"], hparams["optimizer"], hparams["pin_memory"]) == (0, "SGD", False)
        benchmark = callback.report.sections["benchmark"]
        assert metrics["profile/ips (steps per s)"] == pytest.approx(benchmark["ips"]["avg"])
        assert metrics["profile/batch_cost (ms)"] == pytest.approx(benchmark["batch_cost_ns"]["avg"] / 1e6)
        # What the CPU does not have is not there, and not 0.
        assert not any("mfu" in tag or "device memory" in tag for tag in metrics)
        assert "prefetch_factor" not in hparams


def test_the_users_rows_are_as_without_us(tmp_path):
    for folder in ("with", "without"):
        fit(tmp_path / folder, WithHparams(lr=0.5), tensorboard=folder == "with")
    tabs = [tab_of(tmp_path / folder, 1) for folder in ("with", "without")]
    assert tabs[0] == tabs[1]
    assert tabs[0] == ({"lr", "name"}, {"logs/version_0": ({"lr": 0.5, "name": "plain"}, {"hp_metric": -1})})


def test_our_row_carries_the_users_where_lightning_writes_none(tmp_path):
    fit(tmp_path, WithHparams(lr=0.5), logger={"default_hp_metric": False})
    columns, rows = tab_of(tmp_path, 1)
    [(hparams, metrics)] = rows.values()
    assert {"lr", "name", "batch_size"} <= columns
    assert (hparams["lr"], hparams["name"], hparams["batch_size"]) == (0.5, "plain", 2)
    assert metrics["profile/ips (steps per s)"] > 0


def test_nothing_where_texts_or_files_are_off(tmp_path):
    fit(tmp_path, Net(), tensorboard=False)
    assert not [path for path in tmp_path.rglob("events.*") if path.parent.name == "modelprof"]


def test_a_row_that_cannot_be_written_is_warned_of(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("the disk is full")

    monkeypatch.setattr("lightning_modelprof.loop.outputs.write_hparams", fail)
    with our_warnings() as messages:
        callback = fit(tmp_path, Net())
    assert [message for message in messages if "the disk is full" in message]
    assert callback.report.sections["benchmark"] is not None
    assert (tmp_path / "logs" / "version_0" / "modelprof" / "report.json").is_file()


def report_with(settings, **sections):
    nothing = dict.fromkeys(("benchmark", "memory", "flops"))
    run = {"world_size": 1, "all_ranks": None}
    return Report(
        title="t",
        facts=(),
        tables=(),
        notes=(),
        sections={**nothing, "run": run, "settings": settings, **sections},
    )


def test_what_is_not_known_is_left_out():
    settings = {
        "model": "not known",
        "dataloader 0: num_workers": "4",
        "dataloader 1: num_workers": "none",
        "dataloader 1: pin_memory": "True",
        "version of torch": "2",
    }
    row = hparams_of(report_with(settings))
    assert row.hparams == {"num_workers (0)": 4, "pin_memory (1)": True}
    assert row.metrics == {}


def test_metrics_of_several_ranks():
    """Two ranks with 100 samples each in 2 s: 100 samples a second; one rank's own rate is not shown."""
    ranks = {"world_size": 2, "samples": 200, "batch_total_ns": 4 * 10**9}
    row = hparams_of(
        report_with(
            {},
            run={"world_size": 2, "all_ranks": ranks},
            benchmark={"samples_per_s": {"avg": 7.0}, "ips": {"avg": 5.0}, "reader_ratio": 0.25},
            flops={"mfu": 0.5},
            memory={"peak_allocated_bytes": GIB, "peak_rss_bytes": None},
        )
    )
    assert row.metrics == {
        "profile/ips (steps per s)": 5,
        "profile/samples per s": 100,
        "profile/reader_ratio (%)": 25,
        "profile/mfu (%)": 50,
        "profile/peak device memory (MiB)": 1024,
    }
    alone = report_with({}, run={"world_size": 2, "all_ranks": None}, benchmark={"samples_per_s": {"avg": 7}})
    assert hparams_of(alone).metrics == {}


def test_plain_hparams():
    users = {"lr": 0.1, "net": {"depth": 3, "name": "x"}, "flag": True, "none": None, "sizes": [1, 2]}
    assert plain_hparams(users) == {"lr": 0.1, "net/depth": 3, "net/name": "x", "flag": True}


def test_a_run_that_failed_says_so(tmp_path):
    write_hparams(str(tmp_path / "failed"), {"name": "<b>"}, {"m": 1.0}, 3, succeeded=False)
    with tensorboard(tmp_path) as server:
        end = time.monotonic() + 60
        groups = []
        while not groups and time.monotonic() < end:
            groups = post(
                server, "session_groups", allowedStatuses=["STATUS_FAILURE"], startIndex=0, sliceSize=9
            )
            groups = groups.get("sessionGroups", [])
    [group] = groups
    assert group["hparams"] == {"name": "<b>"}


def test_the_names_are_those_of_the_settings(tmp_path):
    """A setting that is called otherwise one day would be missing without a word."""
    callback = fit(tmp_path, Net())
    row = hparams_of(callback.report)
    left_out = {"prefetch_factor", "parameters", "trainable_parameters", "fused_optimizer"}
    expected = {"model", "batch_size", "num_workers", "pin_memory", "persistent_workers", "precision"}
    expected |= {"accumulate_grad_batches", "optimizer", "compile", "strategy", "world_size", "device"}
    assert expected <= set(row.hparams) <= expected | left_out | {"threads"}
