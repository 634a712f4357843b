"""Hand-made runs to diagnose: steps with known phases, and a setup."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.place import Place
from lightning_modelprof.report.model import Status
from lightning_modelprof.run.model_cost import ModelCost, ModuleRecord, ModuleTime, ModuleTimes
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.records import RankRecord, Run, RunInfo
from lightning_modelprof.run.setup import LoaderSetup, TrainingSetup
from lightning_modelprof.run.steps import NOT_MEASURED, StepTimings

MS = 1_000_000
PLACE = Place(function="Reader.__getitem__", file="/home/me/train.py", line=7)
SETUP = TrainingSetup(
    loaders=(LoaderSetup(kind="DataLoader", num_workers=0, persistent_workers=False, dataset=PLACE),),
    usable_cpus=8,
    num_threads=4,
    module_hooks={"training_step": Place(function="Net.training_step", file="/home/me/net.py", line=30)},
)


def steps_of(num_steps=20, tags=None, device_ms=None, **phases_ms):
    """Steps with the given milliseconds per phase: one number for all, or one per step."""
    phases_ns = np.zeros((num_steps, len(PHASES)), np.int64)
    device_ns = np.full((num_steps, len(PHASES)), NOT_MEASURED, np.int64)
    for key, value in phases_ms.items():
        phases_ns[:, PHASE_INDEX[key]] = NOT_MEASURED if value is None else np.asarray(value) * MS
    for key, value in (device_ms or {}).items():
        device_ns[:, PHASE_INDEX[key]] = np.asarray(value) * MS
    return StepTimings(
        step=np.arange(num_steps),
        duration_ns=np.where(phases_ns == NOT_MEASURED, 0, phases_ns).sum(axis=1),
        phases_ns=phases_ns,
        device_phases_ns=device_ns,
        samples=np.full(num_steps, NOT_MEASURED, np.int64),
        tags=np.zeros(num_steps, np.int64) if tags is None else np.asarray(tags, np.int64),
    )


def analysis_of(
    steps,
    *,
    setup=SETUP,
    callbacks=(),
    outside_ms=None,
    cost=None,
    stacks=None,
    config=None,
    facts=None,
    validation=None,
    slow=None,
    cpu=None,
    repeated=None,
    around=None,
    workers=None,
    windows=(),
    notes=(),
    **info,
):
    """The analysis of a run with these steps."""
    record = RankRecord(
        rank=0,
        steps=steps,
        outside_ns={key: value * MS for key, value in (outside_ms or {}).items()},
        callbacks=callbacks,
        model_cost=cost,
        setup=setup,
        stacks=stacks,
        validation=validation,
        slow=slow,
        cpu=cpu,
        repeated=repeated,
        around=around,
        workers=workers,
        windows=windows,
        notes=notes,
    )
    run = Run(info=RunInfo(created="now", config=config or {}, **info), ranks=(record,))
    return Facts(run, facts or {}, {})


def cost_of(*modules, steps=1):
    """Modules with their self times: (path, trainable of 10 parameters, forward ms, backward ms)."""
    return ModelCost(
        modules=tuple(
            ModuleRecord(path=path, type_name="Linear" if path else "Net", parameters=10, trainable=trainable)
            for path, trainable, _, _ in modules
        ),
        times=ModuleTimes(
            steps=steps,
            clock="host",
            times=tuple(
                ModuleTime(path=path, calls=1, forward_ns=int(forward * MS), backward_ns=int(backward * MS))
                for path, _, forward, backward in modules
            ),
        ),
    )


def with_loader(**changes):
    """``SETUP`` with a changed loader."""
    return replace(SETUP, loaders=(replace(SETUP.loaders[0], **changes),))


def only(findings):
    """The only finding."""
    [finding] = findings
    return finding


def found_in(report):
    return [one for one in report.findings if one.status is Status.FOUND]
