"""Changes to the DataLoader's statement, and to copies of its batches."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.report.advice.owners import owner_of_loader
from lightning_modelprof.report.changes.edits import Code, Refused, SourceEdit
from lightning_modelprof.report.changes.offers import (
    line_to_write,
    offer_arguments,
    only_statement,
    statements_about,
    yaml_key,
)
from lightning_modelprof.report.model import CHANGES_NUMERICS, SAME_RESULTS, CodeChange, Finding
from lightning_modelprof.run.setup import LoaderSetup, Statement, TrainingSetup

POSITIONS: Final = (
    *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn"),
    *("pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
)
DEFAULTS: Final = {
    "num_workers": 0,
    "persistent_workers": False,
    "prefetch_factor": None,
    "pin_memory": False,
}
_LEAST_COMPARED: Final = 12
_COPY: Final = "to"
_NAMES: Final = (ast.Name, ast.Attribute)
_NON_BLOCKING: Final = {"non_blocking": True}


def with_workers(finding: Finding, facts: Facts) -> CodeChange | None:
    return _loader_change(dict(finding.wants), facts)


def with_kept_workers(finding: Finding, facts: Facts) -> CodeChange | None:  # noqa: ARG001
    return _loader_change({"persistent_workers": True}, facts)


def with_pinned_memory(finding: Finding, facts: Facts) -> CodeChange | None:
    """Pin memory, or make copies from it non-blocking: whichever is missing."""
    setup = facts.setup
    if setup.cuda is None or len(setup.loaders) != 1:
        return None
    lines = [one.line for one in finding.locations if one.is_exact and one.line is not None]
    copies = [
        one for one in statements_about(setup, _COPY) if any(one.line <= at <= one.end_line for at in lines)
    ]
    is_pinned = bool(setup.loaders[0].pin_memory)
    if not is_pinned and not lines:
        return _loader_change({"pin_memory": True}, facts)
    if not copies:
        return None
    if not is_pinned:
        both = f"{line_to_write('DataLoader', {'pin_memory': True})} and .to(..., non_blocking=True)"
        return CodeChange(text=both, label=SAME_RESULTS)
    statement = copies[0] if len(copies) == len(lines) == 1 else None
    return offer_arguments(
        statement, ".to", _NON_BLOCKING, SAME_RESULTS, check=lambda one: _to_device(one, statement)
    )


def _to_device(source: SourceEdit, statement: Statement | None) -> None:
    """Refuse copies to the CPU, which can't be read before they finish, and unnamed flags."""
    for where in () if statement is None else statement.calls:
        for node in ast.walk(source.call_at(where)):
            if isinstance(node, ast.Constant) and (
                isinstance(node.value, bool) or str(node.value).startswith("cpu")
            ):
                raise Refused("a copy to the CPU, or a flag without a name")


def _loader_change(wanted: Mapping[str, Any], facts: Facts) -> CodeChange | None:
    setup = facts.setup
    if not setup.loaders or not wanted:
        return None
    loader = setup.loaders[0]
    dataset = "" if loader.dataset is None else loader.dataset.function
    has_more_workers = wanted.get("num_workers", 0) > 0
    if owner_of_loader(setup, loader) is not None or (has_more_workers and dataset.endswith(".__iter__")):
        return None  # each worker of an IterableDataset would yield all samples
    label = _label(wanted, facts, dataset)
    statement = only_statement(setup, "DataLoader") if len(setup.loaders) == 1 else None
    key = _yaml_key_of(statement, wanted, setup, loader)
    if key:
        name, value = next(iter(wanted.items()))
        return yaml_key(key, value, label) if len(wanted) == 1 or name == "num_workers" else None
    change = offer_arguments(
        statement, loader.kind, _written(wanted, statement), label, positions=POSITIONS, defaults=DEFAULTS
    )
    return replace(change, text=line_to_write(loader.kind, wanted))


def _written(wanted: Mapping[str, Any], statement: Statement | None) -> Mapping[str, Any]:
    """Keep workers only if there are any: a DataLoader without them refuses ``persistent_workers``."""
    number = _keyword_value(statement, "num_workers")
    if not wanted.get("persistent_workers") or "num_workers" in wanted or not isinstance(number, _NAMES):
        return wanted
    return {**wanted, "persistent_workers": Code(f"{ast.unparse(number)} > 0")}


def _label(wanted: Mapping[str, Any], facts: Facts, dataset: str) -> str:
    """Workers draw their own random numbers; persistent ones also change the next epoch's."""
    if wanted.keys() <= {"pin_memory", "prefetch_factor"}:
        return SAME_RESULTS
    seen = facts.get(Facts.repeated)
    is_fixed = dataset.startswith("TensorDataset.") or (
        seen is not None and seen.num_compared >= _LEAST_COMPARED and seen.num_equal == seen.num_compared
    )
    return SAME_RESULTS if is_fixed and "persistent_workers" not in wanted else CHANGES_NUMERICS


def _yaml_key_of(
    statement: Statement | None, wanted: Mapping[str, Any], setup: TrainingSetup, loader: LoaderSetup
) -> str:
    if not setup.configured_by or statement is None:
        return ""
    given = _keyword_value(statement, next(iter(wanted)))
    if not isinstance(given, ast.Attribute) or not ast.unparse(given).startswith("self."):
        return ""
    is_data = loader.made_by is not None and loader.made_by in setup.data_hooks.values()
    return f"{'data' if is_data else 'model'}.{given.attr}"


def _keyword_value(statement: Statement | None, name: str) -> ast.expr | None:
    if statement is None:
        return None
    try:
        tree = ast.parse(statement.text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == name]
    return found[0] if len(found) == 1 else None
