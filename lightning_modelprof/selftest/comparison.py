"""Compare a profiler number with the same number from another source."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from lightning_modelprof.units import DASH, Unit, format_amount, percent

Value = float | str | None


@dataclass(frozen=True)
class Compared:
    """A comparison; it passes if the difference is at most a share of the truth, or at most ``floor``.

    Attributes:
        ours: the profiler's number; ``None`` if it has none.
        truth: found without the profiler.
        limit: maximum difference as a share of the truth.
        floor: difference that is always allowed, in the unit.
        at_most: whether ``ours`` may be any smaller number.
    """

    name: str
    ours: Value
    truth: Value
    limit: float = 0.0
    unit: Unit = Unit.COUNT
    floor: float = 0.0
    at_most: bool = False

    def used(self) -> float:
        """The difference as a share of the maximum; above 1 it's a failure."""
        if not isinstance(self.ours, int | float) or not isinstance(self.truth, int | float):
            return 0.0 if self.ours == self.truth and self.ours is not None else math.inf
        difference = self.ours - self.truth if self.at_most else abs(self.ours - self.truth)
        allowed = max(self.limit * abs(self.truth), self.floor)
        if not math.isfinite(difference):
            return math.inf
        if difference <= 0:
            return 0.0
        return difference / allowed if allowed else math.inf

    @property
    def passes(self) -> bool:
        return self.used() <= 1

    def sentence(self) -> str:
        """Both numbers, and the limit."""
        ours = DASH if self.ours is None else format_amount(self.ours, self.unit)
        sign = "at most " if self.at_most else ""
        allowed = [percent(self.limit)] if self.limit else []
        allowed += [format_amount(self.floor, self.unit)] if self.floor else []
        limit = f" (limit {' or '.join(allowed)})" if allowed else ""
        return f"{self.name} {ours}, expected {sign}{format_amount(self.truth, self.unit)}{limit}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"unit": self.unit.value, "passes": self.passes}


def there(name: str, count: float | None) -> Compared:
    """Require a count above 0; otherwise other comparisons may compare nothing with nothing."""
    return Compared(name, int(bool(count and count > 0)), 1)


def from_json(values: dict[str, Any]) -> Compared:
    kept = {name: value for name, value in values.items() if name != "passes"}
    return Compared(**kept | {"unit": Unit(kept["unit"])})


class Skip(Exception):  # noqa: N818 -- nothing went wrong
    """A check can't run here; the message says why."""
