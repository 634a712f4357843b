"""Measured facts about the source lines of the training thread, sampled every few milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_modelprof.place import Place
from lightning_modelprof.record import Count, Int, Record
from lightning_modelprof.run.sites import LOGGER, logging_kind


class StackFrame(Place, frozen=True, kw_only=True):
    """One function call on a stack, at one line.

    Attributes:
        line: the running line.
        function: without the class on Python 3.10.
        python_module: such as ``torch.nn.modules.module``.
        is_loggers: whether it's a method of a subclass of Lightning's loggers.
        package: ``""`` also for NumPy's and Python's own code. The package of the LightningModule's class
            has its name, although it counts as the user's.
    """

    file: str
    line: Count
    function_line: Count
    python_module: str
    is_users: bool
    is_loggers: bool = False

    @property
    def logging_kind(self) -> str:
        if self.is_loggers:
            return LOGGER
        return "" if self.is_users else logging_kind(self.python_module, self.function)


class SampledStack(Record, frozen=True, kw_only=True):
    """All samples with the same stack in the same phase and part.

    Attributes:
        phase: key of the phase, as in ``PHASES``.
        frames: indices into ``StackSamples.frames``, outermost first; the innermost was running. The loop's
            own frames are left out, so it may be empty while the loop's own code ran.
        time_ns: time since the previous sample, summed over the samples.
        part: key of the part of a validation inside a fit, as in ``validation.PARTS``; ``""`` in every other
            phase, and in runs of older versions.
    """

    phase: str
    frames: tuple[Count, ...]
    samples: Count
    time_ns: Count
    part: str = ""


class LogCall(Place, frozen=True, kw_only=True):
    """What the source shows of a line that logs or calls a metric.

    Attributes:
        names: logged keys, or else the called metric; non-literals as written.
        is_repeated: whether the call is in a loop.
        options: which of ``prog_bar`` and ``sync_dist`` are passed as true.
        is_kept: whether a metric's result is used for anything but logging, such as the loss; ``None`` in
            runs of older versions.
    """

    file: str
    line: int
    names: tuple[str, ...]
    is_repeated: bool = False
    options: tuple[str, ...] = ()
    is_kept: bool | None = None


class OtherThread(Record, frozen=True, kw_only=True):
    """Another thread of the process that ran Python during the loop.

    Attributes:
        cpu_ns: CPU time during the loop; ``None`` if unknown.
        stacks: sampled stacks; their ``phase`` is that of the training thread.
    """

    name: str
    cpu_ns: Int | None
    stacks: tuple[SampledStack, ...] = ()


class StackSamples(Record, frozen=True, kw_only=True):
    """Stacks of the training thread over one loop.

    Samples are taken every few milliseconds at first, then less and less often, so that a long run costs no
    more than a short one. Steps in a profiler window or an inspection are excluded.

    Attributes:
        frames: distinct calls by line.
        stacks: longest time first.
        samples: all taken, including those left out of ``stacks``.
        first_interval_ns, last_interval_ns: time between two samples at the start and at the end.
        dropped: samples of rare stacks, left out to limit the number of stacks.
        cost_ns: CPU time of the sampling thread.
        log_calls: user lines in ``stacks`` that log or call a metric, if their source is known.
        hook_calls: indices into ``frames`` of torch's calls of hooks on modules and tensors.
        others: other threads that ran Python and used a CPU for more than a little of the loop.
        loop_ns: wall time over which their CPU time was read.
        notes: why there is nothing, or what is missing, a sentence each.
    """

    frames: tuple[StackFrame, ...] = ()
    stacks: tuple[SampledStack, ...] = ()
    samples: Count = 0
    first_interval_ns: Count = 0
    last_interval_ns: Count = 0
    dropped: Count = 0
    cost_ns: Count = 0
    log_calls: tuple[LogCall, ...] = ()
    hook_calls: tuple[Count, ...] = ()
    others: tuple[OtherThread, ...] = ()
    loop_ns: Int = 0
    notes: tuple[str, ...] = ()


def logging_begins(frames: Sequence[StackFrame]) -> tuple[int, int] | None:
    """Where on a stack the user's code logs, calls a logger, or runs a torchmetrics metric.

    Args:
        frames: outermost first.

    Returns:
        Indices of the user's innermost frame before that and of the first logging frame; ``None`` if nothing
        logs, or if the user didn't ask for it.
    """
    caller = None
    for position, frame in enumerate(frames):
        kind = frame.logging_kind
        if kind and caller is not None:
            return caller, position
        if kind == LOGGER:  # Lightning called the logger, so anything below is the logger's own work
            return None
        if frame.is_users:
            caller = position
    return None
