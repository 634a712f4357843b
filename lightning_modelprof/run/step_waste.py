"""Measured facts about work that one step does in vain: done twice, for nothing, or on zeros."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_modelprof.run.ranges import Count, Whole
from lightning_modelprof.run.setup import CodePlace


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedCall:
    """A module that a step called with the same tensors more than once, none of them changed in between.

    Attributes:
        path: of the module.
        calls: in the step, with whatever.
        repeated: those of them that computed what an earlier call had computed.
        lines: of the user's that made these calls, the first one too.
    """

    path: str
    calls: Count
    repeated: Count
    lines: tuple[CodePlace, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTable:
    """An embedding whose gradient has a value for each of its rows, whichever rows the batch uses.

    Attributes:
        path: of the module that looked rows up.
        rows, columns: of the table.
        used: indices that were looked up in the step, each as often as it came: at least as many as rows.
    """

    path: str
    rows: Whole
    columns: Whole
    used: Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedGradients:
    """Gradients of one module's parameters that no optimizer used before they were made anew, or at all.

    Attributes:
        path: of the module whose own parameters they are of.
        passes: backward passes of the step that made gradients of these parameters.
        beyond: of them, those that nobody used and that went on into this module when all gradients that were
            used had been made: the whole pass through it was for nothing.
        within: of them, the others that nobody used: the pass had to go through it, its own gradients were
            for nothing.
        lines: of the user's that began the passes nobody used.
    """

    path: str
    passes: Count
    beyond: Count
    within: Count
    lines: tuple[CodePlace, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWaste:
    """What the counted step did in vain.

    Attributes:
        repeated: modules that computed the same again; those inside of one are listed as well.
        tables: embeddings with dense gradients.
        unused: gradients that nobody used; empty where one optimizer has all parameters.
        notes: what could not be seen, a sentence each.
    """

    repeated: tuple[RepeatedCall, ...] = ()
    tables: tuple[DenseTable, ...] = ()
    unused: tuple[UnusedGradients, ...] = ()
    notes: tuple[str, ...] = ()
