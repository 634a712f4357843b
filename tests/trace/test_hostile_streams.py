"""Printing never ends a fit or loses the report, whatever the standard streams do."""

from __future__ import annotations

import io
import logging
import sys
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.progress import Progress

from lightning_modelprof.engine.session import Session
from lightning_modelprof.errors import describe_error
from lightning_modelprof.show.findings import verdict_word
from lightning_modelprof.show.progress import show_progress
from lightning_modelprof.show.terminal.terminal import print_report
from tests.support.fits import (
    Net,
    fit_quietly,
    loader,
    make_callback,
    make_trainer,
    our_warnings,
    report_of,
    steps_of,
)
from tests.support.sample_reports import gpu_report

pytestmark = pytest.mark.slow

NUM_STEPS = 8


class Unspeakable(Exception):
    """Its message can't be shown."""

    def __str__(self):
        raise RecursionError


class Untellable(Exception):
    """Its message isn't text."""

    def __str__(self):
        return 3  # noqa: PLE0307


class Stream(io.StringIO):
    """Takes text, or fails with an error at a given method."""

    def __init__(self, error=None, at="write", encoding="utf-8", is_terminal=False):
        super().__init__()
        self.error, self.at, self._encoding, self._is_terminal = error, at, encoding, is_terminal

    @property
    def encoding(self):
        return self._encoding

    def isatty(self):
        self._fail("isatty")
        return self._is_terminal

    def write(self, text):
        self._fail("write")
        return super().write(text)

    def flush(self):
        self._fail("flush")

    def _fail(self, where):
        if self.error is not None and where == self.at:
            raise self.error


class Silent:
    """A standard output without any methods."""


def recurse(*args, **kwargs):
    return recurse(*args, **kwargs)


class Recursive(Stream):
    def write(self, text):
        return recurse(text)


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


STREAMS = {
    "closed": closed,
    "no such thing": Silent,
    "OSError": lambda: Stream(OSError(5, "Input/output error")),
    "BrokenPipeError": lambda: Stream(BrokenPipeError(32, "Broken pipe")),
    "broken when flushed": lambda: Stream(BrokenPipeError(32, "Broken pipe"), at="flush"),
    "RecursionError": Recursive,
    "MemoryError": lambda: Stream(MemoryError()),
    "error without a message": lambda: Stream(Unspeakable()),
    "error with an odd message": lambda: Stream(Untellable()),
    "assertion": lambda: Stream(AssertionError("x" * 3_000_000)),
}


def fit(folder, *others, **trainer):
    """Run a fit that prints its report; returns the callback and the weights."""
    torch.manual_seed(3)
    callback, module = make_callback(folder, terminal=True, active=0), Net()
    made = make_trainer(folder, callback, *others, **trainer)
    fit_quietly(made, module, loader(2 * NUM_STEPS))
    assert made.global_step == NUM_STEPS
    return callback, module.state_dict()


def check(callback, folder, messages, expected):
    """The report exists in memory and on disk."""
    assert "Net, 8 training steps (finished)" in callback.report.title
    assert len(steps_of(callback)) == NUM_STEPS
    assert report_of(folder)["summary"]["run"]["status"] == "finished"
    assert len(messages) == expected, messages
    assert all(len(message) < 5_000 for message in messages)


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("name", STREAMS)
def test_failing_standard_output_warns_once(tmp_path, monkeypatch, name, is_terminal):
    stream = STREAMS[name]()
    if isinstance(stream, Stream):
        stream._is_terminal = is_terminal
    monkeypatch.setattr(sys, "stdout", stream)
    with our_warnings() as messages:
        callback, _ = fit(tmp_path)
    check(callback, tmp_path, messages, expected=1)
    assert "couldn't write to terminal" in messages[0]


def test_missing_standard_output_is_silent(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with our_warnings() as messages:
        callback, _ = fit(tmp_path)
    check(callback, tmp_path, messages, expected=0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_report(gpu_report())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437", "utf-8", None, "no-such-encoding", 7])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_standard_output_with_any_encoding_gets_report(tmp_path, monkeypatch, encoding, is_terminal):
    class Encoding(Stream):
        def write(self, text):
            if encoding in {"ascii", "latin-1", "cp437"}:
                text.encode(encoding)
            return super().write(text)

    stream = Encoding(encoding=encoding, is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    with our_warnings() as messages:
        callback, _ = fit(tmp_path)
    check(callback, tmp_path, messages, expected=0)
    assert verdict_word(callback.report.verdict) in stream.getvalue()
    assert f"page: {tmp_path}/modelprof/report.html" in stream.getvalue()


@pytest.mark.skipif(
    sys.getfilesystemencoding() != "utf-8", reason="the file system's encoding has no name for the folder"
)
def test_stream_without_encoding_gets_report(tmp_path, monkeypatch):
    class Tee(Silent):  # a common recipe, here with a Windows file behind it
        written = ""

        def write(self, text):
            text.encode("cp1252")
            self.written += text

    stream = Tee()
    monkeypatch.setattr(sys, "stdout", stream)
    with our_warnings() as messages:
        callback, _ = fit(tmp_path / "\u2603")
    check(callback, tmp_path / "\u2603", messages, expected=0)
    assert " training steps (" in stream.written
    assert "\\u2603/modelprof" in stream.written


def test_failing_isatty_is_harmless(tmp_path, monkeypatch):
    stream = Stream(OSError("nobody knows"), at="isatty")
    monkeypatch.setattr(sys, "stdout", stream)
    with our_warnings() as messages:
        callback, _ = fit(tmp_path)
    check(callback, tmp_path, messages, expected=0)
    assert " training steps (" in stream.getvalue()


def test_closed_reader_of_live_display_is_broken_pipe(monkeypatch):
    """rich's Console raises SystemExit when the reader of its output is gone."""

    class Gone(Stream):
        def write(self, text):
            try:
                raise BrokenPipeError(32, "Broken pipe")
            except BrokenPipeError:
                raise SystemExit(1)  # noqa: B904 - as rich does it

    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(BrokenPipeError):
        print_report(gpu_report())


def test_ctrl_c_during_report_keeps_report(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Stream(KeyboardInterrupt()))
    torch.manual_seed(3)
    callback = make_callback(tmp_path, terminal=True, active=0)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit_quietly(make_trainer(tmp_path, callback), Net(), loader(2 * NUM_STEPS))
    check(callback, tmp_path, [], expected=0)


# Errors that can't be shown

TELLERS = {
    "warnings": lambda patch, error: patch.setattr(warnings, "warn", without_ours(error)),
    "what shows warnings": lambda patch, error: patch.setattr(warnings, "showwarning", raiser(error)),
    "standard error": lambda patch, error: patch.setattr(sys, "stderr", Stream(error)),
    "no standard error": lambda patch, error: patch.setattr(sys, "stderr", None),
}


def raiser(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def show_on_standard_error(message, category, filename, lineno, file=None, line=None):
    if sys.stderr is not None:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def without_ours(error, warn=warnings.warn):
    def fail(message, *args, **kwargs):
        if str(message).startswith("ModelProfCallback"):
            raise error
        warn(message, *args, **kwargs)

    return fail


class Deaf(logging.Handler):
    def emit(self, record):
        raise RecursionError


@pytest.mark.logs_warnings
@pytest.mark.parametrize(
    "error", [RecursionError(), ValueError("I/O operation on closed file"), Unspeakable()]
)
@pytest.mark.parametrize("name", TELLERS)
def test_failing_warnings_and_logs_are_harmless(tmp_path, monkeypatch, name, error):
    _, expected = fit(tmp_path / "plain")
    monkeypatch.setattr(sys, "stdout", Stream(error))
    handler = Deaf()
    logger = logging.getLogger("lightning_modelprof")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            monkeypatch.setattr(warnings, "showwarning", show_on_standard_error)  # not pytest's
            TELLERS[name](monkeypatch, error)
            callback, weights = fit(tmp_path, logger=Breaking(tmp_path))
    finally:
        logger.removeHandler(handler)
    check(callback, tmp_path, [], expected=0)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


class Breaking(CSVLogger):
    """Fails for the callback's figures, so that the fit has something to warn about."""

    def log_metrics(self, metrics, step=None):
        if any(name.startswith("modelprof/") for name in metrics):
            raise Unspeakable


@pytest.mark.logs_warnings
def test_internal_error_that_cannot_be_shown_aborts_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Session, "_on_boundary", raiser(Unspeakable()))
    monkeypatch.setattr(warnings, "warn", without_ours(RecursionError()))
    logger, handler = logging.getLogger("lightning_modelprof"), Deaf()
    logger.addHandler(handler)
    try:
        callback, _ = fit(tmp_path)
    finally:
        logger.removeHandler(handler)
    assert callback.run.info.status == "aborted"


def test_samples_fn_error_without_message_warns_once(tmp_path):
    def count(batch):
        raise Unspeakable

    callback = make_callback(tmp_path, active=0, samples_fn=count)
    trainer = make_trainer(tmp_path, callback)
    with our_warnings() as messages:
        fit_quietly(trainer, Net(), loader(2 * NUM_STEPS))
    check(callback, tmp_path, messages, expected=1)
    assert "samples_fn raised Unspeakable (message can't be shown)" in messages[0]


def test_errors_are_described_briefly():
    assert describe_error(ValueError("no")) == "ValueError: no"
    assert (
        describe_error(Unspeakable())
        == describe_error(Unspeakable("x"))
        == "Unspeakable (message can't be shown)"
    )
    assert describe_error(Untellable()) == "Untellable (message can't be shown)"
    text = describe_error(KeyError("x" * 3_000_111))
    assert len(text) < 2_100
    assert text.endswith("... (3,000,113 characters)")


# Progress bars


@pytest.mark.parametrize("metrics", [None, (), {"loss": 1.0}])
def test_progress_bar_keeps_its_own_metrics(tmp_path, metrics):
    class Bar(ProgressBar):
        shown = ()

        def get_metrics(self, trainer, pl_module):
            return metrics

        def on_train_batch_end(self, *args):
            self.shown = (*self.shown, self.get_metrics(self.trainer, args[1]))

    bar = Bar()
    callback, _ = fit(tmp_path, bar, enable_progress_bar=True, log_every_n_steps=2)
    assert callback.report is not None
    assert len(bar.shown) == NUM_STEPS
    assert metrics in (None, (), {"loss": 1.0}), "what the bar keeps is its own"
    assert bar.shown[0] == metrics
    if metrics:
        assert set(bar.shown[-1]) == {"loss", "ips", "reader"}
    else:
        assert bar.shown[-1] == metrics


@pytest.mark.parametrize("at", ["write", "isatty", "flush"])
def test_failing_progress_display_is_harmless(monkeypatch, at):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stderr", Stream(OSError(5, "Input/output error"), at=at, is_terminal=True))
    with show_progress("a trace") as tell:
        for done in range(3):
            tell(done * 10**7, 3 * 10**7)


def test_progress_is_not_shown_over_live_display(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Stream(is_terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(console=Console(stderr=True)):
        begin = len(stream.getvalue())
        with show_progress("a trace") as tell:
            tell(10**7, 3 * 10**7)
        assert "a trace" not in stream.getvalue()[begin:]


def test_report_is_printed_once_if_another_callback_fails(tmp_path, capsys):
    class Last(Callback):
        def on_train_end(self, *args):
            assert "Perf Summary" not in capsys.readouterr().out, "a bar may still be open"
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fit(tmp_path, Last())
    assert capsys.readouterr().out.count("page: ") == 1
