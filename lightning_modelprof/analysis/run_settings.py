"""What a run was set to, as flat text, to be put beside that of another run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.run.steps import NOT_MEASURED, StepTimings

UNKNOWN: Final = "not known"

_SETUP_NUMBERS: Final = (
    "usable_cpus",
    "local_world_size",
    "manual_optimization",
    "num_trainable_tensors",
    "log_every_n_steps",
    "val_check_interval",
    "check_every_n_epochs",
    "num_val_batches",
    "gradient_clip_val",
    "matmul_precision",
)
"""Fields of ``TrainingSetup`` that are one value each; dataloaders and optimizers have theirs below."""

_WHERE_FILES_GO: Final = frozenset({"dirpath"})
"""Arguments of the callback that differ between any two runs and change nothing."""


def batch_size(steps: StepTimings) -> float | None:
    """Samples of a usual step: the median over the clean steps; ``None`` if it is not known."""
    samples = steps.clean().samples
    if len(samples) == 0 or (samples == NOT_MEASURED).any():
        return None
    return float(np.median(samples))


def run_settings(analysis: Analysis) -> dict[str, str]:
    """Name → value of all that may make one run differ from another, in reading order."""
    info = analysis.info
    root = None if isinstance(analysis.modules, Absent) else analysis.modules.root
    samples = batch_size(analysis.steps)
    values: dict[str, Any] = {
        "model": info.model or UNKNOWN,
        "model parameters": UNKNOWN if root is None else root.parameters,
        "trainable parameters": UNKNOWN if root is None else root.trainable,
        f"{info.sample_unit} in a step": UNKNOWN if samples is None else samples,
        "accumulate_grad_batches": info.accumulate_grad_batches,
        "precision": info.precision or UNKNOWN,
        "device": f"{info.device_type} {info.device_name}".strip(),
        "threads": UNKNOWN if info.num_threads is None else info.num_threads,
        "world size": info.world_size,
        "strategy": info.strategy or UNKNOWN,
        **dict(_setup(analysis)),
        **{f"version of {name}": version for name, version in info.versions.items()},
        **{f"callback: {key}": value for key, value in info.config.items() if key not in _WHERE_FILES_GO},
    }
    return {name: _text(value) for name, value in values.items()}


def setting_differences(
    before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]]
) -> tuple[tuple[str, str, str], ...]:
    """(name, before, after) of each setting that is not the same on both sides; several values side by side.

    Args:
        before: settings of each run of the side.
        after: the same.
    """
    names = dict.fromkeys(name for run in (*before, *after) for name in run)
    found = []
    for name in names:
        sides = [tuple(dict.fromkeys(run.get(name, UNKNOWN) for run in side)) for side in (before, after)]
        # What was read on one side only, by another version or with other arguments, is no difference.
        if sides[0] != sides[1] and (UNKNOWN,) not in sides:
            found.append((name, " | ".join(sides[0]), " | ".join(sides[1])))
    return tuple(found)


def _setup(analysis: Analysis) -> Iterator[tuple[str, Any]]:
    """What was read from the live dataloaders, optimizers and callbacks."""
    if analysis.setup is None:
        return
    setup = asdict(analysis.setup)
    for kind, members in (("dataloader", setup["loaders"]), ("optimizer", setup["optimizers"])):
        for index, member in enumerate(members):
            label = kind if len(members) == 1 else f"{kind} {index}"
            for key, value in member.items():
                yield f"{label}: {key}", value["name"] if isinstance(value, dict) else value
    yield "callbacks", ", ".join(callback["callback"] for callback in setup["callbacks"]) or "none"
    yield "loggers", ", ".join(logger["name"] for logger in setup["loggers"]) or "none"
    for name in _SETUP_NUMBERS:
        yield name, setup[name]
    yield "torch.compile", "no" if setup["compiled"] is None else "yes"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
