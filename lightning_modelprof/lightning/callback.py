"""ModelProfCallback: the door through which Lightning enters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.callbacks import Callback

from lightning_modelprof.config.checks import make_config
from lightning_modelprof.config.options import DEFAULTS, FIELDS, Bounds, InspectOptions, ReportOptions
from lightning_modelprof.config.sources import explain_unknown_arguments, read_yaml
from lightning_modelprof.lightning.hooks import ProfilingHooks
from lightning_modelprof.lightning.saved import Saved, know_lightning


class ModelProfCallback(Saved, ProfilingHooks, Callback):
    """Shows where training time goes, at tens of microseconds per step.

    ``trainer.validate``, ``test`` and ``predict`` get their own report, in which every batch is a step. Loops
    under 20 batches, and fits under 5 steps, get no report unless ``steps``, ``active`` or ``flops`` asks for
    one. Instead they share one saved run and one line of output when the program ends.

    Args:
        active: Steps to record in each torch.profiler window; 0 records none. Default: 10, but no window
            opens until it would take less than 5% of the elapsed loop time.
        wait: Steps to wait before each window's warm-up.
        warmup: Warm-up steps before each window, in which torch.profiler runs but its results are discarded.
        repeat: Number of windows; 0 opens windows until training ends.
        skip_first: Initial steps to exclude from the benchmark, before the first wait. In a loop of known
            length, the default excludes at most a sixth of the steps.
        steps: Steps to record, as [start, end], end exclusive. Default: determined by active, wait, warmup
            and repeat. With steps, skip_first affects the benchmark only.
        stop_after_profile: Stop training after the first step following the last window. Like early stopping,
            this respects min_steps and min_epochs and runs a validation. It ends fits only, and with multiple
            ranks only if all have this callback with the same windows.
        activities: Activities for torch.profiler to record, as a list of cpu, cuda and xpu. Default: all
            available.
        record_shapes: Record operator input shapes in windows.
        with_stack: Record Python stacks; windows become much slower.
        profile_memory: Record allocations in windows.
        flops: Count FLOPs in one step and time modules in three more. Default: true, but not until it would
            take less than 5% of the elapsed loop time or less than 0.1 s in total. The benchmark excludes
            these steps. A compiled model is counted on a copy without data.
        inspect: What to record in addition to timing, as InspectOptions or a dict of its values: sampling,
            workers, device_timing, fvcore, flop_formulas, peak_flops_per_s, ignore_modules.
        samples_fn: Function that counts a batch's samples (or tokens, ...). It runs every step and must
            return an int without waiting for the device. By default, the count comes from the batch itself,
            usually from the first dimension of its tensors.
        unit: Name of the unit that throughput is counted in, such as tokens.
        log_every_n_steps: Log scalars every N steps; 0 disables logging. Default: the Trainer's value, or
            less often if logging would take more than 5% of the time. Only fits log.
        dirpath: Directory for the report, run data and traces. Default: a modelprof directory next to the
            logger's files, or in the Trainer's default_root_dir. Earlier runs are never overwritten: the
            directory's name gets _1, _2, ... appended.
        report: Where and how to show the report, as ReportOptions or a dict of its values: terminal, colours,
            progress_bar, tensorboard, files, views, sorted_by, time_unit, thread_sep, op_detail, row_limit,
            module_depth, top_modules.
        bounds: Limits on disk space, overhead and ranks, as Bounds or a dict of its values: max_trace_mb,
            keep_windows, max_overhead, ranks.
        rules: Thresholds for findings, as {rule: {threshold: value}}; {rule: False} turns a rule off.
            Default: those listed in docs/report.md.

    Attributes:
        report: The newest report; ``None`` before the first.
        run: The measurements behind it; ``None`` before the first.

    Raises:
        ConfigError: Immediately, on invalid arguments; in ``setup``, if the Trainer, the model or the machine
            doesn't support them.
    """

    # A plain attribute: Lightning reads it at every hook, and its own property is slower.
    state_key: str = "ModelProfCallback"

    @explain_unknown_arguments
    def __init__(
        self,
        *,
        active: int | None = DEFAULTS.active,
        wait: int = DEFAULTS.wait,
        warmup: int = DEFAULTS.warmup,
        repeat: int = DEFAULTS.repeat,
        skip_first: int = DEFAULTS.skip_first,
        steps: tuple[int, int] | None = DEFAULTS.steps,
        stop_after_profile: bool = DEFAULTS.stop_after_profile,
        activities: list[Literal["cpu", "cuda", "xpu"]] | None = None,
        record_shapes: bool = DEFAULTS.record_shapes,
        with_stack: bool = DEFAULTS.with_stack,
        profile_memory: bool = DEFAULTS.profile_memory,
        flops: bool | None = DEFAULTS.flops,
        inspect: InspectOptions | dict[str, Any] | None = None,
        samples_fn: Callable[[Any], int] | None = DEFAULTS.samples_fn,
        unit: str = DEFAULTS.unit,
        log_every_n_steps: int | None = DEFAULTS.log_every_n_steps,
        dirpath: str | Path | None = DEFAULTS.dirpath,
        report: ReportOptions | dict[str, Any] | None = None,
        bounds: Bounds | dict[str, Any] | None = None,
        rules: dict[str, Any] | None = None,
    ) -> None:
        config = make_config({name: value for name, value in locals().items() if name in FIELDS})
        super().__init__(config)
        with suppress(Exception):  # of another torch or pytorch_lightning
            know_lightning(ModelProfCallback, Callback)

    @classmethod
    def from_yaml(cls, path: str | Path) -> ModelProfCallback:
        """Make a callback from the arguments in a YAML file.

        Args:
            path: A file with one mapping, argument → value, such as ``configs/default.yaml``.

        Raises:
            ConfigError: If the file can't be read, or an argument is unknown, repeated or invalid.
        """
        return cls(**read_yaml(path))

    def step_info(self, unit: str | None = None) -> str:
        """Average over the steps since the last call, as one line in Paddle's format.

        Args:
            unit: Name of the samples; the callback's ``unit`` by default.

        Returns:
            For example `` reader_cost: 0.02830 s batch_cost: 0.24812 s ips: 128.968 images/s``. Empty if no
            step has ended since the last call or no loop is running.
        """
        return "" if self._session is None else self._session.live.step_info(unit)
