"""Mistakes of new users: each message has the value, what was expected and what to write.

One line, without our traceback, before training starts.
"""

from __future__ import annotations

import lightning.pytorch
import pytest
import pytorch_lightning

from lightning_modelprof import ConfigError, LoopProfiler, ModelProfCallback, ModelProfiler
from lightning_modelprof.cli.main import main
from lightning_modelprof.errors import ModelProfError

pytestmark = pytest.mark.slow

CALLBACK = "ModelProfCallback"
HELP = "See help(lightning_modelprof.ModelProfCallback) for all arguments."

CONSTRUCTOR = {
    "a name with a typo": (
        lambda: ModelProfCallback(actve=10),
        f"{CALLBACK}(...): unknown argument 'actve'. Did you mean 'active'? {HELP}",
    ),
    "an argument of another profiler": (
        lambda: ModelProfCallback(with_flops=True),
        f"{CALLBACK}(...): unknown argument 'with_flops'. Use flops=True to count FLOPs on a real step."
        f" {HELP}",
    ),
    "by position": (
        lambda: ModelProfCallback(10),
        f"{CALLBACK}(...): expected keyword arguments, such as active=10, got the positional argument 10.",
    ),
    "a profiler's by position": (
        lambda: ModelProfiler("logs"),
        f"{CALLBACK}(...): expected keyword arguments, such as active=10, got the positional argument"
        " 'logs'.",
    ),
    "a string for a number": (
        lambda: ModelProfCallback(active="10"),
        f"{CALLBACK}: active: expected an integer of at least 0, or None, got '10'. The default is None;"
        " active=0 records no window.",
    ),
    "below the range": (
        lambda: ModelProfCallback(wait=-1),
        f"{CALLBACK}: wait: expected an integer of at least 0, got -1. The default is 1.",
    ),
    "one number for two": (
        lambda: ModelProfCallback(steps=10),
        f"{CALLBACK}: steps: expected two integers (start, end), got 10. The end is excluded: (3, 14) records"
        " steps 3 to 13.",
    ),
    "the end before the start": (
        lambda: ModelProfCallback(steps=(14, 3)),
        f"{CALLBACK}: steps: expected (start, end) with 0 <= start < end, got (14, 3). The end is excluded:"
        " (3, 14) records steps 3 to 13.",
    ),
    "two schedules": (
        lambda: ModelProfCallback(steps=(3, 14), active=5),
        f"{CALLBACK}: expected steps or active, got both: steps=(3, 14) and active=5. Remove one of them.",
    ),
    "a value outside of its group": (
        lambda: ModelProfCallback(terminal="full"),
        f"{CALLBACK}(...): terminal is in the group report. Write report={{'terminal': 'full'}}.",
    ),
    "a value for a group": (
        lambda: ModelProfCallback(report="full"),
        f"{CALLBACK}: report: expected ReportOptions(...) or a mapping of its values, got 'full'. Leave it"
        " out for the defaults, or see help(lightning_modelprof.ReportOptions).",
    ),
    "the clock alone and a window": (
        lambda: ModelProfCallback(timer_only=True, active=10),
        f"{CALLBACK}: expected timer_only=True or active=10, got both; remove one of them.",
    ),
    "no model": (
        lambda: LoopProfiler(10),
        "LoopProfiler: expected a torch.nn.Module as the first argument, got 10. Pass the model being"
        " trained, or leave it out.",
    ),
    "a loop's group": (
        lambda: LoopProfiler(terminal=False),
        "LoopProfiler(...): terminal is in the group report. Write report={'terminal': False}.",
    ),
    "no file": (
        lambda: ModelProfCallback.from_yaml("nowhere.yaml"),
        "can't read nowhere.yaml: No such file or directory. Check the path.",
    ),
}

TRAINER = {
    "a callback as the profiler": (
        lambda: {"profiler": ModelProfCallback()},
        "Trainer(profiler=...): expected a profiler, got a ModelProfCallback. Write"
        " Trainer(callbacks=[ModelProfCallback(...)]).",
    ),
    "its class as the profiler": (
        lambda: {"profiler": ModelProfCallback},
        "Trainer(profiler=...): expected a profiler, got the class ModelProfCallback. Write"
        " Trainer(callbacks=[ModelProfCallback()]).",
    ),
    "its class as a callback": (
        lambda: {"callbacks": [ModelProfCallback]},
        "Trainer(callbacks=...): expected a list of callbacks, got the class ModelProfCallback. Write"
        " Trainer(callbacks=[ModelProfCallback()]).",
    ),
    "a profiler as a callback": (
        lambda: {"callbacks": [ModelProfiler()]},
        "Trainer(callbacks=...): expected a list of callbacks, got a ModelProfiler. Write"
        " Trainer(profiler=ModelProfiler(...)).",
    ),
    "the profiler's class": (
        lambda: {"profiler": ModelProfiler},
        "Trainer(profiler=...): expected a profiler, got the class ModelProfiler. Write"
        " Trainer(profiler=ModelProfiler()).",
    ),
    "the profiler of other loops": (
        lambda: {"profiler": LoopProfiler()},
        "Trainer(profiler=...): expected a profiler, got a LoopProfiler. Write"
        " Trainer(callbacks=[ModelProfCallback(...)]); LoopProfiler is for loops without a Trainer.",
    ),
}

YAML = {
    "activ: 10": f"unknown argument 'activ'. Did you mean 'active'? {HELP}",
    "active: ten": "active: expected an integer of at least 0, or None, got 'ten'. The default is None;"
    " active=0 records no window.",
    "report: {veiws: [kernel]}": "report: unknown argument 'veiws'. Did you mean 'views'? See"
    " help(lightning_modelprof.ReportOptions) for all arguments.",
    "report: {views: [kernal]}": "report: views: unknown view 'kernal'. Did you mean 'kernel'? Leave it out"
    " to show all.",
    "report: {row_limit: 5, row_limit: 6}": "expected each argument once, got 'row_limit' on line 1 and again"
    " on line 1. Remove one of them.",
    "rules: {input_bound: {warnin: 0.1}}": "rules: input_bound: unknown threshold 'warnin'. Did you mean"
    " 'warning'?",
    "bounds: {max_overhead: 5}": "bounds: max_overhead: expected a share of time between 0 and 1, or None,"
    " got 5. 0.01 is 1%; None sets no limit, active=0 records no window.",
    "bounds: {max_trace_mb: 500MB}": "bounds: max_trace_mb: expected a size above 0 in MB, or None, got"
    " '500MB'. The default is 500; None sets no limit, active=0 records no window.",
    "terminal: full": "terminal is in the group report. Write report: {terminal: 'full'}.",
    "inspect: {flops: true}": "inspect: flops is a top-level argument. Write flops: true.",
    "ModelProfCallback:\n  active: 10": "expected arguments at the top level, such as 'active: 10', got them"
    " below 'ModelProfCallback'. Remove that line and the indentation.",
    "callbacks: []": "expected only ModelProfCallback arguments, such as 'active: 10', got a LightningCLI"
    " file, which configures a whole program. Pass it to that program with --config, or copy the callback's"
    " init_args to a separate file.",
    "active=10": "expected a mapping of arguments, such as 'active: 10', got str.",
    "timer_only: true\nactive: 10": "expected timer_only: true or active: 10, got both; remove one of them.",
}

SEE = "See lightning-modelprof"
COMMAND_LINE = {
    "reprot": (
        "",
        "unknown command 'reprot'. Did you mean 'report'? Expected run, report, open, list, compare, analyze,"
        " tensorboard, loader, selftest.",
    ),
    "train.py": ("", "expected a command, got 'train.py'. Write lightning-modelprof run train.py"),
    "--full": (
        "",
        f"unknown option '--full'. It's an option of report, compare, analyze, loader. {SEE} --help.",
    ),
    "list --full": (
        "list",
        f"unknown option '--full'. It's an option of report, compare, analyze, loader. {SEE} list --help.",
    ),
    "list a b": ("list", "unexpected arguments: b. Remove them, or quote a path with spaces."),
    "analyze": ("analyze", "expected TRACE, got nothing."),
    "analyze --viewz kernel t.json": (
        "analyze",
        f"unknown option '--viewz'. Did you mean '--views'? {SEE} analyze --help.",
    ),
    "analyze t.json --views kernal": (
        "analyze",
        "argument --views: unknown view 'kernal'. Did you mean 'kernel'? Leave it out to show all.",
    ),
    "analyze t.json --row-limit many": (
        "analyze",
        "argument --row-limit: expected an integer of at least 1, got 'many'. The default is 20.",
    ),
    "analyze t.json --json": ("analyze", "argument --json: expected FILE, got nothing. Write --json FILE."),
    "report --full --brief": (
        "report",
        "argument --brief: not allowed with --full. Remove one of them.",
    ),
    "tensorboard runs --logidr logs": (
        "tensorboard",
        f"unknown option '--logidr'. Did you mean '--logdir'? {SEE} tensorboard --help.",
    ),
    "tensorboard runs": ("tensorboard", "expected --logdir, got nothing."),
    "compare before": (
        "compare",
        "expected two runs, or runs for both --before and --after, got 1 without an option.",
    ),
    "compare before after --tolerance 5": (
        "compare",
        "argument --tolerance: expected a fraction above 0 and below 1, such as 0.05 for 5%, got '5'",
    ),
    "run": ("run", "expected a script or -m MODULE, got nothing. Write lightning-modelprof run train.py"),
    "run --actve 3 train.py": (
        "run",
        f"unknown option '--actve'. Did you mean '--active'? {SEE} run --help.",
    ),
    "run --sampling false train.py": (
        "run",
        f"unknown option '--sampling'. Did you mean '--inspect.sampling'? {SEE} run --help.",
    ),
    "loader train.py:make --batches 1.5": (
        "loader",
        "argument --batches: expected an integer of at least 1, got '1.5'.",
    ),
}

FAILING_COMMANDS = {
    "run nowhere.py": "no such script: nowhere.py. Check the path, and put options before the script.",
    "run --active ten wrong.py": "run: active: expected an integer of at least 0, or None, got 'ten'. The"
    " default is None; active=0 records no window.",
    "run --report.terminal loud wrong.py": "run: report: terminal: expected true, false or 'full', got"
    " 'loud'. true prints at most 20 lines, 'full' prints all tables, false prints nothing.",
    "report nowhere": "no such file or directory: nowhere. Give the directory that contains run.json, such as"
    " lightning_logs/version_0/modelprof.",
    "report": "no saved run in '.'. Give the directory that contains run.json, such as"
    " lightning_logs/version_0/modelprof.",
    "analyze nowhere.json": "can't read nowhere.json: No such file or directory. Check the path.",
    "loader wrong.py": "loader: expected MODULE:FACTORY, such as train.py:make_loader, got 'wrong.py'.",
    "loader wrong.py:loadr": "loader: wrong has no 'loadr'. Did you mean 'loader'?",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTNING_MODELPROF", raising=False)
    (tmp_path / "wrong.py").write_text("loader = [1, 2, 3]\n")


@pytest.mark.parametrize(("make", "message"), CONSTRUCTOR.values(), ids=CONSTRUCTOR)
def test_constructor_explains_mistakes(make, message):
    with pytest.raises(ModelProfError) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning])
@pytest.mark.parametrize(("arguments", "message"), TRAINER.values(), ids=TRAINER)
def test_trainer_explains_mistakes(package, arguments, message):
    """Before ``fit``: Lightning calls our entry point when it creates the Trainer."""
    with pytest.raises(ConfigError) as caught:
        package.Trainer(logger=False, **arguments())
    assert str(caught.value) == message


def test_trainer_accepts_correct_arguments():
    trainer = lightning.pytorch.Trainer(
        logger=False, callbacks=[ModelProfCallback()], profiler=ModelProfiler(), enable_checkpointing=False
    )
    assert isinstance(trainer.profiler, ModelProfiler)


@pytest.mark.parametrize("text", YAML)
def test_yaml_explains_mistakes(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        ModelProfCallback.from_yaml("mine.yaml")
    assert str(caught.value) == f"mine.yaml: {YAML[text]}"


@pytest.mark.parametrize("written", COMMAND_LINE)
def test_usage_errors_explain_mistakes(capsys, written):
    command, message = COMMAND_LINE[written]
    with pytest.raises(SystemExit) as ended:
        main(written.split())
    program = " ".join(filter(None, ["lightning-modelprof", command]))
    assert ended.value.code == 2
    usage, _, error = capsys.readouterr().err.rpartition(f"{program}: error: ")
    assert usage.startswith(f"usage: {program} "), "the command's own"
    assert error == f"{message}\n"


@pytest.mark.parametrize("written", FAILING_COMMANDS)
def test_failing_commands_explain_mistakes(capsys, written):
    assert main(written.split()) == 1
    assert capsys.readouterr().err == f"lightning-modelprof: {FAILING_COMMANDS[written]}\n"


def test_options_after_script_go_to_script(tmp_path, capfd):
    (tmp_path / "takes_none.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    assert main(["run", "takes_none.py", "--active", "3"]) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    told = "--active was passed to takes_none.py. Put options of run before the script."
    assert last == f"lightning-modelprof: {told}"
