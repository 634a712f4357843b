"""Suggested code changes in the terminal, the page and report.json."""

from __future__ import annotations

import ast
import json
import textwrap
from dataclasses import replace

import pytest

from lightning_modelprof.report.model import CHANGES_NUMERICS, SAME_RESULTS, CodeChange
from lightning_modelprof.show.document import render_json
from lightning_modelprof.show.html.parts import findings_html
from lightning_modelprof.show.terminal.short import MAX_LINES, pasteable, short_lines
from tests.show.test_html_browser import show
from tests.show.test_html_copying import REFUSE, TAKE
from tests.show.test_html_places import copied
from tests.show.test_show_findings import HOSTILE, SLOW, report

DIFF = """\
--- a/train.py
+++ b/train.py
@@ -1,3 +1,4 @@
 def main():
\twith x:
-\t\tloader = DataLoader(ds)  # <b>
+\t\tloader = DataLoader(ds, num_workers=2)  # <b>
+\t\t\ty
"""
CHANGE = CodeChange(
    text="DataLoader(..., num_workers=2)",
    label=CHANGES_NUMERICS,
    diff=DIFF,
    file="/home/me/train.py",
    line=3,
)
LINE = CodeChange(text="trainer.precision: bf16-mixed", label=SAME_RESULTS, is_yaml=True)


def lines_of(*findings):
    return short_lines(report(*findings), None, "utf-8")


def test_terminal_shows_diff_of_first_finding():
    shown = lines_of(replace(SLOW, change=CHANGE), replace(SLOW, change=CHANGE))
    at = next(number for number, line in enumerate(shown) if "Change in" in line)
    assert shown[at : at + 4] == [
        f"    Change in /home/me/train.py:3 ({CHANGES_NUMERICS}):",
        "    - loader = DataLoader(ds)  # <b>",
        "    + loader = DataLoader(ds, num_workers=2)  # <b>",
        "    +     y",
    ]
    assert sum("Change in" in line for line in shown) == 1
    assert len(shown) < MAX_LINES


LONG = [
    "loader = DataLoader(Words(transform=Mel(a, b)), batch_size=32, num_workers=1, persistent_workers=True)",
    "    loader = DataLoader(Words('a, b, c, d'), batch_size=32, num_workers=1, shuffle=True)",
    "x = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25]",
    "a, b = make(first), 'a string that is longer than a line may be, and has a comma of its own in it'",
    "short = 1",
]


@pytest.mark.parametrize("line", LONG)
@pytest.mark.parametrize("width", [50, 76])
def test_wrapped_line_stays_the_same_statement(line, width):
    parts = pasteable(line, width)
    whole, pasted = (ast.dump(ast.parse(textwrap.dedent(text))) for text in (line, "\n".join(parts)))
    assert whole == pasted
    assert line in LONG[3:] or len(parts) > 1
    assert line in LONG[3:] or all(len(part) <= width for part in parts)


def test_terminal_shows_whole_long_line():
    diff = f"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-{LONG[0].replace(', num_workers=1', '')}\n+{LONG[0]}\n"
    shown = lines_of(replace(SLOW, change=replace(CHANGE, diff=diff)))
    at = next(number for number, line in enumerate(shown) if "Change in" in line)
    added = [line.removeprefix("    + ") for line in shown[at:] if line.startswith("    + ")]
    assert ast.dump(ast.parse("\n".join(added))) == ast.dump(ast.parse(LONG[0]))


def test_terminal_omits_long_diff_but_keeps_action():
    many = "".join(f"+    line {number}\n" for number in range(30))
    long = replace(CHANGE, diff=f"--- a/x\n+++ b/x\n@@ -1 +1,30 @@\n{many}")
    shown = lines_of(replace(SLOW, change=long))
    assert shown == lines_of(SLOW)


def test_terminal_does_not_repeat_suggested_line():
    assert lines_of(replace(SLOW, change=LINE)) == lines_of(SLOW)


def test_hostile_changes_are_escaped():
    bad = replace(
        CHANGE, file=HOSTILE, diff=f"--- a/x\n+++ b/x\n@@ -1 +1 @@\n+\x1b[31m{HOSTILE}\n", text=HOSTILE
    )
    shown = "\n".join(lines_of(replace(SLOW, change=bad)))
    assert "\x1b" not in shown
    page = findings_html(report(replace(SLOW, change=bad)))
    assert "<img" not in page
    assert "\x1b" not in page


def test_page_shows_diff_and_copy_button():
    page = findings_html(report(replace(SLOW, change=CHANGE)))
    assert '<code class="removed">- loader = DataLoader(ds)  # &lt;b&gt;</code>' in page
    assert '<code class="added">+ loader = DataLoader(ds, num_workers=2)  # &lt;b&gt;</code>' in page
    assert "Copy change" in page
    assert CHANGES_NUMERICS in page
    assert "/home/me/train.py:3" in page


def test_page_shows_suggested_line():
    page = findings_html(report(replace(SLOW, change=LINE)))
    assert "<code>trainer.precision: bf16-mixed</code>" in page
    assert "YAML file" in page
    assert "Copy change" not in findings_html(report(SLOW))


def test_report_json_has_change():
    document = json.loads(render_json(report(replace(SLOW, change=CHANGE), SLOW)))
    assert [one["change"] for one in document["findings"]] == [
        {
            "text": CHANGE.text,
            "label": "may change results",
            "diff": DIFF,
            "file": "/home/me/train.py",
            "line": 3,
            "is_yaml": False,
        },
        None,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("clipboard", [TAKE, REFUSE], ids=["clipboard", "selection"])
def test_button_copies_diff(browser, tmp_path, clipboard):
    show(browser, tmp_path, report(replace(SLOW, change=CHANGE)))
    browser.execute_script(clipboard)
    browser.find_element("css selector", "[data-do=change]").click()
    browser.implicitly_wait(1)
    assert (
        browser.execute_async_script(
            "setTimeout(() => arguments[0](document.querySelector('.change output').textContent), 100)"
        )
        == "Copied"
    )
    assert copied(browser) == DIFF
