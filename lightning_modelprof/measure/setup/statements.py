"""The user's statements that findings may want changed, found when the loop starts.

They create the DataLoader, Trainer, optimizer and layers, log values and copy tensors. A statement is kept
only if the source identifies it beyond doubt; if several qualify, none is kept.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeGuard

from torch import nn

from lightning_modelprof.measure.setup.environment import TrainerCall, written_class
from lightning_modelprof.measure.setup.source_file import SourceFile, mentions
from lightning_modelprof.measure.stored import is_trained, named_children, named_modules, parameters_of
from lightning_modelprof.measure.user_code import UserCode, absolute_file
from lightning_modelprof.place import Place
from lightning_modelprof.run.setup import ConvolutionBias, LoaderSetup, Statement

ITEM: Final = "item"
"""``about`` of a ``self.log`` whose value is an ``.item()``."""
COPY: Final = "to"
"""``about`` of ``.to(...)`` and ``.cuda(...)``."""
ANOMALY: Final = "set_detect_anomaly"
CONVOLUTION: Final = "convolution"
UNTRAINED: Final = "untrained"
"""``about`` of a module whose parameters are in no optimizer."""

_ENTRIES: Final = ("fit", "validate", "test", "predict")
_LOGS: Final = ("log", "log_dict")
_COPIES: Final = ("to", "cuda")
_CONVOLUTIONS: Final = ("Conv1d", "Conv2d", "Conv3d")
_TRANSFERS: Final = ("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer")
_NEEDS_BIAS: Final = ("bias", "load_state_dict", "load_from_checkpoint")
"""Attributes through which code may access a bias, or load a checkpoint with one."""
_MOST: Final = 50
_MOST_FILES: Final = 8
_REACHES_GRADIENTS: Final = (
    *("grad", "requires_grad", "requires_grad_"),
    *("unfreeze", "add_param_group", "toggle_optimizer"),
)
"""Attributes through which code may use gradients that no optimizer uses, or train a module later."""
_HARMLESS: Final = ("eval", "train", "load_state_dict", "parameters", "state_dict", "to", "forward")
"""Attributes of a module that don't pass it to other code."""
_GIVE_PARAMETERS: Final = ("parameters", "named_parameters")


class Statements:
    """Finds one loop's statements.

    Args:
        holders: the LightningModule and the DataModule, whose files have the user's code.
    """

    def __init__(self, call: TrainerCall, module: nn.Module, holders: Iterable[Any]) -> None:
        self._call, self._module = call, module
        self._layers = dict(named_modules(module))
        self._user_code = UserCode()  # a class in an installed package is a library's, even if it's the model
        self._read: dict[str, SourceFile | None] = {}
        classes = [kind for one in holders if one is not None for kind in written_class(one).__mro__]
        self._files = [*call.files, *filter(None, map(self._file_of, classes))]

    def _source(self, file: str | None) -> SourceFile | None:
        """Read a user's file; ``None`` if it's a library's, no file, or one too many."""
        if file is None or file.startswith("<") or not self._user_code.is_users_file(file):
            return None
        if file not in self._read and len(self._read) < _MOST_FILES:
            self._read[file] = SourceFile.read(file)
        return self._read.get(file)

    def _file_of(self, kind: type) -> str | None:
        try:
            file = absolute_file(inspect.getfile(kind))
        except (OSError, TypeError):  # built in, or defined at a prompt
            return None
        return file if self._user_code.is_users_file(file) else None

    def _calls_anywhere(self, name: str) -> list[tuple[SourceFile, ast.Call]]:
        """Return all calls of a name in the user's files; a file without the name isn't parsed."""
        files = [one for one in dict.fromkeys(self._files) if one in self._read or mentions(one, name)]
        sources = [one for one in map(self._source, files) if one is not None]
        return [(one, call) for one in sources for call in one.calls(one.tree, name)]

    def _entry(self) -> tuple[SourceFile, ast.Call] | None:
        for place in self._call.lines[:1]:
            source = self._source(place.file)
            call = None if source is None or place.line is None else source.call_at(place.line, *_ENTRIES)
            if source is not None and call is not None:
                return source, call
        return None

    def loader(self, loaders: Sequence[LoaderSetup], position: int) -> Iterator[Statement]:
        """Yield the statement that creates the loop's only DataLoader.

        Args:
            position: the dataloaders' position among the Trainer call's arguments.
        """
        if len(loaders) != 1:
            return
        loader = loaders[0]
        found: list[tuple[SourceFile, ast.Call]] = []
        if loader.made_by is not None:
            source = self._source(loader.made_by.file)
            hook = None if source is None else source.function_at(loader.made_by)
            if source is None or hook is None:
                return
            calls = source.made_by(None, hook, loader.kind) or source.calls(hook, loader.kind)
            found = [(source, call) for call in calls]
        elif (entry := self._entry()) is not None:
            source, call = entry
            given = _argument(call, position, "train_dataloaders", "dataloaders")
            if given is not None:
                calls = source.made_by(given, source.function_around(call), loader.kind)
                found = [(source, one) for one in calls]
        if not found:
            found = self._calls_anywhere(loader.kind)
        found = [(one, call) for one, call in dict.fromkeys(found) if _may_make(call, loader)]
        yield from _only("DataLoader", found)

    def trainer(self, kind: str) -> Iterator[Statement]:
        """Yield the statements that create the Trainer and turn anomaly detection on."""
        found: list[tuple[SourceFile, ast.Call]] = []
        entry = self._entry()
        if entry is not None:
            source, call = entry
            receiver = call.func.value if isinstance(call.func, ast.Attribute) else call.func
            made = source.made_by(receiver, source.function_around(call), kind)
            found = [(source, one) for one in made]
        found = found or self._calls_anywhere(kind)
        yield from _only("Trainer", list(dict.fromkeys(found)))
        switches = [(one, call) for one, call in self._calls_anywhere(ANOMALY) if _turns_on(call)]
        yield from _only(ANOMALY, switches)

    def optimizer(self, hook: Place | None, class_names: Sequence[str]) -> Iterator[Statement]:
        """Yield the statement in ``configure_optimizers`` that creates the only optimizer."""
        source = None if hook is None else self._source(hook.file)
        if source is None or hook is None or len(class_names) != 1:
            return
        function = source.function_at(hook)
        if function is None:
            return
        calls = source.calls(function, class_names[0]) or source.made_by(None, function, class_names[0])
        yield from _only("optimizer", [(source, call) for call in calls])

    def logs(self) -> Iterator[Statement]:
        """Yield ``self.log`` calls in the module's own code, and those whose value is an ``.item()``."""
        left = _MOST
        for kind in written_class(self._module).__mro__:
            source = self._source(self._file_of(kind))
            owner = None if source is None else source.class_named(kind.__qualname__)
            if source is None or owner is None:
                continue
            for call in source.calls(owner, *_LOGS)[:left]:
                left -= 1
                items = [one for one in _logged_values(call) if _is_item(one)]
                for about, calls in (("log", [call]), (ITEM, items)):
                    found = source.statement(about, calls) if calls else None
                    if found is not None:
                        yield found

    def copies(self, hooks: Mapping[str, Place]) -> Iterator[Statement]:
        """Yield calls of ``.to`` and ``.cuda`` in the module's transfer hooks and its step."""
        for name in (*_TRANSFERS, "training_step"):
            place = hooks.get(name)
            source = None if place is None else self._source(place.file)
            function = None if source is None or place is None else source.function_at(place)
            if source is None or function is None:
                continue
            for call in source.calls(function, *_COPIES)[:_MOST]:
                found = source.statement(COPY, [call])
                if found is not None:
                    yield found

    def convolutions(self, biases: Sequence[ConvolutionBias]) -> Iterator[Statement]:
        """Yield the only statement, outside loops, that creates all convolutions before a BatchNorm."""
        paths = dict.fromkeys(one.convolution for one in biases)
        entry = self._entry()
        if entry is not None and any(one.arg == "ckpt_path" for one in entry[1].keywords):
            return
        found: dict[tuple[SourceFile, ast.stmt], dict[ast.Call, None]] = {}
        for path in paths:
            made = self._assignment_of(path)
            if made is None:
                return
            source, statement, path_below, owner, attribute = made
            call = _layer_call(source, statement.value, path_below)
            if call is None or source.name_of(call) not in _CONVOLUTIONS or source.is_repeated(call):
                return
            if source.uses_of(*_NEEDS_BIAS):
                return
            # Each module of the class has this layer, so all of them must come before a BatchNorm.
            below = ".".join((attribute, *path_below))
            for prefix, one in self._layers.items():
                if type(one) is owner and (f"{prefix}.{below}" if prefix else below) not in paths:
                    return
            found.setdefault((source, statement), {})[call] = None
        if len(found) == 1:
            ((source, _), calls) = found.popitem()
            statement_found = source.statement(CONVOLUTION, list(calls))
            if statement_found is not None:
                yield statement_found

    def untrained(self, paths: Sequence[str]) -> Iterator[Statement]:
        """Yield ``self.x = ...`` statements that create modules trained by no optimizer or other code."""
        for path in paths[:_MOST]:
            made = self._assignment_of(path)
            if made is None:
                continue
            source, statement, path_below, owner, attribute = made
            around = source.class_around(statement)
            others = [
                f"{prefix}.{attribute}" if prefix else attribute
                for prefix, one in self._layers.items()
                if type(one) is owner
            ]
            if (
                path_below
                or around is None
                or source.is_repeated(statement)
                or source.uses_of(*_REACHES_GRADIENTS)
                or not set(others) <= set(paths)
                or not _only_optimizers_ask_for_parameters(source)
                or not all(_is_only_used(source, one) for one in source.attributes(around, attribute))
            ):
                continue
            found = source.statement(UNTRAINED, [], at=statement, module=path)
            if found is not None:
                yield found

    def _assignment_of(self, path: str) -> tuple[SourceFile, ast.Assign, tuple[str, ...], type, str] | None:
        """Return where a module is created: file, ``self.x = ...``, its path below x, the class, and x."""
        names = path.split(".")
        for depth in range(len(names) - 1, -1, -1):
            owner = self._layers.get(".".join(names[:depth]))
            if owner is None:
                return None
            kind = written_class(owner)
            source = self._source(self._file_of(kind))
            around = None if source is None else source.class_named(kind.__qualname__)
            if source is None:
                continue
            if around is None:
                return None
            attribute = names[depth]
            targets = [one for one in source.attributes(around, attribute) if isinstance(one.ctx, ast.Store)]
            statement = source.parent(targets[0]) if len(targets) == 1 else None
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                return None
            return source, statement, tuple(names[depth + 1 :]), type(owner), attribute
        return None


def outside_optimizers(module: nn.Module, optimizers: Iterable[Any]) -> tuple[str, ...]:
    """Return the outermost modules with trainable parameters, none of which is in an optimizer."""
    held = {
        id(parameter)
        for optimizer in optimizers
        for group in getattr(optimizer, "optimizer", optimizer).param_groups
        for parameter in group["params"]
    }
    found: list[str] = []
    waiting = [("", module)] if held else []
    while waiting:
        path, inner = waiting.pop()
        parameters = list(parameters_of(inner))
        if path and not any(id(one) in held for one in parameters):
            found += [path] if any(map(is_trained, parameters)) else []
            continue
        prefix = f"{path}." if path else ""
        waiting += [(prefix + name, child) for name, child in named_children(inner)]
    return tuple(sorted(found))


def _only(about: str, found: Sequence[tuple[SourceFile, ast.Call]]) -> Iterator[Statement]:
    """Yield a call's statement if it is the only one."""
    statement = found[0][0].statement(about, [found[0][1]]) if len(found) == 1 else None
    if statement is not None:
        yield statement


def _argument(call: ast.Call, position: int, *names: str) -> ast.expr | None:
    named = next((one.value for one in call.keywords if one.arg in names), None)
    if named is not None:
        return named
    return call.args[position] if len(call.args) > position else None


def _turns_on(call: ast.Call) -> bool:
    mode = _argument(call, 0, "mode")
    return not (isinstance(mode, ast.Constant) and mode.value is False)


_CHECKED: Final = ("num_workers", "batch_size", "pin_memory", "persistent_workers")


def _may_make(call: ast.Call, loader: LoaderSetup) -> bool:
    return all(
        getattr(loader, one.arg) in (None, one.value.value)
        for one in call.keywords
        if one.arg in _CHECKED and isinstance(one.value, ast.Constant)
    )


def _logged_values(call: ast.Call) -> list[ast.expr]:
    is_dict = isinstance(call.func, ast.Attribute) and call.func.attr == "log_dict"
    given = _argument(call, 0 if is_dict else 1, "dictionary" if is_dict else "value")
    if given is None:
        return []
    return given.values if is_dict and isinstance(given, ast.Dict) else [given]


def _is_item(node: ast.expr) -> TypeGuard[ast.Call]:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "item"
        and not node.args
        and not node.keywords
        and not (
            isinstance(node.func.value, ast.Call)
            and isinstance(node.func.value.func, ast.Attribute)
            and node.func.value.func.attr in ("cpu", "numpy", "tolist")
        )
    )


def _layer_call(source: SourceFile, value: ast.expr, path_below: Sequence[str]) -> ast.Call | None:
    """Return the call that creates a layer, in nested ``Sequential``s without names or lists."""
    for index in path_below:
        if not (isinstance(value, ast.Call) and source.name_of(value) == "Sequential" and not value.keywords):
            return None
        is_listed = any(isinstance(one, ast.Starred) for one in value.args)
        if is_listed or not index.isdecimal() or int(index) >= len(value.args):
            return None
        value = value.args[int(index)]
    return value if isinstance(value, ast.Call) else None


def _is_only_used(source: SourceFile, node: ast.Attribute) -> bool:
    """Whether ``self.x`` is only assigned, called or asked for harmless attributes, never passed on."""
    parent = source.parent(node)
    if isinstance(node.ctx, ast.Store):
        return True
    if isinstance(parent, ast.Call):
        return parent.func is node
    return isinstance(parent, ast.Attribute) and parent.attr in _HARMLESS


def _only_optimizers_ask_for_parameters(source: SourceFile) -> bool:
    return all(
        getattr(source.function_around(one), "name", "") == "configure_optimizers"
        for one in source.uses_of(*_GIVE_PARAMETERS)
    )
