"""torchgeo: DataModules that keep their workers, and tasks that make an AdamW of their own."""

from typing import Final

from lightning_modelprof.report.advice.libraries import LibraryWays, Way

TORCHGEO: Final = LibraryWays(
    package="torchgeo",
    loader=(
        # With workers it sets persistent_workers itself.
        Way(
            words="num_workers={value} where the DataModule is made",
            target="torchgeo.datamodules:NonGeoDataModule.__init__",
            parameter="num_workers",
            reaches=("num_workers", "persistent_workers"),
        ),
    ),
)
