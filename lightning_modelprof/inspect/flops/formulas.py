"""FLOPs of operators: torch's own registry, with what it lacks or gets wrong.

A formula is called with the operator's own arguments and its result as ``out_val``, and returns FLOPs: one
multiply-add is two. Only contractions count (matrix products, convolutions, attention, recurrent gates);
biases, norms, activations, pooling and look-ups are zero by convention. Fourier transforms are no
contractions: they have formulas, and whoever adds up keeps them apart.
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

# By the operator's name: an operator of a library that is imported later is found all the same.
_BY_NAME: dict[str, Formula] = {
    **contractions.FORMULAS,
    **attention.FORMULAS,
    **attention.RECURRENT_FORMULAS,
    **packed.FORMULAS,
}


def name_of(operator: Any) -> str:
    """``aten::mm``; of a higher-order operator its own name."""
    return str(getattr(operator, "_qualified_op_name", operator))


def _operator_called(name: str) -> Any | None:
    """``"aten::mm"`` → ``torch.ops.aten.mm``; ``None`` where this torch has no such operator."""
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator, None)


def formula_of(operator: Any) -> Formula | None:
    """The formula of an operator without overload: ours before torch's; ``None`` if nobody has one."""
    return _BY_NAME.get(name_of(operator)) or flop_registry.get(operator)


def own_formulas(given: Mapping[Any, Formula] | None) -> dict[Any, Formula]:
    """The user's formulas by operator, without overloads.

    Args:
        given: formulas by ``torch.ops.namespace.operator``, by one of its overloads or by
            ``"namespace::operator"``.

    Raises:
        KeyError: when a name is no operator of this torch.
    """
    formulas: dict[Any, Formula] = {}
    for key, formula in (given or {}).items():
        operator = _operator_called(key) if isinstance(key, str) else getattr(key, "overloadpacket", key)
        if operator is None:
            raise KeyError(f"formulas: expected an operator known to torch, got {quoted(key)}")
        formulas[operator] = formula
    return formulas
