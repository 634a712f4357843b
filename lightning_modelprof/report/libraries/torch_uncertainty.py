"""torch-uncertainty: DataModules of known data sets."""

from typing import Final

from lightning_modelprof.report.advice.libraries import LibraryWays, Way

TORCH_UNCERTAINTY: Final = LibraryWays(
    package="torch_uncertainty",
    loader=(
        Way(
            words="{arguments} where the DataModule is made",
            target="torch_uncertainty.datamodules:CIFAR10DataModule.__init__",
            parameter="persistent_workers",
            reaches=("num_workers", "persistent_workers", "pin_memory"),
        ),
    ),
)
