"""Long names as a person reads them: cut where they say least."""

from __future__ import annotations

import re

ELLIPSIS = "…"

_AFTER_ARGUMENTS = re.compile(r"(?: const)?(?: \[clone [^\]]*\])*$")
"""What a demangled C++ function may have behind its arguments."""

_NAMESPACE = re.compile(r"(?:\w+|\(anonymous namespace\))::")

_TEMPLATE = re.compile(r"\w<")


def shorten(text: str, limit: int) -> str:
    """Shorten a long name: cut out its middle, because kernels and modules differ at both ends.

    What C++ adds goes first, as far as is needed: namespaces, then the arguments of template arguments, then
    all of them: ``at::sum<at::Add<float>, 4>``, ``sum<Add<float>, 4>``, ``sum<Add<…>, 4>``, ``sum<…>``.
    """
    if len(text) > limit and (text.count("::") > 1 or _TEMPLATE.search(text)):
        text = _NAMESPACE.sub("", text).replace("> >", ">>")
        if len(text) > limit:
            text = _without_templates(text, 2)
        # Much too long still: the whole name of the function says more than one end of its arguments.
        if len(text) > 1.5 * limit and text.find("<") > limit // 2:
            text = _without_templates(text, 1)
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 2
    head = limit - 1 - tail
    return text[:head] + ELLIPSIS + text[len(text) - tail :]


def without_signature(name: str) -> str:
    """The name of a C++ function without its return type ``void`` and its arguments; other names as they are.

    ``void at::native::sum<float>(int, float*)`` becomes ``at::native::sum<float>``: a kernel returns nothing,
    and its arguments repeat what the template says.
    """
    if not name.startswith("void ") and "::" not in name:
        return name
    text = name[: _AFTER_ARGUMENTS.search(name).start()]  # type: ignore[union-attr]  # it may match nothing
    start = _last_parenthesis(text)
    # Words before a parenthesis with a space between are a sentence, not a function: "Memcpy (a::b -> c)".
    if start <= 0 or not (text[start - 1].isalnum() or text[start - 1] in "_>)]}"):
        return name
    return text[:start].removeprefix("void ")


def _last_parenthesis(text: str) -> int:
    """Where the parenthesis opens that closes at the very end; -1 when there is none."""
    depth = 0
    for index in range(len(text) - 1, -1, -1):
        depth += (text[index] == ")") - (text[index] == "(")
        if depth == 0:
            return index if text[index] == "(" else -1
    return -1


def _without_templates(name: str, level: int) -> str:
    """Cut what is in ``level`` or more pairs of angle brackets; other uses of ``<`` and ``>`` cut nothing."""
    parts = []
    depth = 0
    for char in name:
        depth -= char == ">"
        if depth < 0:
            return name
        if depth < level:
            parts.append(char)
        depth += char == "<"
        if char == "<" and depth == level:
            parts.append(ELLIPSIS)
    return "".join(parts) if depth == 0 else name
