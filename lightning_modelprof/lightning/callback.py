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
    """Shows where the time of a training run goes, for some tens of microseconds a step.

    ``trainer.validate``, ``test`` and ``predict`` get a report of their own, in which every batch is a step.
    Loops of fewer than 20 batches, and fits of fewer than 5 steps, get none unless ``steps``, ``active`` or
    ``flops`` ask for it: they are summed up in one archive, and in one line when the program ends.

    Args:
        active: steps that each torch.profiler window records; 0 means timing only. None means 10, once a
            window takes less than 5 % of the time that the loop has run so far.
        wait: steps before each window's warm-up, in which nothing is recorded.
        warmup: steps before each window in which torch.profiler runs and its results are thrown away.
        repeat: number of windows; 0 means windows until training ends.
        skip_first: steps at the start that the benchmark leaves out, and after which the first wait begins.
            Left at 10, the benchmark leaves out no more than a sixth of a loop whose length is known.
        steps: record steps start to end-1 of a half-open (start, end), instead of active, wait, warmup and
            repeat; skip_first then is the benchmark's alone.
        stop_after_profile: end training with the step in which the last window closes (the first one after
            it), as early stopping would: after the Trainer's min_steps and min_epochs, and with a validation.
            Only a fit is ended, and of several ranks only if all have this callback with the same windows.
        activities: what torch.profiler records, out of cpu, cuda and xpu; None means all there are.
        record_shapes: record the shapes of operators' inputs.
        with_stack: record Python stacks; slows the window down much.
        profile_memory: record allocations.
        flops: count the FLOPs of one step while it runs and time the modules in three more, all of which the
            benchmark leaves out. A compiled model is counted on a copy without data. None means that as well,
            once it takes less than 5 % of the time that the loop has run so far, or 0.1 s in all.
        inspect: what is looked at beside the clock, as InspectOptions or a dict of its values: sampling,
            workers, device_timing, fvcore, flop_formulas, peak_flops_per_s, ignore_modules.
        samples_fn: counts the samples (or tokens, ...) of a batch; None means the one number that all
            parts of the batch allow, mostly the first dimension of its tensors.
            It is called every step and must return an int without waiting for the device.
        unit: what samples_fn counts, for example tokens.
        log_every_n_steps: steps between two points of the logged scalars; None means the Trainer's own, or
            more where logging takes over 5 % of the time; 0 logs none. Only a fit logs.
        dirpath: folder for the report, the archive and the traces; None means the folder modelprof beside the
            logger's files, or in the Trainer's default_root_dir. A folder that holds an earlier run is not
            touched: _1, _2, ... is appended.
        report: where the report is shown, and how, as ReportOptions or a dict of its values: terminal,
            colours, progress_bar, tensorboard, files, views, sorted_by, time_unit, thread_sep, op_detail,
            row_limit, module_depth, top_modules.
        bounds: what the profiler may take at most, as Bounds or a dict of its values: max_trace_mb,
            keep_windows, max_overhead, ranks.
        rules: thresholds of the rules behind the findings: rule → {threshold: value}, or rule → False to
            switch it off; docs/report.md lists them.

    Attributes:
        report: the newest report; ``None`` before the first.
        run: the measured facts behind it; ``None`` before the first.

    Raises:
        ConfigError: at once, for anything that cannot be meant; in ``setup`` for what the Trainer, the model
            or the machine does not allow.
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
        """A callback with the arguments in a YAML file.

        Args:
            path: a file with one mapping, argument → value, such as ``configs/default.yaml``.

        Raises:
            ConfigError: when the file cannot be read, or holds an argument that is unknown, given twice, or
                cannot be meant.
        """
        return cls(**read_yaml(path))

    def step_info(self, unit: str | None = None) -> str:
        """Averages over the steps since the last call, as one line in Paddle's words.

        Args:
            unit: what the samples are called; by default the callback's ``unit``.

        Returns:
            Such as `` reader_cost: 0.02830 s batch_cost: 0.24812 s ips: 128.968 images/s``; ``""`` when no
            step ended since the last call, or no loop is running.
        """
        return "" if self._session is None else self._session.live.step_info(unit)
