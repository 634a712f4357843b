"""``self.log`` and metrics as a separate cause: hand-made stacks, and what real calls look like."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.tensorboard import SummaryWriter
from torchmetrics import MeanSquaredError, MetricCollection

from lightning_modelprof.analysis.source.hot_lines import hot_lines
from lightning_modelprof.analysis.source.logging_calls import (
    COMPUTE,
    FORWARD,
    RANKS,
    UPDATE,
    logging_calls,
)
from lightning_modelprof.inspect.lines.sites import SiteWatch
from lightning_modelprof.measure.sampling.log_calls import log_call
from lightning_modelprof.measure.sampling.stack_probe import StackProbe
from lightning_modelprof.measure.user_code import UserCode
from lightning_modelprof.place import Place
from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.rules.callbacks import slow_logging_calls
from lightning_modelprof.report.rules.engine import diagnose, judge
from lightning_modelprof.report.rules.lines import (
    slow_forward_outside_model,
    slow_line_in_module,
)
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.setup import CallbackSetup
from lightning_modelprof.run.sites import LOG, LOGGER, logging_kind
from lightning_modelprof.run.stacks import LogCall
from tests.analysis.test_source_lines import CALL, LAYER, NET, STEP_33, STEP_35, frame, samples_of, with_loop
from tests.support.diagnosed import MS, SETUP, analysis_of, cost_of, only, steps_of
from tests.support.fits import Net, fit_quietly, loader, make_callback, make_trainer


def library(module, function):
    return frame(f"/lib/{module}.py", 9, function, 1, module=module, is_users=False)


LOGS = library("lightning.pytorch.core.module", "LightningModule.log")
LOGS_OTHER = library("pytorch_lightning.core.module", "log_dict")  # its name on Python 3.10
RESULTS = library("lightning.pytorch.trainer.connectors.logger_connector.result", "_ResultCollection.log")
UPDATES = library("torchmetrics.metric", "Metric._wrap_update.<locals>.wrapped_func")
COMPUTES = library("torchmetrics.metric", "Metric._wrap_compute.<locals>.wrapped_func")
WRAPPED = library("torchmetrics.metric", "wrapped_func")  # both names on Python 3.10
METRIC = library("torchmetrics.metric", "Metric.forward")
COLLECTION = library("torchmetrics.collections", "MetricCollection.update")
TRACKER = library("torchmetrics.wrappers.tracker", "MetricTracker.compute")
REDUCE = library("torch.distributed.distributed_c10d", "all_reduce")
FUNCTIONAL = library("torchmetrics.functional.regression.mse", "mean_squared_error")
OWN_UPDATE = frame(NET, 70, "MyMetric.update", 68)
VALIDATES = frame(NET, 50, "Net.validation_step", 48)
RANK_ZERO = library("lightning_utilities.core.rank_zero", "rank_zero_only.<locals>.wrapped_fn")
WRITES = library("lightning.fabric.loggers.tensorboard", "TensorBoardLogger.log_metrics")
ADDS = library("torch.utils.tensorboard.writer", "SummaryWriter.add_scalar")
OWN_LOGGER = replace(frame("/home/me/log.py", 7, "MyLogger.log_metrics", 5), is_loggers=True)
OTHERS_LOGGER = replace(library("someones.logger", "TheirLogger.log_metrics"), is_loggers=True)
CONNECTOR = library("lightning.pytorch.trainer.connectors.logger_connector.logger_connector", "log_metrics")
CALLBACK = frame("/home/me/callback.py", 9, "Mine.on_train_batch_end", 8)
HELPER = frame("/home/me/helper.py", 5, "log_all", 3)


def of(*stacks, **changes):
    return logging_calls(hot_lines(replace(samples_of(*stacks), **changes)))


@pytest.mark.parametrize(
    ("frames", "kind", "line"),
    [
        ((STEP_33, LOGS, RESULTS), LOG, 33),
        ((STEP_33, LOGS_OTHER), LOG, 33),
        ((STEP_33, UPDATES, library("torchmetrics.regression.mse", "update")), UPDATE, 33),
        ((STEP_33, COLLECTION, UPDATES), UPDATE, 33),
        ((STEP_33, COMPUTES), COMPUTE, 33),
        ((STEP_33, WRAPPED, library("torchmetrics.regression.mse", "compute")), COMPUTE, 33),
        ((STEP_33, WRAPPED, library("torchmetrics.regression.mse", "update")), UPDATE, 33),
        ((STEP_33, CALL, METRIC, UPDATES), FORWARD, 33),
        ((STEP_33, TRACKER), COMPUTE, 33),
        ((STEP_33, LOGS, REDUCE), RANKS, 33),
        ((STEP_33, HELPER, LOGS), LOG, 5),
        ((VALIDATES, UPDATES, OWN_UPDATE), UPDATE, 50),
        ((STEP_33, RANK_ZERO, WRITES, ADDS), LOGGER, 33),
        ((STEP_33, ADDS), LOGGER, 33),
        ((STEP_33, library("wandb.sdk.wandb_run", "Run.log")), LOGGER, 33),
        ((STEP_33, HELPER, RANK_ZERO, OWN_LOGGER), LOGGER, 5),
        ((STEP_33, OWN_LOGGER, HELPER, WRITES), LOGGER, 33),
        ((STEP_33, OTHERS_LOGGER), LOGGER, 33),
        ((CALLBACK, WRITES), LOGGER, 9),
        ((STEP_33, WRITES, REDUCE), RANKS, 33),
        ((CONNECTOR, RANK_ZERO, WRITES), None, None),  # Lightning's own call, after the batch
        ((CONNECTOR, RANK_ZERO, OWN_LOGGER), None, None),
        ((CONNECTOR, OWN_LOGGER, WRITES, ADDS), None, None),  # derived from one of Lightning's
        ((CONNECTOR, OWN_LOGGER, HELPER, ADDS), None, None),
        ((STEP_33, library("wandbox.toys", "play")), None, None),
        ((STEP_33, FUNCTIONAL), None, None),
        ((STEP_33, RESULTS), None, None),
        ((STEP_33, CALL, LAYER), None, None),
        ((RESULTS, UPDATES), None, None),  # Lightning's own call after the batch, in the phase Logging
        ((STEP_33,), None, None),
    ],
)
def test_stack_is_classified(frames, kind, line):
    found = of(("forward", frames, 4))
    assert [(one.kind, one.line) for one in found.lines] == ([] if kind is None else [(kind, line)])
    assert found.share == (0 if kind is None else 1)


def test_shares_cover_all_samples():
    """20 + 10 + 10 of 100 samples of 5 ms, 30 of them inside the step."""
    found = of(
        ("forward", (STEP_33, LOGS), 20),
        ("forward", (STEP_35, LOGS), 10),
        ("validation", (VALIDATES, LOGS), 10),
        ("forward", (STEP_35,), 60),
    )
    assert (found.share, found.share_in_step, found.samples) == (0.4, 0.3, 40)
    assert [(one.line, one.share, one.samples) for one in found.lines] == [
        (33, 0.2, 20),
        (35, 0.1, 10),
        (50, 0.1, 10),
    ]


# The rule


def logged(logging=40, others=60, *, phase="forward", frames=(STEP_33, LOGS), calls=(), **info):
    """A step of 20 ms with the given numbers of samples below logging and elsewhere."""
    stacks = samples_of((phase, frames, logging), ("backward", (STEP_35,), others))
    cost = cost_of(("", 0, 0, 0), ("layer", 10, 4, 4))
    steps = steps_of(forward=12, backward=8)
    return analysis_of(steps, cost=cost, stacks=replace(stacks, log_calls=calls), **info)


def test_many_logging_calls_are_found():
    """40 of 100 samples of a 20 ms step: 8 ms. The error is sqrt(0.4 * 0.6 / 100) = 0.049."""
    call = LogCall(file=NET, line=33, names=("loss", "acc"), options=("prog_bar", "sync_dist"))
    found = only(judge(slow_logging_calls, logged(calls=(call,), setup=replace(SETUP, log_every_n_steps=50))))
    assert (found.status, found.severity) == (Status.FOUND, Severity.CRITICAL)
    assert found.saving_ns_per_step == pytest.approx(8 * MS)
    assert found.locations == (Place(file=NET, line=33, function="Net.training_step", is_exact=True),)
    assert "line 33 with loss, acc (40%)" in found.summary
    for told in ("every 50 steps", "log_dict", "on_step=False", "prog_bar=True", "sync_dist=True"):
        assert told in found.action


@pytest.mark.parametrize(
    ("logging", "others", "status"),
    [
        (17, 83, Status.NOT_EVALUATED),  # 0.17 minus twice 0.038 is below 0.10
        (18, 82, Status.FOUND),  # 0.18 minus twice 0.038 is above
        (9, 1, Status.NOT_EVALUATED),  # too few
        (10, 1, Status.FOUND),
        (5, 95, Status.CLEAN),
    ],
)
def test_threshold_of_logging_share(logging, others, status):
    assert only(judge(slow_logging_calls, logged(logging, others))).status is status


def test_short_logging_is_clean():
    """All samples, but of a 0.2 ms step, which is below the threshold."""
    stacks = samples_of(("forward", (STEP_33, LOGS), 100))
    analysis = analysis_of(steps_of(forward=0.2), stacks=stacks)
    assert only(judge(slow_logging_calls, analysis)).status is Status.CLEAN


def test_logging_needs_samples():
    assert only(judge(slow_logging_calls, analysis_of(steps_of(forward=10)))).status is Status.NOT_EVALUATED


@pytest.mark.parametrize(
    ("frames", "advice"),
    [
        ((STEP_33, CALL, METRIC), "update(...)"),
        ((STEP_33, UPDATES), "MetricCollection"),
        ((STEP_33, COMPUTES), "on_train_epoch_end"),
        ((STEP_33, LOGS, REDUCE), "dist_sync_on_step"),
    ],
)
def test_advice_depends_on_call(frames, advice):
    found = only(judge(slow_logging_calls, logged(frames=frames)))
    assert advice in found.action
    assert "global_step" not in found.action


SYNC_ADVICE = ("dist_sync_on_step", "sync_dist")


@pytest.mark.parametrize("is_kept", [True, None])
def test_rank_sync_for_loss_is_not_reported(is_kept):
    """20 samples of a metric whose result is used, 20 of self.log: 4 of 20 ms could be saved, not 8."""
    stacks = samples_of(
        ("forward", (STEP_33, CALL, METRIC, UPDATES, REDUCE), 20),
        ("forward", (STEP_35, LOGS), 20),
        ("backward", (STEP_35,), 60),
    )
    call = LogCall(file=NET, line=33, names=("self.criterion",), is_kept=is_kept)
    analysis = analysis_of(steps_of(forward=12, backward=8), stacks=replace(stacks, log_calls=(call,)))
    found = only(judge(slow_logging_calls, analysis))
    assert found.saving_ns_per_step == pytest.approx(4 * MS)
    assert [one.line for one in found.locations] == [35]
    assert not any(told in found.action for told in SYNC_ADVICE)


def test_loss_computed_by_metric_is_not_logging():
    """12 ms of Forward, 2 in a layer; the other 10 are in a metric, at a line whose result is the loss."""
    stacks = samples_of(
        ("forward", (STEP_33, CALL, METRIC, UPDATES), 83), ("forward", (STEP_35, CALL, LAYER), 17)
    )
    call = LogCall(file=NET, line=33, names=("self.criterion",), is_kept=True)
    hot = hot_lines(replace(stacks, log_calls=(call,)))
    assert logging_calls(hot).share == 0
    assert hot.logging_share(NET, STEP_33.function_line) == (0, 0)
    assert hot_lines(stacks).logging_share(NET, STEP_33.function_line)[0] == 0.83


@pytest.mark.parametrize(
    "frames",
    [
        (replace(STEP_33, package="their_model"), LOGS, REDUCE),  # the LightningModule belongs to a library
        (STEP_33, replace(library("their.losses", "Loss.forward"), package="their"), METRIC, REDUCE),
    ],
)
def test_no_sync_advice_inside_library(frames):
    call = LogCall(file=NET, line=33, names=("a",), options=("sync_dist",), is_kept=False)
    stacks = samples_of(
        ("forward", frames, 20),
        ("forward", (replace(STEP_33, package=frames[0].package), LOGS), 30),
        ("backward", (STEP_35,), 50),
    )
    analysis = analysis_of(steps_of(forward=12, backward=8), stacks=replace(stacks, log_calls=(call,)))
    found = only(judge(slow_logging_calls, analysis))
    assert found.saving_ns_per_step == pytest.approx(6 * MS)
    assert "dist_sync_on_step" not in found.action
    assert ("sync_dist" in found.action) is (not frames[0].package)


def test_advice_for_direct_logger_calls_is_fewer_calls():
    """A direct call ignores ``log_every_n_steps``; the advice is 50 if the loggers write every step."""
    call = LogCall(file=NET, line=33, names=("self.logger.experiment.add_scalar",), is_repeated=True)
    for every, told in ((20, "every 20 steps (if self.global_step % 20 == 0)"), (1, "every 50 steps")):
        analysis = logged(
            frames=(STEP_33, ADDS), calls=(call,), setup=replace(SETUP, log_every_n_steps=every)
        )
        found = only(judge(slow_logging_calls, analysis))
        assert "line 33 with self.logger.experiment.add_scalar in a loop (40%)" in found.summary
        assert told in found.action
        assert "self.log_dict" in found.action
        assert "Each self.log" not in found.action


def test_advice_for_callback_uses_trainer_global_step():
    """A callback has no ``global_step``; the pasted code would raise AttributeError."""
    call = LogCall(file=NET, line=33, names=("self.logger.experiment.add_scalar",))
    hook = Place(file=NET, line=30, function=STEP_33.function)
    callback = CallbackSetup(callback="Writes", kind="Writes", hooks={"on_train_batch_end": hook})
    for callbacks, step in (((callback,), "trainer.global_step"), ((), "self.global_step")):
        analysis = logged(
            frames=(STEP_33, ADDS),
            calls=(call,),
            setup=replace(SETUP, log_every_n_steps=20, callbacks=callbacks),
        )
        assert f"if {step} % 20 == 0" in only(judge(slow_logging_calls, analysis)).action


def test_keys_built_in_loop_are_described():
    call = LogCall(file=NET, line=33, names=("f'value_{n}'",), is_repeated=True)
    found = only(judge(slow_logging_calls, logged(calls=(call,))))
    assert "line 33 with f'value_{n}' in a loop (40%)" in found.summary


def test_thirty_lines_are_one_finding():
    stacks = [("forward", (replace(STEP_33, line=100 + n), LOGS), 1) for n in range(30)]
    analysis = analysis_of(steps_of(forward=20), stacks=samples_of(*stacks, ("forward", (STEP_35,), 10)))
    found = only(judge(slow_logging_calls, analysis))
    assert found.saving_ns_per_step == pytest.approx(15 * MS)
    assert len(found.locations) == 5
    assert "and 25 more" in found.summary


# Effects on other findings


def test_logging_is_only_finding():
    """12 ms of Forward, 2 in a layer, 80 of its 100 samples below log: the rest isn't a finding."""
    stacks = samples_of(
        ("forward", (STEP_33, LOGS), 80),
        ("forward", (STEP_35,), 3),
        ("forward", (STEP_35, CALL, LAYER), 17),
        ("backward", (STEP_35,), 60),
    )
    cost = cost_of(("", 0, 0, 0), ("layer", 10, 2, 4))
    analysis = analysis_of(steps_of(forward=12, backward=8), cost=cost, stacks=stacks)
    verdict, findings = diagnose(analysis)
    assert [
        one.kind for one in findings if one.status is Status.FOUND and one.severity is not Severity.INFO
    ] == ["slow_logging_calls"]
    assert verdict.kind == "overhead_bound"


def test_remaining_step_code_is_still_found():
    """12 ms of Forward, 2 in a layer; 30 of 100 samples below log, 50 at another line: 12 - 2 - 3.6 ms."""
    stacks = samples_of(
        ("forward", (STEP_33, LOGS), 30),
        ("forward", (STEP_35,), 50),
        ("forward", (STEP_33, CALL, LAYER), 20),
    )
    cost = cost_of(("", 0, 0, 0), ("layer", 10, 2, 4))
    analysis = analysis_of(steps_of(forward=12, backward=8), cost=cost, stacks=stacks)
    _, findings = diagnose(analysis, [slow_forward_outside_model])
    assert findings[0].status is Status.FOUND
    assert findings[0].saving_ns_per_step == pytest.approx(6.4 * MS)
    assert findings[0].locations[0].line == 35


def test_validation_time_counts_once_in_verdict():
    """A validation takes 12 of 20 ms: 60% is overhead, and its logging doesn't add another 60%."""
    stacks = samples_of(("validation", (VALIDATES, LOGS), 60), ("backward", (STEP_35,), 40))
    analysis = analysis_of(steps_of(validation=12, backward=8), stacks=stacks)
    found = only(judge(slow_logging_calls, analysis))
    assert found.saving_ns_per_step == pytest.approx(12 * MS)
    assert found.verdict_ns == 0


def test_logging_operators_and_samples_are_not_loop_in_layer():
    """300 operators at a line in a layer's forward, 290 of them for a metric; the same for samples."""
    analysis = with_loop(300)
    lines = tuple(replace(one, logging=290) for one in analysis.cost.sites.lines)
    cost = replace(analysis.cost, sites=replace(analysis.cost.sites, lines=lines))
    stacks = analysis.hot_lines.samples
    changed = analysis_of(steps_of(forward=12, backward=8), cost=cost, stacks=stacks)
    assert only(judge(slow_line_in_module, changed)).status is Status.CLEAN

    inner = frame(NET, 13, "Cell.forward", 11)
    stacks = samples_of(("forward", (STEP_33, CALL, inner, UPDATES), 40), ("backward", (STEP_33,), 60))
    changed = analysis_of(steps_of(forward=12, backward=8), cost=analysis.cost, stacks=stacks)
    assert only(judge(slow_line_in_module, changed)).status is Status.CLEAN


# Measurements of real calls


class Shown(TorchDispatchMode):
    """Passes every operator to a watch, like a step's counter."""

    def __init__(self, watch):
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.watch(func, args, kwargs or {}, result, lambda: ("forward", ""))
        return result


def test_operators_below_metric_are_counted_separately():
    """One line runs two operators directly; the other updates a metric."""
    watch = SiteWatch()
    metric, rows = MetricCollection({"error": MeanSquaredError()}), torch.ones(4, 3)
    with Shown(watch):
        rows.add(1).mul(2)
        metric.update(rows, rows)
    own, measured = sorted(watch.result().lines, key=lambda one: one.line)
    assert (own.calls - own.views, own.logging) == (2, 0)
    assert measured.calls - measured.views == measured.logging > 0


def test_source_gives_keys_and_options(tmp_path):
    source = tmp_path / "net.py"
    source.write_text(
        "def step(self, batch):\n"
        "    self.log('loss', 1, prog_bar=True)\n"
        "    self.log(\n"
        "        name='accuracy',\n"
        "        value=2, sync_dist=True,\n"
        "    )\n"
        "    self.log_dict({'a': 1, 'b': 2})\n"
        "    for n in range(3):\n"
        "        self.log(f'value_{n}', n, prog_bar=False)\n"
        "    self.error.update(batch)\n"
        "    self.log('error', self.error(batch))\n"
        "    self.error(batch)\n"
        "    return [self.log(key, 1) for key in 'ab']\n"
        "x = 1\n"
        "for mean in self.means:\n"
        "    mean(batch.mean())\n"
        "total = float(self.errors['a'](batch.mean()).sum())\n"
        "self.logger.log_metrics({'a': self.error.compute()})\n"
        "for n in range(3): self.loggers[0].experiment.add_scalar('a', self.error(n), float(n))\n"
        "wandb_run.log({'b': 1})\n"
    )
    file = str(source)

    def told(line):
        call = log_call(file, line)
        return None if call is None else (call.names, call.is_repeated, call.options)

    assert told(2) == (("loss",), False, ("prog_bar",))
    assert told(3) == told(4) == (("accuracy",), False, ("sync_dist",))
    assert told(7) == (("a", "b"), False, ())
    assert told(9) == (("f'value_{n}'",), True, ())
    assert told(10) == (("self.error.update",), False, ())
    assert told(11) == (("error",), False, ())
    assert told(12) == (("self.error",), False, ())
    assert told(13) == (("key",), True, ())
    assert told(14) is None
    assert told(16) == (("mean",), True, ())
    assert told(17) == (("self.errors['a']",), False, ())
    assert told(18) == (("self.logger.log_metrics",), False, ())
    assert told(19) == (("self.loggers[0].experiment.add_scalar",), True, ())
    assert told(20) == (("b",), False, ())
    assert log_call(str(tmp_path / "gone.py"), 1) is None
    broken = tmp_path / "broken.py"
    broken.write_text("def broken(:\n    self.log('loss', 1)\n")
    assert log_call(str(broken), 2) is None


@pytest.mark.parametrize(
    ("source", "is_kept"),
    [
        ("self.error(batch)", False),
        ("self.log('error', self.error(batch))", False),
        ("value = self.error(batch); self.log('error', value)", False),
        ("value = self.error(batch).item(); print(float(value))", False),
        ("a, b = self.error(batch), 1; self.log_dict({'a': a, 'b': b})", False),
        ("values['a'] = self.error(batch); self.log_dict(values)", False),
        ("self.logger.log_metrics({'a': self.error(batch)})", False),
        ("self.error.update(self.layer(batch))", False),
        ("x = self.error(batch); x = x + x; self.log('error', x)", False),
        ("return self.error(batch)", True),
        ("loss = self.error(batch); self.log('loss', loss); return loss", True),
        ("loss = self.error(batch); total = 2 * loss; return {'loss': total}", True),
        ("values['a'] = self.error(batch); return sum(values.values())", True),
        ("losses.append(self.error(batch))", True),
        ("self.last = self.error(batch)", True),
        ("if self.error(batch) > 1: raise ValueError", True),
    ],
)
def test_source_shows_whether_result_is_used(tmp_path, source, is_kept):
    """A value that the loss may depend on isn't a removable metric; when in doubt it counts as used."""
    file = tmp_path / "net.py"
    file.write_text(f"def step(self, batch, values, losses):\n    {source}\n")
    assert log_call(str(file), 2).is_kept is is_kept


@pytest.mark.parametrize(
    ("source", "is_kept"),
    [
        ("self.log_dict(self.errors(batch))", False),
        ("errors = self.errors(batch); self.log_dict(errors)", False),
        ("loss = self.errors(batch)['loss']; return loss", True),
    ],
)
def test_returned_value_is_followed_to_caller(tmp_path, source, is_kept):
    file = tmp_path / "net.py"
    file.write_text(
        "def errors(self, batch):\n"
        "    return {'loss': self.error(batch)}\n"
        "def step(self, batch):\n"
        f"    {source}\n"
    )
    assert log_call(str(file), 2, ((str(file), 4),)).is_kept is is_kept


def test_function_names_match_installed_versions():
    """The names that the classification relies on."""
    for function in (LightningModule.log, LightningModule.log_dict):
        assert logging_kind(function.__module__, function.__code__.co_name) == "log"
    metric = MeanSquaredError()
    for bound in (metric.update, metric.compute):
        code = bound.__code__
        assert logging_kind(bound.__globals__["__name__"], code.co_name) == "wrapped_func"
    assert logging_kind(type(metric).forward.__module__, "forward") == FORWARD
    assert logging_kind(MetricCollection.update.__module__, "MetricCollection.update") == UPDATE
    for function in (TensorBoardLogger.log_metrics, CSVLogger.log_metrics, SummaryWriter.add_scalar):
        assert logging_kind(function.__module__, function.__name__) == LOGGER


class Ledger:
    """The parts of the ledger that a look reads."""

    current = PHASE_INDEX["forward"]
    inspection = ranges = validation = None
    in_validation = False


class Watched(Net):
    """Takes the look inside a metric's update, on the training thread."""

    def __init__(self):
        super().__init__()
        self.errors = MetricCollection({"error": Watching()})
        self.look = None

    def training_step(self, batch, batch_idx):
        if self.look is None:
            self.look = StackProbe(Ledger(), UserCode((type(self),)))
            self.errors["error"].look = self.look
        self.errors.update(torch.ones(2), torch.ones(2))
        return super().training_step(batch, batch_idx)


class Watching(MeanSquaredError):
    look = None

    def update(self, preds, target):
        self.look.look(5 * MS)
        super().update(preds, target)


def test_real_fit_is_sampled_below_metrics(tmp_path):
    model = Watched()
    fit_quietly(make_trainer(tmp_path), model, loader())
    samples = model.look.samples()
    found = logging_calls(hot_lines(samples))
    [line] = found.lines
    assert found.share == 1
    assert (line.kind, line.function.rpartition(".")[2]) == (UPDATE, "training_step")
    assert line.logs.names == ("self.errors.update",)


class MetricForLoss(Watched):
    """The metric's value is the loss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.error_of(batch)

    def error_of(self, batch):
        return self.errors["error"](torch.ones(2), torch.ones(2))


def test_real_fit_with_metric_as_loss(tmp_path):
    """Of each step's looks, only the one in the metric's update counts as logging."""
    model = MetricForLoss()
    fit_quietly(make_trainer(tmp_path), model, loader())
    samples = model.look.samples()
    kept = {call.names: call.is_kept for call in samples.log_calls}
    assert kept == {("self.errors.update",): False, ("self.errors['error']",): True}
    [line] = logging_calls(hot_lines(samples)).lines
    assert line.logs.names == ("self.errors.update",)


class LooksWhenItLogs(Logger):
    """A user's logger; the look is taken in a function that it calls."""

    name, version = "own", 1
    look = None

    @property
    def experiment(self):
        self.look.look(5 * MS)
        return self

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        if self.look is not None:
            _write(self)

    def log_hyperparams(self, *args, **kwargs):
        pass


def _write(logger):
    logger.look.look(5 * MS)


class CallsItsLogger(Net):
    """Line by line: the logger's method, its property, and no logger."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        look = self.logger.look or StackProbe(Ledger(), UserCode((type(self),)))
        self.logger.look = look
        self.logger.log_metrics({"a": 1.0}, step=batch_idx)
        self.logger.experiment.finalize("")
        look.look(5 * MS)
        return loss


def test_custom_logger_is_recognized_by_base_class(tmp_path):
    """Three looks per step, two of them in the logger, plus those of Lightning's calls after the batch."""
    model, logger = CallsItsLogger(), LooksWhenItLogs()
    fit_quietly(make_trainer(tmp_path, logger=logger, limit_train_batches=10), model, loader())
    samples = logger.look.samples()
    found = logging_calls(hot_lines(samples))
    assert [(one.kind, one.samples) for one in found.lines] == [(LOGGER, 10), (LOGGER, 10)]
    assert {one.logs.names for one in found.lines} == {
        ("self.logger.log_metrics",),
        ("self.logger.experiment.finalize",),
    }
    assert samples.samples > 30  # Lightning logs every fifth step


def test_operators_of_self_log_are_counted_in_inspected_step(tmp_path):
    """Twenty calls on one line: all of its operators belong to logging."""

    class Logs(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            for number in range(20):
                self.log(f"value_{number}", 1.0)
            return loss

    callback = make_callback(tmp_path, active=0, flops=True, peak_flops_per_s=1e12)
    fit_quietly(make_trainer(tmp_path, callback), Logs(), loader())
    lines = callback.run.ranks[0].model_cost.sites.lines
    many = max(
        (one for one in lines if one.file == __file__ and one.phase == "forward"), key=lambda one: one.calls
    )
    assert many.calls - many.views >= 20
    assert many.logging == many.calls - many.views
