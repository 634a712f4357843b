"""neuralforecast: models whose ``fit`` builds a DataModule and the Trainer."""

from typing import Final

from lightning_modelprof.report.advice.libraries import LibraryWays, Way

_MODEL: Final = "neuralforecast.models.nhits:NHITS.__init__"

NEURALFORECAST: Final = LibraryWays(
    package="neuralforecast",
    loader=(
        Way(
            words="dataloader_kwargs={{items}} where the model is made",
            target=_MODEL,
            parameter="dataloader_kwargs",
        ),
    ),
    optimizer=(
        # Without an optimizer its optimizer_kwargs are ignored.
        Way(
            words="optimizer=torch.optim.{kind}, optimizer_kwargs={{items}} where the model is made",
            target=_MODEL,
            parameter="optimizer_kwargs",
        ),
    ),
)
