"""rl4co: LightningModules that make loader and optimizer of an environment."""

from typing import Final

from lightning_modelprof.report.advice.libraries import LibraryWays, Way

RL4CO: Final = LibraryWays(
    package="rl4co",
    loader=(
        Way(
            words="dataloader_num_workers={value} where the model is made",
            target="rl4co.models.rl.common.base:RL4COLitModule.__init__",
            parameter="dataloader_num_workers",
            reaches=("num_workers",),
        ),
    ),
    optimizer=(
        Way(
            words="optimizer_kwargs={{items}} beside what is in it now, where the model is made",
            target="rl4co.models.rl.common.base:RL4COLitModule.__init__",
            parameter="optimizer_kwargs",
        ),
    ),
)
