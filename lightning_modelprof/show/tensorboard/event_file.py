"""Profiles in TensorBoard's event files, where the dashboard finds them.

TensorBoard activates the dashboard if a run has a summary of this plugin, and its own loaders read the blobs,
wherever the log directory is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Protocol

from lightning_modelprof.report.dashboard_entry import DashboardEntry
from lightning_modelprof.show.tensorboard.profile_blob import pack_head, pack_profile

PLUGIN_NAME: Final = "modelprof"


class SummaryWriter(Protocol):
    """The used part of ``torch.utils.tensorboard.SummaryWriter``."""

    def _get_file_writer(self) -> Any:
        """Return the event file's writer; Lightning's TensorBoardLogger also uses it for hyperparameters."""

    def flush(self) -> Any: ...


def tag_of(profile: DashboardEntry, folder: str = PLUGIN_NAME) -> str:
    """Return a profile's tag in an event file: ``modelprof/run``, ``modelprof/validate/window_0``.

    Args:
        folder: name of the run's directory, which distinguishes multiple fits with one logger.
    """
    loop = () if profile.loop == "fit" else (profile.loop,)
    name = "run" if profile.kind == "run" else f"window_{profile.window}"
    return "/".join((folder, *loop, name))


def write_summary(writer: SummaryWriter, packed: bytes, step: int) -> None:
    """Write a profile through a logger's writer.

    Args:
        packed: result of :func:`profile_summary`, serialized.
        step: the x-coordinate.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415  # slow to import

    writer._get_file_writer().add_summary(Summary.FromString(packed), step)
    writer.flush()


def write_scalars(writer: SummaryWriter, scalars: Mapping[str, float], step: int) -> None:
    """Write all scalars of one step in one event; ``add_scalar`` would write one event each."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415  # slow to import

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
    writer._get_file_writer().add_summary(Summary(value=values), step)


def write_event_file(folder: Path, profiles: Iterable[tuple[str, DashboardEntry]]) -> int:
    """Write profiles to an event file of their own.

    Args:
        folder: where to create it; TensorBoard names a run after its folder.
        profiles: tags and profiles; each is written before the next is requested.

    Returns:
        The number of profiles.

    Raises:
        OSError: if the file can't be written.
    """
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415  # slow to import
    from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

    with ExitStack() as stack:
        number = 0
        for number, (tag, profile) in enumerate(profiles, 1):
            if number == 1:  # if none can be read, no empty file is left
                writer = EventFileWriter(str(folder))
                stack.callback(writer.close)
            writer.add_event(Event(wall_time=time.time(), step=0, summary=profile_summary(profile, tag)))
        return number


def profile_summary(profile: DashboardEntry, tag: str) -> Any:
    """Build TensorBoard's ``Summary`` of a profile.

    Args:
        tag: see :func:`tag_of`; if multiple profiles have one tag, a reader may get any of them.
    """
    from tensorboard.compat.proto import summary_pb2 as summary  # noqa: PLC0415  # slow to import
    from tensorboard.compat.proto.tensor_pb2 import TensorProto  # noqa: PLC0415
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # noqa: PLC0415
    from tensorboard.compat.proto.types_pb2 import DT_STRING  # noqa: PLC0415

    blobs = pack_profile(profile)
    metadata = summary.SummaryMetadata(
        plugin_data=summary.SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME, content=pack_head(profile)),
        data_class=summary.DATA_CLASS_BLOB_SEQUENCE,
    )
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(blobs))])
    tensor = TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=blobs)
    return summary.Summary(value=[summary.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])
