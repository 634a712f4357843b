"""Invalid configuration is rejected before training, with what was expected, what was given and a fix."""

from __future__ import annotations

import argparse
import copy
import errno
import inspect
import os
import pickle
import re
from dataclasses import fields
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback

from lightning_modelprof import Bounds, ConfigError, InspectOptions, ModelProfCallback, ReportOptions
from lightning_modelprof.config import checks as config_checks
from lightning_modelprof.config import sources as config_sources
from lightning_modelprof.config.options import DEFAULTS, GROUP_OF, GROUPS, ProfileConfig
from lightning_modelprof.engine.run_folder import check_writeable
from lightning_modelprof.report.options import DEFAULT_OPTIONS, SORT_KEYS, TIME_UNITS, VIEWS, TableOptions
from tests.support.fits import (
    ROOT,
    Net,
    fit_quietly,
    flat,
    grouped,
    loader,
    make_callback,
    make_trainer,
    our_warnings,
    run_fit,
    steps_of,
)

pytestmark = pytest.mark.slow

CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.name != "lightning_cli.yaml")
NUMBERS = ("active", "wait", "warmup", "repeat", "skip_first", "log_every_n_steps")
FIELDS = [field.name for field in fields(ProfileConfig)]
FLAT = [*(name for name in FIELDS if name not in GROUPS), *GROUP_OF]


class Untouched(Net):
    """Fails the test if training starts."""

    def training_step(self, batch, batch_idx):
        pytest.fail("training started")


def refusal(folder, callbacks):
    """The error message of ``trainer.fit``, which trains no step and leaves the trainer unchanged."""
    trainer = make_trainer(folder, *callbacks)
    profiler = trainer.profiler
    with pytest.raises(ConfigError) as caught:
        fit_quietly(trainer, Untouched(), loader())
    assert trainer.global_step == 0
    assert trainer.profiler is profiler
    return str(caught.value)


def bad(argument, value, *parts):
    shown = re.sub(r" at 0x\w+", "", repr(value))  # the same in every process
    return pytest.param({argument: value}, parts, id=f"{argument}={shown}")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        *(
            bad(name, value, f"{name}: expected an integer of at least", f"got {value!r}")
            for name in NUMBERS
            for value in (-1, True, 2.0, "3")
        ),
        bad("active", -5, "active=0 records no window"),
        bad("terminal", "yes", "report: terminal: expected true, false or 'full', got 'yes'"),
        bad("colours", "yes", "report: colours: expected true, false, or None", "got 'yes'"),
        bad("report", 3, "report: expected ReportOptions(...) or a mapping of its values, got 3"),
        bad("bounds", [1], "bounds: expected Bounds(...) or a mapping of its values, got [1]"),
        bad("report", {"veiws": 3}, "report: unknown argument 'veiws'. Did you mean 'views'?"),
        bad("report", {"ranks": [0]}, "report: ranks is in the group bounds. Write bounds={'ranks': [0]}"),
        bad("inspect", {"active": 3}, "inspect: active is a top-level argument. Write active=3"),
        bad("report", {3: 4}, "report: unknown argument 3."),
        bad("rules", {"input_bond": False}, "rules: unknown rule 'input_bond'. Did you mean 'input_bound'?"),
        bad("rules", {"input_bound": {"warnin": 1}}, "input_bound: unknown threshold 'warnin'. Did you mean"),
        bad(
            "rules", {"input_bound": {"warning": -1}}, "input_bound: warning: expected a number of at least 0"
        ),
        bad(
            "rules",
            {"input_bound": {"warning": 0.5}},
            "input_bound: expected warning of at most critical, got warning=0.5 and critical=0.2. Lower",
        ),
        *(
            bad(name, value, f"{name}: expected true or false, got {value!r}")
            for name, value in (
                ("record_shapes", 1),
                ("files", None),
                ("tensorboard", 0),
            )
        ),
        *(
            bad("steps", value, "steps: expected", f"got {value!r}")
            for value in (
                5,
                "3-14",
                (3,),
                (1, 2, 3),
                (3.0, 14),
                ("3", "14"),
                (True, 5),
                (14, 3),
                (3, 3),
                (-1, 4),
            )
        ),
        pytest.param(
            {"steps": (3, 14), "active": 5}, ("steps=(3, 14) and active=5", "Remove one"), id="both"
        ),
        pytest.param({"steps": [3, 14], "repeat": 2}, ("steps=(3, 14) and repeat=2",), id="steps and repeat"),
        bad("activities", "cpu", "activities: expected a list of cpu, cuda, xpu", "got 'cpu'"),
        bad("activities", 7, "activities: expected a list", "got 7"),
        bad("activities", iter(["cpu"]), "activities: expected a list", "iterator"),
        bad(
            "activities",
            [],
            "activities: expected at least one activity for a window of 10 steps, got []",
            "active=0",
        ),
        bad("activities", ["cpu", "cudda"], "unknown activity 'cudda'", "Did you mean 'cuda'?"),
        bad("activities", ["CPU"], "unknown activity 'CPU'", "Did you mean 'cpu'?", "cpu, cuda, xpu"),
        bad("activities", ["gpu"], "unknown activity 'gpu'", "Did you mean 'cuda'?"),
        bad("activities", ["GPU"], "unknown activity 'GPU'", "Did you mean 'cuda'?"),
        bad("activities", [None], "unknown activity None"),
        bad(
            "views",
            ["kernal"],
            "report: views: unknown view 'kernal'. Did you mean 'kernel'? Leave it out",
        ),
        *(
            bad(
                "ranks",
                value,
                f"ranks: expected a list of ranks, starting at 0, or 'all', got {value!r}",
                "Set [0]",
            )
            for value in (0, None, True, "0", "ALL", [], [-1], [1.0], ["0"], [True], {"all": True})
        ),
        *(
            bad("max_trace_mb", value, f"max_trace_mb: expected a size above 0 in MB, or None, got {value!r}")
            for value in (0, -1, True, "500", float("inf"), float("nan"))
        ),
        bad("max_trace_mb", [500], "got [500]. The default is 500; None sets no limit, active=0 records"),
        *(
            bad(
                "keep_windows",
                value,
                f"keep_windows: expected an integer of at least 1, or None, got {value!r}",
            )
            for value in (0, -1, True, 2.0, "3")
        ),
        bad(
            "keep_windows", [3], "got [3]. The default is 20; None keeps all traces; report={'files': False}"
        ),
        bad("views", "all", "views: unknown view 'all'.", "Leave it out to show all."),
        bad("views", [], "views: expected a list of device, critical_path, overview", "got []"),
        bad("views", 7, "views: expected a list of", "got 7"),
        bad(
            "views", ["model", "ModelView"], "views: expected each view once, got 'model' twice", "Remove one"
        ),
        bad("views", [None], "views: unknown view None"),
        bad("sorted_by", "GPUTotl", "sorted_by: unknown sort key 'GPUTotl'. Did you mean 'gpu_total'?"),
        bad(
            "sorted_by",
            0,
            "sorted_by: unknown sort key 0. Expected one of cpu_total, cpu_self, cpu_avg",
            "Leave it out",
        ),
        bad("time_unit", "parsec", "time_unit: unknown time unit 'parsec'. Expected one of s, ms, us, ns."),
        bad("thread_sep", "yes", "thread_sep: expected true or false, got 'yes'"),
        bad("op_detail", None, "op_detail: expected true or false, got None"),
        *(
            bad("row_limit", value, "row_limit: expected an integer of at least 1", f"got {value!r}", "is 20")
            for value in (0, -1, None, True, 2.0, "3")
        ),
        bad("samples_fn", 4, "samples_fn: expected a function that takes a batch", "got 4"),
        bad("flops", 1, "flops: expected true, false, or None", "got 1"),
        bad("flop_formulas", [len], "flop_formulas: expected a mapping of operators to functions"),
        bad(
            "flop_formulas", {"aten::mm": 2}, "flop_formulas: expected a mapping", "An example is {torch.ops."
        ),
        bad("peak_flops_per_s", 989, "peak_flops_per_s: expected FLOP/s of at least 1e9", "got 989"),
        bad("peak_flops_per_s", True, "peak_flops_per_s: expected FLOP/s of at least", "got True"),
        bad("peak_flops_per_s", {"float32": float("inf")}, "peak_flops_per_s: expected FLOP/s of"),
        bad("peak_flops_per_s", {"bf16": 1e12}, "unknown dtype 'bf16'. Did you mean 'bfloat16'?"),
        bad("ignore_modules", "Linear", "ignore_modules: expected a list of class names", "got 'Linear'"),
        bad("ignore_modules", [3], "ignore_modules: expected a list of class names", "got [3]"),
        bad("module_depth", -1, "module_depth: expected an integer of at least 0", "got -1"),
        bad("top_modules", 0, "top_modules: expected an integer of at least 1", "got 0"),
        bad("unit", "", "unit: expected the name of what samples_fn counts"),
        bad("unit", 3, "unit: expected", "got 3"),
        bad("dirpath", 3, "dirpath: expected a path or None, got 3"),
        bad("dirpath", "", "dirpath: expected a path or None, got ''", "next to the logger's files"),
        bad("dirpath", "  ", "dirpath: expected a path or None, got '  '"),
        bad(
            "steps",
            [3],
            "steps: expected two integers (start, end), got [3]",
            "(3, 14) records steps 3 to 13",
        ),
        pytest.param(
            {"stop_after_profile": True, "active": 0},
            ("needs a window", "active=0", "Set active"),
            id="no window",
        ),
        pytest.param(
            {"stop_after_profile": True, "repeat": 0}, ("last window", "repeat=0"), id="no last window"
        ),
    ],
)
def test_invalid_arguments_are_rejected_immediately(tmp_path, arguments, parts):
    """Not after data preparation, which can take long."""
    with pytest.raises(ConfigError) as caught:
        ModelProfCallback(**grouped({"dirpath": tmp_path / "out"} | arguments))
    message = str(caught.value)
    assert message.startswith("ModelProfCallback: ")
    for part in parts:
        assert part in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        {"steps": [2, 4]},  # a list, as in YAML and JSON
        {"activities": ("cpu",)},
        {"activities": [], "active": 0},
        {"steps": (2, 4), "skip_first": 3},
        {"active": 0, "wait": 0, "warmup": 0, "skip_first": 0},
        {"unit": "tokens", "samples_fn": len},
        {"ranks": [0], "max_trace_mb": 0.5, "keep_windows": 1},
        {"ranks": (0, 7), "max_trace_mb": None, "keep_windows": None},
        {"views": "KernelView", "sorted_by": "SortedKeys.GPUTotal", "time_unit": "US", "row_limit": 1},
        {"views": ("memory", "udfview"), "thread_sep": True, "op_detail": True},
    ],
    ids=str,
)
def test_valid_arguments_are_accepted(tmp_path, arguments):
    assert run_fit(tmp_path, **arguments).report is not None


@pytest.mark.parametrize("activity", ["cuda", "xpu"])
def test_unavailable_activity_is_rejected(tmp_path, activity):
    if getattr(torch, activity).is_available():
        pytest.skip(f"this machine has {activity}")
    message = refusal(tmp_path, [ModelProfCallback(activities=["cpu", activity])])
    assert f"'{activity}' needs a device" in message
    assert "Remove it" in message


def test_callbacks_with_different_arguments_are_rejected(tmp_path):
    callbacks = [make_callback(tmp_path), make_callback(tmp_path, active=3)]
    message = refusal(tmp_path, callbacks)
    assert "expected one ModelProfCallback, got 2 with different arguments. Remove all but one" in message


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"ranks": [0]}, {"ranks": (0,)}),
        ({"samples_fn": lambda _: 1}, {"samples_fn": lambda _: 1}),
    ],
    ids=["ranks", "functions"],
)
def test_callbacks_with_equal_arguments_count_as_one(tmp_path, first, second):
    """Equal values needn't be the same object: an entry point creates new ones each time."""
    callbacks = [make_callback(tmp_path, **arguments) for arguments in (first, second)]
    with our_warnings() as messages:
        fit_quietly(make_trainer(tmp_path, *callbacks), Net(), loader())
    assert len(messages) == 1
    assert callbacks[0].report is callbacks[1].report is not None


def test_callback_works_through_forwarded_hooks(tmp_path):
    """It isn't in the Trainer's list."""
    ours = make_callback(tmp_path)

    class HandsOn(Callback):
        pass

    for name in vars(ModelProfCallback):
        if name == "setup" or name.startswith("on_") or name == "teardown":
            setattr(HandsOn, name, staticmethod(getattr(ours, name)))
    fit_quietly(make_trainer(tmp_path, HandsOn()), Net(), loader())
    assert ours.report is not None


def test_callback_can_be_pickled_after_counting_samples(tmp_path):
    """As ddp_spawn does for a second Trainer."""
    callback = run_fit(tmp_path, samples_fn=len)
    assert pickle.loads(ForkingPickler.dumps(callback)).config == callback.config


def test_folder_below_file_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    message = refusal(tmp_path, [ModelProfCallback(dirpath=tmp_path / "file" / "deep" / "er")])
    assert f"{tmp_path / 'file'} is a file" in message
    assert "Set dirpath" in message


def test_check_writeable_creates_nothing(tmp_path):
    check_writeable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_file_as_folder_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    assert "is a file" in refusal(tmp_path, [ModelProfCallback(dirpath=str(tmp_path / "file"))])


def test_read_only_folder_is_rejected(tmp_path, monkeypatch):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    if os.access(folder, os.W_OK):  # root can write anywhere
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder and access(path, mode))
    message = refusal(tmp_path, [ModelProfCallback(dirpath=folder / "out")])
    assert f"{folder} isn't writable" in message
    assert "report={'files': False}" in message


def test_folder_below_unreadable_one_is_rejected(tmp_path, monkeypatch):
    folder = tmp_path / "locked"
    folder.mkdir()
    stat = Path.stat

    def refuse(path, **kwargs):  # root can enter any folder
        if folder in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **kwargs)

    monkeypatch.setattr(Path, "stat", refuse)
    message = refusal(tmp_path, [ModelProfCallback(dirpath=folder / "deep" / "out")])
    assert f"can't read {folder / 'deep' / 'out'}: Permission denied" in message
    assert "Set dirpath" in message


@pytest.mark.parametrize("address", ["s3://bucket/runs", "memory://runs", "gs://a", "simplecache::s3://b/c"])
def test_remote_folder_is_rejected(tmp_path, monkeypatch, address):
    monkeypatch.chdir(tmp_path)
    message = refusal(tmp_path, [ModelProfCallback(dirpath=address)])
    assert f"expected a local directory for files, got {address}. Set dirpath" in message
    assert "Set dirpath to a local directory, or report={'files': False}" in message
    assert not list(tmp_path.iterdir())


def test_remote_logger_folder_is_rejected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"got s3://bucket/runs/modelprof. Set dirpath"):
        check_writeable(Path("s3://bucket/runs") / "modelprof")
    check_writeable(tmp_path / "a:" / "b")  # a valid folder name
    check_writeable(Path("C:") / "b")


def test_no_folder_is_needed_without_files(tmp_path):
    (tmp_path / "file").write_text("")
    assert run_fit(tmp_path, files=False, dirpath=tmp_path / "file", active=2).report is not None
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("profile_step", "Instead of DeepSpeed's profile_step=n, use steps=(n, n + 1)."),
        ("with_flops", "Use flops=True to count FLOPs on a real step."),
        ("on_trace_ready", "Use dirpath to choose where traces are saved."),
    ],
)
def test_argument_of_another_profiler_gets_hint(tmp_path, name, hint):
    with pytest.raises(ConfigError) as caught:
        ModelProfCallback(**{name: 5})
    assert f"unknown argument {name!r}. {hint} See help(" in str(caught.value)
    assert "Did you mean" not in str(caught.value)
    path = tmp_path / "mine.yaml"
    path.write_text(f"{name}: 5\n")
    with pytest.raises(ConfigError, match=re.escape(hint)):
        ModelProfCallback.from_yaml(path)


def test_names_of_other_profilers_are_not_arguments():
    assert not set(config_checks._IN_OTHER_PROFILERS) & set(FLAT)


@pytest.mark.parametrize(
    ("name", "nearest"), [("actve", "active"), ("warm_up", "warmup"), ("record_shape", "record_shapes")]
)
def test_unknown_arguments_are_rejected(tmp_path, name, nearest):
    with pytest.raises(ConfigError) as caught:
        ModelProfCallback(**{name: 3})
    assert f"unknown argument {name!r}. Did you mean {nearest!r}?" in str(caught.value)
    assert "See help(lightning_modelprof.ModelProfCallback) for all arguments" in str(caught.value)

    path = tmp_path / "config.yaml"
    path.write_text(f"{name}: 3\n")
    with pytest.raises(ConfigError) as caught:
        ModelProfCallback.from_yaml(path)
    assert str(caught.value).startswith(f"{path}: unknown argument {name!r}. Did you mean {nearest!r}?")


def test_lightning_cli_file_is_recognised():
    path = ROOT / "configs" / "lightning_cli.yaml"
    with pytest.raises(ConfigError, match="got a LightningCLI file") as caught:
        ModelProfCallback.from_yaml(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "--config" in str(caught.value)


def test_unrelated_name_gets_no_suggestion():
    with pytest.raises(ConfigError, match=r"unknown argument 'zzzzzz'\. See help"):
        ModelProfCallback(zzzzzz=1)


# YAML


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "- active\n- 3\n", "expected a mapping of arguments, such as 'active: 10', got list", id="list"
        ),
        pytest.param("active\n", "got str", id="text"),
        pytest.param("active: [1\n", "expected YAML, got:", id="broken"),
        pytest.param("active: !!python/object:os.system 1\n", "expected YAML, got:", id="unsafe"),
        pytest.param(b"\xff\xfe\x00\xff", "expected YAML, got:", id="binary"),
        pytest.param("1: 2\n", "unknown argument 1.", id="number as a key"),
        pytest.param("unit: 2020-13-45\n", "expected YAML, got:", id="no such day"),
        pytest.param(
            "active: 10\nwait: 1\nactive: 3\n",
            "expected each argument once, got 'active' on line 1 and again on line 3. Remove one",
            id="twice",
        ),
        pytest.param(
            "steps:\n- {a: 1, a: 2}\n",
            "expected each argument once, got 'a' on line 2 and again on line 2. Remove one",
            id="twice in a list",
        ),
        pytest.param(
            "samples_fn: len\n", "samples_fn: expected null, got 'len'. A function can", id="function"
        ),
        pytest.param(
            "active: ten\n", "active: expected an integer of at least 0, or None, got 'ten'", id="value"
        ),
        pytest.param("steps: [3]\n", "steps: expected two integers (start, end), got (3,)", id="steps"),
        pytest.param("steps: [3, 9]\nactive: 2\n", "steps=(3, 9) and active=2", id="steps and active"),
        pytest.param(
            "activities: []\n", "activities: expected at least one activity for a window", id="no activities"
        ),
        pytest.param("activities: [gpu]\n", "Did you mean 'cuda'?", id="activity"),
        pytest.param(
            "report: {terminal: 1}\n",
            "report: terminal: expected true, false or 'full', got 1",
            id="no boolean",
        ),
        pytest.param("unit: 3\n", "unit: expected the name", id="unit"),
        pytest.param(
            "report: {views: [kernel, op]}\n", "views: unknown view 'op'. Did you mean 'operator'?", id="view"
        ),
        pytest.param("report: {time_unit: 1}\n", "time_unit: unknown time unit 1.", id="time unit"),
        pytest.param("report: {row_limit: 0}\n", "row_limit: expected an integer of at", id="rows"),
        pytest.param("dirpath: ''\n", "dirpath: expected a path or None, got ''", id="no path"),
        pytest.param("stop_after_profile: true\nactive: 0\n", "needs a window, got active=0", id="no window"),
    ],
)
def test_invalid_yaml_is_rejected(tmp_path, text, expected):
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        ModelProfCallback.from_yaml(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert expected in str(caught.value)


@pytest.mark.parametrize("name", ["nothing.yaml", "."])
def test_unreadable_yaml_is_rejected(tmp_path, name):
    with pytest.raises(ConfigError, match="can't read"):
        ModelProfCallback.from_yaml(tmp_path / name)


def test_empty_yaml_means_defaults(tmp_path):
    (tmp_path / "config.yaml").write_text("# nothing\n")
    assert ModelProfCallback.from_yaml(tmp_path / "config.yaml").config == DEFAULTS


def test_yaml_accepts_steps(tmp_path):
    (tmp_path / "config.yaml").write_text("steps: [3, 14]\n")
    callback = ModelProfCallback.from_yaml(str(tmp_path / "config.yaml"))
    assert callback.config.steps == (3, 14)


def test_yaml_accepts_paddle_names(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "report:\n  views: [OverView, KernelView]\n  sorted_by: GPUTotal\n  time_unit: us\n"
        "  op_detail: true\n  row_limit: 5\n"
    )
    config = ModelProfCallback.from_yaml(tmp_path / "config.yaml").config
    assert config.table_options == TableOptions(
        views=("overview", "kernel"), sorted_by="gpu_total", time_unit="us", op_detail=True, row_limit=5
    )
    plain = config.as_plain()
    assert (plain["views"], plain["sorted_by"], plain["time_unit"]) == (
        ["overview", "kernel"],
        "gpu_total",
        "us",
    )


def test_default_options_match_report_defaults():
    assert DEFAULTS.table_options == DEFAULT_OPTIONS


@pytest.mark.parametrize("name", ["views", "sorted_by", "time_unit"])
def test_every_value_is_documented(name):
    """The docstring and the YAML file are enough to write the argument."""
    known = {"views": VIEWS, "sorted_by": SORT_KEYS, "time_unit": TIME_UNITS}[name]
    [documented] = re.findall(
        rf"^    {name}: (.*(?:\n     .*)*)", inspect.getdoc(ReportOptions), re.MULTILINE
    )
    [written] = re.findall(
        rf"^  {name}:(.*(?:\n +#.*)*)", (ROOT / "configs/default.yaml").read_text(), re.MULTILINE
    )
    assert known
    for value in known:
        assert re.search(rf"\b{value}\b", written), value
        for part in value.split("_") if name == "sorted_by" else [value]:
            assert re.search(rf"(\b|_){part}(\b|_)", documented), value


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configurations_are_valid(path):
    config = ModelProfCallback.from_yaml(path).config
    written = yaml.safe_load(path.read_text())
    for name in GROUPS:
        written |= written.pop(name, {})
    assert {name: flat(config)[name] for name in written} == written


def test_deep_dive_has_window_and_verdict_within_60_steps(tmp_path):
    arguments = config_sources.read_yaml(ROOT / "configs" / "deep_dive.yaml")
    arguments["report"] = {**arguments["report"], "terminal": False}
    callback = ModelProfCallback(**arguments, dirpath=tmp_path / "out")
    trainer = make_trainer(tmp_path, callback, max_steps=60, max_epochs=-1)
    fit_quietly(trainer, Net(), loader(128))
    assert len(callback.run.ranks[0].windows) == 1
    assert trainer.global_step == 46, "one step after the window"
    assert callback.report.verdict.word != "CANNOT TELL"


def test_default_yaml_lists_every_default():
    written = yaml.safe_load((ROOT / "configs" / "default.yaml").read_text())
    assert list(written) == FIELDS
    for name, kind in GROUPS.items():
        assert list(written[name]) == [field.name for field in fields(kind)]
        written |= written.pop(name)
    assert written == flat(DEFAULTS)
    assert {type(value) for value in written.values()} <= {int, bool, str, type(None)}


# One set of arguments


def test_callback_and_config_have_same_arguments():
    parameters = inspect.signature(ModelProfCallback.__init__).parameters
    assert [name for name in parameters if name != "self"] == FIELDS
    assert len(FLAT) == len(set(FLAT)), "no name means two things"
    for name in FIELDS:
        expected = None if name in GROUPS else getattr(DEFAULTS, name)
        assert parameters[name].default == expected, name
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_there_are_at_most_21_arguments():
    assert len(FIELDS) <= 21


def another(name):
    """A value that isn't the argument's default."""
    default = flat(DEFAULTS)[name]
    return CLI_VALUES.get(name, default + 1 if type(default) is int else not default)


def test_every_argument_reaches_config():
    defaults = flat(DEFAULTS)
    for name in FLAT:
        value = another(name)
        value = {"samples_fn": len, "flop_formulas": {"aten::mm": len}}.get(name, value)
        callback = ModelProfCallback(**grouped({name: value}))
        assert flat(callback.config)[name] == value != defaults[name]


def test_groups_accept_options_or_mappings():
    made = ModelProfCallback(report=ReportOptions(terminal="full"), bounds=Bounds(ranks=[0]), inspect={})
    same = ModelProfCallback(report={"terminal": "full"}, bounds={"ranks": [0]}, inspect=InspectOptions())
    assert made.config == same.config
    assert (made.config.report.terminal, made.config.bounds.ranks) == ("full", [0])


@pytest.mark.parametrize("name", GROUP_OF)
def test_moved_argument_error_names_its_group(tmp_path, monkeypatch, name):
    group = GROUP_OF[name]
    with pytest.raises(ConfigError) as caught:
        ModelProfCallback(**{name: 3})
    told = f"{name} is in the group {group}. Write"
    assert str(caught.value) == f"ModelProfCallback(...): {told} {group}={{{name!r}: 3}}."
    path = tmp_path / "mine.yaml"
    path.write_text(f"{name}: 3\n")
    with pytest.raises(ConfigError) as caught:
        ModelProfCallback.from_yaml(path)
    assert str(caught.value) == f"{path}: {told} {group}: {{{name}: 3}}."
    monkeypatch.setenv("LIGHTNING_MODELPROF", f"{name}=3")
    with pytest.raises(ConfigError) as caught:
        config_sources.arguments_in_environment()
    assert str(caught.value).endswith(f"{told} {group}.{name}=3.")


def test_every_argument_is_documented():
    text = inspect.getdoc(ModelProfCallback)
    arguments = text.split("Args:")[1].split("Attributes:")[0]
    assert re.findall(r"^    (\w+): ", arguments, re.MULTILINE) == FIELDS
    for name, kind in GROUPS.items():
        members = [field.name for field in fields(kind)]
        text = inspect.getdoc(kind).split("Attributes:")[1]
        assert re.findall(r"^    (\w+): ", text, re.MULTILINE) == members
        listed = re.search(rf"^    {name}: .*?: (.*?)\.", arguments, re.MULTILINE | re.DOTALL)
        assert re.findall(r"\w+", listed.group(1)) == members


def test_as_plain_does_not_copy_values():
    class Counter:
        def __deepcopy__(self, memo):
            pytest.fail("copied")

        def count(self, batch):
            return 1

    plain = ProfileConfig(samples_fn=Counter().count, steps=(1, 2), dirpath=Path("a")).as_plain()
    assert sorted(plain) == sorted(FLAT)
    assert plain["samples_fn"].endswith("Counter.count")
    assert (plain["steps"], plain["dirpath"]) == ([1, 2], "a")


# Switching off


@pytest.mark.parametrize(
    ("value", "is_on"),
    [
        *((value, False) for value in ("0", "false", "False", "OFF", "no", " no ")),
        *((value, True) for value in ("1", "true", "ON", "Yes", "")),
    ],
)
def test_environment_variable_switches_profiling_on_and_off(tmp_path, monkeypatch, value, is_on):
    monkeypatch.setenv("LIGHTNING_MODELPROF", value)
    callback = make_callback(tmp_path, active=2)
    trainer = make_trainer(tmp_path, callback)
    profiler = trainer.profiler
    seen = []
    with our_warnings() as messages:
        fit_quietly(trainer, Net(lambda _: seen.append(trainer.profiler)), loader())
    # If the package is installed, its entry point adds a second callback, which is ignored.
    assert [one for one in messages if "the Trainer has 2 ModelProfCallbacks" not in one] == []
    assert (set(seen) == {profiler}) == (not is_on)
    assert (tmp_path / "modelprof").exists() == is_on
    assert (callback.report is not None) == is_on


def test_invalid_switch_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_MODELPROF", "maybe")
    # By the Trainer, which calls our entry point, or by fit if this package isn't installed.
    with pytest.raises(ConfigError) as caught:
        fit_quietly(make_trainer(tmp_path, make_callback(tmp_path)), Untouched(), loader())
    assert str(caught.value).startswith(
        "environment variable LIGHTNING_MODELPROF: expected on (1, true, on, yes), off (0, false, off,"
        " no), arguments such as active=10,dirpath=out, or the path of a YAML file, got 'maybe'."
    )


def test_nothing_is_checked_if_switched_off(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_MODELPROF", "0")
    assert run_fit(tmp_path, flop_formulas={"no::such": len}).run is None


# LightningCLI reads the signature through jsonargparse


@pytest.fixture
def parser():
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ModelProfCallback, "callback")
    return parser


def instantiate(parser, parsed):
    # renamed in jsonargparse 4.49
    make = parser.instantiate if hasattr(parser, "instantiate") else parser.instantiate_classes
    return make(parsed)["callback"]


CLI_VALUES = {
    "active": 3,
    "wait": 2,
    "warmup": 0,
    "repeat": 4,
    "skip_first": 5,
    "steps": [3, 14],
    "activities": ["cpu", "cuda"],
    "ranks": [0, 2],
    "max_trace_mb": 250.5,
    "keep_windows": 3,
    "max_overhead": 0.05,
    "log_every_n_steps": 7,
    "samples_fn": "builtins.len",
    "unit": "tokens",
    "flop_formulas": {"aten::mm": "builtins.len"},
    "peak_flops_per_s": {"float32": 1e12},
    "ignore_modules": ["Linear"],
    "module_depth": 2,
    "top_modules": 5,
    "dirpath": "somewhere",
    "views": ["kernel", "OverView"],
    "sorted_by": "GPUTotal",
    "time_unit": "us",
    "row_limit": 50,
    "colours": True,
    "terminal": "full",
    "rules": {"input_bound": {"warning": 0.1}, "slow_logger": False},
}


def test_cli_accepts_all_arguments(parser):
    for name in FLAT:
        value = another(name)
        config = instantiate(parser, parser.parse_object({"callback": grouped({name: value})})).config
        functions = {"samples_fn": len, "flop_formulas": {"aten::mm": len}}
        expected = ({"steps": (3, 14)} | functions).get(name, value)
        found = flat(config)[name]
        assert (str(found) if name == "dirpath" else found) == expected, name
    assert instantiate(parser, parser.parse_object({})).config == DEFAULTS


def test_cli_accepts_text(parser):
    parsed = parser.parse_args(
        ["--callback.report.row_limit=3", "--callback.steps=[3, 14]", "--callback.with_stack=true"]
    )
    config = instantiate(parser, parsed).config
    assert (config.report.row_limit, config.steps, config.with_stack) == (3, (3, 14), True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("[kernel, OverView]", ("overview", "kernel")), ("KernelView", ("kernel",)), ("null", None)],
)
def test_cli_accepts_views(parser, text, expected):
    parsed = parser.parse_args([f"--callback.report.views={text}", "--callback.report.sorted_by=CPUTotal"])
    options = instantiate(parser, parsed).config.table_options
    assert (options.views, options.sorted_by) == (expected, "cpu_total")


@pytest.mark.parametrize(
    ("text", "expected"), [("all", "all"), ("[0]", [0]), ("[0, 3]", [0, 3])], ids=["all", "one", "two"]
)
def test_cli_accepts_ranks(parser, text, expected):
    parsed = parser.parse_args([f"--callback.bounds.ranks={text}", "--callback.bounds.keep_windows=null"])
    config = instantiate(parser, parsed).config
    assert (config.bounds.ranks, config.bounds.keep_windows) == (expected, None)


@pytest.mark.parametrize(
    "argument",
    [
        "bounds.ranks=some",
        "bounds.ranks=0",
        "bounds.max_trace_mb=large",
        "bounds.keep_windows=1.5",
        "report.veiws=kernel",
        "activ=3",
        "activities=[gpu]",
        "active=often",
        "steps=[1,2,3]",
        "report.row_limit=all",
    ],
)
def test_cli_rejects_invalid_arguments(parser, argument):
    """Our own check rejects values in groups, because a mapping can hold anything."""
    with pytest.raises((argparse.ArgumentError, ConfigError)):
        instantiate(parser, parser.parse_args([f"--callback.{argument}"]))


# Copies, as launchers and tuners make them


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda c: pickle.loads(ForkingPickler.dumps(c))], ids=["deepcopy", "pickle"]
)
def test_copied_callback_measures(tmp_path, duplicate):
    callback = duplicate(make_callback(tmp_path, active=2, activities=["cpu"], samples_fn=len))
    assert callback.config == make_callback(tmp_path, active=2, activities=["cpu"], samples_fn=len).config
    fit_quietly(make_trainer(tmp_path, callback), Net(), loader())
    assert len(steps_of(callback)) == 32
    assert (steps_of(callback).samples == 2).all()  # a batch is a pair, so its len is 2


def test_callback_serves_several_fits(tmp_path):
    callback = make_callback(tmp_path, active=2)
    for fit in range(3):
        fit_quietly(make_trainer(tmp_path, callback), Net(), loader(8 * (fit + 1)))
        assert len(steps_of(callback)) == 4 * (fit + 1)
    folders = {str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("run.json")}
    assert folders == {"modelprof", "modelprof/fit_2", "modelprof/fit_3"}


@pytest.mark.parametrize(
    ("text", "peak"), [("989.4e12", 989.4e12), ("{bfloat16: 1e14}", {"bfloat16": 1e14}), ("null", None)]
)
def test_yaml_reads_exponents_without_sign(tmp_path, text, peak):
    path = tmp_path / "a.yaml"
    path.write_text(f"inspect:\n  peak_flops_per_s: {text}\n")
    assert ModelProfCallback.from_yaml(path).config.inspect.peak_flops_per_s == peak


def test_unknown_ignore_modules_are_rejected(tmp_path):
    message = refusal(tmp_path, [make_callback(tmp_path, ignore_modules=["Linaer"])])
    assert "in Untouched, got 'Linaer'. Did you mean 'Linear'?" in message
    run_fit(tmp_path, active=0, flops=True, ignore_modules=["Linear", "layers.0"])


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_deeply_nested_values_are_rejected(monkeypatch, tmp_path, opening):
    value = f"sorted_by={opening * 3_000}"
    monkeypatch.setenv("LIGHTNING_MODELPROF", value)
    with pytest.raises(ConfigError, match="environment variable LIGHTNING_MODELPROF: expected arguments"):
        config_sources.arguments_in_environment()
    file = tmp_path / "deep.yaml"
    file.write_text(value.replace("=", ": "))
    with pytest.raises(ConfigError, match="expected YAML"):
        config_sources.read_yaml(file)
