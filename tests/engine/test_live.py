"""Tests the scalars logged during training, and how runs claim directories."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.data.provider import RunTagFilter
from tensorboard.plugins.custom_scalar import layout_pb2

from lightning_modelprof.config.options import ReportOptions
from lightning_modelprof.engine import memory as loop_memory
from lightning_modelprof.engine.outputs import Outputs
from lightning_modelprof.engine.run_folder import RunFolder, claim_directory
from lightning_modelprof.measure.resources.memory import DeviceBytes, ProcessMemory
from tests.support.fits import run_fit


class CountingLogger(CSVLogger):
    """Stores our metrics."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, *, metrics, step=None):  # keyword arguments, as Lightning passes them
        ours = {name: value for name, value in metrics.items() if name.startswith("modelprof/")}
        if ours:
            self.logged.append((step, ours))
        super().log_metrics(metrics, step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "of_trainer", "num_points"),
    [(None, 10, 2), (5, 10, 4), (0, 10, 0), (None, 0, 0)],
    ids=["the Trainer's", "our own", "none of ours", "the Trainer logs nothing"],
)
def test_scalars_are_logged_at_requested_interval(tmp_path, ours, of_trainer, num_points):
    logger = CountingLogger(tmp_path)
    run_fit(
        tmp_path,
        trainer={"logger": logger, "log_every_n_steps": of_trainer, "max_steps": 21},
        active=0,
        skip_first=1,
        log_every_n_steps=ours,
    )
    assert len(logger.logged) == num_points
    for _, scalars in logger.logged:
        assert scalars["modelprof/ips"] == pytest.approx(1e3 / scalars["modelprof/batch_cost_ms"])
        phases = [value for name, value in scalars.items() if "phase_ms" in name]
        assert sum(phases) == pytest.approx(scalars["modelprof/batch_cost_ms"])


@pytest.mark.slow
def test_logged_memory_is_read_at_that_moment(tmp_path, monkeypatch):
    readings = iter(range(1, 100))
    monkeypatch.setattr(loop_memory, "process_memory", lambda: ProcessMemory(next(readings) * 2**20, None))
    monkeypatch.setattr(loop_memory, "device_memory", lambda device: DeviceBytes(allocated=3 * 2**19))
    logger = CountingLogger(tmp_path)
    run_fit(tmp_path, trainer={"logger": logger}, active=0, log_every_n_steps=5)
    logged = [
        {name: value for name, value in scalars.items() if "memory" in name} for _, scalars in logger.logged
    ]
    assert len(logged) > 2
    for number, scalars in enumerate(logged, 1):
        expected = {"modelprof/memory_mib/process": number, "modelprof/memory_mib/allocated": 1.5}
        assert scalars == expected, "reserved is not counted here, and is no zero"


class Reader:
    """Reads a log directory as TensorBoard's plugins do."""

    def __init__(self, folder):
        self.multiplexer = EventMultiplexer()
        self.multiplexer.AddRunsFromDirectory(str(folder)).Reload()

    def charts(self):
        """Chart titles on the Custom Scalars tab for the only run."""
        provider = MultiplexerDataProvider(self.multiplexer, "")
        tag = "custom_scalars__config__"
        found = provider.read_tensors(
            RequestContext(),
            experiment_id="",
            plugin_name="custom_scalars",
            run_tag_filter=RunTagFilter(tags=[tag]),
            downsample=1,  # as the plugin does
        )
        ((points,),) = ([by_tag[tag]] for by_tag in found.values())
        layout = layout_pb2.Layout.FromString(points[0].numpy.item())
        return [chart.title for chart in layout.category[0].chart]


@pytest.mark.slow
def test_tensorboard_has_one_run_one_text_and_no_empty_charts(tmp_path):
    """A CPU with an unknown peak has no MFU. There once was a text for each table."""
    trainer = {"logger": TensorBoardLogger(tmp_path, name="net"), "log_every_n_steps": 5, "max_steps": 21}
    run_fit(tmp_path, trainer=trainer, active=2, skip_first=1, tensorboard=True)
    reader = Reader(tmp_path)
    assert list(reader.multiplexer.Runs()) == ["net/version_0"]
    tags = reader.multiplexer.Runs()["net/version_0"]["tensors"]
    assert [tag for tag in tags if tag.endswith("/text_summary")] == ["modelprof/report/text_summary"]
    assert not [tag for tag in tags if tag.startswith("_hparams_")]  # an empty row for models without any
    assert "Steps per second" in reader.charts()
    assert "MFU" not in reader.charts()


def test_chart_appears_with_its_first_figure(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="net")
    options = ReportOptions(tensorboard=True)
    shown = Outputs(RunFolder(path=None, created="now"), [logger], options, pytest.fail)
    shown.log_scalars({"modelprof/ips": 1.0}, 5)
    logger.experiment.flush()
    assert Reader(tmp_path).charts() == ["Steps per second"]
    shown.log_scalars({"modelprof/ips": 1.0, "modelprof/flops_per_s": 1.0, "modelprof/mfu": 0.5}, 10)
    shown.log_scalars({"modelprof/ips": 1.0}, 15)
    logger.experiment.flush()
    assert Reader(tmp_path).charts() == ["Steps per second", "FLOP/s", "MFU"]


def test_runs_never_share_directory(tmp_path):
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        folders = pool.map(claim_directory, [tmp_path / "modelprof"] * 12)
    assert len(set(folders)) == 12
    assert {folder.name for folder in folders} == {"modelprof", *(f"modelprof_{n}" for n in range(1, 12))}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run.json", "report.html", "report.json", "report.txt"])
def test_existing_files_are_not_overwritten(tmp_path, name):
    """The directory may be the user's, or a run's whose archive was moved."""
    file = tmp_path / "modelprof" / name
    file.parent.mkdir()
    file.write_text("the user's")
    run_fit(tmp_path, active=0)
    assert file.read_text() == "the user's"
    assert {one.name for one in tmp_path.joinpath("modelprof").iterdir()} == {name}
    assert (tmp_path / "modelprof_1" / "report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_fast_dev_run_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callback = run_fit(tmp_path, trainer={"fast_dev_run": 2}, active=0, dirpath=None)
    assert callback.report is not None
    assert not list(tmp_path.rglob("modelprof*"))
