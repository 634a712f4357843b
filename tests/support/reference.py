"""Generate definitions in docs/report.md and the JSON Schema of report.json.

``python -m tests.support.reference`` writes both; a new table gets its section after the one before it.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap

import msgspec

from lightning_modelprof.report.definitions import sections
from lightning_modelprof.show.document import Document
from tests.support.fits import ROOT

PAGE = ROOT / "docs" / "report.md"
SCHEMA = ROOT / "lightning_modelprof" / "report.schema.json"
WIDTH = 140


def with_definitions(page):
    """Update the generated parts of the page, and keep the rest."""
    before = ""
    for section in sections():
        begin, end = f"<!-- generated: {section.key} -->\n", "\n<!-- end -->\n"
        block = f"{begin}\n{wrapped(section.markdown)}\n{end}"
        known = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if known.search(page):
            page = known.sub(lambda _, block=block: block, page)
        else:
            place = page.index("\n## ", page.index(before))
            page = f"{page[:place]}\n## {section.heading}\n\n{block}{page[place:]}"
        before = begin
    return page


def wrapped(markdown):
    """Wrap lines to a readable length, except rows of tables and formulas."""
    lines = []
    for line in markdown.splitlines():
        indent = "  " if line.startswith("- ") else ""
        is_text = line and not line.startswith(("|", "    "))
        options = {"subsequent_indent": indent, "break_long_words": False, "break_on_hyphens": False}
        lines += textwrap.wrap(line, WIDTH, **options) if is_text else [line]
    return "\n".join(lines)


def report_schema():
    schema = msgspec.json.schema(Document)
    for one in schema["$defs"].values():
        if "description" in one:
            text = inspect.cleandoc(one["description"])
            one["description"] = text.replace("``", "`").replace("None", "null")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "lightning-modelprof report"}
    return json.loads(json.dumps(head | schema))  # with lists for tuples


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(report_schema(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(with_definitions(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
