"""Libraries that sit on Lightning, one file each: how their users reach what they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_modelprof.report.advice.libraries import LibraryWays
from lightning_modelprof.report.libraries.anomalib import ANOMALIB
from lightning_modelprof.report.libraries.chemprop import CHEMPROP
from lightning_modelprof.report.libraries.darts import DARTS
from lightning_modelprof.report.libraries.deepforest import DEEPFOREST
from lightning_modelprof.report.libraries.gluonts import GLUONTS
from lightning_modelprof.report.libraries.neuralforecast import NEURALFORECAST
from lightning_modelprof.report.libraries.pytorch_forecasting import PYTORCH_FORECASTING
from lightning_modelprof.report.libraries.pytorch_tabular import PYTORCH_TABULAR
from lightning_modelprof.report.libraries.rl4co import RL4CO
from lightning_modelprof.report.libraries.scvi import SCVI
from lightning_modelprof.report.libraries.torch_uncertainty import TORCH_UNCERTAINTY
from lightning_modelprof.report.libraries.torchgeo import TORCHGEO

_ALL: Final = (
    ANOMALIB,
    CHEMPROP,
    DARTS,
    DEEPFOREST,
    GLUONTS,
    NEURALFORECAST,
    PYTORCH_FORECASTING,
    PYTORCH_TABULAR,
    RL4CO,
    SCVI,
    TORCH_UNCERTAINTY,
    TORCHGEO,
)

LIBRARIES: Final[Mapping[str, LibraryWays]] = {one.package: one for one in _ALL}
"""By the name that they are imported by."""
