"""The rules: each asks one question of a run; here they meet."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, Final

from lightning_modelprof.errors import ConfigError, did_you_mean, quoted
from lightning_modelprof.report.rules.base import Rule
from lightning_modelprof.report.rules.batches import SmallBatches
from lightning_modelprof.report.rules.callbacks import (
    AnomalyDetection,
    ProfilerLeftOn,
    SlowCallback,
    SlowLayerHooks,
    SlowLoggingCalls,
)
from lightning_modelprof.report.rules.cpus import (
    BusyCpus,
    CompetingThread,
    CpuThreadsOversubscribed,
    SingleCpuThread,
)
from lightning_modelprof.report.rules.device import CompileRecompiles, LaunchBound
from lightning_modelprof.report.rules.host_waits import HostDeviceSync, HostToDeviceCopy
from lightning_modelprof.report.rules.input import (
    InputBound,
    RepeatedWork,
    SlowTransfer,
    SynchronousLoader,
    WorkerStartup,
)
from lightning_modelprof.report.rules.lines import (
    ConstantWork,
    SlowCustomModule,
    SlowForwardOutsideModel,
    SlowLineInModule,
)
from lightning_modelprof.report.rules.memory import (
    MemoryCreep,
    MemoryFragmentation,
    MemoryNearCapacity,
    RanOutOfMemory,
)
from lightning_modelprof.report.rules.optimizer import OptimizerNotFused, SlowOptimizer
from lightning_modelprof.report.rules.phases import (
    CheckpointShare,
    ClipCost,
    SlowLearningRateScheduler,
    SlowLogger,
    SlowModuleHook,
    SlowSetup,
    ZeroGradCost,
)
from lightning_modelprof.report.rules.precision import AmpOff, DoublePrecision, MatmulTile, TensorCoresUnused
from lightning_modelprof.report.rules.ranks import CommunicationExposed, StragglerRank
from lightning_modelprof.report.rules.steps import GrowingSteps, SlowStepsCost
from lightning_modelprof.report.rules.tensor_cores import TensorCoresEligible
from lightning_modelprof.report.rules.validation import LongSanityCheck, SlowEpochTurns, ValidationShare
from lightning_modelprof.report.rules.waste import (
    ConvolutionBiasBeforeBatchNorm,
    DenseEmbeddings,
    FrozenForward,
    FrozenLayersComputed,
    ManyCalls,
    RepeatedForward,
    SlowTorchModule,
    UnusedGradientsRule,
    UnusedOutputs,
)

RULES: Final[tuple[Rule, ...]] = (
    RanOutOfMemory(),
    InputBound(),
    StragglerRank(),
    SynchronousLoader(),
    WorkerStartup(),
    RepeatedWork(),
    HostDeviceSync(),
    HostToDeviceCopy(),
    LaunchBound(),
    CommunicationExposed(),
    SlowForwardOutsideModel(),
    SlowCustomModule(),
    SlowLineInModule(),
    ConstantWork(),
    SlowLayerHooks(),
    RepeatedForward(),
    SlowTorchModule(),
    UnusedGradientsRule(),
    UnusedOutputs(),
    DoublePrecision(),
    CompetingThread(),
    AnomalyDetection(),
    ProfilerLeftOn(),
    SlowCallback(),
    SlowModuleHook(),
    SlowLogger(),
    SlowLoggingCalls(),
    ValidationShare(),
    LongSanityCheck(),
    CheckpointShare(),
    SlowEpochTurns(),
    SlowSetup(),
    SlowTransfer(),
    SlowLearningRateScheduler(),
    ZeroGradCost(),
    ClipCost(),
    SlowOptimizer(),
    DenseEmbeddings(),
    OptimizerNotFused(),
    SmallBatches(),
    FrozenLayersComputed(),
    FrozenForward(),
    ManyCalls(),
    ConvolutionBiasBeforeBatchNorm(),
    CompileRecompiles(),
    SlowStepsCost(),
    GrowingSteps(),
    BusyCpus(),
    CpuThreadsOversubscribed(),
    SingleCpuThread(),
    TensorCoresUnused(),
    AmpOff(),
    TensorCoresEligible(),
    MatmulTile(),
    MemoryNearCapacity(),
    MemoryCreep(),
    MemoryFragmentation(),
)
"""All rules with their default thresholds, in the order of findings without a saving."""


def configure_rules(given: Mapping[str, Any] | None, where: str = "rules") -> tuple[Rule, ...]:
    """The rules that are on, with thresholds replaced.

    Args:
        given: kind of a rule → its thresholds by name, or whether it is on; ``None`` changes nothing.
        where: what a message begins with.

    Raises:
        ConfigError: for a rule or a threshold that does not exist, and for a threshold that is no number of
            at least 0 or, being a warning, above its critical one.
    """
    given = given or {}
    known = {rule.kind: rule for rule in RULES}
    for kind in given:
        if kind not in known:
            raise ConfigError(
                f"{where}: unknown rule {quoted(kind)}."
                f"{did_you_mean(kind, known) or f' Expected one of {_list(known)}.'}"
            )
    rules = []
    for kind, rule in known.items():
        wanted = given.get(kind, True)
        if wanted is True:
            rules.append(rule)
        elif wanted is not False:
            rules.append(_with(rule, wanted, where))
    return tuple(rules)


def _with(rule: Rule, wanted: Any, where: str) -> Rule:
    if not isinstance(wanted, Mapping):
        raise ConfigError(
            f"{where}: {rule.kind}: expected a mapping of thresholds, or false, got {quoted(wanted)}."
        )
    names = [field.name for field in fields(rule)]
    for name, value in wanted.items():
        if name not in names:
            raise ConfigError(
                f"{where}: {rule.kind}: unknown threshold {quoted(name)}."
                f"{did_you_mean(name, names) or f' Thresholds: {_list(names)}.'}"
            )
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value <= sys.float_info.max
        ):
            raise ConfigError(
                f"{where}: {rule.kind}: {name}: expected a number of at least 0, got {quoted(value)}."
                f" The default is {getattr(rule, name)}."
            )
    changed = replace(rule, **wanted)
    for lower in names:
        upper = lower.replace("warning", "critical")
        if lower == upper or upper not in names:
            continue
        least, most = getattr(changed, lower), getattr(changed, upper)
        if least > most and {lower, upper} & set(wanted):
            raise ConfigError(
                f"{where}: {rule.kind}: expected {lower} of at most {upper}, got {lower}={least:g} and"
                f" {upper}={most:g}. Lower {lower}, or raise {upper}."
            )
    return changed


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
