"""deepforest: a model that makes its loaders by its config."""

from typing import Final

from lightning_modelprof.report.advice.libraries import LibraryWays, Way

DEEPFOREST: Final = LibraryWays(
    package="deepforest",
    loader=(
        Way(
            words="model.config.workers = {value} before loaders are made",
            target="deepforest.conf.schema:Config.workers",
            reaches=("num_workers",),
        ),
    ),
)
