"""All rules of this package."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from lightning_modelprof.errors import ConfigError, did_you_mean, quoted
from lightning_modelprof.report.discovery import found_beside, place_in
from lightning_modelprof.report.rules.rule import MADE, Rule

_ORDER: Final = (
    *("out_of_memory", "input_bound", "straggler_rank", "synchronous_loader", "worker_startup"),
    *("repeated_work", "host_device_sync", "host_to_device_copy", "launch_bound"),
    *("communication_exposed", "slow_forward_outside_model", "slow_custom_module"),
    *("slow_line_in_module", "constant_work", "slow_layer_hooks", "repeated_forward"),
    *("slow_torch_module", "unused_gradients", "unused_outputs", "double_precision"),
    *("competing_thread", "anomaly_detection", "profiler_left_on", "slow_callback"),
    *("slow_module_hook", "slow_logger", "slow_logging_calls", "validation_share"),
    *("long_sanity_check", "checkpoint_share", "slow_epoch_turns", "slow_setup", "slow_transfer"),
    *("slow_lr_scheduler", "zero_grad_cost", "clip_cost", "slow_optimizer", "dense_embeddings"),
    *("optimizer_not_fused", "small_batches", "frozen_layers_computed", "frozen_forward"),
    *("many_calls", "conv_bias_before_batchnorm", "compile_recompiles", "slow_steps"),
    *("growing_steps", "busy_cpus", "cpu_threads_oversubscribed", "single_cpu_thread"),
    *("tensor_cores_unused", "amp_off", "tensor_cores_eligible", "matmul_tile"),
    *("memory_near_capacity", "memory_creep", "memory_fragmentation"),
)
"""Order of findings without a saving; those of rules not listed come last."""


RULES: Final = found_beside(
    __name__,
    MADE,
    lambda one: (place_in(_ORDER, one.kind), one.ask.__module__),
    without=("engine",),  # imports this file
)
"""All rules with their default thresholds."""


def configure_rules(given: Mapping[str, Any] | None, where: str = "rules") -> tuple[Rule, ...]:
    """Return the enabled rules, with configured thresholds.

    Args:
        given: rule kind → thresholds by name, or whether it is on; ``None`` keeps the defaults.
        where: start of error messages.

    Raises:
        ConfigError: If a rule or threshold is unknown, a threshold isn't a number of at least 0, or a warning
            threshold exceeds the critical one.
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
    names = list(rule.limits)
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
                f" The default is {rule.limits[name]}."
            )
    limits = {**rule.limits, **wanted}
    for lower in names:
        upper = lower.replace("warning", "critical")
        if lower == upper or upper not in names:
            continue
        least, most = limits[lower], limits[upper]
        if least > most and {lower, upper} & set(wanted):
            raise ConfigError(
                f"{where}: {rule.kind}: expected {lower} of at most {upper}, got {lower}={least:g} and"
                f" {upper}={most:g}. Lower {lower}, or raise {upper}."
            )
    return replace(rule, limits=limits)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
