"""chemprop: data sets that make graphs of molecules for each batch."""

from typing import Final

from lightning_modelprof.report.advice.libraries import LibraryWays, Way

CHEMPROP: Final = LibraryWays(
    package="chemprop",
    loader=(
        Way(
            words="chemprop.data.build_dataloader(dataset, {arguments})",
            target="chemprop.data:build_dataloader",
            parameter="**kwargs",
        ),
    ),
    batches=(
        Way(
            words="dataset.cache = True before the training, which makes each molecule's graph once",
            target="chemprop.data:MoleculeDataset.cache",
        ),
    ),
)
