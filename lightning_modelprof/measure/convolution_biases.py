"""Convolutions whose bias a normalisation after them subtracts again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

from torch import nn

from lightning_modelprof.measure.code_place import place_of
from lightning_modelprof.measure.user_code import is_library
from lightning_modelprof.run.setup import CodePlace, ConvolutionBias

_CONVOLUTIONS: Final = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}
_NUMBER: Final = re.compile(r"\d*$")


def convolution_biases(module: nn.Module) -> tuple[ConvolutionBias, ...]:
    """Convolutions with a bias right before a BatchNorm of as many channels that uses the batch's mean.

    In a ``Sequential`` the order of the layers is the order in which they run. Elsewhere only neighbours
    count whose names end in the same number, as in ``conv1`` and ``bn1``.

    Source: the mean that BatchNorm subtracts contains the bias (Ioffe and Szegedy, Batch Normalization,
    2015, section 3.2).
    """
    return tuple(_found(module))


def _found(module: nn.Module) -> Iterator[ConvolutionBias]:
    for path, parent in module.named_modules():
        is_sequential = isinstance(parent, nn.Sequential)
        for (name, layer), (next_name, next_layer) in pairwise(parent.named_children()):
            if not _undoes(layer, next_layer):
                continue
            if not is_sequential and _number(name) != _number(next_name):
                continue
            prefix = f"{path}." if path else ""
            yield ConvolutionBias(
                convolution=prefix + name,
                normalisation=prefix + next_name,
                is_sequential=is_sequential,
                owner=_owner(module, path),
            )


def _undoes(layer: nn.Module, after: nn.Module) -> bool:
    for convolution, normalisation in _CONVOLUTIONS.items():
        if isinstance(layer, convolution) and isinstance(after, normalisation):
            return layer.bias is not None and layer.out_channels == after.num_features
    return False


def _number(name: str) -> str:
    found = _NUMBER.search(name)
    return found.group() if found is not None else ""


def _owner(root: nn.Module, path: str) -> CodePlace | None:
    """The constructor of the innermost module on the path that is not a library's."""
    while True:
        kind: Any = type(root.get_submodule(path))
        place = place_of(kind.__init__)
        if place is not None and not is_library(place.file):
            return place
        if not path:
            return None
        path = path.rpartition(".")[0]
