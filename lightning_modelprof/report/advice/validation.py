"""Which part of a fit's validations is slow, where, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.source.hot_lines import HotLine
from lightning_modelprof.analysis.steps.validation import ValidationSplit
from lightning_modelprof.place import Place
from lightning_modelprof.record import Record
from lightning_modelprof.report.advice.libraries import as_arguments
from lightning_modelprof.report.advice.lines import location_at
from lightning_modelprof.report.advice.loader import (
    FEWER_ITEMS,
    LoaderAdvice,
    loader_advice,
    places_of_batches,
)
from lightning_modelprof.report.advice.owners import owner_of_loader
from lightning_modelprof.report.model import Evidence
from lightning_modelprof.report.rules.rule import count, duration, location_of, ratio
from lightning_modelprof.run.setup import LoaderSetup, TrainingSetup
from lightning_modelprof.units import percent

_METRICS: Final = "torchmetrics"
"""Package whose functions update and compute metrics."""
_MOSTLY: Final = 0.5

_TRANSFER_HOOKS: Final = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_END_HOOK: Final = "on_validation_epoch_end"


class PartAdvice(Record, frozen=True, kw_only=True):
    """Advice on the validations of a fit.

    Attributes:
        summary: the part's share of validation, what it does, and the reason for the action.
        locations: its slowest line, else its functions.
    """

    label: str
    summary: str
    action: str
    locations: tuple[Place, ...]
    evidence: tuple[Evidence, ...]


class _Part(Record, frozen=True, kw_only=True):
    line: HotLine | None
    split: ValidationSplit
    setup: TrainingSetup
    loader: LoaderSetup | None
    cost_ns: float
    whole_ns: float
    num_ranks: int
    is_mostly_metrics: bool


def part_advice(facts: Facts, least_share: float) -> PartAdvice | None:
    """Advise on the slowest part of validation; ``None`` without a known part above ``least_share``."""
    split, setup = facts.get(Facts.validation), facts.get(Facts.setup)
    hot = facts.get(Facts.hot_lines)
    if split is None or setup is None:
        return None
    has_workers = any(one.num_workers for one in setup.val_loaders)
    costs = split.costs(has_workers=has_workers)
    whole_ns = sum(costs.values())
    key = max(costs, key=lambda one: costs[one], default="")
    if key not in _ADVICE or whole_ns <= 0 or costs[key] < least_share * whole_ns:
        return None
    line = None if hot is None else hot.in_part(key)
    if key == "dataloader_init" and _is_mostly_waiting(split, costs[key]):
        line = None  # the training thread's line isn't what it waits for
    part = _Part(
        line=line,
        split=split,
        setup=setup,
        loader=_loader_at(line, setup.val_loaders),
        cost_ns=costs[key],
        whole_ns=whole_ns,
        num_ranks=facts.info.world_size,
        is_mostly_metrics=hot is not None and hot.share_below(_METRICS, key) >= _MOSTLY,
    )
    what, advise, places = _ADVICE[key]
    label, share = split.labels[key], costs[key] / whole_ns
    action, evidence = advise(part)
    why = _loader_advice(part).told if key == "dataloader" else ""
    return PartAdvice(
        label=label,
        summary=f"{percent(share)} of validation time is {what}.{why}",
        action=action,
        locations=(location_at(line),) if line is not None else tuple(map(location_of, places(part))),
        evidence=(
            ratio(f"{label} share of validation", share),
            duration(f"{label} time per validation", costs[key] / max(split.num_runs, 1)),
            count("validation runs", split.num_runs),
            *evidence,
        ),
    )


def _is_mostly_waiting(split: ValidationSplit, start_ns: float) -> bool:
    begun = split.part("dataloader_init")
    return begun is None or 2 * begun.total_ns < start_ns


def _loader_at(line: HotLine | None, loaders: Sequence[LoaderSetup]) -> LoaderSetup | None:
    begins = None if line is None else (line.file, line.function_line)
    datasets = [None if one.dataset is None else (one.dataset.file, one.dataset.line) for one in loaders]
    if begins in datasets and begins is not None:
        return loaders[datasets.index(begins)]
    return loaders[0] if loaders else None


# What to change, by part


def _loader_advice(part: _Part) -> LoaderAdvice:
    split, loader = part.split, part.loader
    each = max(split.num_batches, 1)
    return loader_advice(
        () if loader is None else (loader,),
        part.setup.usable_cpus,
        part.cost_ns / each,
        part.whole_ns / each,
        owner=owner_of_loader(part.setup, loader),
    )


def _of_fetches(part: _Part) -> tuple[str, list[Evidence]]:
    advice = _loader_advice(part)
    return (
        f"{advice.action} This applies to the validation dataloader.",
        advice.evidence,
    )


def _of_transfer(part: _Part) -> tuple[str, list[Evidence]]:
    hooks = ", ".join(one.function for one in _hooks(part.setup, *_TRANSFER_HOOKS))
    parts = [f"Move work from {hooks} into the DataLoader's workers."] if hooks else []
    if part.setup.cuda is not None and part.loader is not None and part.loader.pin_memory is False:
        parts.append(f"{_arguments(part, pin_memory=True)} for the validation dataloader (currently False).")
    return " ".join(parts) or FEWER_ITEMS, []


def _of_step(part: _Part) -> tuple[str, list[Evidence]]:
    size = None if part.loader is None else part.loader.batch_size
    evidence = [count("validation batch_size", size)] if size is not None else []
    if part.is_mostly_metrics:
        return (
            "Update fewer or cheaper metrics per batch, or share updates in a MetricCollection.",
            evidence,
        )
    larger = f"a batch_size above {size}" if size is not None else "larger batches"
    return (
        f"Do less at this line of validation_step, or use {larger}.",
        evidence,
    )


def _of_hooks(part: _Part) -> tuple[str, list[Evidence]]:
    names = ", ".join(one.function for one in _own_hooks(part)) or "the validation hooks"
    return f"Do less in {names}, or move work to the end of validation.", []


def _of_epoch_end(part: _Part) -> tuple[str, list[Evidence]]:
    hook = ", ".join(one.function for one in _hooks(part.setup, _END_HOOK))
    where = f"in {hook}" if hook else "there"
    ranks = " Ranks also wait for each other here." if part.num_ranks > 1 else ""
    return (
        f"Compute fewer or cheaper metrics {where}. Pass thresholds=... to curve metrics and AUROC, and make"
        f" plots and files every few validations.{ranks}",
        [],
    )


def _of_logging(_: _Part) -> tuple[str, list[Evidence]]:
    return (
        "Log less in validation_step. Use self.log(..., on_step=False) and one log_dict.",
        [],
    )


def _of_start(part: _Part) -> tuple[str, list[Evidence]]:
    loader = part.loader
    if part.line is not None:  # the training thread's own work, not a worker's
        return (
            f"Do less in {part.line.function}, or run it once and keep its result.",
            [],
        )
    if loader is None or not loader.num_workers:
        return (
            "Do less at the start of validation (val_dataloader, the sampler, __iter__).",
            [],
        )
    evidence = [count("validation num_workers", loader.num_workers)]
    if loader.persistent_workers:
        return (
            f"Use fewer than {loader.num_workers} validation workers, or do less at their start.",
            evidence,
        )
    return (
        f"{_arguments(part, persistent_workers=True)} for the validation dataloader (currently False).",
        evidence,
    )


def _arguments(part: _Part, **arguments: Any) -> str:
    owner = owner_of_loader(part.setup, part.loader)
    if owner is None or part.loader is None:
        return f"Set {as_arguments(arguments)}"
    return owner.loader(part.loader.kind, **arguments)


# Where to look if samples don't show the line


def _hooks(setup: TrainingSetup, *names: str) -> list[Place]:
    return [setup.module_hooks[name] for name in names if name in setup.module_hooks]


def _own_hooks(part: _Part) -> list[Place]:
    hooks = part.setup.module_hooks
    names = [name for name in hooks if name.startswith("on_validation_") and name != _END_HOOK]
    return [place for place in _hooks(part.setup, *names) if not place.is_library]


def _places_of_start(part: _Part) -> list[Place]:
    loader = part.loader
    places = [] if loader is None else [loader.worker_init, loader.dataset]
    return [place for place in places if place is not None][:1]


_Advise = Callable[[_Part], tuple[str, list[Evidence]]]
_Places = Callable[[_Part], list[Place]]

_ADVICE: Final[dict[str, tuple[str, _Advise, _Places]]] = {
    "dataloader": (
        "waiting for data",
        _of_fetches,
        lambda part: places_of_batches(() if part.loader is None else (part.loader,)),
    ),
    "transfer": (
        "moving batches to the GPU",
        _of_transfer,
        lambda part: _hooks(part.setup, *_TRANSFER_HOOKS),
    ),
    "forward": ("validation_step", _of_step, lambda part: _hooks(part.setup, "validation_step")),
    "module_hooks": ("the module's hooks", _of_hooks, _own_hooks),
    "epoch_end": (
        "metrics and other work at its end",
        _of_epoch_end,
        lambda part: _hooks(part.setup, _END_HOOK) or _hooks(part.setup, "validation_step"),
    ),
    "logging": (
        "logging",
        _of_logging,
        lambda part: (
            [one for one in part.setup.loggers if not one.is_library] or _hooks(part.setup, "validation_step")
        ),
    ),
    "dataloader_init": ("starting the dataloader", _of_start, _places_of_start),
}
"""Part → what its time is, what to change, and where if no line stands out."""
