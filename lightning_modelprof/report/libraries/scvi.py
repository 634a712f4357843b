"""scvi-tools: models whose ``train`` builds data splitter, training plan and Trainer."""

from typing import Final

from lightning_modelprof.report.advice.libraries import LibraryWays, Way

_TRAIN: Final = "scvi.model.base:UnsupervisedTrainingMixin.train"

SCVI: Final = LibraryWays(
    package="scvi",
    loader=(
        Way(
            words="scvi.settings.dl_num_workers = {value}",
            target="scvi:settings.dl_num_workers",
            reaches=("num_workers",),
        ),
        Way(
            words="scvi.settings.dl_persistent_workers = {value}",
            target="scvi:settings.dl_persistent_workers",
            reaches=("persistent_workers",),
        ),
        Way(
            words="model.train(..., datasplitter_kwargs={{items}})",
            target=_TRAIN,
            parameter="datasplitter_kwargs",
        ),
    ),
    optimizer=(
        Way(
            words=(
                "model.train(..., plan_kwargs={'optimizer': 'Custom', 'optimizer_creator': lambda parameters:"
                " torch.optim.{kind}(parameters, {arguments})}) with lr, eps and weight_decay as they are now"
            ),
            target="scvi.train:TrainingPlan.__init__",
            parameter="optimizer_creator",
        ),
    ),
    batches=(
        Way(
            words="model.train(..., load_sparse_tensor=True) for sparse data",
            target=_TRAIN,
            parameter="load_sparse_tensor",
        ),
    ),
)
