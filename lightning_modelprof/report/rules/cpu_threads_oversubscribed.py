"""Do more threads compute than there are CPUs?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.model import Finding, Severity
from lightning_modelprof.report.rules.base import NO_SETUP, Rule, count


@dataclass(frozen=True, kw_only=True)
class CpuThreadsOversubscribed(Rule):
    """Threads of torch in all training processes of the machine, over the CPUs that this process may use.

    On the CPU alone: there the operators run on these threads. Workers of a loader do not count, as nobody
    knows whether they compute or wait. What it costs is not measured.

    Attributes:
        most: threads per CPU above which it is found.
    """

    kind: ClassVar[str] = "cpu_threads_oversubscribed"
    title: ClassVar[str] = "More threads than CPUs"

    most: float = 1.0

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated on another device."""
        setup = analysis.setup
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if analysis.info.device_type != "cpu":
            return self.not_evaluated("the model does not run on the CPU")
        if setup.num_threads is None or setup.usable_cpus is None:
            return self.not_evaluated("the number of threads or of CPUs is not known")
        threads = setup.num_threads * setup.local_world_size
        evidence = [count("threads of torch", threads), count("usable CPUs", setup.usable_cpus)]
        if threads <= self.most * setup.usable_cpus:
            return self.clean(f"{threads} threads of torch on {setup.usable_cpus} CPUs.", evidence)
        fitting = max(1, setup.usable_cpus // setup.local_world_size)
        return (
            self.found(
                f"{threads} threads of torch share {setup.usable_cpus} CPUs.",
                f"torch.set_num_threads({fitting}), or OMP_NUM_THREADS={fitting}: {setup.num_threads} now.",
                Severity.WARNING,
                evidence=evidence,
            ),
        )
