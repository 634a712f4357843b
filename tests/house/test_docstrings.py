"""Tests that the public API is documented: a summary sentence, then every argument."""

from __future__ import annotations

import inspect
import re

import pytest

import lightning_modelprof
from lightning_modelprof.report.model import Report, Table
from lightning_modelprof.timing.inference import InferenceTimes
from lightning_modelprof.timing.spans import StageTimes

NAMES = [name for name in lightning_modelprof.__all__ if callable(getattr(lightning_modelprof, name))]
PUBLIC = {
    **{name: getattr(lightning_modelprof, name) for name in NAMES},
    **{kind.__name__: kind for kind in (Report, Table, InferenceTimes, StageTimes)},
}
OURS = {
    f"{name}.{key}": member
    for name, kind in PUBLIC.items()
    if inspect.isclass(kind)
    for key, member in vars(kind).items()
    if not key.startswith("_") and isinstance(member, classmethod | property) | inspect.isfunction(member)
}


@pytest.mark.parametrize("name", [*PUBLIC, *OURS])
def test_every_public_callable_has_a_summary_sentence(name):
    text = inspect.cleandoc((PUBLIC | OURS)[name].__doc__ or "")
    summary, _, rest = text.partition("\n")
    assert re.fullmatch(r"(?:[A-Z0-9]|``)\S* \S.*\.", summary), f"{name}: {summary!r}"
    assert not rest or rest.startswith("\n"), f"{name}: no blank line after the summary"


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("Error")])
def test_every_argument_is_described_in_a_sentence(name):
    found = PUBLIC[name]
    text = inspect.cleandoc(found.__doc__ or "")
    section = text.partition("Args:\n" if "Args:\n" in text else "Attributes:\n")[2].partition("\n\n")[0]
    described = dict(re.findall(r"^    \**(\w+): (.+)$", section, re.MULTILINE))
    assert list(described) == [name for name in inspect.signature(found).parameters if name != "self"]
    for argument, words in described.items():
        assert re.match(r"[A-Z0-9`]", words), f"{name}: {argument}: {words}"
