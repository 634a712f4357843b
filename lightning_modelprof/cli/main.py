"""The command line: the door to the commands. Needs neither torch nor lightning."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, NoReturn

from lightning_modelprof import __version__
from lightning_modelprof.cli import COMMANDS
from lightning_modelprof.errors import ModelProfError, printable

_EXAMPLES: Final = """examples:
  lightning-modelprof run train.py                     Profile a script without changing it
  lightning-modelprof report                           Show the newest run in this directory
  lightning-modelprof open lightning_logs/version_0    Open a run's page in the browser
  lightning-modelprof list                             List all runs in this directory
  lightning-modelprof compare before after             Compare two runs
  lightning-modelprof analyze trace.json.gz            Analyze a torch.profiler trace
"""


_SIGPIPE: Final = 13
"""Windows has none."""


class _Parser(argparse.ArgumentParser):
    """A parser with capitalized help, whose errors are safe to print in a terminal."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, add_help=False)
        self.add_argument("-h", "--help", action="help", help="Show this help and exit")

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def make_parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="lightning-modelprof",
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
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, or 1 after one line on what went wrong.

    ``compare`` has more of them: see ``build_compare.EXIT_CODES``. ``run`` ends as its script does.
    """
    given = sys.argv[1:] if arguments is None else arguments
    # Of a command that is known the others need not be: importing them takes longer than parsing.
    parser = make_parser(given[:1] if given and given[0] in COMMANDS else COMMANDS)
    options = parser.parse_args(given)
    if options.command is None:
        parser.print_help()
        return 0
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


def _discard_output() -> None:
    """Have Python's own flush at exit find no closed pipe."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
