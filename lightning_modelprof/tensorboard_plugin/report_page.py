"""docs/report.md in pieces: sections, the terms that they define, and the rows of their tables.

In a section a **bold term** is defined by the sentences from the one that names it first up to the next one
that names another term.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

Render = Callable[[str], str]
"""Markdown to HTML."""

PLACES: Final = (
    Path(__file__).with_name("report.md"),  # in a wheel
    Path(__file__).parents[2] / "docs" / "report.md",  # in a checkout
)
TITLE: Final = "# Every figure of a report"
"""First line of the page; another package's file in the same place is not it."""


@dataclass(frozen=True, slots=True)
class Definition:
    """One definition.

    Attributes:
        heading: what is defined.
        html: of ours alone, safe to be shown as it is.
        anchor: of the section, and for a term # and its name: ``kernel-summary#occupancy``.
    """

    heading: str
    html: str
    anchor: str


@dataclass(slots=True)
class Section:
    """One section of the page.

    Attributes:
        heading: of it.
        lines: what stands in it, without the sections below it.
        terms: by their keys.
        rows: header and cells of each row of its tables.
    """

    heading: str
    lines: list[str] = field(default_factory=list)
    terms: dict[str, Definition] = field(default_factory=dict)
    rows: list[tuple[list[str], list[str]]] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        """How the section is called in links."""
        return anchor_of(self.heading)


def anchor_of(heading: str, term: str = "") -> str:
    """How a section, or a term in it, is called in links: ``kernel-summary#blocks-per-sm``."""
    return "#".join(key_of(part).replace("_", "-") for part in (heading, term) if part)


def key_of(label: str) -> str:
    """A label as part of a key: ``Blocks per SM`` → ``blocks_per_sm``, ``Ratio(%)`` → ``ratio``."""
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"\s*\(%\)", "", label.lower())).strip("_") or "percent"


def read_page() -> str | None:
    """The page; ``None`` where it is not installed. It is looked for in two places and nowhere else."""
    for place in PLACES:
        try:
            page = place.read_text(encoding="utf-8")
        except OSError:
            continue
        if page.startswith(TITLE):
            return page
    return None


def renderer() -> Render:
    """Makes HTML in which no HTML of the page's own gets through, and no link to a page that is not here."""
    import markdown  # type: ignore[import-untyped]  # noqa: PLC0415  # TensorBoard's start does not wait

    converter = markdown.Markdown(extensions=["tables"], lazy_ol=False)
    converter.preprocessors.deregister("html_block")
    converter.inlinePatterns.deregister("html")

    def render(text: str) -> str:
        converter.reset()
        return str(converter.convert(re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)))

    return render


def sections_of(page: str, render: Render) -> Iterator[Section]:
    """The sections in the order of the page, each with what it defines.

    Args:
        page: all of it.
        render: of :func:`renderer`.
    """
    parts = re.split(r"^#{1,3} (.+)$", page, flags=re.MULTILINE)[1:]
    for heading, body in zip(parts[::2], parts[1::2], strict=True):
        section = Section(heading.strip(), body.strip().splitlines())
        for block in blocks_of(section.lines):
            if block[0].startswith("|"):
                section.rows += [(_cells(block[0]), _cells(row)) for row in block[2:]]
            else:
                _add_terms(section, " ".join(line.strip() for line in block), render)
        yield section


def blocks_of(lines: list[str]) -> Iterator[list[str]]:
    """Paragraphs, items of lists, and tables."""
    block: list[str] = []
    for line in [*lines, ""]:
        if block and (not line.strip() or re.match(r"(- |\d+\. )", line)):
            yield block
            block = []
        if line.strip():
            block.append(line)


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def _add_terms(section: Section, text: str, render: Render) -> None:
    """The terms that ``text`` names first in its section; those of one sentence share a definition."""
    sentences = re.split(r"(?<=[.?!])\s+(?=[^a-z\s])", re.sub(r"^(- |\d+\. )", "", text))
    named = [re.findall(r"\*\*(.+?)\*\*", sentence) for sentence in sentences]
    for place, terms in enumerate(named):
        new = [term for term in terms if key_of(term) not in section.terms]
        if not new:
            continue
        end = next((later for later in range(place + 1, len(named)) if named[later]), len(named))
        anchor = anchor_of(section.heading, new[0])
        shared = Definition(", ".join(new), render(" ".join(sentences[place:end])), anchor)
        for term in new:
            for part in (term, *re.split(r",\s+|\s+/\s+", term)):
                section.terms.setdefault(key_of(part), shared)


def as_list(header: list[str], row: list[str], render: Render) -> str:
    """The cells of a row, each below the heading of its column."""
    pairs = [(label, cell) for label, cell in zip(header, row, strict=True) if cell]
    items = (f"<dt>{html.escape(label.capitalize())}</dt><dd>{render(cell)}</dd>" for label, cell in pairs)
    return f"<dl>{''.join(items)}</dl>"
