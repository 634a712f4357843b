"""What to change about a DataLoader that training waits for, and where its batches are made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from lightning_modelprof.analysis.source.hot_lines import HotLines
from lightning_modelprof.analysis.steps.batch_cpu import BatchCpu
from lightning_modelprof.analysis.steps.fetches import (
    HANDOVER_NS,
    is_of_sampler,
    is_row_by_row,
    sampler_code,
    sampler_share,
)
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.owners import Owner, written_call
from lightning_modelprof.report.model import Evidence, SavingIs
from lightning_modelprof.report.rules.rule import count, duration, ratio, text
from lightning_modelprof.run.setup import LoaderSetup
from lightning_modelprof.units import digits, milliseconds, percent

FEWER_ITEMS: Final = "Build each batch from fewer, larger tensors instead of long lists."
"""For a slow transfer without user code and without memory to pin."""

_SLICED: Final = 0.3
"""Share of a row-by-row wait that slicing batches takes. Source: the measurement of ``CHEAP_SAMPLE_NS``."""

_WORTH_IT: Final = 0.25
MOST_OF_IT: Final = 0.9
CPU_BOUND: Final = "CPU-bound share of batch time"

_CHEAPER: Final = "Pre-decode or pre-transform the data, or do less work per sample."


def places_of_batches(loaders: Sequence[LoaderSetup]) -> list[Place]:
    """Return where batches are made: in user code, else in a package, else in torch."""
    if not loaders:
        return []
    loader = loaders[0]
    places = [place for place in (loader.dataset, loader.collate) if place is not None]
    return (
        [place for place in places if not place.is_library]
        or [place for place in places if place.package]
        or places
    )


class Fix(NamedTuple):
    """One change to reduce the wait, its maximum saving per step, and the loader arguments it sets."""

    action: str
    saving_ns: float
    arguments: Mapping[str, Any] = {}


def best_first(fixes: Sequence[Fix]) -> list[Fix]:
    """Sort by saving; of the fixes that save about the most, the first given comes first."""
    most_ns = max(one.saving_ns for one in fixes)
    first = next(one for one in fixes if one.saving_ns >= MOST_OF_IT * most_ns)
    return sorted(fixes, key=lambda one: (one is not first, -one.saving_ns))


def arguments_of(fixes: Sequence[Fix]) -> Mapping[str, Any]:
    return next((one.arguments for one in best_first(fixes) if one.arguments), {})


def in_words(fixes: Sequence[Fix]) -> str:
    ranked = best_first(fixes)
    return " Alternatively, ".join([ranked[0].action, *(_after_comma(one.action) for one in ranked[1:])])


def fix_up_to(action: str, saving_ns: float) -> Fix:
    return Fix(f"{action} This saves up to {milliseconds(saving_ns)} per step.", saving_ns)


def _after_comma(action: str) -> str:
    word = action.partition(" ")[0]
    return action[:1].lower() + action[1:] if word.isalpha() else action


class LoaderAdvice(NamedTuple):
    """What to change about a loader that training waits for.

    Attributes:
        saving_ns: cost per step: the part of the wait that the best known fix removes.
        num_workers: recommended number; ``None`` if no other is.
        is_minor: whether it's any DataLoader's own overhead: indexing and collating, or the handover.
        told: the reason, for the full report; sentences that start with a space, or ``""``.
        arguments: DataLoader arguments in the action; empty without any.
        loaders: loaders whose code makes the batches, the one waited for first.
    """

    action: str
    evidence: list[Evidence]
    saving_ns: float
    num_workers: int | None = None
    is_minor: bool = False
    told: str = ""
    arguments: Mapping[str, Any] = {}
    saving_is: SavingIs = "up to"
    loaders: Sequence[LoaderSetup] = ()


def loader_advice(
    loaders: Sequence[LoaderSetup],
    cpus: int | None,
    wait_ns: float,
    wall_ns: float,
    cpu: BatchCpu | None = None,
    *,
    owner: Owner | None = None,
) -> LoaderAdvice:
    """Advise on a loader that training waits for; arguments as in :func:`workers_advice`."""
    if not loaders or not is_row_by_row(loaders[0], wait_ns):
        return workers_advice(loaders, cpus, wait_ns, wall_ns, cpu, owner=owner)
    loader = loaders[0]
    size = loader.batch_size or 1
    sample_ns = wait_ns / size
    if owner is not None:
        return LoaderAdvice(
            f"Fetch whole batches instead of single rows.{owner.cheaper_batches}",
            _row_evidence(sample_ns, size),
            (1 - _SLICED) * wait_ns,
            is_minor=True,
            told=f"{_row_by_row(sample_ns)} {owner.package} indexes them in {owner.where}.",
        )
    return LoaderAdvice(
        f"Fetch whole batches, with __getitems__ or {loader.kind}(dataset, batch_size=None,"
        f" sampler=BatchSampler(RandomSampler(dataset), {size}, drop_last=False)), where dataset[indices]"
        " slices tensors.",
        _row_evidence(sample_ns, size),
        (1 - _SLICED) * wait_ns,
        is_minor=True,
        told=_row_by_row(sample_ns),
    )


def _row_by_row(sample_ns: float) -> str:
    return (
        f" Indexing and collating takes {digits(sample_ns / 1e3)} µs per sample; handing a batch over from a"
        " worker would take longer."
    )


def _row_evidence(sample_ns: float, size: int) -> list[Evidence]:
    return [duration("time per sample", sample_ns), count("batch_size", size)]


def sampler_advice(hot: HotLines | None, wait_ns: float) -> LoaderAdvice | None:
    """Advise if the training thread mostly samples indices, else ``None``."""
    if not is_of_sampler(hot):
        return None
    share, code = sampler_share(hot), sampler_code(hot)
    return LoaderAdvice(
        "Shuffle the indices of a whole epoch with one array operation."
        if code.shuffles or not code.function
        else f"Do the work of {code.function} once per epoch, not per batch.",
        [ratio("sampler's share of the wait", share)],
        share * wait_ns,
        told=f" The sampler takes {percent(share)} of that. It runs in the main process with any"
        " num_workers.",
    )


def workers_advice(
    loaders: Sequence[LoaderSetup],
    cpus: int | None,
    wait_ns: float,
    wall_ns: float,
    cpu: BatchCpu | None = None,
    *,
    owner: Owner | None = None,
) -> LoaderAdvice:
    """Advise on the number of workers and on cheaper batches.

    The saving is the whole wait, however much workers gain. Both fixes come with their savings, the larger
    first; cheaper batches are omitted if workers save nearly all.

    Workers are recommended if they gain at least a quarter of the wait, given one worker's batch time, the
    free CPUs if batches compute, and the handover cost.

    Args:
        loaders: the loop's loaders; the advice is on the first.
        cpus: CPUs that this process may use; ``None`` if unknown.
        wait_ns: wait per batch.
        wall_ns: time from one batch to the next, wait included.
        cpu: CPU use of batches and steps; ``None`` if unknown.
        owner: library that makes the loader; ``None`` if the user does.
    """
    loader = loaders[0] if loaders else None
    if loader is None or loader.num_workers is None:
        return _other_loader_advice(loader, wait_ns, owner)
    if cpu is not None and cpu.workers_keep_up:
        return handover_advice(loader, wait_ns, cpu)
    workers = loader.num_workers
    advised, step_ns = _enough_workers(workers, cpus, wait_ns, wall_ns, cpu)
    gain_ns = wall_ns - step_ns if advised > workers else 0.0
    evidence = loader_evidence(loader, cpus, wait_ns, wall_ns, cpu)
    if gain_ns < _WORTH_IT * wait_ns:
        is_short = is_handed_over_no_faster(workers, wait_ns)
        return cheaper_advice(workers, wait_ns, wall_ns, cpu, evidence, is_short=is_short, owner=owner)
    arguments = _arguments(loader, advised)
    now = f"{'num_workers=' * (len(arguments) > 1)}{workers}"
    action = f"{written_call(loader.kind, arguments, owner)} (currently {now})."
    if gain_ns < MOST_OF_IT * wait_ns:
        more = f" Saves at most {milliseconds(gain_ns)} per step."
        fixes = [Fix(action + more, gain_ns, arguments), cheaper_fix(wait_ns, owner)]
    else:
        fixes = [Fix(action, gain_ns, arguments)]
    evidence[1:1] = [
        count("recommended num_workers", advised),
        duration("best step time with these workers", step_ns),
    ]
    return LoaderAdvice(
        in_words(fixes),
        evidence,
        wait_ns,
        advised,
        told=_cpu_note(cpu),
        arguments=arguments_of(fixes),
    )


def _other_loader_advice(loader: LoaderSetup | None, wait_ns: float, owner: Owner | None) -> LoaderAdvice:
    kind = "the data loader" if loader is None else loader.kind
    return LoaderAdvice(
        f"Make {kind} faster, or load batches in the"
        f" background.{'' if owner is None else owner.cheaper_batches}",
        [],
        wait_ns,
    )


def _cheaper(owner: Owner | None) -> str:
    return f"{_CHEAPER}{'' if owner is None else owner.cheaper_batches}"


def cheaper_fix(wait_ns: float, owner: Owner | None) -> Fix:
    return fix_up_to(_cheaper(owner), wait_ns)


def _enough_workers(
    workers: int, cpus: int | None, wait_ns: float, wall_ns: float, cpu: BatchCpu | None
) -> tuple[int, float]:
    """Return the workers that hide loading if the CPUs allow, and the step time with them."""
    rest_ns = max(wall_ns - wait_ns, 1.0)
    batch_ns = wait_ns if workers == 0 else workers * wall_ns
    least_ns = None if cpu is None else cpu.least_step_ns(rest_ns)
    floor_ns = rest_ns if least_ns is None else min(max(least_ns, rest_ns), wall_ns)
    advised = max(1, math.ceil(batch_ns / floor_ns))
    if least_ns is None and cpus is not None:
        # Reserve one CPU for the training process.
        advised = min(advised, max(cpus - 1, 1))
    return advised, max(floor_ns, batch_ns / advised) + (HANDOVER_NS if workers == 0 else 0.0)


def loader_evidence(
    loader: LoaderSetup, cpus: int | None, wait_ns: float, wall_ns: float, cpu: BatchCpu | None
) -> list[Evidence]:
    """List the loader's and its CPUs' figures, number of workers first."""
    workers = loader.num_workers or 0
    evidence = [
        count("num_workers", workers),
        duration("max batch time per worker", wait_ns if workers == 0 else workers * wall_ns),
        *_cpu_evidence(cpu),
        duration("rest of the step", max(wall_ns - wait_ns, 1.0)),
    ]
    if cpus is not None:
        evidence.append(count("usable CPUs", cpus))
    if loader.start_method is not None:
        evidence.append(text("start method", loader.start_method))
    return evidence


def is_handed_over_no_faster(workers: int, wait_ns: float) -> bool:
    """Return whether a worker's handover would take about as long as the batch itself."""
    return workers == 0 and wait_ns * (1 - _WORTH_IT) <= HANDOVER_NS


def cheaper_advice(
    workers: int,
    wait_ns: float,
    wall_ns: float,
    cpu: BatchCpu | None,
    evidence: list[Evidence],
    *,
    is_short: bool,
    owner: Owner | None,
) -> LoaderAdvice:
    """Advise cheaper batches, if no other number of workers gains enough."""
    why = _why_no_more_workers(workers, cpu, wall_ns, is_short=is_short)
    return LoaderAdvice(_cheaper(owner), evidence, wait_ns, is_minor=is_short, told=why)


def handover_advice(
    loader: LoaderSetup, wait_ns: float, cpu: BatchCpu, *, may_try_none: bool = True
) -> LoaderAdvice:
    """Advise if batches are ready when fetched, so the wait is the handover.

    Args:
        may_try_none: whether the step time without workers is unknown.
    """
    unseen = f" Alternatively, try num_workers=0 if loading a batch takes less than {milliseconds(wait_ns)}."
    return LoaderAdvice(
        f"Build each batch from fewer, larger tensors, or fewer bytes.{unseen if may_try_none else ''}",
        handover_evidence(loader, cpu),
        max(wait_ns - HANDOVER_NS, 0.0),
        is_minor=True,
        told=f"{were_ready(cpu)} More workers wouldn't help.",
    )


def handover_evidence(loader: LoaderSetup, cpu: BatchCpu) -> list[Evidence]:
    return [count("num_workers", loader.num_workers), ratio("batches ready when fetched", cpu.ready)]


def were_ready(cpu: BatchCpu) -> str:
    return (
        f" {percent(cpu.ready or 0.0)} of batches were ready when fetched, so the wait is the handover from"
        " the worker."
    )


def _cpu_evidence(cpu: BatchCpu | None) -> list[Evidence]:
    if cpu is None or cpu.computing is None:
        return []
    free = [] if cpu.free_cpus is None else [count("free CPUs", round(cpu.free_cpus, 2))]
    return [
        ratio(CPU_BOUND, cpu.computing),
        *free,
        duration("CPU time per batch", cpu.batch_ns),
    ]


def _cpu_note(cpu: BatchCpu | None) -> str:
    if cpu is None or cpu.is_computing is None or (cpu.is_computing and cpu.free_cpus is None):
        return " Workers only help if CPUs are free."
    if not cpu.is_computing:
        return " Loading a batch mostly waits, so workers need little CPU."
    return f" A batch takes {milliseconds(cpu.batch_ns or 0.0)} of CPU time, and CPUs are free for it."


def _why_no_more_workers(workers: int, cpu: BatchCpu | None, wall_ns: float, *, is_short: bool) -> str:
    if is_short:
        return " Handing a batch over from a worker would take about as long."
    if cpu is not None and cpu.is_computing:
        what = "More workers" if workers else "Workers"
        idle = cpu.idle_cpus(wall_ns)
        no_cpu = " and no CPU is free" if idle is not None and idle < 1 else ""
        return (
            f" {what} wouldn't help, since a batch takes {milliseconds(cpu.batch_ns or 0.0)} of CPU"
            f" time{no_cpu}."
        )
    if cpu is None or cpu.computing is None:
        return (
            f" num_workers is {workers}. More workers than CPUs only help if they wait for a disk or a"
            " network."
        )
    return ""


def _arguments(loader: LoaderSetup, workers: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"num_workers": workers}
    if not loader.persistent_workers:
        arguments["persistent_workers"] = True
    return arguments
