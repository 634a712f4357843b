"""anomalib: DataModules of images, whose models make their own optimizers."""

from typing import Final

from lightning_modelprof.report.advice.libraries import LibraryWays, Way

ANOMALIB: Final = LibraryWays(
    package="anomalib",
    loader=(
        Way(
            words="{arguments} where the DataModule is made, as in Folder(...)",
            target="anomalib.data:Folder.__init__",
            parameter="num_workers",
            reaches=("num_workers",),
        ),
    ),
)
