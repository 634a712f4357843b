"""What a chart or a flame graph is: a specification and a function of facts that draws it.

@chart("throughput", title="Throughput", help="Samples per second of each step.", views=("overview",))
def throughput(facts: Facts) -> Chart | None: ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from lightning_modelprof.report.specs import LAST, ChartSpec

_DrawT = TypeVar("_DrawT", bound=Callable[..., Any])

CHARTS: Final[list[ChartSpec[Any, Any]]] = []
TRACE_CHARTS: Final[list[ChartSpec[Any, Any]]] = []
FLAMES: Final[list[ChartSpec[Any, Any]]] = []
"""Those of runs, of traces, and flame graphs, in the files that are imported."""


def _adds_to(
    made: list[ChartSpec[Any, Any]],
) -> Callable[..., Callable[[_DrawT], _DrawT]]:
    def decorator(
        id: str,  # noqa: A002  # as the chart calls it
        *,
        title: str,
        help: str,  # noqa: A002  # likewise
        place: int = LAST,
        views: tuple[str, ...] = (),
    ) -> Callable[[_DrawT], _DrawT]:
        def add(draw: _DrawT) -> _DrawT:
            made.append(ChartSpec(id=id, title=title, draw=draw, help=help, place=place, views=views))
            return draw

        return add

    return decorator


chart = _adds_to(CHARTS)
trace_chart = _adds_to(TRACE_CHARTS)
flame = _adds_to(FLAMES)
