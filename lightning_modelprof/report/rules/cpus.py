"""Does the model run on one of several CPUs?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.batches import BatchCpu
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.report.advice.loader import loader_advice
from lightning_modelprof.report.model import Finding, Severity
from lightning_modelprof.report.rules.base import NO_SETUP, Rule, count, percent, ratio, usual_step
from lightning_modelprof.run.setup import TrainingSetup


@dataclass(frozen=True, kw_only=True)
class SingleCpuThread(Rule):
    """Torch has one thread, more CPUs are free, and forward and backward compute for most of a step.

    A hint: small operators gain nothing from threads. What it costs is not measured. What the training thread
    computes is measured for the whole step without its batch, so forward and backward compute that at most.
    A CPU that a worker is advised for is not free.

    Attributes:
        least_share: of forward and backward in the step.
        most_wait: share of the loop for which the training thread waited for a CPU, from which on none is
            free.
    """

    kind: ClassVar[str] = "single_cpu_thread"
    title: ClassVar[str] = "The model runs on one of several CPUs"

    least_share: float = 0.5
    most_wait: float = 0.1

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated on another device."""
        costs, setup = analysis.step_costs, analysis.setup
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if analysis.info.device_type != "cpu":
            return self.not_evaluated("the model does not run on the CPU")
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup.num_threads is None or setup.usable_cpus is None:
            return self.not_evaluated("the number of threads or of CPUs is not known")
        if costs.cpu_wait_share is not None and costs.cpu_wait_share >= self.most_wait:
            waited = percent(costs.cpu_wait_share)
            return self.not_evaluated(f"no CPU was free: the training thread waited for one in {waited}")
        workers = sum(one.num_workers or 0 for one in setup.loaders)
        cpu = analysis.batch_cpu
        workers = max(workers, _advised_workers(costs, setup, cpu))
        free = setup.usable_cpus - setup.local_world_size * (1 + workers)
        share = costs.typical.share("forward", "backward")
        evidence = [
            count("threads of torch", setup.num_threads),
            count("usable CPUs", setup.usable_cpus),
            ratio("forward and backward", share),
        ]
        if setup.num_threads > 1 or free <= 0 or share is None or share < self.least_share:
            return self.clean(f"torch has {setup.num_threads} threads on {setup.usable_cpus} CPUs.", evidence)
        if isinstance(cpu, Absent):
            return self.not_evaluated(cpu.reason)
        evidence.append(ratio("the training thread's CPU time, without batches", cpu.thread_share))
        if cpu.thread_share < self.least_share:
            return self.clean(
                f"The training thread computes in {percent(cpu.thread_share)} of the step, without batches.",
                evidence,
            )
        return (
            self.found(
                f"torch has 1 thread, this process may use {setup.usable_cpus} CPUs, and forward and backward"
                f" are {percent(share)} of the step.",
                f"Try torch.set_num_threads({1 + free}), or OMP_NUM_THREADS={1 + free}."
                " Small operators gain nothing.",
                Severity.INFO,
                evidence=evidence,
            ),
        )


def _advised_workers(costs: StepCosts, setup: TrainingSetup, cpu: BatchCpu | Absent) -> int:
    """Workers that another rule may advise and that compute."""
    wait_ns, (wall_ns, _) = costs.usual_wait_ns(), usual_step(costs, costs.typical)
    if isinstance(cpu, Absent) or cpu.is_computing is False or not wait_ns or not wall_ns:
        return 0
    return loader_advice(setup.loaders, setup.usable_cpus, wait_ns, wall_ns, cpu).num_workers or 0
