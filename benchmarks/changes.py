"""How many third-party training scripts get a diff, and whether each diff applies and parses.

    python benchmarks/changes.py FOLDER [FOLDER ...] [--scripts 40] [--show]

Each folder is an unpacked package or a clone. Its training scripts are the files that call ``fit`` on a
Trainer, or define a ``train_dataloader`` or a LightningModule with ``configure_optimizers``. The benchmark
takes scripts from all folders in turn. For each, it requests three changes, as findings would:

- the training DataLoader: ``num_workers=3, persistent_workers=True``
- the Trainer: ``log_every_n_steps=500``
- the optimizer: ``fused=True``

The scripts don't run, so the source alone identifies the statement: what ``train_dataloader`` returns, the
argument of ``fit``, or the only such call in the file. ``git apply`` applies each diff to a copy in a new
repository. Then the file must parse and must equal the old one except for the requested arguments.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from lightning_modelprof.measure.setup.source_file import SourceFile
from lightning_modelprof.report.changes.loaders import DEFAULTS, POSITIONS
from lightning_modelprof.report.changes.offers import offer_arguments
from lightning_modelprof.report.model import CHANGES_NUMERICS

OPTIMIZERS = ("Adam", "AdamW", "SGD", "Adagrad")
WANTED: dict[str, dict[str, Any]] = {
    "DataLoader": {"num_workers": 3, "persistent_workers": True},
    "Trainer": {"log_every_n_steps": 500},
    "optimizer": {"fused": True},
}


def scripts_in(folder: Path) -> Iterator[Path]:
    """Yield a package's training scripts, found by their syntax trees."""
    for file in sorted(folder.rglob("*.py")):
        if "fabric" in file.parts or any("test" in part for part in file.relative_to(folder).parts):
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError, RecursionError):
            continue
        called = {name_of(one) for one in ast.walk(tree) if isinstance(one, ast.Call)}
        defined = {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}
        fits = {"fit", "Trainer"} <= called
        trains = {"training_step", "configure_optimizers"} <= defined
        loads = "train_dataloader" in defined and "DataLoader" in called
        if fits or trains or loads:
            yield file


def name_of(call: ast.Call) -> str:
    """Return the last part of the called name."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def functions(source: SourceFile, name: str) -> list[ast.FunctionDef]:
    return [one for one in ast.walk(source.tree) if isinstance(one, ast.FunctionDef) and one.name == name]


def calls_for(source: SourceFile, what: str) -> list[ast.Call]:
    """Return the calls that a change may apply to."""
    if what == "optimizer":
        return [
            call
            for one in functions(source, "configure_optimizers")
            for call in source.calls(one, *OPTIMIZERS)
        ]
    found: list[ast.Call] = []
    fits = source.calls(source.tree, "fit")
    if what == "Trainer":
        receivers = [(one, one.func.value) for one in fits if isinstance(one.func, ast.Attribute)]
        found = [
            call
            for fit, value in receivers
            for call in source.made_by(value, source.function_around(fit), what)
        ]
    else:
        for hook in functions(source, "train_dataloader"):
            found += source.made_by(None, hook, what) or source.calls(hook, what)
        for fit in fits:
            named = [
                one.value for one in fit.keywords if one.arg in ("train_dataloaders", "train_dataloader")
            ]
            for value in named or fit.args[1:2]:
                found += source.made_by(value, source.function_around(fit), what)
    return list(dict.fromkeys(found)) or source.calls(source.tree, what)


def changed(source: SourceFile, what: str) -> tuple[str, str]:
    """Return the diff of one change, or why there is none."""
    calls = calls_for(source, what)
    if not calls:
        return "", "no such statement"
    if len(calls) > 1:
        return "", "several statements"
    statement = source.statement(what, calls)
    if statement is None:
        return "", "*args, **kwargs, or no simple statement"
    options: dict[str, Any] = {"positions": POSITIONS, "defaults": DEFAULTS} if what == "DataLoader" else {}
    change = offer_arguments(statement, what, WANTED[what], CHANGES_NUMERICS, **options)
    return change.diff, "" if change.diff else "an argument is computed, or is what is wanted"


def fault_of(file: Path, diff: str, wanted: dict[str, Any]) -> str:
    """Apply a diff, return its fault or ``""``, and restore the file."""
    old = file.read_bytes()
    applied = subprocess.run(
        ["git", "apply"], input=diff.encode(), cwd=file.parent, capture_output=True, check=False
    )
    new = file.read_bytes()
    file.write_bytes(old)
    if applied.returncode:
        return applied.stderr.decode()
    try:
        before, after = ast.parse(old), ast.parse(new)
    except SyntaxError as error:
        return str(error)
    given_before, given_after = (Counter(taken_out(tree, wanted)) for tree in (before, after))
    asked = {f"{name}={value!r}" for name, value in wanted.items()}
    added = given_after - given_before
    if not added or not added.keys() <= asked or len(given_before - given_after) > len(added):
        return f"added {[*added]}"
    return "" if ast.dump(before) == ast.dump(after) else "more has changed"


def taken_out(tree: ast.AST, wanted: dict[str, Any]) -> Iterator[str]:
    """Remove the keyword arguments that a change sets from the tree, and yield them."""
    for one in ast.walk(tree):
        if isinstance(one, ast.Call):
            yield from (f"{key.arg}={ast.unparse(key.value)}" for key in one.keywords if key.arg in wanted)
            one.keywords = [key for key in one.keywords if key.arg not in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--scripts", type=int, default=40)
    parser.add_argument("--show", action="store_true", help="print each diff")
    given = parser.parse_args()
    in_turn = chain.from_iterable(zip_longest(*map(scripts_in, given.folders)))
    chosen = [one for one in in_turn if one is not None][: given.scripts]
    counts, reasons, faults, some = Counter[str](), Counter[tuple[str, str]](), [], 0
    for script in chosen:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / script.name
            file.write_bytes(script.read_bytes())
            subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
            source = SourceFile.read(str(file))
            got = []
            for what, wanted in WANTED.items():
                diff, reason = ("", "not read") if source is None else changed(source, what)
                if not diff:
                    reasons[what, reason] += 1
                    continue
                got.append(what)
                counts[what] += 1
                fault = fault_of(file, diff, wanted)
                faults += [f"{script}: {what}: {fault}"] if fault else []
                if given.show:
                    print(f"{script}\n{diff}")
            some += bool(got)
            print(f"{', '.join(got) or '-':<32} {script}")
    print(f"\n{len(chosen)} scripts, {some} with a diff, {sum(counts.values())} diffs, {len(faults)} wrong")
    for what in WANTED:
        print(f"{what:<12} {counts[what]:>3} of {len(chosen)}")
        for (kind, reason), number in reasons.most_common():
            if kind == what:
                print(f"{'':<12} {number:>3} {reason}")
    print(*faults, sep="\n")
    return len(faults)


if __name__ == "__main__":
    sys.exit(main())
