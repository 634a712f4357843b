"""How a library's user sets the arguments of loaders and optimizers that the library makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightning_modelprof.record import Record


class Way(Record, frozen=True, kw_only=True):
    """One argument or setting of a library.

    Attributes:
        words: what the user does, as an imperative in lower case. ``{arguments}`` becomes
            ``num_workers=2, persistent_workers=True``, ``{items}`` the same as dict items, ``{value}``
            the first value, ``{kind}`` the class.
        target: its owner, as ``module:name.of.attribute``.
        parameter: parameter of the target's signature; ``""`` if the target is an attribute to set.
        reaches: the DataLoader or optimizer arguments it sets; all if empty.
    """

    words: str
    target: str
    parameter: str = ""
    reaches: tuple[str, ...] = ()

    def says(self, arguments: Mapping[str, Any], kind: str) -> str:
        return (
            self.words.replace("{arguments}", as_arguments(arguments))
            .replace("{items}", ", ".join(f"{name!r}: {value!r}" for name, value in arguments.items()))
            .replace("{value}", repr(next(iter(arguments.values()), None)))
            .replace("{kind}", kind)
        )


class LibraryWays(Record, frozen=True, kw_only=True):
    """The ways of one library; ``package`` is its import name."""

    package: str
    loader: Sequence[Way] = ()
    optimizer: Sequence[Way] = ()
    batches: Sequence[Way] = ()


def reached(ways: Sequence[Way], arguments: Mapping[str, Any], kind: str) -> tuple[str, dict[str, Any]]:
    """Return what the user writes for some arguments, and those that none of the ways reaches."""
    left, said = dict(arguments), []
    for way in ways:
        taken = {name: value for name, value in left.items() if not way.reaches or name in way.reaches}
        if taken:
            said.append(way.says(taken, kind))
            left = {name: value for name, value in left.items() if name not in taken}
    return " and ".join(said), left


def as_arguments(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


_MODEL: Final = "neuralforecast.models.nhits:NHITS.__init__"
_TRAIN: Final = "scvi.model.base:UnsupervisedTrainingMixin.train"

_ALL: Final = (
    # anomalib: image DataModules; the models make their own optimizers.
    LibraryWays(
        package="anomalib",
        loader=(
            Way(
                words="set {arguments} in the DataModule, such as Folder(...)",
                target="anomalib.data:Folder.__init__",
                parameter="num_workers",
                reaches=("num_workers",),
            ),
        ),
    ),
    # chemprop: datasets that build molecule graphs per batch.
    LibraryWays(
        package="chemprop",
        loader=(
            Way(
                words="call chemprop.data.build_dataloader(dataset, {arguments})",
                target="chemprop.data:build_dataloader",
                parameter="**kwargs",
            ),
        ),
        batches=(
            Way(
                words="set dataset.cache = True before training, to build each molecule's graph once",
                target="chemprop.data:MoleculeDataset.cache",
            ),
        ),
    ),
    # darts: forecasting models whose ``fit`` builds the DataLoader, optimizer and Trainer.
    LibraryWays(
        package="darts",
        loader=(
            Way(
                words="call model.fit(..., dataloader_kwargs={{items}})",
                target="darts.models.forecasting.torch_forecasting_model:TorchForecastingModel.fit",
                parameter="dataloader_kwargs",
            ),
        ),
        optimizer=(
            Way(
                words="add {items} to the model's optimizer_kwargs",
                target="darts.models.forecasting.pl_forecasting_module:PLForecastingModule.__init__",
                parameter="optimizer_kwargs",
            ),
        ),
    ),
    # deepforest: a model that makes its loaders from its config.
    LibraryWays(
        package="deepforest",
        loader=(
            Way(
                words="set model.config.workers = {value} before creating loaders",
                target="deepforest.conf.schema:Config.workers",
                reaches=("num_workers",),
            ),
        ),
    ),
    # GluonTS: estimators whose ``train`` builds an iterable of batches and the Trainer.
    LibraryWays(
        package="gluonts",
        batches=(
            Way(
                words="call estimator.train(..., cache_data=True), to transform each series once",
                target="gluonts.torch.model.estimator:PyTorchLightningEstimator.train",
                parameter="cache_data",
            ),
        ),
    ),
    # neuralforecast: models whose ``fit`` builds a DataModule and the Trainer.
    LibraryWays(
        package="neuralforecast",
        loader=(
            Way(
                words="pass dataloader_kwargs={{items}} to the model",
                target=_MODEL,
                parameter="dataloader_kwargs",
            ),
        ),
        optimizer=(
            # Ignores optimizer_kwargs without an optimizer.
            Way(
                words="pass optimizer=torch.optim.{kind}, optimizer_kwargs={{items}} to the model",
                target=_MODEL,
                parameter="optimizer_kwargs",
            ),
        ),
    ),
    # pytorch-forecasting: datasets that make their DataLoaders, models that make their optimizer.
    LibraryWays(
        package="pytorch_forecasting",
        loader=(
            Way(
                words="call TimeSeriesDataSet.to_dataloader({arguments})",
                target="pytorch_forecasting:TimeSeriesDataSet.to_dataloader",
                parameter="**kwargs",
            ),
        ),
        optimizer=(
            Way(
                words="pass optimizer_params={{items}} to the model, such as in from_dataset(...)",
                target="pytorch_forecasting.models.base:BaseModel.__init__",
                parameter="optimizer_params",
            ),
        ),
    ),
    # pytorch-tabular: models that take data and optimizer settings from config objects.
    LibraryWays(
        package="pytorch_tabular",
        loader=(
            Way(
                words="use DataConfig({arguments})",
                target="pytorch_tabular.config:DataConfig.__init__",
                parameter="num_workers",
                reaches=("num_workers", "pin_memory"),
            ),
            Way(
                words="use DataConfig(dataloader_kwargs={{items}})",
                target="pytorch_tabular.config:DataConfig.__init__",
                parameter="dataloader_kwargs",
            ),
        ),
        optimizer=(
            Way(
                words="use OptimizerConfig(optimizer_params={{items}})",
                target="pytorch_tabular.config:OptimizerConfig.__init__",
                parameter="optimizer_params",
            ),
        ),
    ),
    # rl4co: LightningModules that make an environment's loader and optimizer.
    LibraryWays(
        package="rl4co",
        loader=(
            Way(
                words="pass dataloader_num_workers={value} to the model",
                target="rl4co.models.rl.common.base:RL4COLitModule.__init__",
                parameter="dataloader_num_workers",
                reaches=("num_workers",),
            ),
        ),
        optimizer=(
            Way(
                words="add {items} to the model's optimizer_kwargs",
                target="rl4co.models.rl.common.base:RL4COLitModule.__init__",
                parameter="optimizer_kwargs",
            ),
        ),
    ),
    # scvi-tools: models whose ``train`` builds data splitter, training plan and Trainer.
    LibraryWays(
        package="scvi",
        loader=(
            Way(
                words="set scvi.settings.dl_num_workers = {value}",
                target="scvi:settings.dl_num_workers",
                reaches=("num_workers",),
            ),
            Way(
                words="set scvi.settings.dl_persistent_workers = {value}",
                target="scvi:settings.dl_persistent_workers",
                reaches=("persistent_workers",),
            ),
            Way(
                words="call model.train(..., datasplitter_kwargs={{items}})",
                target=_TRAIN,
                parameter="datasplitter_kwargs",
            ),
        ),
        optimizer=(
            Way(
                words=(
                    "call model.train(..., plan_kwargs=dict(optimizer='Custom', optimizer_creator="
                    "lambda parameters: torch.optim.{kind}(parameters, {arguments}))) with your current lr,"
                    " eps and weight_decay"
                ),
                target="scvi.train:TrainingPlan.__init__",
                parameter="optimizer_creator",
            ),
        ),
        batches=(
            Way(
                words="call model.train(..., load_sparse_tensor=True) for sparse data",
                target=_TRAIN,
                parameter="load_sparse_tensor",
            ),
        ),
    ),
    # torch-uncertainty: DataModules of public datasets.
    LibraryWays(
        package="torch_uncertainty",
        loader=(
            Way(
                words="set {arguments} in the DataModule",
                target="torch_uncertainty.datamodules:CIFAR10DataModule.__init__",
                parameter="persistent_workers",
                reaches=("num_workers", "persistent_workers", "pin_memory"),
            ),
        ),
    ),
    # torchgeo: DataModules with persistent workers, and tasks that make their own AdamW.
    LibraryWays(
        package="torchgeo",
        loader=(
            # Sets persistent_workers itself if there are workers.
            Way(
                words="set num_workers={value} in the DataModule",
                target="torchgeo.datamodules:NonGeoDataModule.__init__",
                parameter="num_workers",
                reaches=("num_workers", "persistent_workers"),
            ),
        ),
    ),
)

LIBRARIES: Final[Mapping[str, LibraryWays]] = {one.package: one for one in _ALL}
