"""darts: forecasting models that build DataLoader, optimizer and Trainer in ``fit``."""

from typing import Final

from lightning_modelprof.report.advice.libraries import LibraryWays, Way

DARTS: Final = LibraryWays(
    package="darts",
    loader=(
        Way(
            words="model.fit(..., dataloader_kwargs={{items}})",
            target="darts.models.forecasting.torch_forecasting_model:TorchForecastingModel.fit",
            parameter="dataloader_kwargs",
        ),
    ),
    optimizer=(
        Way(
            words="optimizer_kwargs={{items}} beside what is in it now, where the model is made",
            target="darts.models.forecasting.pl_forecasting_module:PLForecastingModule.__init__",
            parameter="optimizer_kwargs",
        ),
    ),
)
