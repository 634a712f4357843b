"""Notes of the table Perf Summary."""

from __future__ import annotations

import pytest

from tests.support.fits import Net, loader, run_fit

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


def notes(callback):
    [table] = [one for one in callback.report.tables if one.id == "perf_summary"]
    return " ".join(table.notes)


@pytest.mark.filterwarnings("ignore:.*yielded None")
@pytest.mark.parametrize(("accumulate", "is_told"), [(1, False), (2, True)])
def test_missing_optimizer_steps_are_noted(tmp_path, accumulate, is_told):
    data = loader(64, collate_fn=lambda rows: None) if accumulate == 1 else loader(64)
    trainer = {"accumulate_grad_batches": accumulate}
    said = notes(run_fit(tmp_path, data=data, active=0, trainer=trainer))
    assert "The optimizer didn't step" in said
    assert ("gradient accumulation" in said) is is_told


class OfTwo(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch[0], batch_idx)


def both(batch):
    return sum(len(one[0]) for one in batch)


@pytest.mark.parametrize(("samples_fn", "expected"), [(None, 4), (both, 8)])
def test_samples_are_counted_over_two_loaders(tmp_path, samples_fn, expected):
    data = [loader(80, batch_size=4), loader(80, batch_size=4)]
    callback = run_fit(tmp_path, module=OfTwo(), data=data, active=0, samples_fn=samples_fn)
    assert set(callback.run.ranks[0].steps.samples.tolist()) == {expected}
    assert ("one batch from each of 2 dataloaders" in notes(callback)) is (samples_fn is None)


def test_single_loader_is_not_noted(tmp_path):
    assert "dataloaders" not in notes(run_fit(tmp_path, data=loader(40), active=0))
