"""What runs, on what: read once when the loop starts."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import torch

from lightning_modelprof.measure.user_code import INSTALLED
from lightning_modelprof.run.loops import Loop
from lightning_modelprof.run.records import RunInfo
from lightning_modelprof.run.setup import Library

_LIGHTNINGS: Final = ("lightning", "pytorch_lightning")


def run_info(
    trainer: Any,
    pl_module: Any,
    loop: Loop,
    *,
    config: dict[str, Any],
    sample_unit: str,
    version: str,
    libraries: Sequence[Library] = (),
) -> RunInfo:
    """The description of a loop that is about to begin; ``libraries`` are those that it belongs to."""
    device = trainer.strategy.root_device
    return RunInfo(
        created=_now(),
        loop=loop.key,
        model=written_class(pl_module).__name__,
        device_type=device.type,
        device_name=device_name(device),
        num_threads=torch.get_num_threads(),
        world_size=trainer.world_size,
        precision=str(trainer.precision),
        strategy=type(trainer.strategy).__name__,
        accumulate_grad_batches=trainer.accumulate_grad_batches if loop.is_fit else 1,
        sample_unit=sample_unit,
        host=platform.node(),
        versions={
            "lightning-modelprof": version,
            "torch": str(torch.__version__),
            **_versions((type(trainer), written_class(pl_module))),
            **{one.package: one.version for one in libraries if one.version},
            "python": platform.python_version(),
        },
        config=config,
    )


def _versions(kinds: Iterable[type]) -> dict[str, str]:
    """Versions of Lightning, and of installed packages with a class among these and their bases."""
    found = {}
    for kind in (base for one in kinds for base in one.__mro__):
        if not {"Trainer", "LightningModule"}.intersection(base.__name__ for base in kind.__mro__):
            continue
        package = kind.__module__.partition(".")[0]
        module = sys.modules.get(package)
        version, file = getattr(module, "__version__", None), getattr(module, "__file__", None)
        is_library = package in _LIGHTNINGS or not {*INSTALLED}.isdisjoint(Path(str(file)).parts)
        if isinstance(version, str) and is_library:
            found[package] = version
    return found


def _now() -> str:
    """The local time, in ISO 8601 with microseconds and zone."""
    try:
        return datetime.now().astimezone().isoformat(timespec="microseconds")
    except (
        Exception
    ):  # somebody else's stand-in for datetime, or a date that it cannot be: a label is missing
        return ""


def written_class(module: Any) -> type:
    """The class that the user wrote: ``fully_shard`` puts one of its own in its place."""
    kind = type(module)
    is_sharded = kind.__bases__[0].__name__ == "FSDPModule"
    return kind.__bases__[-1] if is_sharded else kind


def device_name(device: torch.device) -> str:
    """The device's own name, ``""`` if it has none to tell."""
    if device.type in {"cuda", "xpu"}:
        return str(getattr(torch, device.type).get_device_name(device))
    return platform.processor() or platform.machine()
