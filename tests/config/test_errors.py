"""Error messages are one printable line of limited length, and come before training starts."""

from __future__ import annotations

import pickle

import pytest

from lightning_modelprof import ArchiveError, ConfigError, ModelProfCallback
from lightning_modelprof.engine.run_folder import check_writeable
from lightning_modelprof.errors import ModelProfError, describe_error, quoted, warn
from tests.support.fits import make_callback, make_trainer

LONGEST = 4_100
UNPRINTABLE = "\x1b[2J\x1b]0;gone\x07red \u202egnp.exe\u2066 one\ntwo\u2028three"


def test_quoted_values_are_short_and_recognisable():
    assert quoted([1, 2.5, "x", None, {"a": (True,)}]) == "[1, 2.5, 'x', None, {'a': (True,)}]"
    assert quoted("x" * 300_000).startswith("'xxx")
    assert quoted(1 << 400_000) == "a 400,001-bit integer"
    for value in ("a" * 10_000_000, ["a" * 100] * 100_000, UNPRINTABLE * 1_000):
        assert len(quoted(value)) <= 700
        assert quoted(value).isprintable()


def test_error_is_one_line_of_limited_length():
    error = ConfigError(UNPRINTABLE + "x" * 3_000_000 + "the end")
    assert len(str(error)) <= LONGEST
    assert str(error).isprintable()
    assert str(error).endswith("the end")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(ArchiveError("plain: what it is.")) == "plain: what it is."


def test_every_error_uses_base_constructor():
    kinds = ModelProfError.__subclasses__()
    assert kinds
    assert all(kind.__init__ is ModelProfError.__init__ for kind in kinds)


def test_warning_keeps_line_breaks_but_no_escapes():
    with pytest.warns(RuntimeWarning) as caught:
        warn("could not write to \x1b[2Jx\u202e\nTraceback:\n  line")
    assert str(caught[0].message) == (
        "ModelProfCallback: could not write to \\x1b[2Jx\\u202e\nTraceback:\n  line"
    )


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no"), "ValueError: no"),
        (ValueError(), "ValueError"),
        (KeyError("a"), "KeyError: 'a'"),
        (ValueError("\n first\nsecond"), "ValueError: first\nsecond"),
    ],
)
def test_describe_error_names_type_and_message(error, text):
    assert describe_error(error) == text


@pytest.mark.parametrize("place", ["/proc", "/dev/null"])
def test_system_directories_are_rejected(tmp_path, place):
    trainer = make_trainer(tmp_path, make_callback(tmp_path, dirpath=place))
    with pytest.raises(ConfigError, match="can't write files to") as caught:
        trainer.callbacks[0].setup(trainer, None, "fit")
    assert str(caught.value).isprintable()


def test_check_writeable_creates_nothing(tmp_path):
    check_writeable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    for name in ("x" * 5_000, "a\0b", "a\ud800"):
        with pytest.raises(ConfigError):
            check_writeable(tmp_path / name)


def test_small_alias_is_accepted_and_alias_bomb_is_rejected(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("rules:\n  input_bound: &off false\n  slow_logger: *off\nactivities: [cpu]\n")
    assert ModelProfCallback.from_yaml(path).config.rules == {"input_bound": False, "slow_logger": False}
    nine = "".join(
        f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    path.write_text(f"a: &a [ha, ha, ha, ha, ha, ha, ha, ha, ha]\n{nine}")
    with pytest.raises(ConfigError) as caught:
        ModelProfCallback.from_yaml(path)
    assert len(str(caught.value)) <= LONGEST
    assert str(caught.value).startswith(f"{path}: ")
