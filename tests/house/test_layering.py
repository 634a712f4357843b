"""Tests which parts of the package may import which, by reading the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import lightning_modelprof
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.options import VIEWS
from lightning_modelprof.report.tables.run import all_tables as tables
from tests.support.fits import ROOT

PACKAGE = "lightning_modelprof"
SOURCE = Path(lightning_modelprof.__file__).parent

# Part of the package → the parts it may import: "report.model" is one file, "report" the whole folder.
LAWS = {
    "errors": (),
    "record": (),
    "place": ("errors", "record"),
    "upgrade": (),
    "signals": (),
    "threads": (),
    "units": ("errors",),
    "processes": (),
    "run": ("run", "units", "upgrade", "place", "errors", "record"),
    "trace": ("trace", "run", "units", "place", "errors", "record"),
    "analysis": ("analysis", "trace", "run", "units", "place", "errors", "record"),
    "report": ("report", "analysis", "trace", "run", "units", "place", "errors", "record"),
    "show": (
        "show",
        "threads",
        "upgrade",
        "report.model",
        "report.summary",
        "report.dashboard_entry",
        "report.definitions",
        "units",
        "errors",
        "record",
        "place",
    ),
    "measure": ("measure", "processes", "threads", "run", "units", "place", "errors", "record"),
    "inspect": (
        "inspect",
        "measure.clock",
        "measure.stored",
        "measure.user_code",
        "run",
        "units",
        "errors",
        "record",
        "place",
    ),
    "timing": (
        "timing",
        "inspect",
        "measure",
        "show",
        "report",
        "analysis",
        "run",
        "units",
        "errors",
        "record",
        "place",
    ),
    "config": (
        "config",
        "measure.window.schedule",
        "report.options",
        "report.rules",
        "units",
        "errors",
        "record",
        "place",
    ),
    "engine": (
        "engine",
        "processes",
        "threads",
        "config",
        "inspect",
        "measure",
        "show",
        "report",
        "analysis",
        "trace",
        "run",
        "units",
        "errors",
        "signals",
        "record",
        "__version__",
    ),
    "lightning": (
        "lightning",
        "engine",
        "config",
        "inspect",
        "measure",
        "show",
        "report",
        "run",
        "units",
        "errors",
        "signals",
        "record",
        "place",
    ),
    "reading_traces": (
        "processes",
        "show.progress",
        "report",
        "analysis",
        "trace",
        "run",
        "units",
        "errors",
        "record",
        "place",
    ),
    "reading": (
        "reading_traces",
        "show.findings",
        "show.progress",
        "report",
        "analysis",
        "trace",
        "run",
        "units",
        "errors",
        "record",
        "place",
    ),
    "tensorboard_plugin": (
        "tensorboard_plugin",
        "show",
        "report",
        "run",
        "units",
        "place",
        "errors",
        "record",
    ),
    "cli": (
        "cli",
        "selftest",
        "lightning.from_environment",
        "engine.loader_profile",
        "config",
        "reading",
        "reading_traces",
        "show",
        "report",
        "analysis",
        "trace",
        "run",
        "units",
        "errors",
        "record",
        "__version__",
    ),
    "selftest": (
        "selftest",
        "lightning.callback",
        "inspect.flops.count",
        "reading",
        "reading_traces",
        "report.model",
        "run",
        "units",
        "errors",
    ),
    "callback": ("lightning.callback",),
    "profiler": ("lightning.profiler", "engine.profiler"),
    "__main__": ("cli",),
    "__init__": (
        "lightning.callback",
        "config",
        "errors",
        "record",
        "inspect.flops.count",
        "lightning.profiler",
        "engine.loader_profile",
        "engine.profiler",
        "reading",
        "reading_traces",
        "show.terminal.terminal",
        "timing",
    ),
}
# The two modules that config may import use only units, errors and the standard library.

# Library → the only parts that may import it.
LIBRARIES = {
    "torch": ("inspect", "measure", "timing", "engine", "lightning", "selftest"),
    "fvcore": ("inspect.flops.fvcore_table",),
    "torchmetrics": (),
    "lightning": ("lightning", "selftest"),
    "pytorch_lightning": (),
    "yaml": ("config.sources",),
    "rich": (),  # if installed, Lightning uses another progress bar
    "tqdm": ("show.progress",),
    "jinja2": ("show.html.page",),
    "tensorboard": ("show.tensorboard.event_file", "tensorboard_plugin"),
    "werkzeug": ("tensorboard_plugin",),
    "tabulate": (),
    "pandas": ("show.text",),
    "IPython": ("show.notebook",),
    "msgspec": (
        "record",
        "run.archive",
        "measure.workers",
        "trace",
        "show.document",
        "show.html.document",
        "show.tensorboard",
    ),
    "isal": ("run.archive", "trace.text"),
    "psutil": ("measure.resources",),
}

# The registries of tables. Tables don't import each other.
MEETING_POINTS = ("report.tables.run.all_tables", "report.tables.trace.trace_tables")


def module_name(path):
    """``measure/clock.py`` → ``measure.clock``; a folder's ``__init__`` is the folder."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


FILES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imports_in(tree):
    """Full dotted name of everything that the file imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who imports whom"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_part(name, parts):
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def resolve(imported):
    """``measure.clock.HostClock`` → ``measure.clock``, its file if there is one."""
    while imported and imported not in FILES:
        head, _, _ = imported.rpartition(".")
        if not head:
            return imported
        imported = head
    return imported


@cache
def tree_of(name):
    return ast.parse(FILES[name].read_text())


@cache
def imports_of(name):
    return set(imports_in(tree_of(name)))


@cache
def own_imports_of(name):
    own = (one.removeprefix(f"{PACKAGE}.") for one in imports_of(name) if one.startswith(f"{PACKAGE}."))
    return {resolve(one) for one in own}


@pytest.mark.parametrize("name", FILES)
def test_module_imports_only_allowed_parts(name):
    part = name.partition(".")[0]
    assert part in LAWS, f"{part} is new: write its law into LAWS, and into docs/architecture.md"
    wrong = {imported for imported in own_imports_of(name) if not is_part(imported, LAWS[part])}
    assert not wrong, f"{name} imports {wrong}"
    assert PACKAGE not in imports_of(name)  # import lightning_modelprof would hide which parts are used


@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_are_imported_only_in_their_files(library):
    users = {name for name in FILES if any(is_part(imported, [library]) for imported in imports_of(name))}
    wrong = {name for name in users if not is_part(name, LIBRARIES[library])}
    assert not wrong, f"{library} is imported by {wrong}"


@pytest.mark.parametrize("name", ["measure.window.schedule", "report.options"])
def test_modules_used_by_config_import_no_library(name):
    parents = [".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 1)]
    for part in (name, *parents):
        assert own_imports_of(part) <= {"units", "errors"}
        assert {imported.partition(".")[0] for imported in imports_of(part)} - {PACKAGE} <= set(
            sys.stdlib_module_names
        )


def test_entry_points_are_not_imported_below():
    doors = {"callback", "cli.main", "reading", "timing.model_profile"}
    found = {(name, door) for name in FILES for door in own_imports_of(name) & doors if name != door}
    # Commands are part of the entry point, and the self-test uses the public API.
    found = {pair for pair in found if not pair[0].startswith(("cli.", "selftest."))}
    assert found == {("__init__", "reading"), ("__init__", "timing.model_profile"), ("__main__", "cli.main")}


def test_imports_have_no_cycles():
    done = set()

    def visit(name, path):
        assert name not in path, " → ".join([*path, name])
        if name not in done:
            for imported in own_imports_of(name) if name in FILES else ():
                visit(imported, [*path, name])
            done.add(name)

    for name in FILES:
        visit(name, [])
    assert done >= set(FILES)


def test_rules_do_not_import_their_callers():
    asking = {f"report.rules.{name}" for name in ("engine", "passes", "all_rules")}
    rules = [name for name in FILES if is_part(name, ["report.rules"]) and name not in asking]
    assert len(rules) > 10
    assert {name: found for name in rules if (found := own_imports_of(name) & asking)} == {}


def test_tables_do_not_import_rules():
    tables_of_reports = {name: own_imports_of(name) for name in FILES if name.startswith("report.tables.")}
    assert tables_of_reports
    wrong = {
        name: rules
        for name, own in tables_of_reports.items()
        if (rules := {imported for imported in own if imported.startswith("report.rules")})
    }
    assert wrong == {}


TABLE_FILES = [name for name in FILES if name.startswith(("report.tables.run.", "report.tables.trace."))]


@pytest.mark.parametrize("name", [name for name in FILES if name not in MEETING_POINTS])
def test_tables_are_imported_only_by_registries(name):
    shared = {"report.tables.rows", "report.tables.run.table", "report.tables.trace.table"}
    found = {imported for imported in own_imports_of(name) if imported.startswith("report.tables")} - shared
    assert not found if name in TABLE_FILES else found <= set(MEETING_POINTS)


def builders():
    """Build functions of all registered tables."""
    return [entry.build for entry in (*tables.TABLES, *tables.TRACE_TABLES)]


@pytest.mark.parametrize("name", TABLE_FILES)
def test_every_table_file_is_registered(name):
    """A file that no entry refers to would never be shown."""
    seen = {builder.__module__.removeprefix(f"{PACKAGE}.") for builder in builders()}
    assert name in seen | set(MEETING_POINTS) | {"report.tables.run.table", "report.tables.trace.table"}


def test_every_trace_fact_has_table():
    """Except the two that describe the trace itself."""
    shown = {entry.which.name for entry in tables.TRACE_TABLES}
    assert set(TraceFacts.names()) - shown == {"checks", "launch_count"}


def derives_a_fact(name):
    """Whether the file has a function that derives a fact from a timeline."""
    return any(
        isinstance(node, ast.FunctionDef)
        and node.name.startswith(("summarize_", "list_"))
        and [ast.unparse(argument.annotation) for argument in node.args.args] == ["Timeline"]
        for node in tree_of(name).body
    )


def test_every_fact_file_is_derived_and_shown():
    files = {name for name in FILES if name.startswith("analysis.") and derives_a_fact(name)}
    assert {"analysis.trace.model_summary", "analysis.trace.operators"} <= files
    assert files - own_imports_of("analysis.trace.trace_facts") == set()
    shown = [entry.build.__module__.removeprefix(f"{PACKAGE}.") for entry in tables.TRACE_TABLES]
    assert files - set().union(*map(own_imports_of, shown)) == set()


def test_views_are_in_table_order():
    """The options list views in reading order, and each has a table."""
    assert tuple(dict.fromkeys(entry.view for entry in tables.TRACE_TABLES)) == VIEWS


LIGHT = [
    "",
    "run",
    "run.archive",
    "trace.reader",
    "analysis.facts",
    "analysis.trace.trace_facts",
    "report.options",
    "report.build",
    "report.build_trace",
    "report.compare.build_compare",
    "show.html.page",
    "show.document",
    "show.terminal.terminal",
    "show.progress",
]
LIGHT += [
    "reading",
    "reading_traces",
    "show.text",
    "show.tensorboard.scalars",
    "cli.run",
    "cli.main",
    "config.options",
    "config.checks",
    "config.sources",
]

# All in one process, as none may import the heavy libraries.
WEIGH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name, *sorted({"torch", "lightning", "torchmetrics", "pytorch_lightning"} & set(sys.modules)))
"""


def test_light_modules_import_neither_torch_nor_lightning():
    names = [".".join(filter(None, (PACKAGE, name))) for name in LIGHT]
    result = subprocess.run(
        [sys.executable, "-c", WEIGH, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == names


def test_public_names_exist():
    for name in lightning_modelprof.__all__:
        assert getattr(lightning_modelprof, name) is not None
    assert dir(lightning_modelprof) == sorted(lightning_modelprof.__all__)
    with pytest.raises(AttributeError, match="no attribute 'ModelProf'"):
        lightning_modelprof.ModelProf  # noqa: B018


def test_foreign_errors_are_formatted_in_one_place():
    """Only ``told`` handles endless messages and a ``__str__`` that raises."""
    assert names_type_and_message("f'it failed: {type(error).__name__}: {error}'") == [1]
    own = ROOT / "lightning_modelprof" / "errors.py"
    places = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "lightning_modelprof").rglob("*.py"))
        if path != own
        for line in names_type_and_message(path.read_text(encoding="utf-8"))
    ]
    assert places == []


def names_type_and_message(source):
    """Line numbers of f-strings with both ``type(x).__name__`` and ``x``."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        values = [ast.unparse(part.value) for part in node.values if isinstance(part, ast.FormattedValue)]
        if any(f"type({value}).__name__" in values for value in values):
            lines.append(node.lineno)
    return lines
