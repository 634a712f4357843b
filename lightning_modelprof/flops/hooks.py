"""Hooks of ours on modules of the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ModuleHook:
    """A hook that never fails, and that does nothing on a copy of its module.

    A step that is inspected may save, pickle or copy the model: the copy must neither hold what we measure
    with nor report to it.

    Args:
        call: what the hook does; ``None`` for nothing.
        on_error: called with what ``call`` raised.
    """

    def __init__(
        self,
        call: Callable[..., None] | None = None,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        self._call = call
        self._on_error = on_error

    def __call__(self, *arguments: Any) -> None:
        """Do it; the module goes on whatever happens."""
        if self._call is None:
            return
        try:
            self._call(*arguments)
        except Exception as error:  # the user's step must not notice
            if self._on_error is not None:
                self._on_error(error)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        """Copies and pickles do nothing."""
        return ModuleHook, ()
