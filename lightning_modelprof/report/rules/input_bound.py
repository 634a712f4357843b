"""Does the loop wait for its batches?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.analyze import Analysis
from lightning_modelprof.report.model import Evidence, Finding
from lightning_modelprof.report.rules.base import (
    ShareRule,
    count,
    duration,
    milliseconds,
    percent,
    ratio,
    text,
)
from lightning_modelprof.run.training_setup import CodePlace, LoaderSetup, TrainingSetup


@dataclass(frozen=True, kw_only=True)
class InputBound(ShareRule):
    """The mean time per clean step in which the loop waits for its batch is more than a share of the step.

    Workers needed: if one worker makes a batch in T and the rest of a step takes C, w workers deliver one
    batch every T / w, so the wait ends at w = T / C, rounded up. Without workers T is the wait itself. With
    workers that are always behind, a step takes T / w, so T is w times the step.

    Source: 5 % and 20 % are the bands of TensorFlow's profiler for input.

    Caveats:
        T is that of one process alone; workers that share CPUs, a disk or a lock are slower together.
    """

    kind: ClassVar[str] = "input_bound"
    title: ClassVar[str] = "The loop waits for its batches"
    bound: ClassVar[str | None] = "input_bound"

    warning: float = 0.05
    critical: float = 0.20

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where fetches were not seen."""
        costs = analysis.step_costs
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        wait_ns = costs.typical.exposed_wait_ns
        if wait_ns is None or not costs.typical.wall_ns:
            return self.not_evaluated("the fetches of batches were not seen")
        share = wait_ns / costs.typical.wall_ns
        evidence = [duration("wait per step", wait_ns), ratio("share of the step", share)]
        if not self.is_found(share, wait_ns, costs.typical.errors_ns.get("dataloader", 0.0)):
            return self.clean(f"Batches are waited for {milliseconds(wait_ns)} a step.", evidence)
        setup = analysis.setup
        loader = setup.loaders[0] if setup is not None and setup.loaders else None
        advice, more = _advice(loader, setup, wait_ns, costs.typical.wall_ns)
        return (
            self.found(
                f"A step of {milliseconds(costs.typical.wall_ns)} waits {milliseconds(wait_ns)}"
                f" ({percent(share)}) for its batch.",
                advice,
                self.severity(share),
                saving_ns=wait_ns,
                places=places_of_batches(setup),
                evidence=[*evidence, *more],
            ),
        )


def places_of_batches(setup: TrainingSetup | None) -> list[CodePlace]:
    """Where batches are made: in the user's own code, else in the library's."""
    if setup is None or not setup.loaders:
        return []
    loader = setup.loaders[0]
    places = [place for place in (loader.dataset, loader.collate) if place is not None]
    return [place for place in places if not place.is_library] or places


def _advice(
    loader: LoaderSetup | None, setup: TrainingSetup | None, wait_ns: float, wall_ns: float
) -> tuple[str, list[Evidence]]:
    """What to change, and the numbers behind it."""
    if loader is None or setup is None or loader.num_workers is None:
        kind = "the loader" if loader is None else loader.kind
        return f"Make batches faster, or beside the training: {kind} is not torch's DataLoader.", []
    workers, cpus = loader.num_workers, setup.usable_cpus
    rest_ns = max(wall_ns - wait_ns, 1.0)
    batch_ns = wait_ns if workers == 0 else workers * wall_ns
    needed = max(workers + 1, math.ceil(batch_ns / rest_ns))
    evidence = [
        count("num_workers", workers),
        count("workers needed", needed),
        duration("one worker's time for a batch at most", batch_ns),
        duration("rest of the step", rest_ns),
    ]
    if cpus is not None:
        evidence.append(count("usable CPUs", cpus))
    if loader.start_method is not None:
        evidence.append(text("start method", loader.start_method))
    free = needed if cpus is None else max(cpus - 1, 1)
    # One CPU stays for the training process; whoever waits for a disk or a network needs none.
    advised = min(needed, max(free, workers))
    left_ns = max(0.0, batch_ns / max(advised, 1) - rest_ns)
    parts = []
    if advised > workers:
        evidence.append(duration("wait with these workers, if a CPU is free for each", left_ns))
        parts.append(
            f"{_call(loader, advised)}: num_workers is {workers} now."
            " Measure it, as workers need CPUs that are free."
        )
    if needed > free:
        parts.append(
            f"It would take {needed} workers to hide {milliseconds(batch_ns)} a batch behind"
            f" {milliseconds(rest_ns)} of work, and this process may use {cpus} CPUs: more workers than that"
            " only help if they wait for a disk or a network. Make a batch cheaper: decode and transform"
            " ahead of the training, or do less per sample."
        )
    return " ".join(parts), evidence


def _call(loader: LoaderSetup, workers: int) -> str:
    """The constructor as it should be called."""
    arguments = [f"num_workers={workers}"]
    if not loader.persistent_workers:
        arguments.append("persistent_workers=True")
    return f"{loader.kind}({', '.join(arguments)})"
