"""ModelProfCallback: the door through which Lightning enters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.callbacks import Callback

from lightning_modelprof.config import DEFAULTS, ProfileConfig
from lightning_modelprof.config_checks import check_config
from lightning_modelprof.config_sources import explain_unknown_arguments, read_yaml
from lightning_modelprof.fit.hooks import ProfilingHooks
from lightning_modelprof.fit.saved import Saved, know_lightning


class ModelProfCallback(Saved, ProfilingHooks, Callback):
    """Shows where the time of a training run goes, at about the cost of an empty callback.

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
        activities: what torch.profiler records, out of cpu, cuda and xpu; None means all there are.
        record_shapes: record the shapes of operators' inputs.
        with_stack: record Python stacks; slows the window down much.
        profile_memory: record allocations.
        ranks: which ranks record windows, such as [0]; every rank measures time all the same. All by default:
            a rank that records is slower, so one that does so alone keeps the others waiting and sees none of
            its own waits for them; and a comparison of ranks needs the trace of each. The steps of a window
            are left out of the benchmark on every rank.
        max_trace_mb: end a window early when another step would make its trace larger than this, in MB of
            JSON before it is packed, as estimated from memory after each recorded step; None sets no limit.
        keep_windows: traces that stay on disk, for each rank: the newest so many, and the first, to compare
            them with; None keeps all.
        max_overhead: share of the loop's time that this profiler may take, such as 0.01: a window, but the
            first, that would take it beyond that is left out. None sets no limit; the report says what was
            taken.
        stop_after_profile: end training with the step in which the last window closes (the first one after
            it), as early stopping would: after the Trainer's min_steps and min_epochs, and with a validation.
            Only a fit is ended, and of several ranks only if all have this callback with the same windows.
        device_timing: on CUDA, XPU and MPS, record events at phase boundaries for device time by phase.
        log_every_n_steps: steps between two points of the logged scalars; None means the Trainer's own, 0
            logs none. Only a fit logs.
        progress_bar: show ips and the reader's share in the progress bar.
        samples_fn: counts the samples (or tokens, ...) of a batch; None means the one number that all
            parts of the batch allow, mostly the first dimension of its tensors.
            It is called every step and must return an int without waiting for the device.
        unit: what samples_fn counts, for example tokens.
        sampling: look every few milliseconds, and ever less often, at the line that the training thread is at
            and at the memory in use, from a thread of its own.
        flops: count the FLOPs of one step while it runs and time the modules in three more, all of which the
            benchmark leaves out. A compiled model is counted on a copy without data. None means that as well,
            once it takes less than 5 % of the time that the loop has run so far, or 0.1 s in all.
        flop_formulas: formulas for operators that have none, or better ones: operator, or its name such as
            "mylib::mm", → formula(*args, **kwargs, out_val=result), which returns FLOPs.
        peak_flops_per_s: what the device can do, in FLOP/s, or such by dtype; None means the published
            dense peak of the device, if it is known.
        fvcore: count the forward with fvcore too, and say where the two counts differ. For this,
            training_step is called once more, on a copy of the module.
        ignore_modules: names of classes or paths of modules that are in no figure of the module tables.
        module_depth: deepest modules in the module tree, 0 being the model; None means all.
        top_modules: classes that are named for each depth of the module tree.
        terminal: print the report when the loop ends.
        tensorboard: write the report's tables to the run's TensorBoard as text.
        files: write the report, the archive and the traces to a folder; in a fast_dev_run only with dirpath.
        dirpath: that folder; None means the folder modelprof beside the logger's files, or in the
            Trainer's default_root_dir. A folder that holds an earlier run is not touched: _1, _2, ... is
            appended.
        views: which tables of the traces the report has, out of device, overview, model, distributed,
            operator, kernel, memory_manipulation, userdefined, memory, step_breakdown, idle, launch and
            dataloader; None means all. Here and in sorted_by, Paddle's names mean the same: KernelView.
        sorted_by: order of operators, kernels and ranges: cpu_ or gpu_ with total, self, avg, max, min,
            memory or self_memory, or calls; None means GPU total where there are device events, else CPU
            total.
        time_unit: unit of the durations in text: s, ms, us or ns; None means one that fits each table.
        thread_sep: show operators and ranges by host thread.
        op_detail: show below each operator what it calls and launches.
        row_limit: most rows of a table in text, and most below any one row; report.json has all.
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
        activities: list[Literal["cpu", "cuda", "xpu"]] | None = None,
        record_shapes: bool = DEFAULTS.record_shapes,
        with_stack: bool = DEFAULTS.with_stack,
        profile_memory: bool = DEFAULTS.profile_memory,
        ranks: Literal["all"] | list[int] = "all",
        max_trace_mb: float | None = DEFAULTS.max_trace_mb,
        keep_windows: int | None = DEFAULTS.keep_windows,
        max_overhead: float | None = DEFAULTS.max_overhead,
        stop_after_profile: bool = DEFAULTS.stop_after_profile,
        device_timing: bool = DEFAULTS.device_timing,
        log_every_n_steps: int | None = DEFAULTS.log_every_n_steps,
        progress_bar: bool = DEFAULTS.progress_bar,
        samples_fn: Callable[[Any], int] | None = DEFAULTS.samples_fn,
        unit: str = DEFAULTS.unit,
        sampling: bool = DEFAULTS.sampling,
        flops: bool | None = DEFAULTS.flops,
        flop_formulas: Mapping[Any, Callable[..., int]] | None = DEFAULTS.flop_formulas,
        peak_flops_per_s: float | dict[str, float] | None = None,
        fvcore: bool = DEFAULTS.fvcore,
        ignore_modules: list[str] | None = None,
        module_depth: int | None = DEFAULTS.module_depth,
        top_modules: int = DEFAULTS.top_modules,
        terminal: bool = DEFAULTS.terminal,
        tensorboard: bool = DEFAULTS.tensorboard,
        files: bool = DEFAULTS.files,
        dirpath: str | Path | None = DEFAULTS.dirpath,
        views: list[str] | str | None = None,
        sorted_by: str | None = DEFAULTS.sorted_by,
        time_unit: str | None = DEFAULTS.time_unit,
        thread_sep: bool = DEFAULTS.thread_sep,
        op_detail: bool = DEFAULTS.op_detail,
        row_limit: int = DEFAULTS.row_limit,
        rules: dict[str, Any] | None = None,
    ) -> None:
        config = ProfileConfig(
            active=active,
            wait=wait,
            warmup=warmup,
            repeat=repeat,
            skip_first=skip_first,
            steps=steps,
            activities=activities,
            record_shapes=record_shapes,
            with_stack=with_stack,
            profile_memory=profile_memory,
            ranks=ranks,
            max_trace_mb=max_trace_mb,
            keep_windows=keep_windows,
            max_overhead=max_overhead,
            stop_after_profile=stop_after_profile,
            device_timing=device_timing,
            log_every_n_steps=log_every_n_steps,
            progress_bar=progress_bar,
            samples_fn=samples_fn,
            unit=unit,
            sampling=sampling,
            flops=flops,
            flop_formulas=flop_formulas,
            peak_flops_per_s=peak_flops_per_s,
            fvcore=fvcore,
            ignore_modules=ignore_modules,
            module_depth=module_depth,
            top_modules=top_modules,
            terminal=terminal,
            tensorboard=tensorboard,
            files=files,
            dirpath=dirpath,
            views=views,
            sorted_by=sorted_by,
            time_unit=time_unit,
            thread_sep=thread_sep,
            op_detail=op_detail,
            row_limit=row_limit,
            rules=rules,
        )
        check_config(config)
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
