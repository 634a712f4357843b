"""Profiles for the dashboard's tests: from real fits and traces, too new, damaged, or with hostile names."""

from __future__ import annotations

import json
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.compat.proto import summary_pb2
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.cli.main import main
from lightning_modelprof.engine.process_loops import PROCESS_LOOPS
from lightning_modelprof.report.build_dashboard_entry import step_columns
from lightning_modelprof.report.dashboard_entry import DashboardEntry
from lightning_modelprof.report.model import Column, Report, Table, Unit
from lightning_modelprof.show.tensorboard.event_file import write_event_file
from lightning_modelprof.show.tensorboard.profile_blob import PROFILE_SCHEMA_VERSION, pack_head, pack_profile
from tests.support.fits import Net, fit_quietly, loader, make_trainer
from tests.support.steps_page import sample_steps
from tests.support.traces import real_file

HOSTILE = "<img src=x onerror=alert(1)> \ud800 \x1b[31m ' \" & ${x} \u202e"

RUNS = (
    "net/version_0",
    "net/version_1",
    "<b>hostile</b>",
    "newer",
    "damaged steps",
    "newer head",
    "two_ranks",
    "v100_resnet50_workers0",
    "a100_nccl",
)
"""What :func:`write_logs` writes."""


def write_logs(root: Path, work: Path) -> None:
    """Two fits, a profile that is too new, one with hostile names, damaged ones, and real traces.

    Args:
        root: the log directory.
        work: an empty folder for files that don't belong in the log directory.
    """
    fit(root)
    fit(root, version=1)
    hostile = profile_of(report_of(HOSTILE, HOSTILE), HOSTILE)
    write_event_file(root / "<b>hostile</b>", [("modelprof/<i>window</i>", hostile)])
    blobs = pack_profile(hostile)
    write_raw(root / "newer", "modelprof/window_0", pack_head(hostile), [newer(blobs[0])])
    phases = replace(report_of(), tables=(replace(report_of().tables[0], id="phases"),))
    run = DashboardEntry(
        kind="run", loop="fit", window=None, label="x", report=phases, steps=step_columns(sample_steps(50))
    )
    document, steps = pack_profile(run)
    write_raw(root / "damaged steps", "modelprof/run", pack_head(run), [document, steps[:60]])
    head = pack_head(hostile).replace(b'version":%d' % PROFILE_SCHEMA_VERSION, b'version":99')
    write_raw(root / "newer head", "modelprof/window_0", head, blobs)
    ranks = work / "two_ranks"
    ranks.mkdir()
    for name in ("sampled_2rank_rank0", "sampled_2rank_rank1"):
        shutil.copy(real_file(name), ranks)
    for source in (ranks, real_file("v100_resnet50_workers0"), real_file("a100_nccl")):
        assert main(["tensorboard", str(source), "--logdir", str(root)]) == 0


def fit(root: Path, version: int = 0) -> ModelProfCallback:
    """A fit with two windows, logged by TensorBoard's logger."""
    logger = TensorBoardLogger(root, name="net", version=version)
    callback = ModelProfCallback(
        active=2,
        wait=4,
        repeat=2,
        skip_first=4,
        report={"terminal": False},
        inspect={"sampling": False},
        profile_memory=True,
    )
    trainer = make_trainer(root, callback, logger=logger)
    PROCESS_LOOPS.forget()  # as if each loop were alone in its process
    fit_quietly(trainer, Net(), loader())
    PROCESS_LOOPS.forget()
    trainer.validate(trainer.model, loader(16), verbose=False)
    return callback


def profile_of(report: Report, label: str = "steps 1 to 2", window: int = 0, **fields: Any) -> DashboardEntry:
    """A window's profile."""
    return DashboardEntry(kind="window", loop="fit", window=window, label=label, report=report, **fields)


def report_of(name: str = "row", title: str = "t") -> Report:
    """A report with one table."""
    table = Table(
        id="operators",
        title=title,
        columns=(Column("name", "Name"), Column("n", "N", Unit.COUNT)),
        rows=((name, 3), ("other", None)),
    )
    return Report(title=title, facts=((name, name),), tables=(table,), notes=(name,))


def write_raw(folder: Path, tag: str, content: bytes, blobs: list[bytes]) -> None:
    """Write a summary of the plugin with arbitrary bytes."""
    data = summary_pb2.SummaryMetadata.PluginData(plugin_name="modelprof", content=content)
    metadata = summary_pb2.SummaryMetadata(plugin_data=data, data_class=summary_pb2.DATA_CLASS_BLOB_SEQUENCE)
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(blobs))])
    tensor = TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=blobs)
    value = summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
    writer = EventFileWriter(str(folder))
    writer.add_event(Event(wall_time=1.0, step=0, summary=summary_pb2.Summary(value=[value])))
    writer.close()


def newer(packed: bytes) -> bytes:
    """The same document in a version that doesn't exist yet."""
    document = json.loads(zlib.decompress(packed))
    document["head"]["schema_version"] = 99
    document["head"]["kind"] = "galaxy"  # only that version knows its meaning
    return zlib.compress(json.dumps(document).encode())
