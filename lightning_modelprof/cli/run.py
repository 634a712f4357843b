"""``lightning-modelprof run``: profile a script as it is."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

from lightning_modelprof.config.options import FIELDS, GROUPS, SWITCH
from lightning_modelprof.errors import ConfigError, one_line, quoted
from lightning_modelprof.lightning.from_environment import SEEN

HELP = "profile a script without changing it"
DESCRIPTION = (
    "Runs a Python script, or a module with -m, with a ModelProfCallback in each of its Trainers. Options"
    " stand before the script; what follows it is the script's own."
)
EPILOG = (
    "Each argument of ModelProfCallback is an option, such as --active 10 or --report.terminal full."
    " docs/usage.md and help(lightning_modelprof.ModelProfCallback) say what they do."
)
USAGE = "%(prog)s [options] SCRIPT [ARGUMENTS]\n       %(prog)s [options] -m MODULE [ARGUMENTS]"

_FROM_PYTHON = ("samples_fn", "inspect.flop_formulas")
"""Functions, which no command line can give."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Those of ``run``: one option for each argument of the callback."""
    group = command.add_argument_group("arguments of ModelProfCallback, in YAML's notation")
    for name in option_names():
        group.add_argument(f"--{name}", metavar="VALUE", dest=f"set {name}")
    command.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="MODULE",
        help="run a module, as python -m does",
    )
    command.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the script and its arguments"
    )
    command.set_defaults(check=_check)


def option_names() -> list[str]:
    """Each argument by its name, those of groups as ``report.terminal``."""
    names = []
    for name in FIELDS:
        members = [f"{name}.{field.name}" for field in fields(GROUPS[name])] if name in GROUPS else [name]
        names += [one for one in members if one not in _FROM_PYTHON]
    return names


def _check(options: argparse.Namespace) -> None:
    """Refuse a command without a script.

    Raises:
        ValueError: with what to write.
    """
    if not options.module and not options.rest:
        raise ValueError("run: expected a script or -m MODULE. Write: lightning-modelprof run train.py")


def run(options: argparse.Namespace) -> int:
    """Run the script; returns its exit code."""
    what = (options.module or options.rest)[0]
    if not options.module and not Path(what).is_file():
        raise ConfigError(f"{quoted(what)}: expected a Python script, got no such file. Check the path.")
    given = {name: getattr(options, f"set {name}") for name in option_names()}
    asked = ",".join(f"{name}={value}" for name, value in given.items() if value is not None)
    if asked:
        from lightning_modelprof.config.sources import parse_asked_for

        parse_asked_for(asked, "lightning-modelprof run")
    program = [sys.executable, *(["-m", *options.module] if options.module else options.rest)]
    with tempfile.TemporaryDirectory(prefix="modelprof_") as folder:
        seen = Path(folder) / "trainer"
        code = _run(program, {**os.environ, SWITCH: asked or "1", SEEN: str(seen)})
        if not seen.exists():
            line = (
                f"lightning-modelprof: {what} made no Lightning Trainer, so nothing was measured. Record a"
                " loop of your own with torch.profiler, and give the trace to lightning-modelprof analyze."
            )
            print(one_line(line), file=sys.stderr)
    return code


def _run(program: list[str], environment: dict[str, str]) -> int:
    """Run a program in the foreground: it gets the signals, and its exit code is ours."""
    running: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, _: object) -> None:
        for process in running:
            process.send_signal(number)

    # Ctrl-C goes to the script as well, which ends by it.
    handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: hand_on}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        running.append(subprocess.Popen(program, env=environment))
        code = running[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
