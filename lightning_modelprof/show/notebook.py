"""The report as a notebook card: the step to scale, speed, findings, and the page behind one click."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from lightning_modelprof.errors import printable
from lightning_modelprof.report.model import Finding, Report, Severity, Status
from lightning_modelprof.show.findings import saving_text, speed_line, verdict_word
from lightning_modelprof.show.html.page import render_html
from lightning_modelprof.show.layout import shorten
from lightning_modelprof.show.step_card import step_card_svg

_MAX_FINDINGS: Final = 4
_MAX_PAGE: Final = 2_000_000
"""Maximum characters of a page inside a notebook; longer ones are only in the run's directory."""

_MAX_TEXT: Final = 400
"""Maximum characters of one text, so that long names don't enlarge the card."""

_TONES: Final[dict[Severity | None, tuple[str, str]]] = {
    Severity.CRITICAL: ("■", "#d9531e"),
    Severity.WARNING: ("▲", "#b58500"),
    Severity.INFO: ("●", "#3b82c4"),
    None: ("○", "#888"),
}
"""Symbol and color of a finding; the colors are readable on white and on black."""

_BOX: Final = (
    "font:14px/1.45 system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif;"
    "max-width:820px;border:1px solid rgba(128,128,128,.4);border-radius:6px;padding:12px 16px;margin:6px 0"
)
_SMALL: Final = "font-size:13px;opacity:.75"
_LINK: Final = "color:inherit;text-decoration:underline"
_LAST: Final = "font-size:13px;margin-top:12px;overflow-wrap:anywhere"
_CODE: Final = "font-size:12px;background:rgba(128,128,128,.15);padding:1px 4px;border-radius:3px"


def report_card(report: Report) -> str:
    """Return the card with the page behind one click, as HTML in the text color and theme of any notebook.

    Args:
        report: what to show; without a verdict, only its title and the page behind it.
    """
    page = escape(render_html(report).decode())
    if len(page) > _MAX_PAGE:
        return _card(report, "")
    return _card(
        report,
        '<details style="margin-top:8px"><summary style="cursor:pointer">Full report</summary>'
        f'<iframe srcdoc="{page}" loading="lazy" title="Full report" style="width:100%;height:600px;'
        'border:1px solid rgba(128,128,128,.4);margin-top:6px;background:#fff"></iframe></details>',
    )


def show_in_notebook(report: Report, *, page: str = "", value: str = "callback.report") -> bool:
    """Show the card below the running cell; returns whether there is a notebook to show it in.

    Notebooks keep the output of every cell, so this has at most 30 kB and only names the page.

    Args:
        page: path of its report.html, if any.
        value: expression that shows the page as the value of a cell.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None or not hasattr(ipython, "get_ipython") else ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):  # no shell yet, or a terminal
        return False
    from IPython.display import display  # noqa: PLC0415  # already imported in a notebook

    show: Any = display
    show({"text/html": _card(report, _where(page, value)), "text/plain": repr(report)}, raw=True)
    return True


def _where(page: str, value: str) -> str:
    in_a_cell = f'<code style="{_CODE}">{_text(value)}</code>'
    if not page:
        return f'<div style="{_LAST}">Full report: run {in_a_cell} in a cell</div>'
    # Notebooks resolve relative paths next to themselves; the text of other paths can be copied.
    address = Path(page).as_uri() if Path(page).is_absolute() else quote(Path(page).as_posix())
    link = f'<a href="{escape(address)}" target="_blank" style="{_LINK}">{_text(page)}</a>'
    return f'<div style="{_LAST}">Full report: {link}, or run {in_a_cell} in a cell</div>'


def _card(report: Report, last: str) -> str:
    return f'<div style="{_BOX}">{"".join(_pieces(report))}{last}</div>'


def _pieces(report: Report) -> Iterator[str]:
    if report.verdict is None:
        yield f"<div>{_text(report.title)}</div>"
    else:
        yield (
            f'<div style="font-size:15px"><b>{_text(verdict_word(report.verdict))}</b>&ensp;'
            f"{_text(report.verdict.summary)}</div>"
        )
    if report.step_card is not None and report.step_card.wall_ns > 0:
        yield f'<div style="margin:10px 0">{step_card_svg(report.step_card, is_alone=False)}</div>'
    yield f'<div style="{_SMALL}">{_text(speed_line(report))}</div>'
    found = [one for one in report.findings if one.status is Status.FOUND]
    yield from map(_finding, found[:_MAX_FINDINGS])
    if len(found) > _MAX_FINDINGS:
        more = len(found) - _MAX_FINDINGS
        yield f'<div style="{_SMALL}">{more} more finding{"s" if more > 1 else ""} in the full report</div>'


def _finding(finding: Finding) -> str:
    symbol, tone = _TONES[finding.severity]
    gain = saving_text(finding)
    saving = f"&ensp;<b>{gain}</b>" if gain else ""
    places = [str(location) for location in finding.locations[:1]]
    places += [f"→ {location.inner}" for location in finding.locations[:1] if location.inner]
    place = f'<div><code style="font-size:12px">{_text(" ".join(places))}</code></div>' if places else ""
    action = finding.action or finding.summary
    return (
        f'<div style="margin-top:10px;padding-left:10px;border-left:3px solid {tone}">'
        f'<div><span style="color:{tone}">{symbol}</span> <b>{_text(finding.title)}</b>{saving}</div>'
        f'{place}<div style="font-size:13px">{_text(action)}</div></div>'
    )


def _text(text: str) -> str:
    return escape(shorten(printable(text), _MAX_TEXT))
