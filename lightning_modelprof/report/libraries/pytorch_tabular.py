"""pytorch-tabular: models that are told of data and optimizer by config objects."""

from typing import Final

from lightning_modelprof.report.advice.libraries import LibraryWays, Way

PYTORCH_TABULAR: Final = LibraryWays(
    package="pytorch_tabular",
    loader=(
        Way(
            words="DataConfig({arguments})",
            target="pytorch_tabular.config:DataConfig.__init__",
            parameter="num_workers",
            reaches=("num_workers", "pin_memory"),
        ),
        Way(
            words="DataConfig(dataloader_kwargs={{items}})",
            target="pytorch_tabular.config:DataConfig.__init__",
            parameter="dataloader_kwargs",
        ),
    ),
    optimizer=(
        Way(
            words="OptimizerConfig(optimizer_params={{items}})",
            target="pytorch_tabular.config:OptimizerConfig.__init__",
            parameter="optimizer_params",
        ),
    ),
)
