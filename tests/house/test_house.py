"""The house stays one in which things are found: its counts, from the sources."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

import pytest

from tests.house.test_layering import FILES, IMPORTS, OWN, PACKAGE, SOURCE

ROOT = SOURCE.parent
MOST_ENTRIES = 27
FRAGMENT_LINES = 40

SAME_NAME = {
    # One thing by one name in each room: what was measured, the facts, the table, the chart, the rule.
    ("run", "analysis", "report", "measure", "inspect", "loop", "lightning", "trace", "timing"),
    # How it is shown, and how it is asked for.
    ("show", "report", "loop", "trace"),
    ("cli", "analysis", "report"),
    ("config", "report", "lightning"),
    # A door and what is behind it.
    ("callback", "lightning"),
    ("profiler", "lightning", "loop"),
}
"""Rooms in which files may have one name: the room makes the difference plain."""

ONE_FILE_EACH = ("analysis.trace.", "report.tables.")
"""Rooms whose files are one thing each, however small it is."""

FRAGMENTS = {
    "__main__": "Python's own name for it",
    "callback": "a door",
    "profiler": "a door",
    "cli.list": "a command, which the command line finds by its file",
    "lightning.from_environment": "Lightning imports it at the start of every Trainer",
}

OWN_NUMBERS = {
    "lightning.host": "three words of a progress bar",
    "loop.step_timing": "the line of Paddle's step_info, in its own digits",
    "report.compare.build_compare": "a factor, with the digits that its interval allows",
    "report.rules": "parts of sentences",
    "report.tables.run": "parts of sentences",
    "show.html": "coordinates of drawings",
    "show.step_card": "coordinates of drawings",
    "units": "here they are written",
}
"""Who rounds numbers by a format of its own, and why; ``:g`` is for what somebody has given."""


def test_no_folder_has_many_entries():
    folders = defaultdict(set)
    for path in SOURCE.rglob("*"):
        if "__pycache__" not in path.parts and "static" not in path.parts:
            folders[path.parent].add(path.name)
    crowded = {str(folder): len(names) for folder, names in folders.items() if len(names) > MOST_ENTRIES}
    assert crowded == {}


def test_two_files_of_one_name_are_in_rooms_that_tell_them_apart():
    by_name = defaultdict(list)
    for module, path in FILES.items():
        if path.name != "__init__.py":
            by_name[path.name].append(module)
    unclear = {}
    for name, modules in by_name.items():
        rooms = [module.split(".")[0] for module in modules]
        if len(modules) > 1 and not any(set(rooms) <= set(allowed) for allowed in SAME_NAME):
            unclear[name] = modules
    assert unclear == {}


def test_no_class_name_is_used_twice():
    by_name = defaultdict(list)
    for module, path in FILES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                by_name[node.name].append(module)
    assert {name: modules for name, modules in by_name.items() if len(modules) > 1} == {}


def test_there_are_no_fragments():
    """A small module with one importer belongs into it."""
    importers = defaultdict(set)
    for module, imported in OWN.items():
        for one in imported:
            importers[one].add(module)
    found = {
        module
        for module, path in FILES.items()
        if path.name != "__init__.py"
        and not module.startswith(ONE_FILE_EACH)
        and path.read_text().count("\n") < FRAGMENT_LINES
        and len(importers[module] - {module}) <= 1
    }
    assert found == set(FRAGMENTS)


def test_only_one_room_knows_lightning():
    users = {
        module
        for module, imported in IMPORTS.items()
        if any(name.split(".")[0] in {"lightning", "pytorch_lightning"} for name in imported)
    }
    assert {user.split(".")[0] for user in users} == {"lightning", "selftest"}
    assert not {module for module, imported in OWN.items() if module.startswith("loop.")} & {
        module for module, imported in OWN.items() if any(name.startswith("lightning.") for name in imported)
    }


def test_tables_know_no_rules():
    wrong = {
        module: [name for name in imported if name.startswith("report.rules")]
        for module, imported in OWN.items()
        if module.startswith("report.tables.")
    }
    assert {module: names for module, names in wrong.items() if names} == {}
    assert PACKAGE == "lightning_modelprof"


def test_numbers_are_rounded_in_one_place():
    """Everything else writes them through ``units.py``."""
    found = {
        module
        for module, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FormattedValue)
        and node.format_spec is not None
        and re.search(r"\..*[efg%]", ast.unparse(node.format_spec))
    }
    allowed = {module for module in found if any(f"{module}.".startswith(f"{own}.") for own in OWN_NUMBERS)}
    assert found == allowed
    assert all(any(f"{module}.".startswith(f"{own}.") for module in found) for own in OWN_NUMBERS)


_FILE_NAME = re.compile(r"`([\w/]+\.py)`")


def _named_files():
    """Where a text of ours names a Python file, and which."""
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    codes = [*SOURCE.rglob("*.py"), *ROOT.glob("benchmarks/*.py")]
    for file in [*texts, *codes]:
        if file.name != "CHANGELOG.md":
            for name in _FILE_NAME.findall(file.read_text(encoding="utf-8")):
                yield file, name


@pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="a copy without all of the house")
def test_files_that_are_named_are_there():
    there = [
        file.as_posix()
        for folder in ("lightning_modelprof", "tests", "examples", "benchmarks")
        for file in (ROOT / folder).rglob("*.py")
    ] + [file.as_posix() for file in ROOT.glob("*.py")]
    elsewhere = {"train.py", "breakdown_analysis.py", "profiler/tensor_core.py"}
    gone = sorted(
        f"{file.relative_to(ROOT)}: {name}"
        for file, name in _named_files()
        if name not in elsewhere and not any(path.endswith(f"/{name}") for path in there)
    )
    assert not gone
