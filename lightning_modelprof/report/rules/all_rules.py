"""The rules: each asks one question of a run; here they meet."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.report.rules.anomaly_detection import AnomalyDetection
from lightning_modelprof.report.rules.base import Rule
from lightning_modelprof.report.rules.busy_cpus import BusyCpus
from lightning_modelprof.report.rules.callbacks import SlowCallback
from lightning_modelprof.report.rules.checkpoint_share import CheckpointShare
from lightning_modelprof.report.rules.clip_cost import ClipCost
from lightning_modelprof.report.rules.communication_exposed import CommunicationExposed
from lightning_modelprof.report.rules.competing_thread import CompetingThread
from lightning_modelprof.report.rules.compile_recompiles import CompileRecompiles
from lightning_modelprof.report.rules.conv_bias_before_batchnorm import ConvolutionBiasBeforeBatchNorm
from lightning_modelprof.report.rules.cpu_threads_oversubscribed import CpuThreadsOversubscribed
from lightning_modelprof.report.rules.cpus import SingleCpuThread
from lightning_modelprof.report.rules.dense_embeddings import DenseEmbeddings
from lightning_modelprof.report.rules.double_precision import DoublePrecision
from lightning_modelprof.report.rules.frozen_layers_computed import FrozenLayersComputed
from lightning_modelprof.report.rules.host_to_device_copy import HostToDeviceCopy
from lightning_modelprof.report.rules.host_waits import HostDeviceSync
from lightning_modelprof.report.rules.input import InputBound
from lightning_modelprof.report.rules.launch_bound import LaunchBound
from lightning_modelprof.report.rules.lines import SlowLineInModule
from lightning_modelprof.report.rules.memory import MemoryCreep
from lightning_modelprof.report.rules.memory_fragmentation import MemoryFragmentation
from lightning_modelprof.report.rules.memory_near_capacity import MemoryNearCapacity
from lightning_modelprof.report.rules.optimizer import OptimizerNotFused
from lightning_modelprof.report.rules.out_of_memory import RanOutOfMemory
from lightning_modelprof.report.rules.precision import AmpOff, MatmulTile, TensorCoresUnused
from lightning_modelprof.report.rules.ranks import StragglerRank
from lightning_modelprof.report.rules.repeated_work import RepeatedWork
from lightning_modelprof.report.rules.slow_custom_module import SlowCustomModule
from lightning_modelprof.report.rules.slow_epoch_turns import SlowEpochTurns
from lightning_modelprof.report.rules.slow_forward_outside_model import SlowForwardOutsideModel
from lightning_modelprof.report.rules.slow_layer_hooks import SlowLayerHooks
from lightning_modelprof.report.rules.slow_logger import SlowLogger
from lightning_modelprof.report.rules.slow_logging_calls import SlowLoggingCalls
from lightning_modelprof.report.rules.slow_lr_scheduler import SlowLearningRateScheduler
from lightning_modelprof.report.rules.slow_module_hook import SlowModuleHook
from lightning_modelprof.report.rules.slow_optimizer import SlowOptimizer
from lightning_modelprof.report.rules.slow_transfer import SlowTransfer
from lightning_modelprof.report.rules.small_batches import SmallBatches
from lightning_modelprof.report.rules.steps import SlowStepsCost
from lightning_modelprof.report.rules.synchronous_loader import SynchronousLoader
from lightning_modelprof.report.rules.unused_gradients import UnusedGradientsRule
from lightning_modelprof.report.rules.validation import ValidationShare
from lightning_modelprof.report.rules.waste import RepeatedForward
from lightning_modelprof.report.rules.worker_startup import WorkerStartup
from lightning_modelprof.report.rules.zero_grad_cost import ZeroGradCost

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
    SlowLayerHooks(),
    RepeatedForward(),
    UnusedGradientsRule(),
    DoublePrecision(),
    CompetingThread(),
    AnomalyDetection(),
    SlowCallback(),
    SlowModuleHook(),
    SlowLogger(),
    SlowLoggingCalls(),
    ValidationShare(),
    CheckpointShare(),
    SlowEpochTurns(),
    SlowTransfer(),
    SlowLearningRateScheduler(),
    ZeroGradCost(),
    ClipCost(),
    SlowOptimizer(),
    DenseEmbeddings(),
    OptimizerNotFused(),
    SmallBatches(),
    FrozenLayersComputed(),
    ConvolutionBiasBeforeBatchNorm(),
    CompileRecompiles(),
    SlowStepsCost(),
    BusyCpus(),
    CpuThreadsOversubscribed(),
    SingleCpuThread(),
    TensorCoresUnused(),
    AmpOff(),
    MatmulTile(),
    MemoryNearCapacity(),
    MemoryCreep(),
    MemoryFragmentation(),
)
"""All rules with their default thresholds, in the order of findings that have no time at stake."""
