#!/usr/bin/env python3
"""Print the project's size: ``python tests/support/size.py``, from the project's root.

Code lines exclude blank lines, comments and standalone strings, and include the package's data files. Pages
are characters / 80.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

_LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def count(source: str) -> tuple[int, int]:
    """Lines of code and of docstrings, including those of attributes."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_string and isinstance(node.value.value, str):
            docs |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docs), len(docs)


def main() -> None:
    """Print three lines: code per folder, imports and classes, and the totals."""
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout
    files = [Path(name) for name in listed.splitlines() if Path(name).is_file()]
    package = [one for one in files if one.parts[0] == "lightning_modelprof"]
    python = [one for one in package if one.suffix == ".py"]
    test_files = [one for one in files if one.parts[0] == "tests" and one.suffix == ".py"]
    folders: Counter[str] = Counter()
    docs = classes = 0
    for one in python:
        lines, strings = count(one.read_text())
        docs += strings
        folders[one.parts[1] if len(one.parts) > 2 else "."] += lines
        classes += sum(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(one.read_text())))
    data = [one for one in package if one.suffix in {".json", ".yaml", ".yml", ".toml"}]
    code = folders.total() + sum(len(one.read_text().splitlines()) for one in data)
    is_page = {".js", ".css", ".j2", ".html"}
    pages = sum(
        len(one.read_text()) for one in package if one.suffix in is_page and "vendor" not in one.parts
    )
    tests = sum(count(one.read_text())[0] for one in test_files)
    words = sum(len(one.read_text().split()) for one in files if one.suffix == ".md")
    deep = re.compile(r"^\s*(?:from|import) lightning_modelprof\.\w+\.\w+", re.MULTILINE)
    imports = sum(len(deep.findall(one.read_text())) for one in test_files)
    print("folders: " + ", ".join(f"{name} {lines:,}" for name, lines in folders.most_common()))
    print(f"test imports two folders deep: {imports}; classes: {classes}")
    print(
        f"code {code:,} · docstrings {docs:,} · Python files {len(python)} · pages {pages // 80:,}"
        f" · test code {tests:,} · words {words:,}"
    )


if __name__ == "__main__":
    main()
