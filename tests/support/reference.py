"""The generated parts of docs/report.md, which are the definitions that stand in the package.

``python -m tests.support.reference`` writes them; a new table gets its section after the one before it.
"""

from __future__ import annotations

import re
import textwrap

from lightning_modelprof.report.definitions import sections
from tests.support.fits import ROOT

PAGE = ROOT / "docs" / "report.md"
WIDTH = 140


def with_definitions(page):
    """The page with its generated parts as they are to be; what stands around them is not touched."""
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
    """Lines of a length that can be read; rows of tables and formulas stay as they are."""
    lines = []
    for line in markdown.splitlines():
        indent = "  " if line.startswith("- ") else ""
        is_text = line and not line.startswith(("|", "    "))
        options = {"subsequent_indent": indent, "break_long_words": False, "break_on_hyphens": False}
        lines += textwrap.wrap(line, WIDTH, **options) if is_text else [line]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(with_definitions(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
