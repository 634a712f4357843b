"""A fit as one row of TensorBoard's HParams tab: what it was set to, and how fast it was."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from lightning_modelprof.analysis.compare import UNKNOWN
from lightning_modelprof.report.model import Report

_MIB: Final = 2**20
_GROUP: Final = "profile"
"""TensorBoard shows tags with the same first part together."""

_NAMES: Final = {
    "model": "model",
    "model parameters": "parameters",
    "trainable parameters": "trainable_parameters",
    "dataloader: batch_size": "batch_size",
    "dataloader: num_workers": "num_workers",
    "dataloader: prefetch_factor": "prefetch_factor",
    "dataloader: pin_memory": "pin_memory",
    "dataloader: persistent_workers": "persistent_workers",
    "precision": "precision",
    "accumulate_grad_batches": "accumulate_grad_batches",
    "optimizer: kind": "optimizer",
    "optimizer: fused": "fused_optimizer",
    "torch.compile": "compile",
    "strategy": "strategy",
    "world size": "world_size",
    "device": "device",
    "threads": "threads",
}
"""Name of a setting in the report → name in the tab."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HParamsRow:
    """What the tab shows of one fit; what is not known is not in it.

    Attributes:
        hparams: name → value; of several dataloaders or optimizers with the number of each.
        metrics: tag → value; the tag is also what the tab shows, so it has the unit.
    """

    hparams: dict[str, str | float | bool]
    metrics: dict[str, float]


def hparams_of(report: Report) -> HParamsRow:
    """The row of a fit, from the machine-readable part of its report."""
    hparams = {}
    for setting, text in report.sections["settings"].items():
        number = re.match(r"(?:dataloader|optimizer) (\d+): ", setting)
        name = _NAMES.get(re.sub(r"^(dataloader|optimizer) \d+: ", r"\1: ", setting))
        if name is not None and text not in (UNKNOWN, "none"):
            hparams[name if number is None else f"{name} ({number[1]})"] = _typed(text)
    known = {name: value for name, value in _metrics(report.sections).items() if value is not None}
    return HParamsRow(
        hparams=hparams, metrics={f"{_GROUP}/{name}": float(value) for name, value in known.items()}
    )


def _metrics(sections: Mapping[str, Any]) -> dict[str, float | None]:
    """The figures, ``None`` what is not known.

    Definition: averages of the Perf Summary of the first rank, the samples of all ranks together; peaks of
    the first rank.
    """
    speed, memory = sections["benchmark"] or {}, sections["memory"] or {}
    return {
        "ips (steps per s)": _average(speed.get("ips")),
        "samples per s": _samples_per_s(speed, sections["run"]),
        "batch_cost (ms)": _scaled(_average(speed.get("batch_cost_ns")), 1e-6),
        "reader_ratio (%)": _scaled(speed.get("reader_ratio"), 100),
        "mfu (%)": _scaled((sections["flops"] or {}).get("mfu"), 100),
        "peak device memory (MiB)": _scaled(memory.get("peak_allocated_bytes"), 1 / _MIB),
        "peak process memory (MiB)": _scaled(memory.get("peak_rss_bytes"), 1 / _MIB),
    }


def _samples_per_s(speed: Mapping[str, Any], run: Mapping[str, Any]) -> float | None:
    """Of all ranks: their samples over the mean time of a rank. One of several ranks does not tell."""
    if run["world_size"] == 1:
        return _average(speed.get("samples_per_s"))
    ranks = run["all_ranks"]
    if ranks is None or ranks["world_size"] != run["world_size"]:  # of some ranks only
        return None
    if ranks["samples"] is None or not ranks["batch_total_ns"]:
        return None
    return float(ranks["samples"] / (ranks["batch_total_ns"] / ranks["world_size"]) * 1e9)


def _average(statistics: Mapping[str, Any] | None) -> float | None:
    return None if statistics is None else statistics["avg"]


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _typed(text: str) -> str | float | bool:
    """A truth or a number where the text is one, so that the tab sorts and filters it as such."""
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text)
    except ValueError:
        return text
