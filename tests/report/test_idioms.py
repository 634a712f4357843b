"""Advice on calls that are known to be slow."""

import linecache
import os
from dataclasses import replace

import pytest

from lightning_modelprof.analysis.source.hot_lines import HotLines
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.idioms import IDIOMS, idiom_advice, with_idiom
from lightning_modelprof.report.model import Finding, Severity, Status
from lightning_modelprof.run.stacks import SampledStack, StackFrame, StackSamples

NOON = "2026-05-01T12:00:00+00:00"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("for _, row in frame.iterrows():", "whole columns"),
        ("frame = pd.read_csv(self.paths[index])", "Read the file once"),
        ("data = np.load(path)", "mmap_mode"),
        ("index = rng.choice(self.n, p=self.p)", "Draw many values per call"),
        ("auc = roc_auc_score(target, score)", "once per epoch"),
        ("norms = torch.linalg.svdvals(weight)", "Decompose"),
        ("self.best = copy.deepcopy(model.state_dict())", "Copy only"),
        ("frame.to_csv(self.path)", "Write once"),
        ("self.all = torch.cat([self.all, new])", "Keep running sums"),
        ("self.all[key] = np.append(self.all[key], new)", "Keep running sums"),
        ("x = torch.cat([x, skip], dim=1)", ""),
        ("return torch.cat([self.up(x), self.skip], 1)", ""),
        ("rows = features.tolist()", ".tolist()"),
        ("x = torch.tensor(rows)", "from_numpy"),
        ("x = torch.tensor([row.x for row in rows])", "from_numpy"),
        ("x = torch.tensor(self.tokenizer(text).ids)", ""),
        ("x = torch.tensor([self.tokenizer.encode(text)])", ""),
        ("row = self.df.iloc[index]", "Convert the columns once"),
        ('text = self.frame.loc[int(index), "text"]', "Convert the columns once"),
        ("one = self.table.at[index, 'x']", "Convert the columns once"),
        ("part = self.df.loc[self.df.user == user]", "Group the rows"),
        ("gc.collect()", "Call gc.collect()"),
        ("torch.cuda.empty_cache()", "Call gc.collect()"),
        ("self.net.apply(self.start)", ""),
        ("order = torch.argsort(scores)", ""),
        ("at = self.nodes.index(node)", "a dict or a set"),
        ("one = frame[frame.patient == patient]", "Group the rows once"),
        ("order = sorted(self.lengths)", "Sort once"),
        ("loss = self.head(hidden)  # np.load(path) was slow", ""),
        ("x = self.index + 1", ""),
    ],
)
def test_line_gets_its_advice(line, said):
    assert (said in idiom_advice(line)) if said else not idiom_advice(line)


def test_idioms_have_different_advice():
    assert len({one.advice for one in IDIOMS}) == len(IDIOMS)


def finding(path, **changes):
    place = Place(file=str(path), line=2, function="f", is_exact=True)
    return Finding(
        kind="input_bound",
        status=Status.FOUND,
        severity=Severity.WARNING,
        title="",
        summary="",
        action="Do less.",
        locations=(replace(place, **changes),),
    )


def samples(*stacks):
    """Samples of 1 ms each: (count, then places as (file, line) or a package, outermost first)."""
    frames, found = [], []
    for count, *places in stacks:
        for place in places:
            file, line = (f"/lib/{place}/x.py", 1) if isinstance(place, str) else (str(place[0]), place[1])
            module = place if isinstance(place, str) else "data"
            frames.append(
                StackFrame(
                    file=file,
                    line=line,
                    function="f",
                    function_line=1,
                    python_module=module,
                    is_users=not isinstance(place, str),
                )
            )
        numbers = tuple(range(len(frames) - len(places), len(frames)))
        found.append(SampledStack(phase="dataloader", frames=numbers, samples=count, time_ns=count * 10**6))
    return HotLines(samples=StackSamples(frames=tuple(frames), stacks=tuple(found), samples=len(found)))


def file_of(tmp_path, *lines):
    file = tmp_path / "data.py"
    file.write_text("def f():\n" + "".join(f"    {line}\n" for line in lines))
    os.utime(file, (0, 0))
    return file


def test_idiom_applies_only_to_slow_line(tmp_path):
    """The outer line loads a file in 2 of 10 samples; the other 8 are in a line it calls."""
    file = file_of(tmp_path, "x = np.load(read(path))", "y = slow(x)", "z = x.tolist()")
    inner = Place(file=str(file), line=3, function="g", is_exact=True)
    hot = samples((2, (file, 2)), (8, (file, 2), (file, 3)))
    assert with_idiom(finding(file), NOON, hot).action == "Do less."
    assert with_idiom(finding(file, inner=inner), NOON, hot).action == "Do less."
    hot = samples((2, (file, 2)), (8, (file, 2), (file, 4)))
    assert with_idiom(finding(file, inner=replace(inner, line=4)), NOON, hot).action.startswith(
        "Keep tensors"
    )
    # It doesn't apply to a second place that takes less time, or without samples there.
    both = finding(file)
    both = replace(both, locations=(replace(both.locations[0], line=3), *both.locations))
    assert with_idiom(both, NOON, samples((8, (file, 3)), (6, (file, 2)))).action == "Do less."
    assert with_idiom(finding(file), NOON, samples((8, (file, 3)))).action == "Do less."
    assert with_idiom(finding(file), NOON, None).action == "Do less."
    # Samples of workers count as well.
    said = with_idiom(finding(file), NOON, None, samples((8, (file, 2)))).action
    assert said.startswith("Load it once")


def test_library_place_leads_to_calling_line(tmp_path):
    file = file_of(tmp_path, "row = self.df.iloc[i]")
    inside = Place(file="/lib/pandas/x.py", line=1, function="fast_xs", is_exact=True, package="pandas")
    hot = samples((8, (file, 2), "pandas"))
    assert with_idiom(finding(file, inner=inside), NOON, hot).action.startswith("Convert the columns once")


@pytest.mark.parametrize(
    ("line", "below", "said"),
    [
        ("x = torch.tensor(ids)", None, True),
        ("x = torch.tensor(ids)", "transformers", False),
        ("row = self.df.iloc[i]", "pandas", True),
        ("row = self.grid.iloc[i]", None, False),
        ("x = np.load(path)", "numpy", True),
        ("x = frame.apply(lambda row: row)", "pandas", True),
        ("x = self.net.apply(lambda one: one)", "torch", False),
    ],
)
def test_callees_of_line_are_evidence(tmp_path, line, below, said):
    file = file_of(tmp_path, line)
    hot = samples((8, (file, 2), *([below] if below else [])), (3, (file, 2), "re"))
    assert (with_idiom(finding(file), NOON, hot).action != "Do less.") is said


def test_changed_file_is_not_read(tmp_path):
    file = tmp_path / "data.py"
    file.write_text("def f():\n    x = np.load(path)\n")
    assert with_idiom(finding(file), NOON, samples((9, (file, 2)))).action.startswith("Load") is (
        file.stat().st_mtime < 1777636800
    )
    os.utime(file, (4e9, 4e9))
    assert with_idiom(finding(file), NOON, samples((9, (file, 2)))).action == "Do less."


def test_notebook_cell_is_read(monkeypatch):
    cell, text = "/tmp/ipykernel_1/23.py", "def f():\n    x = np.load(path)\n"
    monkeypatch.setattr(linecache, "cache", {cell: (len(text), None, text.splitlines(keepends=True), cell)})
    assert with_idiom(finding(cell), NOON, samples((9, (cell, 2)))).action.startswith("Load it once")


@pytest.mark.parametrize("changes", [{"is_exact": False}, {"package": "torch"}, {"file": None}])
def test_place_outside_user_code_gets_no_advice(tmp_path, changes):
    file = tmp_path / "data.py"
    file.write_text("def f():\n    x = np.load(path)\n")
    os.utime(file, (0, 0))
    assert with_idiom(finding(file, **changes), NOON, samples((9, (file, 2)))).action == "Do less."
