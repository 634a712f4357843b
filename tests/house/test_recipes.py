"""The recipes of CONTRIBUTING.md, followed to the letter in a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.fits import ROOT

pytestmark = pytest.mark.slow

PACKAGE = "lightning_modelprof"


class Copy:
    """A copy of the project, in which steps of a recipe are done."""

    def __init__(self, folder):
        self.folder = folder
        for name in (PACKAGE, "tests", "configs", "docs", "examples"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
            shutil.copy(ROOT / name, folder)

    def write(self, name, text):
        """A new file."""
        path = self.folder / PACKAGE / name
        assert not path.exists()
        path.write_text(textwrap.dedent(text).lstrip())

    def line(self, name, before, new):
        """A line, or an import, in front of the first place that reads so."""
        path = self.folder / PACKAGE / name
        text = path.read_text()
        assert before in text, name
        indent = before[: len(before) - len(before.lstrip())]
        put = textwrap.indent(textwrap.dedent(new).strip(), indent)
        path.write_text(text.replace(before, f"{put}\n{before}", 1))

    def run(self, *arguments):
        result = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        return result.stdout

    def brings_the_page_up_to_date(self, text):
        """The definition of what is new is in the reference."""
        self.run("-m", "tests.support.reference")
        assert text in (self.folder / "docs" / "report.md").read_text()

    def keeps_the_laws(self):
        """The architecture's tests pass; how many files there may be is not for a copy to say."""
        laws = ("tests/house/test_layering.py", "tests/house/test_house.py")
        self.run("-m", "pytest", "-q", *laws, "-k", "not there_are_not_many_files")


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


REPORT = """
from tests.support.diagnosed import analysis_of, steps_of
from lightning_modelprof.report.build import build_report
report = build_report(analysis_of(steps_of(forward=9, dataloader=1)))
"""


def test_a_table_of_a_run(copy):
    copy.write(
        "report/tables/run/oracle.py",
        '''
        """Oracle: how many steps there were."""

        from __future__ import annotations

        from typing import Final

        from lightning_modelprof.analysis.facts import Analysis
        from lightning_modelprof.report.kinds import TableKind
        from lightning_modelprof.report.model import Column, Table, Unit
        from lightning_modelprof.report.options import TableOptions

        ORACLE: Final = TableKind(
            id="oracle",
            title="Oracle",
            help="How many steps there were.",
            columns=(Column("name", "Name"), Column("steps", "Steps", Unit.COUNT, help="finished ones.")),
            views=("steps",),
        )


        def oracle(analysis: Analysis, options: TableOptions) -> tuple[Table, ...]:
            """How many steps there were."""
            return (ORACLE.table(rows=(("all", analysis.num_steps),)),)
        ''',
    )
    home = "report/tables/run/all_tables.py"
    copy.line(
        home,
        f"from {PACKAGE}.report.tables.run.call",
        f"from {PACKAGE}.report.tables.run.oracle import ORACLE, oracle",
    )
    copy.line(home, "    RunTable(callback_times", "RunTable(oracle, (ORACLE,)),")
    copy.brings_the_page_up_to_date("How many steps there were.")
    copy.keeps_the_laws()
    assert copy.run("-c", REPORT + "print(report.table('oracle').rows)").strip() == "(('all', 20),)"


def test_a_table_of_traces(copy):
    copy.write(
        "analysis/trace/oracle.py",
        '''
        """How many events a trace has."""

        from __future__ import annotations

        from lightning_modelprof.analysis.absent import Absent
        from lightning_modelprof.analysis.timeline.timeline import Timeline
        from lightning_modelprof.record import Record


        class Oracle(Record, frozen=True, kw_only=True):
            """The number."""

            events: int


        def summarize_oracle(timeline: Timeline) -> Oracle | Absent:
            """Count them."""
            number = len(timeline.trace)
            return Oracle(events=number) if number else Absent("there are no events")
        ''',
    )
    copy.write(
        "report/tables/trace/oracle.py",
        '''
        """Oracle: how many events each rank has."""

        from __future__ import annotations

        from collections.abc import Mapping
        from typing import Final

        from lightning_modelprof.analysis.absent import Absent
        from lightning_modelprof.analysis.trace.oracle import Oracle
        from lightning_modelprof.report.kinds import Figure, TableKind
        from lightning_modelprof.report.model import Column, Table, Unit
        from lightning_modelprof.report.options import TableOptions

        ORACLE: Final = TableKind(
            id="oracle",
            title="Oracle",
            help="How many events each rank has.",
            columns=(Column("rank", "Rank"), Column("events", "Events", Unit.COUNT, help="of its trace.")),
            views=("overview",),
            compared=Figure(keys=("events",), sum_over="window"),
        )


        def oracle_table(by_rank: Mapping[int, Oracle | Absent], options: TableOptions) -> Table:
            """How many events each rank has."""
            known = {rank: one for rank, one in by_rank.items() if not isinstance(one, Absent)}
            return ORACLE.table(
                rows=tuple((str(rank), one.events) for rank, one in known.items()),
                absent_reason=None if known else "there are no events",
            )
        ''',
    )
    facts = "analysis/trace/trace_facts.py"
    copy.line(
        facts,
        f"from {PACKAGE}.analysis.trace.copies",
        f"from {PACKAGE}.analysis.trace.oracle import Oracle, summarize_oracle",
    )
    copy.line(facts, "    device_usage: DeviceUsage | Absent\n", "    oracle: Oracle | Absent")
    copy.line(facts, "        device_usage=summarize", "        oracle=summarize_oracle(timeline),")
    home = "report/tables/trace/trace_tables.py"
    copy.line(
        home,
        f"from {PACKAGE}.report.tables.trace.copies",
        f"from {PACKAGE}.report.tables.trace.oracle import ORACLE, oracle_table",
    )
    copy.line(
        home,
        "    TraceTable(OVERVIEW",
        'TraceTable(ORACLE, "overview", lambda facts: facts.oracle, oracle_table),',
    )
    copy.brings_the_page_up_to_date("How many events each rank has.")
    copy.keeps_the_laws()
    show = """
    import glob
    from lightning_modelprof import analyze
    report = analyze(*glob.glob("tests/data/traces/*_rank0*.gz"))
    print(report.table("oracle").rows[0][1] > 1000)
    """
    assert copy.run("-c", textwrap.dedent(show)).strip() == "True"


def test_a_rule(copy):
    copy.line(
        "report/rules/batches.py",
        "def _by_work(",
        '''
        class Answer(Rule, frozen=True, kw_only=True):
            """Always."""

            kind: ClassVar[str] = "answer"
            title: ClassVar[str] = "There is an answer"
            help: ClassVar[RuleHelp] = RuleHelp("it was asked")

            def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
                """Found."""
                return (self.found("It is 42.", "Ask.", Severity.INFO),)


        ''',
    )
    home = "report/rules/all_rules.py"
    copy.line(
        home, f"from {PACKAGE}.report.rules.validation", f"from {PACKAGE}.report.rules.batches import Answer"
    )
    copy.line(home, "    AnomalyDetection(),\n", "Answer(),")
    copy.brings_the_page_up_to_date("| `answer` | it was asked |")
    copy.keeps_the_laws()
    show = REPORT + "print([one.summary for one in report.findings if one.kind == 'answer'])"
    assert copy.run("-c", show).strip() == "['It is 42.']"


def test_a_chart(copy):
    copy.line(
        "report/charts/model.py",
        "def memory_curve(",
        '''
        def no_answer(analysis: Analysis) -> Chart | None:
            """Nothing to draw."""
            return None


        ''',
    )
    home = "report/charts/all_charts.py"
    copy.line(
        home, f"from {PACKAGE}.report.charts.ranks", f"from {PACKAGE}.report.charts.model import no_answer"
    )
    copy.line(
        home,
        '    Drawing(\n        id="flops_by_phase"',
        'Drawing(id="no_answer", title="No answer", draw=no_answer, help="Nothing to draw."),',
    )
    copy.brings_the_page_up_to_date("**No answer**: Nothing to draw.")
    copy.keeps_the_laws()
    assert copy.run("-c", REPORT + "print(bool(report.charts))").strip() == "True"


def test_a_phase(copy):
    copy.line(
        "run/phases.py", '    Phase(\n        "user_profiler"', 'Phase("answer", "Answer", "asking", "own"),'
    )
    copy.brings_the_page_up_to_date("| `answer` | Answer | asking |")
    copy.keeps_the_laws()
    show = """
    from lightning_modelprof import LoopProfiler
    with LoopProfiler(active=0, report={"files": False, "terminal": False}) as profiler:
        for _ in profiler.fetch(range(30)):
            with profiler.phase("answer"):
                sum(range(20000))
    print(profiler.report.table("phases") is not None)
    from lightning_modelprof.run.phases import PHASE_INDEX
    print(bool((profiler.run.ranks[0].steps.phases_ns[:, PHASE_INDEX["answer"]] > 0).all()))
    """
    assert copy.run("-c", textwrap.dedent(show)).split() == ["True", "True"]


ARGUMENT = {
    "of_a_group": ("    keep_windows: int", "            keep_windows, max", "  keep_windows: 20"),
    "of_its_own": ("    repeat: int = 1", "        repeat: number of windows", "repeat: 1"),
}


@pytest.mark.parametrize("kind", ARGUMENT)
def test_an_argument(copy, kind):
    """A whole number: its type is its check."""
    field, documented, written = ARGUMENT[kind]
    is_in_group = kind == "of_a_group"
    options, callback = "config/options.py", "lightning/callback.py"
    copy.line(options, field, "    answer: int = 42")
    if is_in_group:
        copy.line(options, "        keep_windows: traces", "answer: to everything.")
        copy.line(callback, documented, "answer,")
    else:
        copy.line(callback, "        repeat: int", "answer: int = DEFAULTS.answer,")
        copy.line(callback, documented, "answer: to everything.")
    copy.line("../configs/default.yaml", written, "answer: 42")
    copy.keeps_the_laws()
    names = (
        "yaml",
        "the_same",
        "reaches",
        "documented",
        "cli_accepts_all",
        "plain_values",
        "refuses_at_once",
    )
    copy.run("-m", "pytest", "-q", "-m", "", "tests/config/test_config.py", "-k", " or ".join(names))
    show = """
    import sys
    from lightning_modelprof import ConfigError, LoopProfiler, ModelProfCallback, ModelProfiler
    from lightning_modelprof.config.sources import parse_asked_for
    is_in_group = sys.argv[1] == "of_a_group"
    given = lambda value: {"bounds": {"answer": value}} if is_in_group else {"answer": value}
    for door in (ModelProfCallback, ModelProfiler, LoopProfiler):
        try:
            door(**given(-1))
        except ConfigError as error:
            print("expected an integer of at least 0, got -1. The default is 42." in str(error))
    print(ModelProfCallback(**given(7)).config.as_plain()["answer"])
    print(parse_asked_for("bounds.answer=8" if is_in_group else "answer=8", "here") == given(8))
    """
    assert copy.run("-c", textwrap.dedent(show), kind).split() == ["True", "True", "True", "7", "True"]


def test_the_recipes_are_those_of_the_guide():
    """Who adds a recipe to the page adds it here."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert [line[4:] for line in page.splitlines() if line.startswith("### ")] == [
        "A table of a run",
        "A table of traces",
        "A column",
        "A rule",
        "A command",
        "A chart",
        "A view of the dashboard",
        "A library that sits on Lightning",
        "A FLOP formula",
        "A device's peak",
        "An output",
        "A phase",
        "A configuration argument",
    ]
    assert Path(ROOT, "tests", "house").is_dir()
