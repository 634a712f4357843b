"""The report as one page: a single file that needs no network and makes no requests."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from contextlib import suppress
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemBytecodeCache, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket

from lightning_modelprof.errors import printable
from lightning_modelprof.report.model import Report
from lightning_modelprof.show.html.document import as_script, page_document, table_data
from lightning_modelprof.show.html.head import (
    absent_lines,
    fact_lines,
    file_lines,
    found_views,
    key_figures,
    note_lines,
    other_rules,
    setting_lines,
    verdict_view,
)
from lightning_modelprof.show.layout import part_absent
from lightning_modelprof.show.step_card import card_svg

SHARED_FOLDER: Final = Path(__file__).parent

_MODULES: Final = (
    "dom.js",
    "cells.js",
    "columns.js",
    "copying.js",
    "places.js",
    "rows.js",
    "table.js",
    "chart.js",
    "flame.js",
    "step_card.js",
    "document.js",
)

SHARED_FILES: Final = ("parts.css", *_MODULES)
"""Styles and modules for pages that show parts; ``document.js`` calls the others."""

_LEFT_OUT: Final = re.compile(
    r"^import .*\n|^export (?=class|function|async|const)|^ *//.*\n|^ */\*\*(?:[^*]|\*(?!/))*\*/\n",
    re.MULTILINE,
)


def render_html(report: Report) -> bytes:
    """Write the whole report as one HTML file.

    The file contains its styles, script and data, and a policy that keeps the browser from loading, sending
    or running anything else. Every text of the report is escaped. The script draws charts, flame graphs and
    tables from one JSON document; without it, the page says what it leaves out.

    Returns:
        UTF-8, the same bytes for the same report.
    """
    shown = [table for table in part_absent(report.tables)[0] if table.rows]
    tables = [table_data(table, is_folded=table.is_detail) for table in shown]
    document = page_document(report.charts, report.flames, tables)
    files = file_lines(report.summary)
    script = _script()
    page = (
        _environment()
        .get_template("report.html.j2")
        .render(
            title=printable(report.title),
            policy=_policy(script),
            style=_text("parts.css") + _text("report.css"),
            script=script,
            verdict=verdict_view(report.verdict),
            findings=found_views(report.findings),
            others=other_rules(report.findings),
            card=card_svg(report),
            figures=key_figures(report.summary),
            facts=fact_lines(report),
            settings=setting_lines(report),
            document=document,
            data=as_script(document),
            absent=absent_lines(report.tables),
            notes=note_lines(report.notes),
            files=files,
            has_text=any(name == "report.txt" for name, _ in files),
            is_trace=bool(report.summary.traces),
        )
    )
    # An unpaired surrogate, as in some file names, has no UTF-8 form.
    return page.encode("utf-8", "backslashreplace")


def part_macros() -> Any:
    """Return the macros of ``parts.html.j2`` as functions, which escape their texts."""
    return _environment().get_template("parts.html.j2").module


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(SHARED_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        bytecode_cache=_template_cache(),
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _template_cache() -> FileSystemBytecodeCache | None:
    if sys.dont_write_bytecode:
        return None
    folder = Path(cache_from_source(__file__)).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return _TemplateCache(str(folder))


class _TemplateCache(FileSystemBytecodeCache):
    """Compiles templates again if it can't cache them."""

    def load_bytecode(self, bucket: Bucket) -> None:
        with suppress(Exception):  # a damaged file
            super().load_bytecode(bucket)

    def dump_bytecode(self, bucket: Bucket) -> None:
        with suppress(Exception):  # a full disk
            super().dump_bytecode(bucket)


@cache
def _text(name: str) -> str:
    return (SHARED_FOLDER / name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    """Join all modules, because a page in a single file has nowhere to import from.

    The joined modules share all names, so imports, the word ``export`` and comments are left out. No two
    modules may give the same name to different things; the browser refuses such a script.
    """
    return _LEFT_OUT.sub("", "".join(map(_text, (*_MODULES, "report.js"))))


def _policy(script: str) -> str:
    """Load nothing from anywhere and run only the page's own script, identified by its hash.

    Source: Content Security Policy Level 3, W3C.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline';"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )
