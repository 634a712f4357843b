"""The command line's entry point. Imports neither torch nor lightning."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, NoReturn

from lightning_modelprof import __version__
from lightning_modelprof.cli import COMMANDS
from lightning_modelprof.errors import ModelProfError, did_you_mean, printable, quoted

_EXAMPLES: Final = """examples:
  lightning-modelprof run train.py                     Profile a script without changing it
  lightning-modelprof report                           Show the newest run in this directory
  lightning-modelprof open lightning_logs/version_0    Open a run's page in the browser
  lightning-modelprof list                             List all runs in this directory
  lightning-modelprof compare before after             Compare two runs
  lightning-modelprof analyze trace.json.gz            Analyze a torch.profiler trace
"""


_SIGPIPE: Final = 13
"""Missing on Windows."""


_COMMAND_OF_FILE: Final = {".py": "run", ".json": "analyze", ".gz": "analyze"}
"""Suffix of a file given in place of a command → the command for such files."""

_OUR_FILES: Final = ("run.json", "run.json.gz", "report.json")

_SHELLS: Final = ("bash", "zsh", "fish")

_NO_VALUE: Final = re.compile(r"argument (\S+): expected (?:one|at least one) argument")
_REWORDED: Final = (
    ("unrecognized arguments: (.*)", r"unexpected arguments: \1. Remove them, or quote a path with spaces."),
    (r"(argument .*): invalid choice: (.*) \(choose from (.*)\)", r"\1: expected one of \3, got \2."),
    ("the following arguments are required: (.*)", r"expected \1, got nothing."),
    ("(argument .*): not allowed with argument (.*)", r"\1: not allowed with \2. Remove one of them."),
)
"""argparse's message → replacement."""


class _Parser(argparse.ArgumentParser):
    """A parser with capitalized help, and terminal-safe errors that show what to write."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, add_help=False)
        self.add_argument("-h", "--help", action="help", help="Show this help and exit")

    def error(self, message: str) -> NoReturn:
        without = _NO_VALUE.fullmatch(message)
        name = "" if without is None else without[1].rpartition("/")[2]
        if name in self._option_string_actions:
            metavar = self._option_string_actions[name].metavar
            message = f"argument {name}: expected {metavar}, got nothing. Write {name} {metavar}."
        for theirs, ours in _REWORDED:
            message = re.sub(f"^{theirs}$", ours, message)
        super().error(printable(message))

    def check_options(self, given: Sequence[str]) -> None:
        """Refuse unknown options and suggest the nearest, before argparse reports a missing argument."""
        known = self._option_string_actions
        has_program = any(action.nargs == argparse.REMAINDER for action in self._actions)
        rest = iter(given)
        for text in rest:
            is_option = re.match("-[^0-9.]", text) is not None
            if text == "--" or (has_program and (not is_option or text == "-m")):
                return
            if not is_option:
                continue
            name, equals, _ = text.partition("=")
            meant = [action for option, action in known.items() if option.startswith(name)]
            if not meant:
                self.error(f"unknown option {quoted(name)}.{self._near(name)} See {self.prog} --help.")
            if meant[0].nargs is None and not equals:
                next(rest, None)

    def _near(self, name: str) -> str:
        options = {option.strip("-"): option for option in self._option_string_actions if len(option) > 2}
        near = did_you_mean(name.strip("-"), options, options)
        others = [one for one, its in _commands(make_parser()).items() if name in its._option_string_actions]
        return f" It's an option of {', '.join(others)}." if others else near


def make_parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="lightning-modelprof",
        usage="%(prog)s [options] COMMAND ...",
        description="Show where PyTorch Lightning training time goes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"lightning-modelprof {__version__}",
        help="Show the version and exit",
    )
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=_SHELLS,
        metavar="SHELL",
        help=f"Print the completion script for {', '.join(_SHELLS)} and exit",
    )
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", prog="lightning-modelprof"
    )
    for name in names:
        command = import_module(f"lightning_modelprof.cli.{name}")
        its = commands.add_parser(
            name,
            help=command.HELP,
            description=command.DESCRIPTION,
            epilog=getattr(command, "EPILOG", None),
            usage=getattr(command, "USAGE", None),
        )
        its.set_defaults(run=command.run, check=None)
        command.add_arguments(its)
    return parser


class _PrintCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _: Any, values: Any, __: Any = None) -> None:
        from lightning_modelprof.cli.completion import completion_script

        print(completion_script(values, parser, _commands(parser)), end="")
        parser.exit()


def _commands(parser: argparse.ArgumentParser) -> dict[str, Any]:
    [choices] = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    return choices


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, or 1 after one line about the error.

    ``compare`` has more exit codes, see ``build_compare.EXIT_CODES``; ``run`` returns its script's.
    """
    given = sys.argv[1:] if arguments is None else arguments
    # Skip a known command's siblings: importing them takes longer than parsing.
    is_command = bool(given) and given[0] in COMMANDS
    parser: Any = make_parser(given[:1] if is_command else COMMANDS)
    if given and not is_command and not given[0].startswith("-"):
        parser.error(_unknown_command(given[0]))
    if is_command:
        parser = _commands(parser)[given[0]]
    parser.check_options(given[1:] if is_command else given)
    options = parser.parse_args(given[1:] if is_command else given)
    if not is_command:
        parser.print_help()
        return 0
    options.command = given[0]
    try:
        if options.check is not None:
            options.check(options)
    except ValueError as error:
        parser.error(str(error))
    try:
        code = int(options.run(options))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except ModelProfError as error:
        print(f"lightning-modelprof: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # such as head, which has read enough
        _discard_output()
        return 128 + _SIGPIPE
    except OSError as error:
        reason = printable(error.strerror or str(error))
        print(f"lightning-modelprof: {options.command}: {reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"lightning-modelprof: {options.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _unknown_command(name: str) -> str:
    is_ours = os.path.basename(name) in _OUR_FILES  # noqa: PTH119  # importing pathlib is slow
    command = "report" if is_ours else _COMMAND_OF_FILE.get(os.path.splitext(name)[1])  # noqa: PTH122
    if command is not None:
        return f"expected a command, got {quoted(name)}. Write lightning-modelprof {command} {name}"
    return f"unknown command {quoted(name)}.{did_you_mean(name, COMMANDS)} Expected {', '.join(COMMANDS)}."


def _discard_output() -> None:
    """Keep Python's flush at exit from hitting the closed pipe."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
