"""The commands: which run they use, what they print and what they import."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_modelprof import ModelProfCallback
from lightning_modelprof import cli as commands
from lightning_modelprof.cli import run as run_command
from lightning_modelprof.cli.main import main, make_parser
from lightning_modelprof.cli.run import option_help
from lightning_modelprof.config.options import FIELDS, GROUP_OF, GROUPS
from tests.support.documents import raw_rows
from tests.support.fits import ROOT, run_fit

pytestmark = pytest.mark.slow

EVENT = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 3, "pid": 1, "tid": 1}
TRACE = json.dumps({"traceEvents": [EVENT]})

HEAVY = {"numpy", "msgspec", "torch", "lightning", "tensorboard", "jinja2", "yaml", "pandas"}
"""Packages that are slow to import."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs in one folder; the second contains another loop's run."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("a", "b", "c"):
        run_fit(folder, dirpath=folder / name / "modelprof", steps=(20, 24))
    shutil.copytree(folder / "c" / "modelprof", folder / "b" / "modelprof" / "fit_2")
    return folder


# Imports


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["--print-completion", "zsh"],
        ["reprot"],
        ["report", "--no-such"],
        ["report", "/no/such"],
        ["open", "/no/such"],
    ],
    ids=" ".join,
)
def test_help_and_errors_import_nothing_heavy(tmp_path, arguments):
    """Imports dominate the startup time, which benchmarks/startup.py measures."""
    script = (
        "import sys\nfrom lightning_modelprof.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print('|', *sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not HEAVY & set(result.stderr.rpartition("|")[2].split())


def test_help_of_one_command_imports_no_other():
    script = (
        "import sys\nfrom lightning_modelprof.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\nprint('|', *sorted(sys.modules), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, "run", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    seen = set(result.stderr.rpartition("|")[2].split())
    own = {one.rpartition(".")[2] for one in seen if one.startswith("lightning_modelprof.cli.")}
    assert own == {"main", "run"}
    assert not {"difflib", "uuid", "lightning_modelprof.run"} & seen


def test_analyze_imports_neither_run_tables_nor_page(tmp_path):
    (tmp_path / "trace.json").write_text(TRACE)
    script = (
        "import sys\nfrom lightning_modelprof.cli.main import main\nmain(sys.argv[1:])\n"
        "print('|', *sorted(sys.modules), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, "analyze", str(tmp_path / "trace.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    seen = result.stderr.rpartition("|")[2].split()
    ours = [name for name in seen if name.startswith("lightning_modelprof.")]
    assert not {f"lightning_modelprof.{one}" for one in UNUSED} & set(ours)
    assert not {"torch", "lightning", "tensorboard", "jinja2", "yaml"} & set(seen)


UNUSED = (
    "report.tables.run.all_tables",
    "show.html.page",
    "callback",
)


# Help


def test_no_arguments_print_help_with_examples(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    for name in commands.COMMANDS:
        assert re.search(rf"^    {name}\b", out, re.MULTILINE), name


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_command_is_described(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert len(out.partition("\n\n")[2].partition("\n\n")[0]) > 50, "a sentence below the usage"


@pytest.mark.parametrize("name", ["", *commands.COMMANDS])
def test_help_fits_on_screen_and_lists_every_option(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main([*filter(None, [name]), "--help"])
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 40
    out = " ".join(out.split())
    parser = make_parser()
    if name:
        parser = next(one for one in parser._actions if isinstance(one.choices, dict)).choices[name]
    for action in parser._actions:
        for option in action.option_strings:
            group, dot, own = option.partition(".")
            is_listed = re.search(rf"(?<!\S){re.escape(group)}\. with [^;]*\b{own}\b", out) if dot else None
            assert is_listed or option in out, option


SHELLS = {
    "bash": """
        source {script}
        COMP_WORDS=({line}); [[ "{line}" == *" " ]] && COMP_WORDS+=("")
        COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _lightning_modelprof; printf '%s\\n' "${{COMPREPLY[@]}}"
    """,
    "fish": """
        source {script}
        complete -C '{line}'
    """,
}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lightning-modelprof ", {*commands.COMMANDS}),
        ("lightning-modelprof comp", {"compare"}),
        ("lightning-modelprof --v", {"--version"}),
        ("lightning-modelprof analyze --s", {"--step-range", "--sorted-by"}),
        ("lightning-modelprof run --report.te", {"--report.terminal", "--report.tensorboard"}),
    ],
)
def test_completion_suggests_commands_and_options(tmp_path, capsys, shell, line, expected):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", shell])
    assert ended.value.code == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    typed = SHELLS[shell].format(script=tmp_path / "script", line=line)
    result = subprocess.run([shell, "-c", typed], capture_output=True, text=True, check=True)
    found = {one.partition("\t")[0] for one in result.stdout.splitlines()}
    assert found >= expected
    assert found - expected <= {"--help", "--version", "--print-completion"}


def test_zsh_completion_has_every_option(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--print-completion", "zsh"])
    script = capsys.readouterr().out
    assert script.startswith("#compdef lightning-modelprof\n")
    assert set(re.findall(r"--report\.\w+", script)) >= {"--report.terminal", "--report.views"}
    for name in commands.COMMANDS:
        assert f" {name}) words_of=" in script
    if shutil.which("zsh") is not None:
        (tmp_path / "script").write_text(script)
        subprocess.run(["zsh", "-n", str(tmp_path / "script")], check=True)


@pytest.mark.parametrize("name", ["", *commands.COMMANDS])
def test_every_option_has_help(name):
    parser = make_parser()
    if name:
        parser = next(one for one in parser._actions if isinstance(one.choices, dict)).choices[name]
    assert parser._actions
    described = option_help()
    for action in parser._actions:
        words = " ".join(action.option_strings or [action.dest])
        if action.choices and not action.option_strings:
            for one in action._choices_actions:
                assert re.match(r"[A-Z]\w+ \w+", one.help), one.dest
            continue
        text = described[words.removeprefix("--")] if action.help == argparse.SUPPRESS else action.help
        assert re.match(r"[A-Z][\w.-]+ \S+", text or ""), f"{words}: {text}"
        assert text.endswith(".") == (". " in text), f"{words}: {text}"


def test_run_help_comes_from_callback_docstring(capsys):
    """It's read from the source without importing it; a missing entry would leave an option without help."""
    described = option_help()
    assert set(described) >= set(run_command.option_names())
    text = " ".join((ModelProfCallback.__doc__ or "").split())
    for name in ("active", "dirpath", "unit"):
        first = described[name].partition(" (default")[0].partition(". ")[0]
        assert first in text, name
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "--with_stack BOOL Record Python stacks; windows become much slower (default: false)" in out
    assert "less than 5% of the elapsed loop time" in out


def test_every_cli_module_is_a_command_or_shared():
    shared = {"__init__", "main", "completion", "arguments", "option_help", "output", "import_profiles"}
    files = {path.stem for path in Path(commands.__file__).parent.glob("*.py")} - shared
    assert files == set(commands.COMMANDS)


# Run selection


def test_report_uses_and_names_newest_run(runs, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    assert main(["report"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"This is {Path('c/modelprof')}, the newest of 4 runs in the current directory." in out


@pytest.fixture
def folds(runs, tmp_path):
    """Three fits and two validation loops of one callback, one after the other."""
    places = ["", "fit_2", "fit_3", "validate", "validate_2"]
    for number, place in enumerate(places):
        folder = tmp_path / "prof" / place
        shutil.copytree(runs / "a" / "modelprof", folder, dirs_exist_ok=True)
        run = json.loads((folder / "run.json").read_text())
        run["info"]["created"] = f"2026-03-0{number + 1}T10:00:00.000000+00:00"
        (folder / "run.json").write_text(json.dumps(run))
    return tmp_path


def test_list_shows_all_fits_of_one_callback(folds, capsys):
    for folder, places in (
        (folds, ["prof/fit_3", "prof/fit_2", "prof"]),
        (folds / "prof", ["fit_3", "fit_2", "."]),
    ):
        assert main(["list", str(folder)]) == 0
        assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == places


def test_report_and_compare_use_newest_fit_in_folder(folds, runs, capsys):
    newest = folds / "prof" / "fit_3"
    for folder in (folds, folds / "prof", newest):
        assert main(["report", str(folder), "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["summary"]["run"]["created"].startswith("2026-03-03")
    first = str(folds / "prof" / "run.json")
    for folder in (folds, folds / "prof"):
        assert main(["compare", first, str(folder)]) in (0, 3, 4)
        assert f"This is {newest}, the newest of 3 runs" in " ".join(capsys.readouterr().out.split())
    assert main(["compare", str(newest), str(folds)]) == 1
    assert "the same run is given twice" in capsys.readouterr().err


def test_printed_full_command_names_same_run(folds, capsys):
    for given, printed in ((folds, folds / "prof" / "fit_3"), (folds / "prof" / "run.json",) * 2):
        assert main(["report", str(given)]) == 0
        assert f"lightning-modelprof report {printed} --full" in capsys.readouterr().out


def test_list_explains_invalid_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for name, problem in (("nope", "no such directory"), ("file", "not a directory")):
        assert main(["list", str(tmp_path / name)]) == 1
        assert f"lightning-modelprof: {problem}: {tmp_path / name}\n" == capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("report", "a", "--full"), ("report", "a", "--json", "-"), ("list",)])
def test_closed_pipe_ends_command_quietly(runs, arguments):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "lightning_modelprof", *arguments],
            cwd=runs,
            stdout=writing,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
        )
    finally:
        os.close(writing)
    assert ended.stderr == b""
    assert ended.returncode == 141


def test_folder_without_runs_is_an_error(tmp_path, capsys):
    for command in ("report", "open", "list"):
        assert main([command, str(tmp_path)]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert str(tmp_path) in error


def test_list_prints_one_line_per_run(runs, capsys):
    assert main(["list", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == [
        f"c{os.sep}modelprof",
        f"b{os.sep}modelprof{os.sep}fit_2",
        f"b{os.sep}modelprof",
        f"a{os.sep}modelprof",
    ]
    for line in lines:
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d  Net +[\d.,]+ ± [\d.,]+ steps/s  +[A-Z -]+  ", line)
        assert len(line.rpartition("  ")[0]) <= 86


def test_damaged_run_does_not_hide_others(runs, tmp_path, capsys):
    shutil.copytree(runs / "a", tmp_path / "a")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    assert main(["list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("broken: ")


def test_list_ignores_hidden_folders_and_packages(runs, tmp_path, capsys):
    for name in (".cache", "node_modules", "real"):
        shutil.copytree(runs / "a", tmp_path / name)
    assert main(["list", str(tmp_path)]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.endswith(f"real{os.sep}modelprof")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("command", ["report", "open", "list"])
def test_slow_search_prints_progress(tmp_path, monkeypatch, command):
    """The fake search runs until the line is printed, and the delay before the line is 0."""
    monkeypatch.setattr("lightning_modelprof.show.progress._WAIT_S", 0)
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)

    def walk(folder, onerror):
        while "looking" not in shown.getvalue():
            time.sleep(0.001)
        return iter([])

    monkeypatch.setattr("os.walk", walk)
    assert main([command, str(tmp_path)]) == 1
    assert shown.getvalue().startswith(f"looking for runs in {tmp_path} ...\n")


# Output


def test_brief_is_one_line(runs, tmp_path, capsys):
    assert main(["report", str(runs / "a"), "--brief"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "steps/s" in out
    (tmp_path / "trace.json").write_text(TRACE)
    assert main(["analyze", str(tmp_path / "trace.json"), "--brief"]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_writing_one_file_prints_one_line(runs, tmp_path, capsys):
    for option in ("--html", "--json"):
        file = tmp_path / f"out{option[1:]}"
        assert main(["report", str(runs / "a" / "modelprof"), option, str(file)]) == 0
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("", f"wrote {file}\n")
        assert file.stat().st_size > 1000


def test_open_creates_missing_page_and_starts_browser(runs, tmp_path, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    shutil.copytree(runs / "a", tmp_path / "a")
    page = tmp_path / "a" / "modelprof" / "report.html"
    page.unlink()
    assert main(["open", str(tmp_path)]) == 0
    assert opened == [page.as_uri()]
    assert page.stat().st_size > 10_000, "made anew"
    assert str(page) in capsys.readouterr().out
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    assert main(["open", str(tmp_path)]) == 0
    assert f"No browser found. Open this page: {page}" in capsys.readouterr().out


@pytest.mark.parametrize("packed", [False, True])
def test_analyze_reads_trace_from_stdin(tmp_path, packed):
    import gzip  # noqa: PLC0415

    data = gzip.compress(TRACE.encode()) if packed else TRACE.encode()
    result = subprocess.run(
        [sys.executable, "-m", "lightning_modelprof", "analyze", "-", "--json", "-"],
        input=data,
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    assert raw_rows(json.loads(result.stdout)["tables"]["operators"])[0]["name"] == "aten::mm"


# compare


def test_stages_are_compared_with_first_run(runs, capsys):
    paths = [str(runs / name) for name in "abc"]
    assert main(["compare", *paths, "--json", "-"]) == 0
    stages = raw_rows(json.loads(capsys.readouterr().out)["tables"]["stages"])
    assert [row["run"] for row in stages] == paths
    assert stages[0]["times_as_fast"] is None
    for row in stages[1:]:
        ratio = stages[0]["batch_cost_ns"] / row["batch_cost_ns"]
        assert row["times_as_fast"] == pytest.approx(ratio)
        assert row["ips"] == pytest.approx(1e9 / row["batch_cost_ns"])
        assert row["gpu_busy"] is None
        assert row["peak_bytes"] > 1e6
        assert row["verdict"]
    assert main(["compare", *paths]) == 0
    assert "Stages" in capsys.readouterr().out


def test_same_run_twice_is_rejected(runs, capsys):
    assert main(["compare", *(str(runs / name) for name in "aba")]) == 1
    assert "the same run is given twice" in capsys.readouterr().err


def test_compare_prints_markdown(runs, capsys):
    code = main(["compare", str(runs / "a"), str(runs / "b"), "--markdown"])
    assert code in (0, 3, 4)
    out = capsys.readouterr().out
    assert out.startswith("## ")
    assert "\x1b" not in out
    assert re.search(r"^\| Metric \| before \| after \| change \(%\) \|", out, re.MULTILINE)
    assert main(["compare", *(str(runs / name) for name in "abc"), "--markdown"]) == 0
    assert re.search(r"^\| run \| time per step", capsys.readouterr().out, re.MULTILINE)


# run

SCRIPT = """
import sys
import torch
from lightning.pytorch import LightningModule, Trainer

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch):
        return self.layer(torch.ones(2, 2)).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

if __name__ == "__main__":
    print("given", *sys.argv[1:], flush=True)
    Trainer(accelerator="cpu", max_epochs=1, enable_progress_bar=False, logger=False,
            enable_checkpointing=False).fit(Net(), [0] * 30)
    sys.exit(7)
"""

WITHOUT_TRAINER = """
import os, sys

print("given", *sys.argv[1:], "asked", os.environ["LIGHTNING_MODELPROF"])
sys.exit(7)
"""
"""Imports neither torch nor Lightning, which take seconds."""


def run_in(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    environment.pop("LIGHTNING_MODELPROF", None)
    return subprocess.run(
        [sys.executable, "-m", "lightning_modelprof", "run", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_run_profiles_unchanged_script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--active", "3", "--report.terminal", "false", "--dirpath", "out"]
    result = run_in(tmp_path, *options, "train.py", "--lr", "3")
    assert result.returncode == 7, result.stderr
    assert "given --lr 3" in result.stdout
    saved = json.loads((tmp_path / "out" / "run.json").read_text())["info"]["config"]
    assert (saved["active"], saved["terminal"]) == (3, False)
    assert "created no Lightning Trainer" not in result.stderr


@pytest.mark.parametrize("how", [["train.py"], ["-m", "train"]], ids=["script", "module"])
def test_script_without_trainer_gets_message(tmp_path, how):
    (tmp_path / "train.py").write_text(WITHOUT_TRAINER)
    result = run_in(tmp_path, "--active", "3", "--report.terminal", "false", *how, "--lr", "3")
    assert result.returncode == 7, result.stderr
    assert result.stdout == "given --lr 3 asked active=3,report.terminal=false\n"
    [line] = result.stderr.splitlines()
    assert f"{how[-1]} created no Lightning Trainer, so nothing was measured" in line


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["no_such.py"], 1, "no such script: no_such.py"),
        (["--active", "-1", "train.py"], 1, "active: expected an integer of at least 0, or None, got -1"),
        (["--report.views", "[devcie]", "train.py"], 1, "Did you mean 'device'?"),
        ([], 2, "expected a script or -m MODULE"),
        (["--actve", "3", "train.py"], 2, "--actve"),
    ],
)
def test_invalid_run_is_rejected_before_script_starts(tmp_path, arguments, code, words):
    (tmp_path / "train.py").write_text("print('it ran')")
    result = run_in(tmp_path, *arguments)
    assert (result.returncode, "it ran" in result.stdout) == (code, False)
    assert words in result.stderr


def test_every_callback_argument_is_an_option():
    names = {name.rpartition(".")[2] for name in run_command.option_names()}
    everything = {name for name in FIELDS if name not in GROUPS} | set(GROUP_OF)
    assert names == everything - {"samples_fn", "flop_formulas"}, "all but functions"
    assert make_parser().parse_args(["run", "--wait", "3", "a.py"]).rest == ["a.py"]


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_script(tmp_path, number):
    (tmp_path / "train.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(41))\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs ignore it
        "print('ready', flush=True)\n"
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    sys.exit(42)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_modelprof", "run", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.2)
        if number == signal.SIGINT:  # a terminal sends it to the whole group
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.wait(30) == (42 if number == signal.SIGINT else 41)


@pytest.mark.parametrize("arguments", [["report"], ["open"], ["compare", "other"]], ids=" ".join)
@pytest.mark.parametrize("asked", ["", "run.json"])
def test_run_that_links_to_itself_is_an_error(tmp_path, capsys, monkeypatch, arguments, asked):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    for folder in (tmp_path, tmp_path / "other"):
        (folder / "run.json").symlink_to("run.json")
    assert main([*arguments, str(tmp_path / asked)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "run.json" in error
    assert "symbolic links" in error
    assert "PosixPath" not in error


HARD_TO_TYPE = "my runs; it's $HOME & more"


def test_printed_commands_can_be_pasted(tmp_path, capsys, monkeypatch):
    """Even if a path has spaces and quotes: a shell recovers the original arguments."""
    folder = tmp_path / HARD_TO_TYPE
    monkeypatch.chdir(tmp_path)
    run_fit(folder, dirpath=folder / "run", terminal=True, trainer={"logger": TensorBoardLogger(folder)})
    assert main(["report", str(folder / "run")]) == 0
    assert main(["tensorboard", str(folder / "run"), "--logdir", str(folder / "logs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [line.partition(": ")[2] for line in lines if line.startswith(("all tables: ", "dashboard: "))]
    commands += [line.partition("tab: ")[2] for line in lines if line.startswith("Open the Model Profile")]
    assert [shlex.split(one) for one in commands] == [
        ["lightning-modelprof", "report", f"{HARD_TO_TYPE}/run", "--full"],
        ["tensorboard", "--logdir", HARD_TO_TYPE],
        ["lightning-modelprof", "report", str(folder / "run"), "--full"],
        ["tensorboard", "--logdir", str(folder / "logs")],
    ]
