"""``lightning-modelprof open``: show a saved run's page in the browser."""

from __future__ import annotations

import argparse

from lightning_modelprof.cli.report import PATH_HELP
from lightning_modelprof.errors import printable

HELP = "Open a saved run's page in the browser"
DESCRIPTION = (
    "Open a saved run's report.html in the browser. If a directory has more than one run, open the newest."
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", nargs="?", default=".", metavar="DIR", help=PATH_HELP)


def run(options: argparse.Namespace) -> int:
    """Open the page, writing it first if the run has none."""
    import webbrowser

    from lightning_modelprof.run.locate import newest_run
    from lightning_modelprof.show.progress import show_waiting

    with show_waiting(f"looking for runs in {options.path}"):
        file, choice = newest_run(options.path)
    page = file.with_name("report.html").absolute()
    if not page.is_file():
        from lightning_modelprof.cli.output import write_file
        from lightning_modelprof.reading import read_report
        from lightning_modelprof.show.html.page import render_html

        write_file(str(page), render_html(read_report(file)))
    if choice:
        print(printable(choice))
    try:
        is_open = webbrowser.open(page.as_uri())
    except (webbrowser.Error, OSError):
        is_open = False
    print(printable(str(page) if is_open else f"No browser found. Open this page: {page}"))
    return 0
