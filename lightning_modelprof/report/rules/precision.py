"""What the tensor cores of a CUDA device would do faster: TF32, 16-bit numbers, sizes that fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.analyze import Analysis
from lightning_modelprof.report.model import Finding, Location, Severity
from lightning_modelprof.report.rules.base import NO_CUDA, NO_SETUP, Rule, count, text
from lightning_modelprof.run.training_setup import TrainingSetup

_VOLTA: Final = (7, 0)
"""First compute capability with tensor cores (16-bit); NVIDIA Volta white paper, 2017."""
_AMPERE: Final = (8, 0)
"""First with TF32 and bfloat16; NVIDIA A100 white paper, 2020."""


def _is_half(precision: str) -> bool:
    return "16" in precision or "8" in precision or "transformer-engine" in precision


@dataclass(frozen=True, kw_only=True)
class TensorCoresUnused(Rule):
    """Products of float32 matrices, on a device with TF32, at the precision ``highest``."""

    kind: ClassVar[str] = "tensor_cores_unused"
    title: ClassVar[str] = "Matrix products leave the tensor cores alone"
    takes_time_there: ClassVar[bool] = False

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated without such a device."""
        setup = analysis.setup
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if setup.cuda is None:
            return self.not_evaluated(NO_CUDA)
        if setup.cuda.capability < _AMPERE:
            return self.not_evaluated("the device has no TF32")
        if _is_half(analysis.info.precision) or setup.matmul_precision != "highest":
            return self.clean(f"Precision is {analysis.info.precision}, of matmul {setup.matmul_precision}.")
        return (
            self.found(
                f"Precision is {analysis.info.precision} and that of matrix products is 'highest', so they do"
                " not use the tensor cores.",
                "torch.set_float32_matmul_precision('high') uses TF32: 10 bits of mantissa in products.",
                Severity.INFO,
                evidence=[text("matmul precision", setup.matmul_precision or "unknown")],
            ),
        )


@dataclass(frozen=True, kw_only=True)
class AmpOff(Rule):
    """32-bit training on a device whose tensor cores take 16-bit numbers."""

    kind: ClassVar[str] = "amp_off"
    title: ClassVar[str] = "Mixed precision is off"
    takes_time_there: ClassVar[bool] = False

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated without such a device."""
        setup = analysis.setup
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if setup.cuda is None:
            return self.not_evaluated(NO_CUDA)
        if setup.cuda.capability < _VOLTA:
            return self.not_evaluated("the device has no tensor cores")
        if _is_half(analysis.info.precision):
            return self.clean(f"Precision is {analysis.info.precision}.")
        wanted = "bf16-mixed" if setup.cuda.capability >= _AMPERE else "16-mixed"
        return (
            self.found(
                f"Precision is {analysis.info.precision}.",
                f"Trainer(precision='{wanted}'), if the model trains as well with it. Measure it.",
                Severity.INFO,
                evidence=[text("precision", analysis.info.precision)],
            ),
        )


@dataclass(frozen=True, kw_only=True)
class MatmulTile(Rule):
    """Linear layers of 16-bit numbers whose sizes are no multiples of a number.

    Attributes:
        multiple: of which sizes should be multiples.

    Source: 8 for 16-bit numbers, NVIDIA, Deep Learning Performance: Matrix Multiplication, 2023, "Tensor Core
    Requirements".
    """

    kind: ClassVar[str] = "matmul_tile"
    title: ClassVar[str] = "Sizes of linear layers do not fit the tensor cores"
    takes_time_there: ClassVar[bool] = False

    multiple: int = 8

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated without 16-bit numbers on CUDA."""
        setup = analysis.setup
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if setup.cuda is None:
            return self.not_evaluated(NO_CUDA)
        if not _is_half(analysis.info.precision):
            return self.not_evaluated("the training is not in 16 bits")
        return self._sizes(setup)

    def _sizes(self, setup: TrainingSetup) -> tuple[Finding, ...]:
        odd = [
            layer
            for layer in setup.layers
            if layer.in_features % self.multiple or layer.out_features % self.multiple
        ]
        if not odd:
            return self.clean(
                f"All {len(setup.layers)} linear layers have sizes that are multiples of {self.multiple}."
            )
        first = odd[0]
        return (
            self.found(
                f"{len(odd)} of {len(setup.layers)} linear layers have a size that is no multiple of"
                f" {self.multiple}: {first.path} is {first.in_features} x {first.out_features}.",
                f"Pad such sizes (a vocabulary, for example) to a multiple of {self.multiple}.",
                Severity.INFO,
                places=[Location(module=layer.path) for layer in odd],
                evidence=[count("layers", len(odd))],
            ),
        )
