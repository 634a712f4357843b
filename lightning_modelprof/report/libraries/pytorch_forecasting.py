"""pytorch-forecasting: data sets that make their DataLoaders, models that make their optimizer."""

from typing import Final

from lightning_modelprof.report.advice.libraries import LibraryWays, Way

PYTORCH_FORECASTING: Final = LibraryWays(
    package="pytorch_forecasting",
    loader=(
        Way(
            words="TimeSeriesDataSet.to_dataloader({arguments})",
            target="pytorch_forecasting:TimeSeriesDataSet.to_dataloader",
            parameter="**kwargs",
        ),
    ),
    optimizer=(
        Way(
            words="optimizer_params={{items}} where the model is made, as in from_dataset(...)",
            target="pytorch_forecasting.models.base:BaseModel.__init__",
            parameter="optimizer_params",
        ),
    ),
)
