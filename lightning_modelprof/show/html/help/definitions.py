"""The definitions of figures as a page needs them: all of them, or those of one report."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Set
from functools import cache
from typing import Any

from lightning_modelprof.report.definitions import Section, anchor_of, key_of, places, sections
from lightning_modelprof.report.model import Report, Status, Table
from lightning_modelprof.show.html.head import key_figures


@cache
def definitions_document(others: tuple[Section, ...] = ()) -> dict[str, Any]:
    """All definitions as plain JSON values.

    Args:
        others: sections that stand last, as of the page's own views.

    Returns:
        ``sections``: anchor → ``heading`` and ``html``, whole sections in reading order first, then terms
        (their anchors have a #). ``figures``: ``table:kernels``, ``column:kernels:blocks_per_sm``,
        ``phase:forward``, ... → anchor.
    """
    render = renderer()
    found = [*sections(), *others]
    shown = {one.anchor: {"heading": one.heading, "html": render(one.markdown)} for one in found}
    for section in found:
        for term in section.terms:
            shown[anchor_of(section, term)] = {"heading": term.label, "html": render(term.markdown)}
    return {"sections": shown, "figures": places(found)}


def report_definitions(report: Report, tables: list[Table]) -> dict[str, Any]:
    """The same of what a page of a report shows, in as few bytes: equal texts stand once, under a number.

    A section is without its terms, which stand beside it, and a term without its name, which the page has.

    Args:
        report: whose charts, findings and key figures are shown.
        tables: that are shown.
    """
    found = list(sections())
    known = places(found)
    with_rows = {key.split(":")[1] for key in known if key.startswith("row:")}
    figures = {key: known[key] for key in _keys(report, tables, with_rows) if key in known}
    texts = {one.anchor: one.text or one.markdown for one in found}
    for section in found:
        texts |= {anchor_of(section, term): term.text for term in section.terms}
    htmls = {anchor: _rendered(texts[anchor]) for anchor in figures.values()}
    distinct = dict.fromkeys(("#" in anchor, html) for anchor, html in htmls.items())
    names = {one: f"{'#' * one[0]}{number}" for number, one in enumerate(distinct)}
    return {
        "sections": {name: {"html": html} for (_, html), name in names.items()},
        "figures": {key: names["#" in anchor, htmls[anchor]] for key, anchor in figures.items()},
    }


def as_data_block(document: Any) -> str:
    """JSON that may stand in a script element of a page: nothing in it ends or begins one.

    Only what has to be is escaped, as definitions are full of tags.
    """
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return (
        text.replace("</", "<\\/")
        .replace("<!", "\\u003c!")
        .replace("<s", "\\u003cs")
        .replace("<S", "\\u003cS")
    )


def _keys(report: Report, tables: list[Table], with_rows: Set[str]) -> Iterator[str]:
    """Of everything that the page may ask for, as ``help.js`` does."""
    for table in tables:
        name = "changes" if table.id.endswith("_changes") else re.sub(r"_\d+$", "", table.id)
        yield f"table:{name}"
        yield from (f"column:{name}:{column.key}" for column in table.columns)
        for row in table.rows if name in with_rows else ():
            words = re.sub(r" \([^)]*\)$", "", str(row[0])).split(" ")
            yield from (f"row:{name}:{key_of(' '.join(words[start:]))}" for start in range(len(words)))
    yield from (f"chart:{chart.id}" for chart in report.charts)
    yield from (f"flame:{flame.id}" for flame in report.flames)
    yield from (f"rule:{one.kind}" for one in report.findings if one.status is Status.FOUND)
    if report.verdict is not None:
        yield f"verdict:{report.verdict.kind}"
    yield from (f"figure:{key_of(figure.label)}" for figure in key_figures(report.sections))


@cache
def _rendered(text: str) -> str:
    return renderer()(text)


@cache
def renderer() -> Callable[[str], str]:
    """Makes HTML in which no HTML of a definition's own gets through, and no link to what is not here."""
    import markdown  # type: ignore[import-untyped]  # noqa: PLC0415  # TensorBoard's start does not wait

    converter = markdown.Markdown(extensions=["tables"], lazy_ol=False)
    converter.preprocessors.deregister("html_block")
    converter.inlinePatterns.deregister("html")

    def render(text: str) -> str:
        converter.reset()
        return str(converter.convert(re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)))

    return render
