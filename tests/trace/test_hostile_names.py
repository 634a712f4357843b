"""Names and values that nobody means: nothing hangs or obeys them, and one short sentence refuses them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from lightning_modelprof import ArchiveError, ConfigError, ModelProfCallback, TraceError, analyze, read_report
from lightning_modelprof.cli.main import main
from lightning_modelprof.config.checks import make_config
from lightning_modelprof.config.options import FIELDS, GROUP_OF
from lightning_modelprof.errors import ModelProfError, one_line, quoted, told, warn
from lightning_modelprof.loop.run_folder import check_writeable
from tests.support.fits import grouped, make_callback, make_trainer, run_fit

pytestmark = pytest.mark.slow

LONGEST = 4_100
MEGABYTES = 10_000_000

NAMES = {
    "escape": "\x1b[2J\x1b]0;gone\x07red",
    "c1": "\x9b31mred\x85\x9d",
    "bidi": "\u202egnp.exe\u2066x\u200f",
    "lines": "one\ntwo\rthree\u2028four\x0bfive",
    "not UTF-8": os.fsdecode(b"caf\xe9"),
    "markup": "[bold red]x[/] :smile: %s {0}",
}


def laughs():
    """Ten lists in each other, each nine times in the next: a few hundred objects, 3,486,784,401 texts."""
    value = ["ha"] * 9
    for _ in range(9):
        value = [value] * 9
    return value


def nested():
    value = []
    for _ in range(50_000):
        value = [value]
    return value


class BadPath(os.PathLike):
    def __fspath__(self):
        raise RuntimeError("no \x1b[31mpath")

    def __repr__(self):
        raise RuntimeError("no repr")


VALUES = {
    "text": "a" * MEGABYTES,
    "escapes": "\x1b[31m" * 100_000,
    "dots": "." * MEGABYTES,
    "spaces": "cpu" + " " * MEGABYTES,
    "bytes": b"a" * MEGABYTES,
    "list": ["a" * 100] * 100_000,
    "long names": ["a" * MEGABYTES, "b"],
    "tuple": (1,) * 1_000_000,
    "mapping": {str(number): number for number in range(200_000)},
    "mapping of long": {"a" * MEGABYTES: "b" * MEGABYTES},
    "rules": {"input_bound": {"a" * MEGABYTES: 1}},
    "laughs": laughs(),
    "laughs in a mapping": {"input_bound": {"warning": laughs()}},
    "list of laughs": [laughs()],
    "nested": nested(),
    "integer": int("f" * 100_000, 16),
    "negative": -int("f" * 100_000, 16),
    "integers": [int("f" * 100_000, 16)] * 2,
    "threshold": {"input_bound": {"warning": 10**5_000}, "bfloat16": 10**5_000},
    "array": np.zeros(1_000_000),
    "no repr": BadPath(),
    "nan": float("nan"),
}


@pytest.mark.parametrize("value", VALUES)
def test_no_value_of_an_argument_hangs_or_fills_the_screen(value):
    for name in (*FIELDS, *GROUP_OF):
        said = ""
        try:
            make_config(grouped({name: VALUES[value]})).as_plain()
        except ConfigError as error:
            said = str(error)
        assert len(said) <= LONGEST, name
        assert said.isprintable(), name


def test_no_name_of_an_argument_fills_the_screen():
    with pytest.raises(ConfigError, match="unknown argument") as caught:
        ModelProfCallback(**{"a" * MEGABYTES: 1})
    assert len(str(caught.value)) <= LONGEST


def test_what_is_quoted_is_short_and_says_what_it_was():
    assert quoted([1, 2.5, "x", None, {"a": (True,)}]) == "[1, 2.5, 'x', None, {'a': (True,)}]"
    assert quoted("x" * 300_000).startswith("'xxx")
    assert quoted(1 << 400_000) == "a 400,001-bit integer"
    assert all(len(quoted(value)) <= 700 and quoted(value).isprintable() for value in VALUES.values())


def test_an_error_is_one_line_of_bounded_length():
    error = ConfigError("".join(NAMES.values()) + "x" * 3_000_000 + "the end")
    assert len(str(error)) <= LONGEST
    assert str(error).isprintable()
    assert str(error).endswith("the end")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(ArchiveError("plain: what it is.")) == "plain: what it is."


def test_a_warning_keeps_its_lines_and_nothing_else():
    with pytest.warns(RuntimeWarning) as caught:
        warn("could not write to \x1b[2Jx\u202e\nTraceback:\n  line")
    assert str(caught[0].message) == (
        "ModelProfCallback: could not write to \\x1b[2Jx\\u202e\nTraceback:\n  line"
    )


# Paths

IMPOSSIBLE = {
    "zero byte": "a\0b",
    "half a pair": "a\ud800b",
    "too long": "a" * 5_000,
    "much too long": "a/" * 5_000_000,
    "bytes": b"a\0b",
    "number": 3,
    "nothing": None,
    "list": ["a"],
    "own": BadPath(),
}


@pytest.fixture
def loop(tmp_path):
    """A link that leads to itself."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return tmp_path / "loop"


@pytest.mark.parametrize("path", IMPOSSIBLE)
@pytest.mark.parametrize(
    ("read", "kind"),
    [(read_report, ArchiveError), (analyze, TraceError), (ModelProfCallback.from_yaml, ConfigError)],
)
def test_an_impossible_path_is_refused_in_one_sentence(read, kind, path):
    with pytest.raises(kind, match="can't read ") as caught:
        read(IMPOSSIBLE[path])
    assert len(str(caught.value)) < 1_000
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("read", "kind"),
    [(read_report, ArchiveError), (analyze, TraceError), (ModelProfCallback.from_yaml, ConfigError)],
)
def test_paths_that_lead_nowhere(read, kind, tmp_path, loop):
    (tmp_path / "file").write_text("text")
    places = (
        loop,
        loop / "below",
        tmp_path / "file" / "below",
        tmp_path / "none",
        str(tmp_path),
        bytes(tmp_path),
    )
    for place in places:
        with pytest.raises(kind) as caught:
            read(place)
        assert str(caught.value).isprintable()


COMMANDS = (
    ("report", "{}"),
    ("analyze", "{}"),
    ("compare", "{}", "other"),
    ("compare", "--before", "a", "--after", "{}"),
    ("tensorboard", "{}", "--logdir", "logs"),
    ("report", "logs", "--html", "{}/x"),
    ("report", "logs", "--sorted-by", "{}"),
    ("report", "logs", "--row-limit", "{}"),
    ("report", "logs", "--module-depth", "{}"),
    ("analyze", "x", "--max-gib", "{}"),
    ("analyze", "x", "--views", "{}"),
    ("analyze", "x", "--{}"),
    ("{}",),
    ("report", "logs", "{}"),
    ("compare", "{}", "b", "c"),
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_name_reaches_the_terminal_as_it_is(command, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = main([part.replace("{}", NAMES[name]) for part in command])
    except SystemExit as end:
        code = end.code
    assert code in (1, 2)
    out, err = capsys.readouterr()
    assert err
    assert all(line.isprintable() for line in (out + err).splitlines())
    assert len((out + err).splitlines()) == (out + err).count("\n")  # no other ends of lines
    assert NAMES[name].isprintable() or NAMES[name] not in err


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b", "a" * 5_000])
@pytest.mark.parametrize("command", [one for one in COMMANDS if "{}" in one], ids=" ".join)
def test_no_path_ends_a_command_in_a_traceback(command, path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = main([part.replace("{}", path) for part in command])
    except SystemExit as end:
        code = end.code
    assert code in (1, 2)
    assert capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_folders_with_such_names_are_read_and_written(name, tmp_path, capsys):
    folder = tmp_path / NAMES[name].replace("/", "")
    callback = run_fit(tmp_path, dirpath=folder, terminal=True)
    printed = capsys.readouterr().out
    assert one_line(str(folder)) in printed
    assert NAMES[name].isprintable() or NAMES[name] not in printed
    assert sorted(file.name for file in folder.iterdir() if file.is_file()) == [
        "report.html",
        "report.json",
        "report.txt",
        "run.json",
    ]
    assert callback.report is not None
    assert read_report(folder).facts
    assert main(["report", str(folder)]) == 0
    assert main(["tensorboard", str(folder), "--logdir", str(tmp_path / "logs")]) == 0
    is_refused = name == "not UTF-8"  # by TensorBoard's writer
    assert main(["tensorboard", str(folder), "--logdir", str(folder / "logs")]) == is_refused
    out, err = capsys.readouterr()
    assert all(line.isprintable() for line in (out + err).splitlines())


# The folder of the files


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b", Path("a\0b"), b"a", BadPath()])
def test_a_folder_that_cannot_be_called_that(path):
    with pytest.raises(ConfigError, match="dirpath: expected a path or None, got") as caught:
        make_config({"dirpath": path})
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("place", ["/sys", "/proc", "/sys/kernel/x", "/dev/null", "/proc/self/mem/x"])
def test_a_folder_of_the_system(tmp_path, place):
    trainer = make_trainer(tmp_path, make_callback(tmp_path, dirpath=place))
    with pytest.raises(ConfigError, match="can't write files to") as caught:
        trainer.callbacks[0].setup(trainer, None, "fit")
    assert str(caught.value).isprintable()


def test_looking_whether_a_folder_can_be_made_leaves_nothing(tmp_path):
    check_writeable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    for name in ("x" * 5_000, "a\0b", "a\ud800"):
        with pytest.raises(ConfigError):
            check_writeable(tmp_path / name)


# YAML

LAUGHS = "a: &a [ha, ha, ha, ha, ha, ha, ha, ha, ha]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
FILES = {
    "laughs": LAUGHS,
    "laughs as a value": "rules:\n" + "".join(f"  {line}\n" for line in LAUGHS.splitlines()) + "ranks: *i\n",
    "merged laughs": "a: &a {x: 1}\n"
    + "".join(
        f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "itself": "ranks: &a [*a]\n",
    "itself as a key": "? &a [*a]\n: 1\n",
    "large": "# " + "x" * MEGABYTES + "\nactive: 3\n",
    "long value": "unit: " + "x" * 60_000,
    "hexadecimal": "active: 0x" + "f" * 60_000,
    "digits": "active: " + "1" * 60_000,
    "sexagesimal": "active: 1" + ":1" * 30_000,
    "deep": "ranks: " + "[" * 30_000,
    "deep keys": "? " * 30_000,
    "many": "ranks: [" + "1, " * 20_000 + "1]",
    "escapes": 'unit: "' + "\\e[2J" * 10_000 + '"\n',
    "controls": "unit: \x1b[2J\n",
    "names": "".join(f"name{number}: 1\n" for number in range(3_000)),
    "broken": "active: [\n\n\n  : }\n",
    "zero bytes": "\0" * 100,
}


@pytest.mark.parametrize("name", FILES)
def test_no_yaml_hangs_or_fills_the_screen(name, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(FILES[name])
    with pytest.raises(ConfigError) as caught:
        ModelProfCallback.from_yaml(path)
    assert len(str(caught.value)) <= LONGEST
    assert str(caught.value).isprintable()
    assert str(caught.value).startswith(f"{path}: ")


def test_an_alias_that_means_little_is_taken(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("rules:\n  input_bound: &off false\n  slow_logger: *off\nactivities: [cpu]\n")
    assert ModelProfCallback.from_yaml(path).config.rules == {"input_bound": False, "slow_logger": False}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_arguments_are_read_from_files_alone(make, tmp_path):
    make(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"expected a YAML file, got|can't read"):
        ModelProfCallback.from_yaml(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="expected a YAML file, got a device"):
        ModelProfCallback.from_yaml("/dev/zero")


def test_every_error_of_ours_is_of_the_one_kind():
    kinds = ModelProfError.__subclasses__()
    assert kinds
    assert all(kind.__init__ is ModelProfError.__init__ for kind in kinds)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no"), "ValueError: no"),
        (ValueError(), "ValueError"),
        (KeyError("a"), "KeyError: 'a'"),
        (ValueError("\n first\nsecond"), "ValueError: first\nsecond"),
    ],
)
def test_what_is_told_of_an_error(error, text):
    assert told(error) == text
