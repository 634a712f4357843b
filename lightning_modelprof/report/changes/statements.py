"""Changes to statements that make the Trainer, the optimizer and layers, and to ``self.log`` calls."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.report.advice.owners import owner_of_optimizer
from lightning_modelprof.report.changes.edits import Refused, SourceEdit
from lightning_modelprof.report.changes.offers import (
    line_to_write,
    offer,
    offer_arguments,
    only_statement,
    statements_about,
    yaml_key,
)
from lightning_modelprof.report.model import CHANGES_NUMERICS, SAME_RESULTS, CodeChange, Finding
from lightning_modelprof.report.rules.phases import rarer_logging
from lightning_modelprof.report.rules.rule import AMPERE
from lightning_modelprof.run.setup import Statement, TrainingSetup

_TRAINER: Final = "Trainer"
_ANOMALY: Final = "set_detect_anomaly"
_DEFAULTS: Final = {"detect_anomaly": False, "profiler": None, "foreach": None}


def with_mixed_precision(finding: Finding, facts: Facts) -> CodeChange | None:  # noqa: ARG001
    """Use 16-bit numbers if the tensor cores take them."""
    setup = facts.setup
    if setup.cuda is None:
        return None
    wanted = "bf16-mixed" if setup.cuda.capability >= AMPERE else "16-mixed"
    if wanted == "16-mixed" and setup.gradient_clip_val and any(one.fused for one in setup.optimizers):
        return None  # Lightning refuses this
    return _trainer_change(setup, {"precision": wanted}, CHANGES_NUMERICS)


def with_rarer_logging(finding: Finding, facts: Facts) -> CodeChange | None:  # noqa: ARG001
    """Use the larger ``log_every_n_steps`` that the finding recommends."""
    setup = facts.setup
    if not setup.loggers:
        return None
    return _trainer_change(setup, {"log_every_n_steps": rarer_logging(setup)}, SAME_RESULTS)


def without_profiler(finding: Finding, facts: Facts) -> CodeChange | None:  # noqa: ARG001
    return _trainer_change(facts.setup, {"profiler": None}, SAME_RESULTS)


def without_anomaly_detection(finding: Finding, facts: Facts) -> CodeChange | None:  # noqa: ARG001
    """Turn off anomaly detection if only one place turns it on."""
    setup = facts.setup
    of_trainer = _trainer_change(setup, {"detect_anomaly": False}, SAME_RESULTS)
    switches = statements_about(setup, _ANOMALY)
    if not switches or "detect_anomaly=True" in getattr(only_statement(setup, _TRAINER), "text", ""):
        return of_trainer if not switches else CodeChange(text=of_trainer.text, label=SAME_RESULTS)
    statement = switches[0] if len(switches) == 1 else None
    change = offer_arguments(statement, _ANOMALY, {"mode": False}, SAME_RESULTS, positions=("mode",))
    return CodeChange(
        text="torch.autograd.set_detect_anomaly(False)",
        label=SAME_RESULTS,
        diff=change.diff,
        file=change.file,
        line=change.line,
    )


def _trainer_change(setup: TrainingSetup, wanted: Mapping[str, Any], label: str) -> CodeChange:
    statement = only_statement(setup, _TRAINER)
    ((name, value),) = wanted.items()
    if setup.configured_by and statement is None:
        return yaml_key(f"trainer.{name}", value, label)
    return offer_arguments(statement, _TRAINER, wanted, label, defaults=_DEFAULTS, replaced=("profiler",))


def with_fused_step(finding: Finding, facts: Facts) -> CodeChange | None:  # noqa: ARG001
    setup = facts.setup
    if len(setup.optimizers) != 1 or owner_of_optimizer(setup) is not None:
        return None
    optimizer = setup.optimizers[0]
    name = "fused" if optimizer.has_fused else "foreach"
    if name == "fused" and setup.gradient_clip_val and facts.info.precision == "16-mixed":
        return None  # Lightning refuses to clip for a fused optimizer that unscales gradients
    place = setup.module_hooks.get("configure_optimizers")
    if setup.configured_by and (place is None or place.is_library):
        path = "optimizer.init_args" if setup.configured_by == "LightningCLI" else "optimizer"
        return yaml_key(f"{path}.{name}", True, CHANGES_NUMERICS)
    wanted: dict[str, Any] = {name: True}
    if name == "fused" and optimizer.foreach:
        wanted["foreach"] = None  # torch refuses both
    statement = only_statement(setup, "optimizer")
    change = offer_arguments(
        statement, optimizer.kind, wanted, CHANGES_NUMERICS, defaults=_DEFAULTS, check=_can_be_fused
    )
    return (
        change
        if change.diff
        else CodeChange(text=line_to_write(optimizer.kind, {name: True}), label=CHANGES_NUMERICS)
    )


def _can_be_fused(source: SourceEdit) -> None:
    """Refuse sparse gradients and differentiable steps, which fused optimizers don't support."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.keyword) and node.arg in ("sparse", "differentiable"):
            raise Refused(f"{node.arg} gradients")


_CONVOLUTION: Final = "convolution"
_UNTRAINED: Final = "untrained"
_POSITIONS: Final = (
    *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias"),
    *("padding_mode", "device", "dtype"),
)


def without_bias(finding: Finding, facts: Facts) -> CodeChange | None:  # noqa: ARG001
    """Drop a convolution's bias that BatchNorm cancels."""
    statement = only_statement(facts.setup, _CONVOLUTION)
    return offer_arguments(
        statement, "Conv", {"bias": False}, CHANGES_NUMERICS, positions=_POSITIONS, defaults={}
    )


def frozen(finding: Finding, facts: Facts) -> CodeChange | None:
    """Freeze a module that no optimizer trains: at the start, in the counted step or at the end."""
    setup = facts.setup
    if len(finding.wants) != 1:
        return None
    path, _ = finding.wants[0]
    statement = next((one for one in statements_about(setup, _UNTRAINED) if one.module == path), None)
    if path not in setup.untrained or statement is None:
        return None
    new = f"self.{path.rpartition('.')[2]}.requires_grad_(False)"

    def edit(source: SourceEdit) -> None:
        source.add_after(statement.line, statement.end_line, new)

    return offer(statement, edit, new, SAME_RESULTS)


_MUCH: Final = 0.1
"""Share of logging time from which a line counts."""


def with_logging_by_epoch(finding: Finding, facts: Facts) -> CodeChange | None:  # noqa: ARG001
    """Reduce values across ranks once per epoch if one ``self.log`` takes most of the time."""
    setup, calls = facts.setup, facts.logging_calls
    most = [one for one in calls.lines if one.share >= _MUCH * calls.share]
    if len(most) != 1 or most[0].logs is None or "sync_dist" not in most[0].logs.options:
        return None
    if most[0].package or not most[0].function.endswith("training_step"):
        return None
    statement = only_statement(setup, "log", most[0].line)
    callee = "self.log_dict" if statement is not None and ".log_dict(" in statement.text else "self.log"
    positions = ("name", "value", "prog_bar", "logger", "on_step", "on_epoch")
    return offer_arguments(
        statement,
        callee,
        {"on_step": False, "on_epoch": True},
        SAME_RESULTS,
        positions=positions if callee == "self.log" else ("dictionary", *positions[2:]),
        check=lambda source: _keeps_keys(source, statement),
    )


def _keeps_keys(source: SourceEdit, statement: Statement | None) -> None:
    """Refuse if the keys would change, or something in the file may watch the value."""
    for where in () if statement is None else statement.calls:
        call = source.call_at(where)
        given = {one.arg: one.value for one in call.keywords}
        if isinstance(given.get("on_epoch"), ast.Constant) and "on_step" not in {
            name for name, value in given.items() if isinstance(value, ast.Constant) and value.value is False
        }:
            raise Refused("the key would lose its suffix")
        first = call.args[:1] or [given[name] for name in ("name", "dictionary") if name in given]
        keys = [text for part in first for text in _texts(part)]
        others = _texts(source.tree)
        for key in keys:
            if sum(text.startswith(key) for text in others) > sum(text.startswith(key) for text in keys):
                raise Refused("something may watch the value")


def _texts(tree: ast.AST) -> list[str]:
    values = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [value for value in values if isinstance(value, str) and value]


def without_item(finding: Finding, facts: Facts) -> CodeChange | None:
    """Log a tensor if one ``self.log`` reads its value."""
    setup = facts.setup
    if len(finding.locations) != 1:
        return None
    place = finding.locations[0]
    if not place.is_exact or place.line is None:
        return None
    statement = only_statement(setup, "item", place.line)
    if statement is None or statement.file != place.file:
        return None

    def edit(source: SourceEdit) -> None:
        for where in statement.calls:
            source.drop_method(source.call_at(where), "item")

    return offer(statement, edit, "self.log(..., value), without .item()", SAME_RESULTS)
