"""GluonTS: estimators whose ``train`` builds an iterable of batches and the Trainer."""

from typing import Final

from lightning_modelprof.report.advice.libraries import LibraryWays, Way

GLUONTS: Final = LibraryWays(
    package="gluonts",
    batches=(
        Way(
            words="estimator.train(..., cache_data=True), which transforms each series once",
            target="gluonts.torch.model.estimator:PyTorchLightningEstimator.train",
            parameter="cache_data",
        ),
    ),
)
