"""Send a command's report to the terminal or to files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_modelprof.cli.arguments import asks_for_tables
from lightning_modelprof.errors import ArchiveError, as_path, printable
from lightning_modelprof.report.model import Report
from lightning_modelprof.run.opening import write_atomically


def put_out(report: Report, options: argparse.Namespace, last_words: Sequence[str] = ()) -> None:
    """Print the report, or write it to the requested files.

    Args:
        options: parsed arguments, of which ``json``, ``html``, ``full`` and ``brief`` apply.

    Raises:
        ArchiveError: when a file can't be written.
    """
    page = getattr(options, "html", None)  # compare has none
    if page is not None:
        from lightning_modelprof.show.html.page import render_html

        write_file(page, render_html(report))
    if options.json is not None:
        from lightning_modelprof.show.document import render_json

        if options.json == "-":
            sys.stdout.buffer.write(render_json(report))
        else:
            write_file(options.json, render_json(report))
    elif page is None:
        from lightning_modelprof.show.terminal.terminal import print_lines, print_report

        if getattr(options, "brief", False):
            from lightning_modelprof.show.findings import brief_lines

            print_lines(brief_lines(report))
        else:
            print_report(report, full=options.full or asks_for_tables(options), last_words=last_words)


def write_file(path: str, data: bytes) -> None:
    """Write a file and print a line about it.

    Raises:
        ArchiveError: when it can't be written.
    """
    target = as_path(path, ArchiveError)
    if not target.parent.is_dir():  # a typo shouldn't create directories
        raise ArchiveError(f"can't write {target}: no such directory: {target.parent}")
    try:
        write_atomically(target, data)
    except OSError as error:
        raise ArchiveError(f"can't write {target}: {error.strerror}") from None
    print(printable(f"wrote {target}"), file=sys.stderr)
