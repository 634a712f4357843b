"""Code is attributed to the user or to a library that creates loaders, optimizers and Trainers for them.

The libraries are created here, in a folder named like that of installed packages. Entries for real
libraries are checked where those are installed.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from dataclasses import replace

import pytest

from lightning_modelprof.measure.user_code import place_of
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.libraries import LIBRARIES, Way, reached
from lightning_modelprof.report.advice.owners import owner_of_loader, owner_of_optimizer
from lightning_modelprof.report.model import Status
from lightning_modelprof.report.rules.engine import judge
from lightning_modelprof.report.rules.input import input_bound
from lightning_modelprof.report.rules.optimizer import optimizer_not_fused
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.setup import Library, LoaderSetup, OptimizerSetup
from lightning_modelprof.show.findings import found_texts
from tests.support.diagnosed import SETUP, analysis_of, only, steps_of
from tests.support.fits import fit_quietly, make_callback, make_trainer, report_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

FAKELIB = {
    "__init__": '__version__ = "1.2.3"\n',
    "core": """
        import time
        import torch
        from lightning.pytorch import LightningDataModule, LightningModule
        from torch.utils.data import DataLoader

        class Windows(torch.utils.data.Dataset):
            def __init__(self, pause=0.0):
                self.pause = pause
            def __len__(self):
                return 64
            def __getitem__(self, index):
                time.sleep(self.pause)
                return torch.ones(4), torch.ones(1)

        class Lit(LightningModule):
            def __init__(self, pause=0.0):
                super().__init__()
                self.pause = pause
                self.layers = torch.nn.Linear(4, 1)
            def training_step(self, batch, batch_idx):
                inputs, targets = batch
                return (self.layers(inputs) - targets).square().mean()
            def configure_optimizers(self):
                return torch.optim.Adam(self.parameters())
            def on_train_batch_end(self, *args):
                time.sleep(self.pause)

        class Data(LightningDataModule):
            def train_dataloader(self):
                return DataLoader(Windows(), batch_size=8)

        def fit(module, trainer, pause=0.0):
            trainer.fit(module, DataLoader(Windows(pause), batch_size=8))
        """,
}
FAKEDATA = {
    "__init__": "",
    "datasets": """
        import torch

        class Cases(torch.utils.data.Dataset):
            def __init__(self, transform):
                self.transform = transform
            def __len__(self):
                return 64
            def __getitem__(self, index):
                return self._transform(index)
            def _transform(self, index):
                return self.transform((torch.ones(8), torch.ones(())))
        """,
    "transforms": """
        import time

        class Compose:
            def __init__(self, *steps):
                self.steps = steps
            def __call__(self, item):
                for step in self.steps:
                    item = step(item)
                return item

        class Cheap:
            def __call__(self, item):
                return item

        class Blur:
            def __call__(self, item):
                return _blur(item)

        def _blur(item):
            time.sleep(0.004)
            return item
        """,
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Puts packages where installed ones are and returns their modules."""
    root = tmp_path / "lib" / "site-packages"
    monkeypatch.syspath_prepend(str(root))

    def install(package, files, *modules):
        (root / package).mkdir(parents=True)
        for name, source in files.items():
            (root / package / f"{name}.py").write_text(textwrap.dedent(source))
        found = [importlib.import_module(f"{package}.{name}") for name in modules]
        return found[0] if len(found) == 1 else found

    yield install
    for package in ("fakelib", "fakedata"):
        for name in [one for one in sys.modules if one.partition(".")[0] == package]:
            del sys.modules[name]


@pytest.fixture
def fakelib(installed):
    return installed("fakelib", FAKELIB, "core")


def line_of(function):
    return function.__code__.co_firstlineno


# Recorded setup


def fit_in_library(fakelib, folder, module, pause=0.0, **kwargs):
    """Call a library that calls the Trainer, like a user does."""
    callback = make_callback(folder, active=0, **kwargs)
    fakelib.fit(module, make_trainer(folder, callback, max_epochs=4), pause)
    return callback


@pytest.mark.slow
def test_library_that_calls_trainer_is_recorded(fakelib, tmp_path):
    callback = fit_in_library(fakelib, tmp_path, fakelib.Lit())
    setup = callback.run.ranks[0].setup
    assert setup.notes == ()
    [library] = setup.libraries
    assert (library.package, library.version) == ("fakelib", "1.2.3")
    assert (setup.package_call.package, setup.package_call.function) == ("fakelib", "fit")
    assert setup.package_call.file == fakelib.__file__
    assert (setup.user_call.file, setup.user_call.package) == (__file__, "")
    assert setup.user_call.line == line_of(fit_in_library) + 3
    [loader] = setup.loaders
    assert (loader.made_by, loader.dataset.package) == (None, "fakelib")
    assert owner_of_loader(setup, loader).place == setup.package_call
    assert owner_of_optimizer(setup).place.function == "Lit.configure_optimizers"
    assert callback.run.info.versions["fakelib"] == "1.2.3"
    assert "lightning" in callback.run.info.versions
    [versions] = [value for label, value in callback.report.facts if label == "Versions"]
    assert "fakelib 1.2.3" in versions
    assert load_run(tmp_path).ranks[0].setup == setup


@pytest.mark.slow
def test_library_of_inherited_class_is_recorded(fakelib, tmp_path):
    class Own(fakelib.Lit):
        def configure_optimizers(self):
            return super().configure_optimizers()

    callback = make_callback(tmp_path, active=0)
    fit_quietly(make_trainer(tmp_path, callback), Own(), fakelib.DataLoader(fakelib.Windows(), batch_size=8))
    setup = callback.run.ranks[0].setup
    assert [one.package for one in setup.libraries] == ["fakelib"]
    assert (setup.package_call, setup.user_call) == (None, None)
    assert owner_of_optimizer(setup) is None  # it overrides the method
    assert owner_of_loader(setup, setup.loaders[0]) is None  # it calls DataLoader(...) itself
    assert setup.module_hooks["on_train_batch_end"].package == "fakelib"


@pytest.mark.slow
def test_loader_from_library_datamodule_is_recorded(fakelib, tmp_path):
    callback = make_callback(tmp_path, active=0)
    fit_quietly(make_trainer(tmp_path, callback), fakelib.Lit(), datamodule=fakelib.Data(), data=None)
    setup = callback.run.ranks[0].setup
    made_by = setup.loaders[0].made_by
    assert (made_by.function, made_by.package) == ("Data.train_dataloader", "fakelib")
    assert owner_of_loader(setup, setup.loaders[0]).package == "fakelib"


@pytest.mark.slow
def test_no_library_in_plain_fit(tmp_path):
    from tests.support.fits import Net, run_fit  # noqa: PLC0415

    setup = run_fit(tmp_path, module=Net(), active=0).run.ranks[0].setup
    assert (setup.libraries, setup.package_call, setup.user_call) == ((), None, None)
    assert owner_of_loader(setup, setup.loaders[0]) is None
    assert owner_of_optimizer(setup) is None


def test_function_belongs_to_its_package(fakelib):
    import torch  # noqa: PLC0415

    assert place_of(fakelib.Windows.__getitem__).package == "fakelib"
    assert place_of(torch.utils.data.default_collate).package == ""
    assert place_of(line_of).package == ""


# Findings in a library


def found(report, kind):
    [finding] = [one for one in report.findings if one.kind == kind and one.status is Status.FOUND]
    return finding


@pytest.mark.slow
def test_slow_hook_inherited_from_library(fakelib, tmp_path):
    class Own(fakelib.Lit):
        pass

    callback = make_callback(tmp_path, active=0, sampling=True)
    data = fakelib.DataLoader(fakelib.Windows(), batch_size=8)
    fit_quietly(make_trainer(tmp_path, callback, max_epochs=6), Own(pause=0.01), data)
    finding = found(callback.report, "slow_module_hook")
    [place] = finding.locations
    assert (place.file, place.function, place.package) == (
        fakelib.__file__,
        "Lit.on_train_batch_end",
        "fakelib",
    )
    assert place.line == line_of(fakelib.Lit.on_train_batch_end) + 1
    assert finding.action.startswith("Do less in Lit.on_train_batch_end")
    assert "Lit.on_train_batch_end is part of fakelib" in finding.action
    [text] = found_texts([finding])
    assert f"Where: fakelib/core.py:{place.line} in Lit.on_train_batch_end, of fakelib" in text.lines
    document = report_of(tmp_path)
    [saved] = [one for one in document["findings"] if one["kind"] == "slow_module_hook"]
    assert saved["locations"][0]["package"] == "fakelib"


@pytest.mark.slow
def test_user_call_is_shown_with_library_line(fakelib, tmp_path):
    callback = fit_in_library(fakelib, tmp_path, fakelib.Lit(), pause=0.002, sampling=True)
    finding = found(callback.report, "input_bound")
    place = finding.locations[0]
    assert (place.file, place.package) == (fakelib.__file__, "fakelib")
    assert place.line == line_of(fakelib.Windows.__getitem__) + 1
    assert (place.call.file, place.call.line) == (__file__, line_of(fit_in_library) + 3)
    [text] = found_texts([finding])
    assert any("of fakelib, called from" in line for line in text.lines)
    assert "through fakelib, which makes the DataLoader in fit (fakelib/core.py:" in finding.action


@pytest.mark.slow
def test_input_finding_locates_slow_transform(installed, tmp_path):
    from tests.support.fits import run_fit  # noqa: PLC0415

    datasets, transforms = installed("fakedata", FAKEDATA, "datasets", "transforms")
    data = datasets.Cases(transforms.Compose(transforms.Cheap(), transforms.Blur()))
    loader = datasets.torch.utils.data.DataLoader(data, batch_size=4)
    callback = run_fit(tmp_path, data=loader, trainer={"max_epochs": 3}, active=0, sampling=True)
    place = found(callback.report, "input_bound").locations[0]
    assert (place.function, place.package) == ("Cases.__getitem__", "fakedata")
    assert (place.inner.file, place.inner.package) == (transforms.__file__, "fakedata")
    assert place.inner.function == "Blur.__call__"
    assert place.inner.line == line_of(transforms.Blur.__call__) + 1


@pytest.mark.slow
def test_user_line_locates_slow_transform(installed, tmp_path):
    from tests.support.fits import Numbers, run_fit  # noqa: PLC0415

    transforms = installed("fakedata", FAKEDATA, "transforms")

    class Own(Numbers):
        change = transforms.Compose(transforms.Cheap(), transforms.Blur())

        def __getitem__(self, index):
            return Own.change(super().__getitem__(index))

    from torch.utils.data import DataLoader  # noqa: PLC0415

    callback = run_fit(
        tmp_path, data=DataLoader(Own(), batch_size=4), trainer={"max_epochs": 3}, active=0, sampling=True
    )
    place = found(callback.report, "input_bound").locations[0]
    assert (place.file, place.package) == (__file__, "")
    assert place.inner.function == "Blur.__call__"


# Advice


HOOK = Place(
    function="Data.train_dataloader", file="/x/site-packages/fakelib/data.py", line=33, is_library=True,
    package="fakelib",
)  # fmt: skip


def setup_of(package, **changes):
    """A setup whose loader and optimizer come from a library."""
    folder = f"/x/site-packages/{package}"
    loader = LoaderSetup(
        kind="DataLoader",
        num_workers=0,
        persistent_workers=False,
        dataset=Place(
            function="Windows.__getitem__", file=f"{folder}/data.py", line=7, is_library=True, package=package
        ),
        made_by=replace(HOOK, file=f"{folder}/data.py", package=package),
    )
    setup = replace(
        SETUP,
        libraries=(Library(package=package, version="1", folders=(folder,)),),
        loaders=(replace(loader, **changes),),
        optimizers=(
            OptimizerSetup(
                kind="Adam", foreach=None, fused=None, has_foreach=True, has_fused=True, num_tensors=480
            ),
        ),
    )
    hook = replace(HOOK, function="Lit.configure_optimizers", file=f"{folder}/core.py", package=package)
    return replace(setup, module_hooks={**setup.module_hooks, "configure_optimizers": hook})


def action(rule, setup, **phases):
    finding = only(judge(rule, analysis_of(steps_of(40, **phases), setup=setup)))
    assert finding.status is Status.FOUND
    return finding.action


WAITS = {"dataloader": 20, "forward": 10, "backward": 10}


def test_advice_uses_library_argument():
    said = action(input_bound, setup_of("darts"), **WAITS)
    assert said.startswith("Call model.fit(..., dataloader_kwargs={'num_workers': ")
    assert "'persistent_workers': True}) (darts makes the DataLoader in Data.train_dataloader" in said
    said = action(optimizer_not_fused, setup_of("neuralforecast"), optimizer=10, forward=10, backward=10)
    assert said.startswith("Pass optimizer=torch.optim.Adam, optimizer_kwargs={'fused': True} to the model")


def test_advice_sets_library_settings_one_by_one():
    said = action(input_bound, setup_of("scvi"), **WAITS)
    assert said.startswith("Set scvi.settings.dl_num_workers = ")
    assert " and set scvi.settings.dl_persistent_workers = True (scvi makes" in said


def test_advice_combines_two_ways():
    said = action(input_bound, setup_of("pytorch_tabular"), **WAITS)
    assert said.startswith("Use DataConfig(num_workers=")
    assert (
        " and use DataConfig(dataloader_kwargs={'persistent_workers': True}) (pytorch_tabular makes" in said
    )


def test_advice_names_missing_library_argument():
    said = action(input_bound, setup_of("anomalib"), **WAITS)
    assert "which has no argument for persistent_workers=True)" in said


def test_advice_names_library_cache():
    said = action(input_bound, setup_of("gluonts", kind="Batches", num_workers=None), **WAITS)
    assert said.endswith(
        " Alternatively, call estimator.train(..., cache_data=True), to transform each series once (gluonts)."
    )


def test_advice_names_unknown_library_and_function():
    said = action(input_bound, setup_of("fakelib"), **WAITS)
    assert not said.startswith("DataLoader(")
    assert "through fakelib, which makes the DataLoader in Data.train_dataloader (fakelib/data.py:33)" in said
    said = action(optimizer_not_fused, setup_of("fakelib"), optimizer=10, forward=10, backward=10)
    assert said.startswith("Set fused=True through fakelib, which makes the Adam in Lit.configure_optimizers")
    assert "override configure_optimizers in a subclass" in said


def test_advice_for_user_loader_of_library_data():
    theirs = setup_of("chemprop", made_by=None)
    assert action(input_bound, theirs, **WAITS).startswith(
        "Call chemprop.data.build_dataloader(dataset, num_workers="
    )
    theirs = setup_of("fakelib", made_by=None)
    assert action(input_bound, theirs, **WAITS).startswith("Set num_workers=")


def test_advice_calls_no_constructor_inside_library():
    """All rules about a DataLoader or an optimizer."""
    from lightning_modelprof.report.rules.engine import diagnose  # noqa: PLC0415

    setup = setup_of("fakelib")
    analysis = analysis_of(steps_of(40, dataloader=20, optimizer=20, forward=10, backward=10), setup=setup)
    _, findings = diagnose(analysis)
    said = [one.action for one in findings if one.status is Status.FOUND]
    assert len(said) >= 2
    assert not any("DataLoader(" in one or "Adam(" in one for one in said)


def test_setup_of_older_version_has_no_library_owner():
    """Older versions didn't record libraries."""
    loader = SETUP.loaders[0]
    assert owner_of_loader(SETUP, loader) is None
    assert owner_of_loader(None, None) is None


# Entries


def test_best_way_comes_first_and_rest_is_returned():
    ways = (
        Way(words="set({value})", target="", reaches=("one",)),
        Way(words="make({arguments})", target="", reaches=("two", "three")),
    )
    assert reached(ways, {"two": 2, "one": 1, "four": 4}, "X") == ("set(1) and make(two=2)", {"four": 4})
    assert reached((), {"one": 1}, "X") == ("", {"one": 1})


WAYS = [
    pytest.param(package, way, id=f"{package}-{way.target.rpartition(':')[2]}-{way.parameter}")
    for package, library in LIBRARIES.items()
    for way in (*library.loader, *library.optimizer, *library.batches)
]


@pytest.mark.parametrize(("package", "way"), WAYS)
def test_entries_match_installed_library(package, way):
    pytest.importorskip(package)
    module, _, path = way.target.partition(":")
    target = importlib.import_module(module)
    for name in path.split("."):
        target = getattr(target, name)  # fails here if the attribute no longer exists
    if not way.parameter:
        return
    parameters = inspect.signature(target).parameters
    if way.parameter.startswith("**"):
        assert any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    else:
        assert way.parameter in parameters


def test_each_entry_has_way():
    assert LIBRARIES
    for package, library in LIBRARIES.items():
        assert library.package == package
        assert library.loader or library.optimizer or library.batches


def test_place_belongs_to_user_by_default():
    assert (Place().package, Place().call) == ("", None)
