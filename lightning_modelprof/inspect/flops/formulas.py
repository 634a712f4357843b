"""FLOPs of operators: torch's own registry, plus what it lacks or gets wrong.

A formula is called with the operator's own arguments and its result as ``out_val``, and returns FLOPs. A
multiply-add is two FLOPs. Only contractions count (matrix products, convolutions, attention, recurrent
gates); biases, norms, activations, pooling and look-ups are zero by convention. Fourier transforms aren't
contractions. They have formulas, but totals keep them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from lightning_modelprof.errors import quoted
from lightning_modelprof.inspect.flops import attention, contractions, packed
from lightning_modelprof.inspect.flops.contractions import Formula, WithRecompute

__all__ = ["Formula", "WithRecompute", "formula_of", "name_of", "own_formulas"]

# By name, so that operators of libraries imported later are found too.
_BY_NAME: dict[str, Formula] = {
    **contractions.FORMULAS,
    **attention.FORMULAS,
    **attention.RECURRENT_FORMULAS,
    **packed.FORMULAS,
}


def name_of(operator: Any) -> str:
    """Return a name such as ``aten::mm``; a higher-order operator's own name."""
    return str(getattr(operator, "_qualified_op_name", operator))


def _operator_called(name: str) -> Any | None:
    """Return ``torch.ops.aten.mm`` for ``"aten::mm"``; ``None`` if this torch has no such operator."""
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator, None)


def formula_of(operator: Any) -> Formula | None:
    """Return an operator's formula, without overload: ours before torch's; ``None`` without one."""
    return _BY_NAME.get(name_of(operator)) or flop_registry.get(operator)


def own_formulas(given: Mapping[Any, Formula] | None) -> dict[Any, Formula]:
    """Return the user's formulas by operator, without overloads.

    Args:
        given: formulas by ``torch.ops.namespace.operator``, by one of its overloads or by
            ``"namespace::operator"``.

    Raises:
        KeyError: when torch knows no operator of that name.
    """
    formulas: dict[Any, Formula] = {}
    for key, formula in (given or {}).items():
        operator = _operator_called(key) if isinstance(key, str) else getattr(key, "overloadpacket", key)
        if operator is None:
            raise KeyError(f"formulas: expected an operator known to torch, got {quoted(key)}")
        formulas[operator] = formula
    return formulas
