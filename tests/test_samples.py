"""How many samples a batch holds: what is counted, and what samples_fn may not answer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_modelprof.measure.samples import MAX_COUNT, SampleCounter, check_count
from lightning_modelprof.run.steps import NOT_MEASURED
from tests.fits import Net, fit_quietly, loader, make_callback, make_trainer, our_warnings, steps_of

X = torch.zeros(3, 5)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, 3),
        ([X, torch.zeros(7)], 3),
        ({"b": {"c": (X,)}}, 3),
        ({"number": 1, "text": "a", "x": X}, 3),
        ((torch.tensor(1.0), X), 3),
        (None, NOT_MEASURED),
        ("text", NOT_MEASURED),
        ([], NOT_MEASURED),
        (torch.tensor(1), NOT_MEASURED),
        (SimpleNamespace(num_graphs=4), 4),
        (SimpleNamespace(num_graphs=-4), NOT_MEASURED),
        (SimpleNamespace(num_graphs=2**70), NOT_MEASURED),
        (SimpleNamespace(num_graphs=torch.tensor(4)), NOT_MEASURED),
    ],
    ids=str,
)
def test_counts(batch, expected):
    assert SampleCounter()(batch) == expected


def test_batches_may_change_their_shape():
    count = SampleCounter()
    batches = (X, [X], {"a": X}, [torch.zeros(2)], None, X)
    assert [count(batch) for batch in batches] == [3, 3, 3, 2, NOT_MEASURED, 3]


@pytest.mark.parametrize("count", [0, 5, MAX_COUNT, np.int32(5)])
def test_accepted(count):
    assert check_count(count) == count
    assert type(check_count(count)) is int


@pytest.mark.parametrize(
    ("count", "error", "problem"),
    [
        (-1, ValueError, "from 0 to 2**63 - 1, got -1"),
        (MAX_COUNT + 1, ValueError, "from 0 to 2**63 - 1, got 9223372036854775808"),
        (torch.tensor(5), TypeError, "waiting for the device in every step"),
        (2.5, TypeError, "float"),
        (None, TypeError, "NoneType"),
    ],
)
def test_refused(tmp_path, count, error, problem):
    with pytest.raises(error) as caught:
        check_count(count)
    assert problem in str(caught.value)

    callback = make_callback(tmp_path, active=0, samples_fn=lambda batch: count, unit="tokens")
    with our_warnings() as messages:
        fit_quietly(make_trainer(tmp_path, callback), Net(), loader())
    assert len(messages) == 1, messages
    assert f"samples_fn raised {error.__name__}: " in messages[0]
    assert problem in messages[0]
    assert "tokens/s will not be known" in messages[0]
    assert (steps_of(callback).samples == NOT_MEASURED).all()
    assert callback.report.sections["benchmark"]["samples_per_s"] is None


def test_a_wrong_count_late_costs_the_rate_and_nothing_else(tmp_path):
    counts = iter([*[4] * 10, -4, *[4] * 100])
    callback = make_callback(tmp_path, active=0, samples_fn=lambda batch: next(counts))
    with our_warnings() as messages:
        fit_quietly(make_trainer(tmp_path, callback), Net(), loader())
    assert len(messages) == 1, messages
    assert steps_of(callback).samples.tolist() == [4] * 10 + [NOT_MEASURED] * 22
