"""Measured facts about which source lines the training thread was at, seen every few milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_modelprof.place import Place
from lightning_modelprof.record import Count, Int, Record
from lightning_modelprof.run.sites import LOGGER, logging_kind


class StackFrame(Place, frozen=True, kw_only=True):
    """One function call on a stack, at one line.

    Attributes:
        line: that was running.
        function: on Python 3.10 without the class.
        python_module: such as ``torch.nn.modules.module``.
        is_loggers: whether it is a method of a class of Lightning's loggers, whoever wrote that class.
        package: ``""`` also for NumPy's and Python's own code. That of the LightningModule's class counts as
            the user's, too.
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
    """All samples with the same stack in the same phase, and part of it.

    Attributes:
        phase: key of the phase, as in ``PHASES``.
        frames: positions in ``StackSamples.frames``, outermost first; the innermost is what ran. What the
            loop itself consists of is not in it, so it may be empty: the loop's own code ran.
        time_ns: that they stand for: of each the time since the sample before it.
        part: key of the part of a validation inside a fit, as in ``validation.PARTS``; ``""`` in every other
            phase, and in runs of versions that did not tell them apart.
    """

    phase: str
    frames: tuple[Count, ...]
    samples: Count
    time_ns: Count
    part: str = ""


class LogCall(Place, frozen=True, kw_only=True):
    """What the source says of a line that logs, or that calls a metric.

    Attributes:
        names: keys that are logged, or else the metric that is called; what is no literal, as it is written.
        is_repeated: whether the call is in a loop.
        options: those of ``prog_bar`` and ``sync_dist`` that are given as true.
        is_kept: whether something other than logging takes a metric's result, such as the loss; ``None`` in
            runs of older versions.
    """

    file: str
    line: int
    names: tuple[str, ...]
    is_repeated: bool = False
    options: tuple[str, ...] = ()
    is_kept: bool | None = None


class OtherThread(Record, frozen=True, kw_only=True):
    """Another thread of the process that ran Python while the loop did.

    Attributes:
        cpu_ns: CPU time that it took of the loop; ``None`` where the system does not tell.
        stacks: where it was, as samples; of these ``phase`` is that of the training thread.
    """

    name: str
    cpu_ns: Int | None
    stacks: tuple[SampledStack, ...] = ()


class StackSamples(Record, frozen=True, kw_only=True):
    """What the training thread was doing over one loop.

    A sample is taken every few milliseconds at first and less and less often, so that a long run costs no
    more than a short one. Steps in a profiler window or an inspection are left out.

    Attributes:
        frames: each call at each line once.
        stacks: longest time first.
        samples: how many were taken, also those that were left out of ``stacks``.
        first_interval_ns, last_interval_ns: time between two samples at the begin and at the end.
        dropped: samples of rare stacks that were too many to be told apart.
        cost_ns: CPU time of the sampling thread.
        log_calls: of the user's lines in ``stacks`` that log or call a metric, where their source is known.
        hook_calls: positions in ``frames`` of torch's calls of hooks on modules and tensors.
        others: other threads that ran Python, and had a CPU in more than a little of the loop.
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
    """Where on a stack the user's code logs, calls a logger, or lets a metric of torchmetrics work.

    Args:
        frames: outermost first.

    Returns:
        Positions of the user's innermost frame before that, and of the first frame of what logs; ``None``
        where nothing does, or where it is not the user who asked for it.
    """
    caller = None
    for position, frame in enumerate(frames):
        kind = frame.logging_kind
        if kind and caller is not None:
            return caller, position
        if kind == LOGGER:  # Lightning called it, and what it calls is the logger's own business
            return None
        if frame.is_users:
            caller = position
    return None
