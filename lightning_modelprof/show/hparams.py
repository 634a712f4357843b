"""A row of TensorBoard's HParams tab, in an event file of its own.

TensorBoard takes the columns of the tab from the first run that describes an experiment, and shows no others.
So none is described here: where nobody does, the columns are all that any row has.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


def write_hparams(
    folder: str,
    hparams: Mapping[str, str | float | bool],
    metrics: Mapping[str, float],
    step: int,
    *,
    succeeded: bool,
) -> None:
    """Write one row.

    Args:
        folder: where the event file is made; TensorBoard calls the row by it. A run has one row, so no other
            row may be in it.
        hparams: what the run was set to.
        metrics: tag → value of each figure.
        step: the x-coordinate of the figures.
        succeeded: whether the run came to its end.

    Raises:
        OSError: when it cannot be written.
    """
    from tensorboard.compat.proto import event_pb2, summary_pb2  # noqa: PLC0415  # it takes a while
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2  # noqa: PLC0415
    from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS  # noqa: PLC0415
    from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

    begin = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for name, value in hparams.items():
        if isinstance(value, bool):
            begin.hparams[name].bool_value = value
        elif isinstance(value, str):
            begin.hparams[name].string_value = value
        else:
            begin.hparams[name].number_value = value
    status = STATUS_SUCCESS if succeeded else STATUS_FAILURE
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())

    def marked(tag: str, **content: Any) -> Any:
        data = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **content)
        head = metadata.create_summary_metadata(data)
        return summary_pb2.Summary.Value(tag=tag, metadata=head, tensor=metadata.NULL_TENSOR)

    values = [
        marked(metadata.SESSION_START_INFO_TAG, session_start_info=begin),
        marked(metadata.SESSION_END_INFO_TAG, session_end_info=end),
        *(summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()),
    ]
    writer = EventFileWriter(folder)
    try:
        summary = summary_pb2.Summary(value=values)
        writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))
    finally:
        writer.close()


def plain_hparams(users: Mapping[str, Any], prefix: str = "") -> dict[str, str | float | bool]:
    """Hyperparameters of the user's as the tab takes them, nested ones with a slash as Lightning names them.

    Args:
        users: as a logger keeps them; values that are no text, number or truth are left out.
        prefix: goes before every name.
    """
    plain: dict[str, str | float | bool] = {}
    for name, value in users.items():
        if isinstance(value, Mapping):
            plain |= plain_hparams(value, f"{prefix}{name}/")
        elif isinstance(value, str | float | int):
            plain[f"{prefix}{name}"] = value
    return plain
