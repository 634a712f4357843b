"""Source statements that a finding may suggest changing are located, or none is if it's unclear."""

from __future__ import annotations

import ast
import hashlib
import textwrap

import pytest
import torch
from torch import nn

from lightning_modelprof.measure.setup.environment import _configurator
from lightning_modelprof.measure.setup.source_file import SourceFile, mentions
from lightning_modelprof.measure.setup.statements import outside_optimizers
from lightning_modelprof.place import Place


def source_of(text, path="/home/me/train.py"):
    return SourceFile(path, textwrap.dedent(text).encode())


def loaders(text, function="train_dataloader"):
    """The DataLoaders a hook may return."""
    source = source_of(text)
    [hook] = [one for one in ast.walk(source.tree) if getattr(one, "name", "") == function]
    return [ast.unparse(one) for one in source.made_by(None, hook, "DataLoader")]


@pytest.mark.parametrize(
    "body",
    [
        "return DataLoader(self.data)",
        "loader = DataLoader(self.data)\n        return loader",
        "return self._loader()\n    def _loader(self):\n        return DataLoader(self.data)",
        "return self.made\n    def setup(self, stage):\n        self.made = DataLoader(self.data)\n"
        "        self.other = DataLoader(1)",
        "return make(self.data)",
        "return torch.utils.data.DataLoader(self.data)",
        "return Loader(self.data)",
        "return self.first()\n    def first(self):\n        return self.second()\n    def second(self):\n"
        "        return DataLoader(self.data)",
    ],
)
def test_loader_of_hook_is_found(body):
    text = (
        "from torch.utils.data import DataLoader as Loader\n"
        "def make(data):\n    return Loader(data)\n"
        f"class Data:\n    def train_dataloader(self):\n        {body}\n"
        "    def val_dataloader(self):\n        return DataLoader(2)\n"
    )
    [found] = loaders(text)
    assert "data)" in found


def test_recursive_functions_are_not_followed_forever():
    assert (
        loaders("def train_dataloader():\n    return other()\ndef other():\n    return train_dataloader()\n")
        == []
    )
    assert loaders("def train_dataloader():\n    x = x\n    return x\n") == []


def test_statement_has_text_range_and_file_hash():
    text = "é = 1\nif é:\n    x = DataLoader('é',\n        batch_size=2)  # rows\n"
    source = source_of(text)
    statement = source.statement("DataLoader", source.calls(source.tree, "DataLoader"))
    assert statement.text == "x = DataLoader('é',\n        batch_size=2)"
    assert (statement.line, statement.end_line) == (3, 4)
    assert statement.calls == ((3, 8, 4, 21),)
    assert statement.digest == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "text",
    [
        "DataLoader(*given)",
        "DataLoader(**given)",
        "with DataLoader(1):\n    pass\n",
        "for x in DataLoader(1):\n    pass\n",
        f"DataLoader({'1, ' * 4000})",
    ],
)
def test_unsuitable_statement_is_none(text):
    source = source_of(text)
    assert source.statement("DataLoader", source.calls(source.tree, "DataLoader")) is None


def test_two_statements_are_none():
    source = source_of("DataLoader(1)\nDataLoader(2)\n")
    assert source.statement("DataLoader", source.calls(source.tree, "DataLoader")) is None


def test_moved_function_is_not_found():
    source = source_of("@cached\ndef train_dataloader():\n    pass\n")
    assert source.function_at(Place(function="Data.train_dataloader", line=1)) is not None
    assert source.function_at(Place(function="Data.train_dataloader", line=2)) is None
    assert source.function_at(Place(function="Data.val_dataloader", line=1)) is None


def test_unreadable_file_is_none(tmp_path):
    file = tmp_path / "train.py"
    for data in (b"DataLoader(", b"\xff\xfe", b"# coding: latin-1\n'\xe9'\n", b"x = 1\0", b"#" * 600_000):
        file.write_bytes(data)
        assert SourceFile.read(str(file)) is None
    assert SourceFile.read(str(tmp_path)) is None
    assert SourceFile.read(str(tmp_path / "gone.py")) is None
    assert not mentions(str(tmp_path / "gone.py"), "x")
    file.write_bytes(b"DataLoader()")
    assert mentions(str(file), "DataLoader")
    assert SourceFile.read(str(file)) is not None


def test_modules_outside_optimizers():
    pair = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    net = nn.Sequential(pair, nn.Linear(1, 1), nn.Linear(1, 1), nn.ReLU())
    net[2].requires_grad_(False)
    held = torch.optim.SGD(net[1].parameters(), lr=0.1)
    assert outside_optimizers(net, [held]) == ("0",)
    held.add_param_group({"params": net[0][1].parameters()})
    assert outside_optimizers(net, [held]) == ("0.0",)
    net[0][0].weight = net[1].weight
    assert outside_optimizers(net, [held]) == ()
    assert outside_optimizers(net, []) == ()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("lightning.pytorch.cli", "LightningCLI"),
        ("pytorch_lightning.cli", "LightningCLI"),
        ("hydra._internal.utils", "Hydra"),
        ("hydrangea", ""),
        ("__main__", ""),
    ],
)
def test_configurator_is_found_by_module(module, name):
    assert _configurator(module) == name
