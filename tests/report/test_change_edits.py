"""Source edits: what they write and where, and that nothing else changes."""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.report.changes.edits import Refused, SourceEdit
from lightning_modelprof.report.changes.offers import diff_of
from lightning_modelprof.run.setup import Statement

WANTED = {"num_workers": 2, "persistent_workers": True}
POSITIONS = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers")


def call_in(tree, name="DataLoader"):
    return next(
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.Call) and name in (getattr(one.func, "id", ""), getattr(one.func, "attr", ""))
    )


def edited(source, wanted=WANTED, **options):
    edit = SourceEdit(source if isinstance(source, bytes) else source.encode())
    edit.set_arguments(call_in(edit.tree), wanted, positions=POSITIONS, **options)
    return edit.result().decode()


BOTH = "num_workers=2, persistent_workers=True"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("DataLoader(ds, batch_size=32)\n", f"DataLoader(ds, batch_size=32, {BOTH})\n"),
        ("DataLoader(ds)", f"DataLoader(ds, {BOTH})"),
        ("DataLoader()", f"DataLoader({BOTH})"),
        ("DataLoader((ds))", f"DataLoader((ds), {BOTH})"),
        ("DataLoader(ds,)", "DataLoader(ds, num_workers=2, persistent_workers=True,)"),
        ("x = (DataLoader(ds)\n  .y)\n", f"x = (DataLoader(ds, {BOTH})\n  .y)\n"),
        ("DataLoader(ds, num_workers=0, a=1)", "DataLoader(ds, num_workers=2, a=1, persistent_workers=True)"),
        (
            "DataLoader('日本', num_workers = 0)  # é",
            "DataLoader('日本', num_workers = 2, persistent_workers=True)  # é",
        ),
        (
            "DataLoader(ds, 4, True, None, None, 0)",
            "DataLoader(ds, 4, True, None, None, 2, persistent_workers=True)",
        ),
        ("DataLoader(ds,\n           a=1)\n", f"DataLoader(ds,\n           a=1, {BOTH})\n"),
        (
            "DataLoader(\n    ds,  # ) ,\n    # last\n)\n",
            "DataLoader(\n    ds,  # ) ,\n    num_workers=2,\n    persistent_workers=True,\n    # last\n)\n",
        ),
        (
            "DataLoader(\n    ds,\n    a=1  # end\n)\n",
            "DataLoader(\n    ds,\n    a=1,  # end\n    num_workers=2,\n    persistent_workers=True\n)\n",
        ),
        (
            "if x:\n\ty = DataLoader(\n\t\tds\n\t)\n",
            "if x:\n\ty = DataLoader(\n\t\tds,\n\t\tnum_workers=2,\n\t\tpersistent_workers=True\n\t)\n",
        ),
        (
            "DataLoader(\r\n  ds,\r\n)\r\n",
            "DataLoader(\r\n  ds,\r\n  num_workers=2,\r\n  persistent_workers=True,\r\n)\r\n",
        ),
        ("DataLoader(\n)\n", "DataLoader(\n    num_workers=2,\n    persistent_workers=True\n)\n"),
        ("\ufeffDataLoader(ds)\n", f"\ufeffDataLoader(ds, {BOTH})\n"),
        ("DataLoader(ds, f'{a}\u2028', '''\n''')\n", f"DataLoader(ds, f'{{a}}\u2028', '''\n''', {BOTH})\n"),
    ],
)
def test_arguments_are_added_in_natural_places(before, after):
    assert edited(before) == after


def test_defaults_are_not_written():
    wanted = {"num_workers": 0, "persistent_workers": False, "prefetch_factor": None}
    given = "DataLoader(ds, num_workers=4, persistent_workers=True)"
    assert edited(given, wanted, defaults=wanted) == "DataLoader(ds, num_workers=0, persistent_workers=False)"


@pytest.mark.parametrize(
    "source",
    [
        "DataLoader(ds, **more)",
        "DataLoader(*given)",
        "DataLoader(ds, num_workers=args.workers)",
        "DataLoader(ds, num_workers=2, persistent_workers=True)",
        "DataLoader(x for x in y)",
        "DataLoader(ds)\rx = 1\r",
        "# -*- coding: latin-1 -*-\nDataLoader('é')\n".encode("latin-1"),
        "DataLoader(",
    ],
)
def test_unsafe_sources_are_refused(source):
    with pytest.raises(Refused):
        edited(source)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("self.log('é', loss.item())\n", "self.log('é', loss)\n"),
        ("self.log('x', (a - b).item(), prog_bar=True)", "self.log('x', (a - b), prog_bar=True)"),
        ("self.log('x', a\n  .item ( ))", "self.log('x', a)"),
    ],
)
def test_method_call_is_dropped(before, after):
    edit = SourceEdit(before.encode())
    edit.drop_method(call_in(edit.tree, "item"), "item")
    assert edit.result().decode() == after


@pytest.mark.parametrize("source", ["x.item(1)", "x.item(  # why\n)", "x.item(*a)"])
def test_call_with_content_is_kept_or_dropped_whole(source):
    edit = SourceEdit(source.encode())
    try:
        edit.drop_method(call_in(edit.tree, "item"), "item")
        assert edit.result() == b"x"
    except Refused:
        pass


@pytest.mark.parametrize(
    ("before", "lines", "after"),
    [
        ("self.a = B()", (1, 1), "self.a = B()\nself.a.x()"),
        (
            "if c:\r\n\tself.a = B(\r\n)  # why\r\n",
            (2, 3),
            "if c:\r\n\tself.a = B(\r\n)  # why\r\n\tself.a.x()\r\n",
        ),
        (
            "if c:\n    pass\nelse:\n    self.a = B()\n",
            (4, 4),
            "if c:\n    pass\nelse:\n    self.a = B()\n    self.a.x()\n",
        ),
    ],
)
def test_statement_is_added_below(before, lines, after):
    edit = SourceEdit(before.encode())
    edit.add_after(*lines, "self.a.x()")
    assert edit.result().decode() == after


@pytest.mark.parametrize("source", ["self.a = B(); y = 1\n", "if c: self.a = B()\n", "x = 1\n\n"])
def test_nothing_is_added_below_shared_line(source):
    edit = SourceEdit(source.encode())
    with pytest.raises(Refused):
        edit.add_after(1, 1 if "a" in source else 2, "self.a.x()")


SPACES = st.sampled_from(["", " ", "  ", "\n    ", "\n\t", "  # a, b)\n  ", "\n\n "])
VALUES = st.sampled_from(
    ["1", "'é)'", "[1,\n 2]", "f(a, b=(3,))", "None", "lambda x: x", "'''\n,'''", "{'a': 0}"]
)


@st.composite
def calls(draw):
    """A call with any arguments, written in any way."""
    names = draw(st.lists(st.sampled_from("abcdefg"), unique=True, max_size=4))
    given = [draw(VALUES) for _ in range(draw(st.integers(0, 2)))]
    given += [f"{name}{draw(st.sampled_from(['=', ' = ']))}{draw(VALUES)}" for name in names]
    text = "".join(f"{draw(SPACES)}{one}{draw(SPACES)}," for one in given)
    if given and not draw(st.booleans()):
        text = text[:-1]
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    before = draw(st.sampled_from(["", "x = ", "é = '日本'; y = ", "def f():\n    return "]))
    after = draw(st.sampled_from(["", "\n", "  # end\n", "\nz = 1"]))
    return f"{before}DataLoader({text}{draw(SPACES)}){after}".replace("\n", newline)


@given(calls())
def test_any_call_gets_new_arguments_and_keeps_others(source):
    before, after = ast.parse(source), ast.parse(edited(source))
    call, new = call_in(before), call_in(after)
    assert [ast.dump(one) for one in new.args] == [ast.dump(one) for one in call.args]
    added = [one for one in new.keywords if one.arg in WANTED]
    assert {one.arg: ast.literal_eval(one.value) for one in added} == WANTED
    new.keywords = [one for one in new.keywords if one.arg not in WANTED]
    assert ast.dump(after) == ast.dump(before)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def statement_of(file, data):
    file.write_bytes(data)
    [node] = ast.parse(data).body
    call = call_in(node)
    where = (call.lineno, call.col_offset, call.end_lineno, call.end_col_offset)
    return Statement(
        about="DataLoader",
        file=str(file),
        digest=hashlib.sha256(data).hexdigest(),
        line=1,
        end_line=call.end_lineno,
        text=data.decode(),
        calls=(where,),
    )


def change(statement):
    def edit(source):
        source.set_arguments(source.call_at(statement.calls[0]), WANTED)

    return diff_of(statement, edit)


@pytest.mark.parametrize("name", ["train.py", "my train.py", "größe.py", "a/b c/t.py"])
@pytest.mark.parametrize("data", [b"DataLoader(ds)", b"DataLoader(ds)\n", b"DataLoader(\r\n ds,\r\n)\r\n"])
def test_git_applies_the_diff_in_the_working_directory(name, data, here):
    file = here / name
    file.parent.mkdir(parents=True, exist_ok=True)
    diff = change(statement_of(file, data))
    assert f"+++ b/{name}" in diff
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(here.parent)}
    subprocess.run(["git", "apply"], input=diff.encode(), check=True, env=environment)
    assert file.read_bytes().decode() == edited(data)


def test_file_outside_working_directory_gets_no_diff(here, tmp_path_factory):
    file = tmp_path_factory.mktemp("elsewhere") / "train.py"
    assert change(statement_of(file, b"DataLoader(ds)\n")) == ""


def test_pipe_or_folder_is_not_read(here):
    """A run from elsewhere may name any path."""
    statement = statement_of(here / "train.py", b"DataLoader(ds)\n")
    (here / "train.py").unlink()
    os.mkfifo(here / "train.py")
    assert change(statement) == ""
    (here / "train.py").unlink()
    (here / "train.py").mkdir()
    assert change(statement) == ""


def test_many_changed_lines_give_no_diff(here):
    data = b"DataLoader(\n    ds,\n" + b"".join(b"    a%d=0,\n" % number for number in range(9)) + b")\n"
    statement = statement_of(here / "train.py", data)
    wanted = {f"a{number}": 1 for number in range(9)}

    def edit(source):
        source.set_arguments(source.call_at(statement.calls[0]), wanted)

    assert diff_of(statement, edit) == ""
