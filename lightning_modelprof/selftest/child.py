"""Run one check in this process: ``python -m lightning_modelprof.selftest.child NAME ...``."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.errors import describe_error, printable
from lightning_modelprof.selftest.comparison import Compared, Skip
from lightning_modelprof.selftest.machine import facts, scrubbed, told

RESULTS: Final = "results.jsonl"

_FRAME: Final = re.compile(r'lightning_modelprof[\\/]([\w\\/]+)\.py", line (\d+)')


def function_of(path: str) -> Callable[[Any], Iterator[Compared]]:
    """Import the check ``module:function``."""
    module, _, name = path.partition(":")
    found: Callable[[Any], Iterator[Compared]] = getattr(import_module(module), name)
    return found


def places(text: str) -> str:
    """This package's innermost lines in a traceback, such as ``engine.session:120``."""
    found = [
        f"{module.replace(chr(92), '/').replace('/', '.')}:{line}" for module, line in _FRAME.findall(text)
    ]
    return " < ".join(dict.fromkeys(reversed(found[-4:])))


def main() -> None:
    """Write each comparison immediately, to keep those before a crash."""
    parser = argparse.ArgumentParser()
    parser.add_argument("check")
    parser.add_argument("--device")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(options.seconds - 1, 0.5))

    def write(**line: Any) -> None:
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            with (options.folder / RESULTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    try:
        if options.check == "machine":
            write(facts=facts(options.device))
            return
        from lightning_modelprof.selftest.lab import Lab  # noqa: PLC0415 -- reports a failing import

        for one in function_of(options.check)(Lab(options.device, options.folder)):
            write(comparison=one.as_json())
    except Skip as reason:
        write(skip=scrubbed(str(reason)))
    except Exception as error:
        traceback.print_exc()
        # Errors of "machine" only reach the terminal, where the whole message helps.
        said = printable(describe_error(error)) if options.check == "machine" else told(error)
        write(error=f"raised {said}", place=places(traceback.format_exc()))
        sys.exit(1)


if __name__ == "__main__":
    main()
