"""Help for the options of ``run``: the docstrings of ModelProfCallback and its groups, read from the source.

Importing the callback would import torch and lightning.
"""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from typing import Any, Final

from lightning_modelprof.config.options import DEFAULTS, GROUPS

_CALLBACK: Final = "lightning_modelprof.lightning.callback"
_GROUPS: Final = "lightning_modelprof.config.options"

_ENTRY: Final = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
_DEFAULT: Final = "Default: "
_NEXT_SENTENCE: Final = re.compile(r"(?<=\.) (?=[A-Z])")


def option_help() -> dict[str, str]:
    """Option, such as ``active`` or ``report.terminal`` → its help, with the default."""
    entries = _entries(_CALLBACK, "ModelProfCallback", "Args")
    found = {name: _shortened(text, getattr(DEFAULTS, name)) for name, text in entries.items()}
    for group, kind in GROUPS.items():
        values = getattr(DEFAULTS, group)
        for name, text in _entries(_GROUPS, kind.__name__, "Attributes").items():
            found[f"{group}.{name}"] = _shortened(text, getattr(values, name))
    return found


def _entries(module: str, name: str, section: str) -> dict[str, str]:
    """Argument → text, from one section of a class's docstring."""
    spec = find_spec(module)
    source = None if spec is None else getattr(spec.loader, "get_source", lambda _: None)(module)
    for node in ast.parse(source or "").body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            part = (ast.get_docstring(node) or "").partition(f"{section}:\n")[2].partition("\n\n")[0]
            return {key: " ".join(text.split()) for key, text in _ENTRY.findall(part)}
    return {}


def _shortened(text: str, default: Any) -> str:
    """The first sentence and the default, in YAML's notation."""
    sentences = _NEXT_SENTENCE.split(text)
    notation = {"True": "true", "False": "false", "None": "null"}
    in_words = next((one.removeprefix(_DEFAULT) for one in sentences if one.startswith(_DEFAULT)), None)
    value = notation.get(str(default), default) if in_words is None else in_words.removesuffix(".")
    shown = f"{sentences[0].removesuffix('.')} (default: {value})"
    for python, yaml in notation.items():
        shown = re.sub(rf"\b{python}\b", yaml, shown)
    return shown
