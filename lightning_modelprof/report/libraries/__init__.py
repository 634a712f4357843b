"""Libraries that sit on Lightning, one file each: how their users reach what they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_modelprof.report.libraries.anomalib import ANOMALIB
from lightning_modelprof.report.libraries.base import LibraryWays
from lightning_modelprof.report.libraries.chemprop import CHEMPROP
from lightning_modelprof.report.libraries.darts import DARTS
from lightning_modelprof.report.libraries.gluonts import GLUONTS
from lightning_modelprof.report.libraries.neuralforecast import NEURALFORECAST
from lightning_modelprof.report.libraries.pytorch_forecasting import PYTORCH_FORECASTING
from lightning_modelprof.report.libraries.scvi import SCVI
from lightning_modelprof.report.libraries.torchgeo import TORCHGEO

LIBRARIES: Final[Mapping[str, LibraryWays]] = {
    one.package: one
    for one in (ANOMALIB, CHEMPROP, DARTS, GLUONTS, NEURALFORECAST, PYTORCH_FORECASTING, SCVI, TORCHGEO)
}
"""By the name that they are imported by."""
