"""Archives of older versions, brought up to date before they are read."""

from __future__ import annotations

from typing import Any, Final

_PLACE: Final = frozenset(("name", "file", "line"))
_PLACE_IN_FULL: Final = _PLACE | {"is_library", "package"}
_FRAME: Final = frozenset(("function_line", "is_users", "module"))


def upgrade(content: Any) -> Any:
    """The JSON values of an archive, as this version writes them.

    Up to version 2 the function of a place was called ``name``, and the Python module of a stack frame
    ``module``.
    """
    if isinstance(content, list):
        return [upgrade(one) for one in content]
    if not isinstance(content, dict):
        return content
    renamed: dict[str, str] = {}
    if content.keys() <= _PLACE_IN_FULL and content.keys() >= _PLACE:
        renamed = {"name": "function"}
    elif content.keys() >= _FRAME:
        renamed = {"module": "python_module"}
    return {renamed.get(key, key): upgrade(value) for key, value in content.items()}
