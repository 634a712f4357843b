"""Tests the documentation: links exist, code runs, and commands and arguments are valid."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from torch.utils.data import DataLoader

from lightning_modelprof import ModelProfCallback, benchmark_inference, count_flops, profile_model
from lightning_modelprof.cli import main as cli
from lightning_modelprof.cli.compare import compared_paths
from lightning_modelprof.cli.main import make_parser
from tests.support.fits import ROOT, run_script

pytestmark = pytest.mark.slow

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [*sorted((ROOT / "docs" / "guides").glob("*.md")), ROOT / "docs" / "faq.md"]
PROGRAM = "lightning-modelprof"
CALLBACK = "ModelProfCallback"
SUMMARY = {"sorted_by", "op_detail", "thread_sep", "time_unit", "views"}  # Paddle's, which isn't installed

OURS = (ModelProfCallback, count_flops, profile_model, benchmark_inference)
THEIRS = (
    DataLoader,
    Trainer,
    PyTorchProfiler,
    torch.profiler.profile,
    torch.profiler.schedule,
    torch.profiler.tensorboard_trace_handler,
)
FOREIGN = {
    *("scheduler", "closed", "ready", "record", "targets", "emit_nvtx"),  # Paddle's
    *("sort_by", "batch_size_fn", "max_new_tokens"),  # for a table, ThroughputMonitor and generate
    "export_to_flame_graph",  # PyTorchProfiler takes it as a keyword argument
    *("with_flops", "with_modules", "profile_memory"),  # torch.profiler's, passed on by PyTorchProfiler
    *("pl_trainer_kwargs", "trainer_kwargs", "cache_data", "fused"),  # for libraries and torch.optim
}
"""Valid argument names that appear in none of these signatures."""

FENCE = re.compile(
    r"(?:^<!-- (?P<marker>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.S | re.M
)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.M)
SHELL_OPERATORS = re.compile(r"(?:[;&|<>()]+|do|then|case|in|if|!)\Z")


@dataclass(frozen=True)
class Block:
    """A fenced code block and the marker comment above it."""

    page: Path
    language: str
    marker: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.name}: {self.text.strip().splitlines()[0]}"


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> list[Block]:
    found = FENCE.finditer(text_of(page))
    return [Block(page, one["language"], one["marker"] or "", one["text"]) for one in found]


def prose(text: str) -> str:
    """Text without fenced and indented code."""
    return re.sub(r"^ {4}.*$", "", FENCE.sub("", text), flags=re.M)


# ---- Links


def anchors(text: str) -> set[str]:
    """GitHub's anchors for a page's headings."""
    seen: dict[str, int] = {}
    for heading in HEADING.findall(prose(text)):
        words = LINK.sub(lambda link: link[0][1 : link[0].index("]")], heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        seen[slug] = seen.get(slug, -1) + 1
        if seen[slug]:
            seen[f"{slug}-{seen[slug]}"] = 0
    return set(seen)


def broken_links(page: Path) -> list[str]:
    problems = []
    for link in LINK.findall(CODE_SPAN.sub("", prose(text_of(page)))):
        if re.match(r"[a-z]+:", link):  # a URL or an email address
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            problems.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(text_of(target)):
            problems.append(f"{link}: no such heading")
    return problems


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_exist(page):
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path):
    (tmp_path / "b.md").write_text("# What it is\n## `compare`: is it faster?\n## Twice\n## Twice\n")
    page = tmp_path / "a.md"
    page.write_text(
        "[1](b.md) [2](b.md#what-it-is) [3](b.md#compare-is-it-faster) [4](b.md#twice-1) [5](https://x.org/y)\n"
        "`[6](c.md)`\n\n    [7](c.md)\n\n```\n[8](c.md)\n```\n"
        "[9](c.md) [10](b.md#twice-2) [11](#nothing) ![12](d.png)\n"
    )
    assert [problem.partition(":")[0] for problem in broken_links(page)] == [
        "c.md",
        "b.md#twice-2",
        "#nothing",
        "d.png",
    ]


def test_every_guide_is_linked_and_short():
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in LINK.findall(text_of(page))
        if "://" not in link
    }
    assert [guide.name for guide in GUIDES if guide not in linked] == []
    assert [guide.name for guide in GUIDES if len(text_of(guide).splitlines()) > 145] == []


FILE_NAME = re.compile(r"`([\w/]+\.py)`")
ELSEWHERE = {"train.py", "breakdown_analysis.py", "profiler/tensor_core.py"}
"""Files of users and other projects."""


def test_named_files_exist():
    folders = ("lightning_modelprof", "tests", "examples", "benchmarks")
    known = [f"/{file.relative_to(ROOT)}" for one in folders for file in (ROOT / one).rglob("*.py")]
    known += [f"/{file.name}" for file in ROOT.glob("*.py")]
    code = [*(ROOT / "lightning_modelprof").rglob("*.py"), *ROOT.glob("benchmarks/*.py")]
    named = [
        (file, name)
        for file in (*PAGES, ROOT / "benchmarks" / "README.md", *code)
        for name in FILE_NAME.findall(text_of(file))
    ]
    assert len(named) > 100
    gone = [
        f"{file.relative_to(ROOT)}: {name}"
        for file, name in named
        if name not in ELSEWHERE and not any(path.endswith(f"/{name}") for path in known)
    ]
    assert gone == []


# ---- Code

BLOCKS = [block for guide in GUIDES for block in blocks(guide)]
PYTHON = [block for block in BLOCKS if block.language == "python"]


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_python_blocks_compile_and_say_if_they_run(block):
    compile(block.text, block.page.name, "exec")
    assert re.fullmatch(r"run|run as \w+\.py|not run: \w.{10,}", block.marker), "run it, or say why not"


@pytest.mark.parametrize(
    "guide", [g for g in GUIDES if any(b.marker.startswith("run") for b in blocks(g))], ids=lambda g: g.stem
)
def test_marked_blocks_run(guide, tmp_path, monkeypatch, capsys):
    """Blocks run in page order: Python in one namespace or as separate scripts, and our commands."""
    monkeypatch.chdir(tmp_path)
    num_threads = torch.get_num_threads()
    names: dict[str, object] = {}
    marked = [one for one in blocks(guide) if one.marker.startswith("run")]
    assert marked
    try:
        for number, block in enumerate(marked):
            script = tmp_path / (
                block.marker.removeprefix("run as ") if " as " in block.marker else f"part_{number}.py"
            )
            if block.language == "sh":
                for command in commands(block.text):
                    code = cli.main(command)
                    # On a busy machine a comparison may correctly be inconclusive.
                    assert code == 0 or (command[0] == "compare" and code == 4), capsys.readouterr()
                continue
            script.write_text(block.text)
            if " as " in block.marker:
                result = run_script(block.text, cwd=tmp_path, timeout=100)
                assert result.returncode == 0, result.stderr[-3000:]
            else:
                names.update(runpy.run_path(str(script), init_globals=names))
    finally:
        torch.set_num_threads(num_threads)


# ---- Commands


def commands(text: str) -> list[list[str]]:
    """Arguments of each of our commands in a shell script."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        if PROGRAM not in line:
            continue
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.wordchars += "$*{}=,:@"
        words = list(lexer)
        ends = [i for i, word in enumerate(words) if SHELL_OPERATORS.match(word)]
        for begin, end in zip([-1, *ends], [*ends, len(words)], strict=True):
            if words[begin + 1 : begin + 2] == [PROGRAM]:
                found.append(words[begin + 2 : end])
    return found


def mentioned_commands(page: Path) -> list[list[str]]:
    """Commands in all code. A span with just a subcommand names it, so only its --help is parsed."""
    text = text_of(page)
    code = [block.text for block in blocks(page) if block.language in {"", "sh"}]
    code += re.findall(rf"^ {{4}} *({PROGRAM}.*)$", text, re.M)
    called = [command for one in code for command in commands(one)]
    for span in CODE_SPAN.findall(prose(text)):
        called += [command if len(command) > 1 else [*command, "--help"] for command in commands(span)]
    return called


CALLS = [(page, call) for page in (*GUIDES, *PAGES[:1]) for call in mentioned_commands(page)]


@pytest.mark.parametrize(
    ("page", "call"), CALLS, ids=lambda value: value.name if isinstance(value, Path) else " ".join(value)
)
def test_commands_parse(page, call, capsys):
    assert exit_code(call) == 0, f"{page.name}: {capsys.readouterr().err}"


def exit_code(call: list[str]) -> object:
    """Exit code of the parser, without running the command."""
    try:
        options = make_parser().parse_args(call)
    except SystemExit as error:  # also after --help
        return error.code
    if options.command == "compare":
        compared_paths(options)
    return 0


def test_wrong_commands_are_found():
    (call,) = commands(f"echo 1 && {PROGRAM} analyze a_$i --sorted-by nothing > x.txt  # why")
    assert call == ["analyze", "a_$i", "--sorted-by", "nothing"]
    assert exit_code(call) == 2
    assert len(CALLS) > 15


# ---- Arguments


def parameters(functions) -> set[str]:
    return {name for function in functions for name in inspect.signature(function).parameters}


def unknown_arguments(text: str) -> list[str]:
    """Keywords passed to the callback that it doesn't accept. Text that isn't Python has none."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    ours = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == CALLBACK]
    known = parameters((ModelProfCallback,))
    return [keyword.arg for call in ours for keyword in call.keywords if keyword.arg not in known]


def named_arguments(text: str) -> list[str]:
    """Keyword names in code spans, such as ``active`` in `active=3`."""
    return [
        name
        for span in CODE_SPAN.findall(prose(text))
        for name in re.findall(r"(?<![-\w])([a-z_]+)=(?!=)", span)
    ]


def column_called_here(text: str) -> str:
    """Cells in the "here" column of a guide's tables."""
    cells, column = [], None
    for line in text.splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not row:
            column = None
        elif "here" in row:
            column = row.index("here")
        elif column is not None:
            cells.append(row[column])
    return "\n".join(cells)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_arguments_exist(guide):
    text = text_of(guide)
    code = [block.text for block in blocks(guide)] + CODE_SPAN.findall(prose(text))
    assert [name for one in code for name in unknown_arguments(one)] == []
    known = parameters(OURS) | parameters(THEIRS) | FOREIGN | SUMMARY
    assert [name for name in named_arguments(text) if name not in known] == []
    ours = [name for name in named_arguments(column_called_here(text)) if name not in parameters(OURS)]
    assert ours == []


def test_wrong_arguments_are_found():
    assert unknown_arguments("t = Trainer(callbacks=[ModelProfCallback(active=1, wramup=2)], x=1)") == [
        "wramup"
    ]
    assert named_arguments("`active=3` and `f(unti='s', x == 1)`, `LEVEL=6`, `--json=x`") == [
        "active",
        "unti",
    ]
    assert column_called_here("| there | here |\n|---|---|\n| a | b |\n\n| c | d |") == "---\nb"


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_named_examples_and_configurations_exist(guide):
    named = re.findall(r"(?:examples|configs|tests|benchmarks)/\w+\.\w+", text_of(guide))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_readme_is_one_page():
    lines = text_of(ROOT / "README.md").splitlines()
    assert len(lines) <= 110
    assert max(map(len, lines)) <= 100
