"""Files of older versions, brought up to date before they are read."""

from __future__ import annotations

from typing import Any, Final

_DEFINITION: Final = frozenset(("name", "file", "line"))
_DEFINITION_IN_FULL: Final = _DEFINITION | {"is_library", "package"}
_FRAME: Final = frozenset(("function_line", "is_users", "module"))
_LOCATION: Final = frozenset(("file", "line", "function", "is_exact"))


def upgrade(content: Any) -> Any:
    """The JSON values of a saved run, or of a report in an event file, as this version writes them.

    Up to version 2 of a saved run, and 1 of an event file, the function of a place was called ``name`` in
    definitions and the Python module of a stack frame ``module``, and what isn't known of a finding's place
    was ``null``. The user's own configuration stays as it is.
    """
    if isinstance(content, list):
        return [upgrade(one) for one in content]
    if not isinstance(content, dict):
        return content
    keys, renamed = content.keys(), {}
    if _DEFINITION <= keys <= _DEFINITION_IN_FULL:
        renamed = {"name": "function"}
    elif keys >= _FRAME:
        renamed = {"module": "python_module"}
    elif keys >= _LOCATION:
        content = {key: value for key, value in content.items() if value is not None}
    return {
        renamed.get(key, key): value if key == "config" else upgrade(value) for key, value in content.items()
    }
