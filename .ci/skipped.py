#!/usr/bin/env python3
"""Prints CI's skipped tests and checks, by reason: ``skipped.py LOG [CHECK ...]``.

LOG is the output of pytest with ``-rs``. Each CHECK is another skipped check, with its reason.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

_SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] \S+?:(?:\d+:)? (.+)$", re.MULTILINE)


def summary(log: str, checks: list[str]) -> str:
    """Return the summary for the end of CI's output."""
    tests: Counter[str] = Counter()
    for count, reason in _SKIPPED.findall(log):
        tests[reason] += int(count)
    lines = [*checks, *(f"{count} test{'s'[: count > 1]}: {why}" for why, count in tests.most_common())]
    return "\n".join([f"Skipped: {len(lines) or 'nothing'}", *(f"  - {line}" for line in lines)])


if __name__ == "__main__":
    print(summary(Path(sys.argv[1]).read_text(encoding="utf-8", errors="replace"), sys.argv[2:]))
