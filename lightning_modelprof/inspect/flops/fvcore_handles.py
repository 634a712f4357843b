"""fvcore's analysis, set to multiply-adds of contractions and with rules for what it lacks or gets wrong.

fvcore reads the graph of one traced forward pass. Its rules for addmm, bmm and convolution are kept; those
for norms, pooling and resampling are dropped, as they are no contractions. fvcore calls one multiply-add
a flop.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from math import isqrt, prod
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from lightning_modelprof.inspect.flops.formulas import operator_called
from lightning_modelprof.inspect.flops.zero_cost import holds_no_contraction

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it decorates functions with torch.jit.script, which is deprecated
    from fvcore.nn import FlopCountAnalysis, parameter_count
    from fvcore.nn.jit_handles import addmm_flop_jit, bmm_flop_jit, conv_flop_jit, get_shape


__all__ = ["MACS", "OUTPUTS", "ForwardAnalysis", "may_hold_contractions", "parameter_count"]


Rule: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], "int | Counter[str]"]
"""Inputs and outputs of a node of the graph → its multiply-adds, the way of fvcore's handles."""


MACS: Final = "macs"


OUTPUTS: Final = "outputs"


_COMPLEX_PRODUCTS: Final = 4  # real multiply-adds in a complex one


_COMPLEX: Final = (torch.complex32, torch.complex64, torch.complex128)


def shape(value: Any) -> list[int]:
    """Sizes of a value of the graph.

    Raises:
        ValueError: for what is no plain tensor.
    """
    found = get_shape(value)
    if found is None:
        raise ValueError(f"expected a plain tensor, got {value.type()}")
    return list(found)


# ---- Rules that fvcore lacks or gets wrong


def _linear(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    return prod(shape(outputs[0])) * shape(inputs[1])[-1]


def _matmul(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Any product that sums over the first operand's last dimension; broadcast ones and vectors too."""
    first = shape(inputs[0])
    return prod(shape(outputs[0])) * first[-1] if first and shape(inputs[1]) else 0


def _added_matmul(inputs: Sequence[Any], _outputs: Sequence[Any]) -> int:
    return prod(shape(inputs[1])) * shape(inputs[2])[-1]


def _by_vector(inputs: Sequence[Any], _outputs: Sequence[Any]) -> int:
    return prod(shape(inputs[0]))


def _added_by_vector(inputs: Sequence[Any], _outputs: Sequence[Any]) -> int:
    return prod(shape(inputs[1]))


def _added_outer(inputs: Sequence[Any], _outputs: Sequence[Any]) -> int:
    return prod(shape(inputs[1])) * prod(shape(inputs[2]))


def _tensordot(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """With summed sizes s, the operands hold A·s and B·s elements and the result A·B."""
    first, second, result = (prod(shape(value)) for value in (*inputs[:2], outputs[0]))
    return result * isqrt(first * second // result) if result else 0


def _convolution_with_named_padding(inputs: Sequence[Any], outputs: Sequence[Any]) -> Counter[str]:
    """Padding that is called "same" or "valid": such a convolution is never transposed."""
    return Counter(conv=prod(shape(outputs[0])) * prod(shape(inputs[1])[1:]))


def _attention(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Scores over the queries' width, then sums over the keys; a mask leaves nothing out."""
    query, key, value = (shape(operand) for operand in inputs[:3])
    return prod(shape(outputs[0])[:-1]) * key[-2] * (query[-1] + value[-1])


def _recurrent(inputs: Sequence[Any], _outputs: Sequence[Any]) -> int:
    """Every row meets every matrix once: all gates, layers and directions, and projections."""
    lists = [value.node() for value in inputs if value.node().kind() == "prim::ListConstruct"]
    weights = [size for value in lists[-1].inputs() if len(size := shape(value)) == 2]
    return prod(shape(inputs[0])[:-1]) * sum(prod(size) for size in weights)


def _bilinear(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """One multiply-add for each pair of input features and each output."""
    return prod(shape(outputs[0])) * prod(shape(inputs[2])[1:])


def _distances(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """A matrix product with two more columns for the squares, where torch computes it so; or none at all.

    Source: ``cdist_impl`` in torch's aten/src/ATen/native/Distance.cpp.
    """
    first, second = shape(inputs[0]), shape(inputs[1])
    power, mode = inputs[2].toIValue(), inputs[3].toIValue() or 0
    is_large = first[-2] > 25 or second[-2] > 25
    by_product = power == 2 and (mode == 1 or (mode == 0 and is_large))
    return prod(shape(outputs[0])) * (first[-1] + 2) if by_product else 0


def _einsum(inputs: Sequence[Any], _outputs: Sequence[Any]) -> int:
    shapes = [shape(value) for value in inputs[1].node().inputs()]
    return einsum_macs(inputs[0].toIValue(), shapes, inputs[2].toIValue() if len(inputs) > 2 else None)


_RULES: Final[dict[str, Rule]] = {
    "aten::addmm": addmm_flop_jit,
    "aten::bmm": bmm_flop_jit,
    "aten::_convolution": conv_flop_jit,
    "aten::_convolution_mode": _convolution_with_named_padding,
    "aten::linear": _linear,
    **dict.fromkeys(("aten::mm", "aten::matmul", "aten::inner", "aten::_int_mm"), _matmul),
    **dict.fromkeys(("aten::addmm_", "aten::baddbmm", "aten::baddbmm_"), _added_matmul),
    **dict.fromkeys(("aten::addbmm", "aten::addbmm_"), _added_matmul),
    **dict.fromkeys(("aten::mv", "aten::dot", "aten::vdot"), _by_vector),
    **dict.fromkeys(("aten::addmv", "aten::addmv_"), _added_by_vector),
    **dict.fromkeys(("aten::addr", "aten::addr_"), _added_outer),
    "aten::tensordot": _tensordot,
    "aten::einsum": _einsum,
    "aten::scaled_dot_product_attention": _attention,
    **dict.fromkeys(("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"), _recurrent),
    "aten::bilinear": _bilinear,
    "aten::cdist": _distances,
}


# ---- What is no contraction although no rule says so

_MADE_OF_CONTRACTIONS: Final = frozenset(
    """
    bilinear cdist corrcoef cov det einsum gru gru_cell inner inverse logdet lstm lstm_cell lu_solve
    nuclear_norm orgqr pinverse qr scaled_dot_product_attention slogdet svd
    """.split()  # noqa: SIM905 - so many names read better without quotes
)


_PARTS_OF_CONTRACTIONS: Final = re.compile("conv|mm|matmul|matrix|dot|rnn|linear$|linalg|quantized|fbgemm")


def _is_free(func: Any) -> bool:
    """Whether an overload surely holds no contraction.

    fvcore sees operators before torch takes them apart; only few of those that it takes apart hold one.
    """
    name = func.overloadpacket.__name__.strip("_")
    if name.startswith(("fft_", "stft", "istft")):  # a Fourier transform is no contraction
        return True
    if name in _MADE_OF_CONTRACTIONS or name.endswith("_mm"):
        return False
    if holds_no_contraction(func):
        return True
    is_taken_apart = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return bool(is_taken_apart) and _PARTS_OF_CONTRACTIONS.search(name) is None


def may_hold_contractions(kind: str) -> bool:
    """Whether a node of this kind, for which there is no rule, may hold multiply-adds."""
    if not kind.startswith("aten::"):
        return True
    # An operator in place does what the one without the underscore does, and may lack its tags.
    operators = [operator_called(name) for name in (kind, kind.rstrip("_"))]
    overloads = [
        getattr(found, name) for found in operators if found is not None for name in found.overloads()
    ]
    # Overloads do the same with other arguments, and not all have tags. Those of numbers and lists, as all of
    # aten::Int, are known to the interpreter of the graph alone.
    known = [func for func in overloads if torch._C._dispatch_has_kernel(func.name())]
    return bool(known) and not any(_is_free(func) for func in known)


# ---- The analysis


class _Names(dict[Any, str]):
    """Canonical names by module or name; modules by identity, as a metric's hash changes with its state."""

    @staticmethod
    def _key(key: Any) -> Any:
        return key if isinstance(key, str) else id(key)

    def __getitem__(self, key: Any) -> str:
        return super().__getitem__(self._key(key))

    def __setitem__(self, key: Any, name: str) -> None:
        super().__setitem__(self._key(key), name)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._key(key))


class ForwardAnalysis(FlopCountAnalysis):  # type: ignore[misc]  # fvcore gives it no types
    """fvcore's count of a module without arguments: one trace for multiply-adds and activations.

    Its counts are by ``(MACS, operator)`` and ``(OUTPUTS, operator)``.

    Args:
        root: the module.

    Attributes:
        failed: calls of operators that a rule could not count, by operator.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root, ())
        self.failed: Counter[str] = Counter()
        handles = {kind: self._handle(kind, rule) for kind, rule in _RULES.items()}
        self.clear_op_handles().set_op_handle(**handles)
        self.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")

    def _handle(self, kind: str, rule: Rule) -> Callable[[list[Any], list[Any]], Counter[tuple[str, str]]]:
        def count(inputs: list[Any], outputs: list[Any]) -> Counter[tuple[str, str]]:
            try:
                result = rule(inputs, outputs)
                named = result if isinstance(result, Counter) else {self._simplify_op_name(kind): result}
                ((name, macs),) = named.items()
                elements = prod(shape(outputs[0]))
                if any(_is_complex(value) for value in inputs):
                    macs *= _COMPLEX_PRODUCTS
            except Exception:  # an operand that is no plain tensor: the operator is listed, the rest counted
                self.failed[kind] += 1
                return Counter()
            return Counter({(MACS, name): int(macs), (OUTPUTS, name): elements})

        return count

    def _get_aliases(self, model: nn.Module) -> _Names:
        names = _Names()
        for name, module in model.named_modules(remove_duplicate=False):
            if module not in names:
                names[module] = name
            names[name] = names[module]
        return names

    def _should_ignore_node(self, node: Any) -> bool:
        """Keep what has blocks or calls of its own: fvcore does not look into them."""
        if node.kind() in ("prim::If", "prim::Loop", "prim::CallMethod"):
            return False
        return bool(super()._should_ignore_node(node))


def _is_complex(value: Any) -> bool:
    return bool(value.isCompleteTensor()) and value.type().dtype() in _COMPLEX


def einsum_macs(equation: str, shapes: Sequence[Sequence[int]], path: Sequence[int] | None = None) -> int:
    """Multiply-adds of all products of two operands that sum over something.

    A product that sums over nothing is element-wise, such as an outer product, and no contraction. What only
    one operand has and the result lacks is summed before, without products.

    Args:
        equation: as torch.einsum takes it.
        shapes: of the operands.
        path: positions of the two operands of each product, flat; their result goes to the end. ``None``
            contracts from left to right.

    Source: ``einsum`` and ``sumproduct_pair`` in torch's aten/src/ATen/native/Linear.cpp.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = [_labels(term, len(shape)) for term, shape in zip(left.split(","), shapes, strict=True)]
    sizes: dict[Hashable, int] = {}
    for labels, shape in zip(terms, shapes, strict=True):
        for label, size in zip(labels, shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1)) if size else 0
    if not all(sizes.values()):
        return 0
    # A dimension of size 1 is as good as none.
    operands = [
        {label for label, size in zip(labels, shape, strict=True) if size > 1}
        for labels, shape in zip(terms, shapes, strict=True)
    ]
    kept = _result_labels(terms, right if arrow else None)
    macs = 0
    while len(operands) > 1:
        if path is None:
            one, other = operands.pop(0), operands.pop(0)
        else:
            low, high = sorted(path[:2])
            path = path[2:]
            other, one = operands.pop(high), operands.pop(low)
        needed = kept.union(*operands)
        summed = (one & other) - needed
        result = (one | other) & needed
        if summed:
            macs += prod(sizes[label] for label in result | summed)
        operands.insert(0 if path is None else len(operands), result)
    return macs


def _labels(term: str, dimensions: int) -> list[Hashable]:
    """A label for each dimension; those of an ellipsis are numbered from the right."""
    before, dots, after = term.partition("...")
    hidden = range(dimensions - len(before) - len(after), 0, -1) if dots else range(0)
    return [*before, *hidden, *after]


def _result_labels(terms: Sequence[Sequence[Hashable]], right: str | None) -> set[Hashable]:
    """The labels of the result; without an arrow, the ellipsis' and those that stand there once."""
    times = Counter(label for labels in terms for label in labels)
    if right is None:
        return {label for label, found in times.items() if found == 1 or isinstance(label, int)}
    hidden = {label for label in times if isinstance(label, int)} if "..." in right else set()
    return {*right.replace("...", ""), *hidden}
