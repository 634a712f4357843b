"""What is said of calls that are known to be slow."""

import linecache
import os
from dataclasses import replace

import pytest

from lightning_modelprof.report.advice.idioms import IDIOMS, idiom_advice, with_idiom
from lightning_modelprof.report.model import Finding, Location, Severity, Status

NOON = "2026-05-01T12:00:00+00:00"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("for _, row in frame.iterrows():", "whole columns"),
        ("frame = pd.read_csv(self.paths[index])", "Read the file once"),
        ("data = np.load(path)", "mmap_mode"),
        ("index = rng.choice(self.n, p=self.p)", "draw many at once"),
        ("auc = roc_auc_score(target, score)", "once an epoch"),
        ("norms = torch.linalg.svdvals(weight)", "Decompositions"),
        ("self.best = copy.deepcopy(model.state_dict())", "Copy only"),
        ("frame.to_csv(self.path)", "Write once"),
        ("self.all = torch.cat([self.all, new])", "Joining copies"),
        ("rows = features.tolist()", ".tolist()"),
        ("x = torch.tensor(rows)", "from_numpy"),
        ("at = self.nodes.index(node)", "a dict or a set"),
        ("one = frame[frame.patient == patient]", "group them once"),
        ("order = sorted(self.lengths)", "Sort once"),
        ("loss = self.head(hidden)  # np.load(path) was slow", ""),
        ("x = self.index + 1", ""),
    ],
)
def test_a_line(line, said):
    assert (said in idiom_advice(line)) if said else not idiom_advice(line)


def test_each_is_tried():
    assert len({one.advice for one in IDIOMS}) == len(IDIOMS)


def finding(path, **changes):
    place = Location(file=str(path), line=2, function="f", is_exact=True)
    return Finding(
        kind="input_bound",
        status=Status.FOUND,
        severity=Severity.WARNING,
        title="",
        summary="",
        action="Do less.",
        locations=(replace(place, **changes),),
    )


def test_the_innermost_line_is_read(tmp_path):
    file = tmp_path / "data.py"
    file.write_text("def f():\n    x = np.load(path)\n    y = x.tolist()\n")
    os.utime(file, (0, 0))
    assert with_idiom(finding(file), NOON).action.startswith("Load it once")
    inner = Location(file=str(file), line=3, function="g", is_exact=True)
    assert with_idiom(finding(file, inner=inner), NOON).action.startswith("Keep tensors")


def test_a_file_that_changed_since_is_not_read(tmp_path):
    file = tmp_path / "data.py"
    file.write_text("def f():\n    x = np.load(path)\n")
    assert with_idiom(finding(file), NOON).action.startswith("Load") is (file.stat().st_mtime < 1777636800)
    os.utime(file, (4e9, 4e9))
    assert with_idiom(finding(file), NOON).action == "Do less."


def test_what_was_typed_into_a_notebook_is_read(monkeypatch):
    cell, text = "/tmp/ipykernel_1/23.py", "def f():\n    x = np.load(path)\n"
    monkeypatch.setattr(linecache, "cache", {cell: (len(text), None, text.splitlines(keepends=True), cell)})
    assert with_idiom(finding(cell), NOON).action.startswith("Load it once")


@pytest.mark.parametrize("changes", [{"is_exact": False}, {"package": "torch"}, {"file": None}])
def test_other_places(tmp_path, changes):
    file = tmp_path / "data.py"
    file.write_text("def f():\n    x = np.load(path)\n")
    os.utime(file, (0, 0))
    assert with_idiom(finding(file, **changes), NOON).action == "Do less."
