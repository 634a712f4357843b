"""Which run a logger's folder refers to: the newest by archive time, with a note that says so."""

from __future__ import annotations

import json
import shutil

import pytest

from lightning_modelprof import read_report
from lightning_modelprof.cli.main import main
from lightning_modelprof.run.locate import choice_note, find_run
from tests.support.fits import ROOT, run_fit


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_fit(folder, dirpath=folder / "modelprof", active=0)
    return folder / "modelprof"


def make_run(saved, folder, created):
    """A copy of the saved run with another start time; ``None`` removes the time, "empty" all content."""
    shutil.copytree(saved, folder)
    run = json.loads((folder / "run.json").read_text())
    if created is None:
        del run["info"]["created"]
    else:
        run["info"]["created"] = created
    text = "" if created == "empty" else json.dumps(run)
    (folder / "run.json").write_text(text)


EARLY = "2026-03-01T10:00:00.000000+01:00"
MIDDLE = "2026-03-01T09:30:00.000000+00:00"  # later, though the text sorts earlier
LATE = "2026-03-01T03:00:00.000000-08:00"


@pytest.mark.parametrize(
    ("runs", "newest"),
    [
        ({"modelprof": EARLY, "modelprof_1": MIDDLE, "modelprof_2": LATE}, "modelprof_2"),
        ({"modelprof": LATE, "modelprof_1": EARLY, "modelprof_2": MIDDLE}, "modelprof"),
        ({"modelprof": EARLY, "modelprof_9": MIDDLE, "modelprof_10": MIDDLE}, "modelprof_10"),
        ({"modelprof": None, "modelprof_2": None, "modelprof_10": None}, "modelprof_10"),
        ({"modelprof": EARLY, "modelprof_1": "empty"}, "modelprof"),
        ({"modelprof": "no time", "modelprof_1": EARLY, "modelprof_2": "9" * 900}, "modelprof_1"),
        ({"modelprof_1": EARLY}, "modelprof_1"),
        ({"modelprof": EARLY, "modelprof_old": LATE, "modelprof_1_2": LATE}, "modelprof"),
    ],
)
def test_newest_run_is_chosen(saved, tmp_path, runs, newest):
    for name, created in runs.items():
        make_run(saved, tmp_path / name, created)
    assert find_run(tmp_path) == tmp_path / newest / "run.json"


def test_run_folder_refers_to_itself(saved, tmp_path):
    make_run(saved, tmp_path / "run", EARLY)
    make_run(saved, tmp_path / "run" / "modelprof", LATE)
    make_run(saved, tmp_path / "run" / "modelprof_1", LATE)
    assert find_run(tmp_path / "run") == tmp_path / "run" / "run.json"
    assert choice_note(tmp_path / "run") == ""


def test_every_command_reports_newest_run_and_notes_it(saved, tmp_path, capsys):
    logger, other = tmp_path / "version_0", tmp_path / "other"
    for name, created in (("modelprof", MIDDLE), ("modelprof_1", LATE), ("modelprof_2", EARLY)):
        make_run(saved, logger / name, created)
    make_run(saved, other, EARLY)
    said = f"This is {logger / 'modelprof_1'}, the newest of 3 runs in {logger}."
    report = read_report(logger)
    assert report.summary.run.created == LATE
    assert report.notes[0].startswith(said)
    for command in (["report", str(logger)], ["compare", str(other), str(logger)]):
        main(command)
        assert "".join(said.split()) in "".join(capsys.readouterr().out.split())  # a long path is wrapped
    assert main(["tensorboard", str(logger), "--logdir", str(tmp_path / "logs")]) == 0
    assert said in capsys.readouterr().out
    main(["report", str(logger / "modelprof_2")])
    assert "the newest of" not in capsys.readouterr().out


def test_install_instructions_use_clone_not_index():
    """No index has a package of this name."""
    places = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").glob("*")]
    places += [*(ROOT / "examples").rglob("*.*"), *(ROOT / "lightning_modelprof").rglob("*.py")]
    lines = [
        line
        for place in places
        if place.is_file() and place.suffix in (".md", ".py", ".yaml", ".ipynb")
        for line in place.read_text().splitlines()
        if "pip install" in line
    ]
    assert lines
    clone = "-e ./lightning-modelprof"
    assert [line for line in lines if "lightning-modelprof" in line.replace(clone, "")] == []
