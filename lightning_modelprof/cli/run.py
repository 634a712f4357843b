"""``lightning-modelprof run``: profile an unchanged script."""

from __future__ import annotations

import argparse
import ast
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.config.options import DEFAULTS, GROUPS, SWITCH, ProfileConfig
from lightning_modelprof.errors import ConfigError, printable
from lightning_modelprof.lightning.from_environment import SEEN

HELP = "Profile a script without changing it"
DESCRIPTION = (
    "Run a Python script, or a module with -m, and add a ModelProfCallback to each of its Trainers. Put"
    " options before the script; everything after it is passed to the script."
)
EXAMPLE = "Example: lightning-modelprof run --active 10 --report.terminal full train.py"
USAGE = "%(prog)s [options] SCRIPT [ARGUMENTS]\n       %(prog)s [options] -m MODULE [ARGUMENTS]"

_FROM_PYTHON = ("samples_fn", "inspect.flop_formulas")
"""Functions, which can't be passed on a command line."""

_IN_HELP = ("timer_only", "active", "stop_after_profile", "with_stack", "flops", "dirpath", "report.terminal")
"""Options with a description; the others are only named, to keep the help short."""

_METAVARS = {"bool": "BOOL", "bool | None": "BOOL", "int": "N", "int | None": "N"}


class _HelpFormatter(argparse.HelpFormatter):
    """Name the argument of ``-m``, which argparse would show as dots, and keep a text's line breaks."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, **{"max_help_position": 30, **settings})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n".join(fill(line, width, indent) for line in text.splitlines())

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return "MODULE" if action.dest == "module" else super()._format_args(action, default_metavar)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add one option per callback argument, then the script."""
    command.formatter_class = _HelpFormatter
    group = command.add_argument_group("ModelProfCallback arguments, as YAML values")
    described = option_help()
    for name, kind in _option_types().items():
        text = described.get(name, "").replace("%", "%%") if name in _IN_HELP else argparse.SUPPRESS
        group.add_argument(f"--{name}", metavar=_METAVARS.get(kind, "VALUE"), dest=f"set {name}", help=text)
    command.epilog = f"{_other_options()}\n{EXAMPLE}"
    command.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="MODULE",
        help="Run a module, like python -m",
    )
    command.add_argument(
        "rest",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [ARGUMENTS]",
        help="Script to run, and its arguments",
    )
    command.set_defaults(check=_check)


def _other_options() -> str:
    """List the options without a description, by group."""
    others: dict[str, list[str]] = {}
    for name in _option_types():
        if name not in _IN_HELP:
            group, _, own = name.rpartition(".")
            others.setdefault(group, []).append(own)
    own = ", ".join(f"--{name}" for name in others.pop(""))
    groups = "; ".join(f"--{group}. with {', '.join(names)}" for group, names in others.items())
    return f"More, described in configs/default.yaml and help(ModelProfCallback): {own}; {groups}."


def option_names() -> list[str]:
    """Names of all options; grouped ones are like ``report.terminal``."""
    return list(_option_types())


def _option_types() -> dict[str, str]:
    types: dict[str, str] = {}
    for field in fields(ProfileConfig):
        if field.name in GROUPS:
            its = {f"{field.name}.{one.name}": str(one.type) for one in fields(GROUPS[field.name])}
        else:
            its = {field.name: str(field.type)}
        types |= {name: kind for name, kind in its.items() if name not in _FROM_PYTHON}
    return types


def _check(options: argparse.Namespace) -> None:
    if not options.module and not options.rest:
        raise ValueError(
            "expected a script or -m MODULE, got nothing. Write lightning-modelprof run train.py"
        )


_WRONG_ARGUMENTS: Final = 2
"""Exit code of a program that rejects an argument."""


def _is_ours(text: str) -> bool:
    return text.startswith("--") and text.partition("=")[0].removeprefix("--") in option_names()


def run(options: argparse.Namespace) -> int:
    """Run the script and return its exit code."""
    what = (options.module or options.rest)[0]
    if not options.module and not Path(what).is_file():
        raise ConfigError(f"no such script: {what}. Check the path, and put options before the script.")
    given = {name: getattr(options, f"set {name}") for name in option_names()}
    asked = ",".join(f"{name}={value}" for name, value in given.items() if value is not None)
    if asked:
        from lightning_modelprof.config.checks import RUN_COMMAND
        from lightning_modelprof.config.sources import parse_asked_for

        parse_asked_for(asked, RUN_COMMAND)
    program = [sys.executable, *(["-m", *options.module] if options.module else options.rest)]
    with tempfile.TemporaryDirectory(prefix="modelprof_") as folder:
        seen = Path(folder) / "trainer"
        code = _run(program, {**os.environ, SWITCH: asked or "1", SEEN: str(seen)})
        late = [text for text in program[2:] if _is_ours(text)]
        if code == _WRONG_ARGUMENTS and late:
            line = (
                f"lightning-modelprof: {late[0]} was passed to {what}. Put options of run before the script."
            )
            print(printable(line), file=sys.stderr)
        elif not seen.exists():
            line = (
                f"lightning-modelprof: {what} created no Lightning Trainer, so nothing was measured. To"
                " profile a loop of your own, use LoopProfiler, or analyze a torch.profiler trace with"
                " lightning-modelprof analyze."
            )
            print(printable(line), file=sys.stderr)
    return code


def _run(program: list[str], environment: dict[str, str]) -> int:
    """Run a program in the foreground, pass signals on to it and return its exit code."""
    running: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, _: object) -> None:
        for process in running:
            process.send_signal(number)

    # Ctrl-C reaches the script too and ends it.
    handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: hand_on}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        running.append(subprocess.Popen(program, env=environment))
        code = running[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


_CALLBACK: Final = "lightning_modelprof.lightning.callback"
_GROUPS: Final = "lightning_modelprof.config.options"

_ENTRY: Final = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
_DEFAULT: Final = "Default: "
_NEXT_SENTENCE: Final = re.compile(r"(?<=\.) (?=[A-Z])")


def option_help() -> dict[str, str]:
    """Help of each option, such as ``active`` or ``report.terminal``, with its default."""
    entries = _entries(_CALLBACK, "ModelProfCallback", "Args")
    found = {name: _shortened(text, getattr(DEFAULTS, name)) for name, text in entries.items()}
    for group, kind in GROUPS.items():
        values = getattr(DEFAULTS, group)
        for name, text in _entries(_GROUPS, kind.__name__, "Attributes").items():
            found[f"{group}.{name}"] = _shortened(text, getattr(values, name))
    return found


def _entries(module: str, name: str, section: str) -> dict[str, str]:
    """Argument → text, from one section of a class's docstring."""
    spec = find_spec(module)
    source = None if spec is None else getattr(spec.loader, "get_source", lambda _: None)(module)
    for node in ast.parse(source or "").body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            part = (ast.get_docstring(node) or "").partition(f"{section}:\n")[2].partition("\n\n")[0]
            return {key: " ".join(text.split()) for key, text in _ENTRY.findall(part)}
    return {}


def _shortened(text: str, default: Any) -> str:
    sentences = _NEXT_SENTENCE.split(text)
    notation = {"True": "true", "False": "false", "None": "null"}
    in_words = next((one.removeprefix(_DEFAULT) for one in sentences if one.startswith(_DEFAULT)), None)
    value = notation.get(str(default), default) if in_words is None else in_words.removesuffix(".")
    shown = f"{sentences[0].removesuffix('.')} (default: {value})"
    for python, yaml in notation.items():
        shown = re.sub(rf"\b{python}\b", yaml, shown)
    return shown
