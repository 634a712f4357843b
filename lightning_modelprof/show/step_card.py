"""The step card: the mean step to scale, as a picture for pages and to share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from html import escape
from typing import Final

from lightning_modelprof.errors import printable
from lightning_modelprof.report.model import Report, StepCard, StepPart
from lightning_modelprof.show.html.colors import color_class, color_classes, color_of
from lightning_modelprof.show.layout import display_width, shorten
from lightning_modelprof.units import digits, duration_unit, format_amount, format_tick

CORE: Final = ("dataloader", "forward", "backward", "optimizer")
"""Phases that are never merged."""

REST: Final = "rest"
"""Key of the merged small phases."""

MOST_REST: Final = 0.1
"""Maximum share of the step for all merged phases together."""

_SMALL: Final = 0.03
"""Share of the step below which a part can't be told apart by eye."""


def merge_small(parts: Sequence[StepPart], small: float = _SMALL) -> tuple[StepPart, ...]:
    """Return the parts to draw, in order, with small ones merged at the end: at most a tenth of the step.

    Args:
        parts: parts of the CPU lane.
        small: share of the lane below which a part is small.
    """
    total_ns, rest_ns = sum(part.ns for part in parts), 0.0
    merged: set[str] = set()
    for part in sorted(parts, key=lambda one: one.ns):
        is_small = part.key not in CORE and part.ns < small * total_ns
        if is_small and rest_ns + part.ns <= MOST_REST * total_ns:
            merged.add(part.key)
            rest_ns += part.ns
    kept = tuple(part for part in parts if part.key not in merged)
    return (*kept, StepPart(key=REST, label="other", ns=rest_ns)) if rest_ns > 0 else kept


class StepNumbers:
    """Milliseconds of one step, all with as many decimals as give the step time three digits."""

    def __init__(self, card: StepCard) -> None:
        self._card = card
        self._places = max(0, 2 - math.floor(math.log10(card.wall_ns / 1e6)))

    @property
    def step(self) -> str:
        return self._text(self._rounded(self._card.wall_ns))

    @property
    def best(self) -> str:
        """Step time without what the findings could save, each saving counted once."""
        return self._text(self._best())

    def parts(self, parts: Sequence[StepPart], *, is_best: bool = False) -> list[str]:
        """Return each part of the step, or of the best case; a part that rounds to 0 keeps one digit.

        They add up to :attr:`step` or :attr:`best`, because the largest remainders are rounded up. A phase
        has the same number everywhere, whichever small phases are merged.
        """
        phases: Sequence[StepPart] = self._card.better if is_best else self._card.host
        alone = {part.key: part.ns for part in parts if part.key != REST}
        if not alone.items() <= {(part.key, part.ns) for part in phases}:  # the GPU's
            phases = parts
        total = self._best() if is_best else self._rounded(self._card.wall_ns)
        shown = self._adding_up([part.ns for part in phases], total)
        at = {part.key: number for part, number in zip(phases, shown, strict=True)}
        rest = sum((number for key, number in at.items() if key not in alone), Decimal(0))
        numbers = [rest if part.key == REST else at[part.key] for part in parts]
        if phases is parts:  # the GPU can be idle for one cause in multiple places
            numbers = shown
        return [
            self._text(number) if number else digits(part.ns / 1e6, 1)
            for part, number in zip(parts, numbers, strict=True)
        ]

    def _adding_up(self, parts_ns: Sequence[float], total: Decimal) -> list[Decimal]:
        unit = Decimal(1).scaleb(-self._places)
        exact = [Decimal(ns) / 10**6 for ns in parts_ns]
        floors = [one.quantize(unit, ROUND_FLOOR) for one in exact]
        left = int((total - sum(floors)) / unit)
        order = sorted(range(len(exact)), key=lambda number: floors[number] - exact[number])
        for number in order[: max(0, left)]:
            floors[number] += unit
        return floors

    def _best(self) -> Decimal:
        return self._rounded(self._card.wall_ns) - self._rounded(self._card.saved_ns)

    def _rounded(self, ns: float) -> Decimal:
        return (Decimal(ns) / 10**6).quantize(Decimal(1).scaleb(-self._places), ROUND_HALF_EVEN)

    def _text(self, number: Decimal) -> str:
        return f"{number:,}"


_NOTHING: Final = 0.005
"""Share below which a cause of idle time isn't worth a line."""

_LEAST_GAIN: Final = 0.02
"""Minimum share of the step that findings must save for the best case to be drawn."""

_SAME_CONTRAST: Final = 0.19
"""Luminance on which white and our black have the same contrast."""

_WIDTH: Final = 760
_NARROW: Final = 350
"""Width of the card for phone-sized pages, where the other one would be unreadable."""

_BAR: Final = 26
_GAP: Final = 10
_HEAD: Final = 30
_LINE: Final = 18
_CHAR: Final = 6.4
"""Approximate width of a 12 px character; there's room for wider texts."""

_MAX_TEXT: Final = 300
"""Maximum characters of one text, so that long names don't enlarge the picture."""

_FONT: Final = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','Liberation Sans',Arial,sans-serif"


def step_card_svg(card: StepCard, *, is_alone: bool = True) -> str:
    """Draw the card as SVG: the CPU lane, the GPU lane, and the best case if all findings are fixed.

    Args:
        is_alone: draw a white background, for a separate file; otherwise use the page's colors.
    """
    return _Drawing(card, is_alone=is_alone).svg()


def card_svg(report: Report) -> str:
    """Return a report's card in the colors of its page; ``""`` if it has none.

    Contains it twice, once with the class ``narrow`` for narrow pages; the page shows one of them.
    """
    card = report.step_card
    if card is None or card.wall_ns <= 0:
        return ""
    return step_card_svg(card, is_alone=False) + _Drawing(card, is_alone=False, width=_NARROW).svg()


class _Drawing:
    def __init__(self, card: StepCard, *, is_alone: bool, width: int = _WIDTH) -> None:
        self._card = card
        self._is_alone = is_alone
        self._width = width
        self._is_narrow = width < _WIDTH
        self._left = 68 if self._is_narrow else 76
        self._idle = f"mp-idle-{width}"
        self._scale = (width - self._left - 12) / card.wall_ns
        self._host = merge_small(card.host)
        self._numbers = StepNumbers(card)
        keys = [part.key for part in self._host]
        self._colors = dict(zip(keys, map(color_of, color_classes(keys)), strict=True))
        self._hatches: dict[str, str] = {}
        self._pieces: list[str] = []
        self._y = 0.0

    def svg(self) -> str:
        card = self._card
        gain = card.saved_ns / card.wall_ns
        title, condition = f"Step time {self._numbers.step} ms", ""
        if gain >= _LEAST_GAIN:
            title = f"Step time {self._numbers.step} → {self._numbers.best} ms"
            condition = "if all findings are fixed"
        full_title = f"{title} {condition}".rstrip()
        large = 'font-size="16" font-weight="600"'
        self._y = _HEAD
        if self._is_narrow:
            self._text(0, 18, title, large)
            for line in filter(None, (condition, card.step)):
                self._text(0, self._y + 6, line, 'opacity=".7"')
                self._y += _LINE
        else:
            self._text(0, 18, full_title, large)
            self._text(self._width - 12, 18, card.step, 'text-anchor="end" opacity=".7"')
        self._lane("CPU", self._host)
        if card.device:
            self._lane("GPU", card.device)
        if gain >= _LEAST_GAIN:
            kept = {part.key for part in self._host}
            rest = [part for part in card.better if part.key not in kept]
            better = [part for part in card.better if part.key in kept]
            rest_ns = sum(part.ns for part in rest)
            self._lane(
                "best" if self._is_narrow else "best case",
                [*better, StepPart(key=REST, label="other", ns=rest_ns)],
                is_best=True,
            )
        self._axis()
        self._legend()
        for part, line in self._idle_lines():
            self._pieces.append(
                f'<rect x="{self._left}" y="{self._y + 3:.0f}" width="11" height="11"'
                f' fill="{self._hatched(self._color_of(part))}"/>'
            )
            self._text(self._left + 16, self._y + 13, line)
            self._y += _LINE
        if card.figures:
            figures = [f"{label} {format_amount(value, unit)}" for label, value, unit in card.figures]
            for line in figures if self._is_narrow else [" · ".join(figures)]:
                self._text(self._left, self._y + 13, line, 'font-weight="600"')
                self._y += _LINE
        return self._svg(full_title)

    def _svg(self, title: str) -> str:
        height = round(self._y + 6)
        behind = f'<rect width="{self._width}" height="{height}" fill="#fff"/>' if self._is_alone else ""
        color = ' color="#1b1f24"' if self._is_alone else ""
        named = ' xmlns="http://www.w3.org/2000/svg"'
        size = f' width="{self._width}" height="{height}"' if self._is_alone else ""
        return (
            f'<svg{named} class="step-card{" narrow" * self._is_narrow}" viewBox="0 0 {self._width} {height}"'
            f'{size}{color} role="img"'
            f' aria-label="{_escape(title)}" font-family="{_FONT}" font-size="12">'
            f"{self._defs()}{behind}{''.join(self._pieces)}</svg>\n"
        )

    def _color_of(self, part: StepPart) -> str:
        return self._colors.get(part.key) or color_of(color_class(part.key) or "m-rest")

    def _hatched(self, color: str) -> str:
        """Return the fill of idle time whose cause has this color."""
        # Named after the color: a notebook page has many pictures, where equal names must mean the same.
        name = self._hatches.setdefault(color, f"{self._idle}-{color[1:]}")
        return f"url(#{name})"

    def _defs(self) -> str:
        patterns = "".join(
            f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse"'
            f' patternTransform="rotate(45)"><rect width="6" height="6" fill="{color}" fill-opacity=".16"/>'
            f'<path d="M0 0V6" stroke="{color}" stroke-width="2.4" stroke-opacity=".8"/></pattern>'
            for color, name in self._hatches.items()
        )
        return f"<defs>{patterns}</defs>" if patterns else ""

    def _lane(self, label: str, parts: Sequence[StepPart], *, is_best: bool = False) -> None:
        times = self._numbers.parts(parts, is_best=is_best)
        self._text(self._left - 8, self._y + 17, label, 'text-anchor="end" opacity=".7"')
        x = float(self._left)
        for part, ms in zip(parts, times, strict=True):
            width = part.ns * self._scale
            if width <= 0:
                continue
            color = self._color_of(part)
            fill = self._hatched(color) if part.is_idle else color
            edge = f' stroke="{color}" stroke-opacity=".6" stroke-width=".8"' if part.is_idle else ""
            hint = f"{part.label} {ms} ms"
            if part.location is not None:
                hint += f", {part.location}"
            self._pieces.append(
                f'<rect x="{x:.2f}" y="{self._y:.0f}" width="{max(width - 1, 0.5):.2f}" height="{_BAR}"'
                f' fill="{fill}"{edge}><title>{_escape(hint)}</title></rect>'
            )
            for text in (f"{part.label} {ms} ms", f"{ms} ms"):
                if display_width(text) * _CHAR + 10 <= width:
                    ink = "currentColor" if part.is_idle else _ink_on(color)
                    self._text(x + 5, self._y + 17, text, f'fill="{ink}"')
                    break
            x += width
        self._y += _BAR + _GAP

    def _axis(self) -> None:
        y, wall_ns = self._y - 2, self._card.wall_ns
        step_ns = _round_step(wall_ns, most=3 if self._is_narrow else 7)
        ticks = [number * step_ns for number in range(int(wall_ns / step_ns) + 1)]
        unit_ns, unit = duration_unit(ticks[-1])
        end = self._left + wall_ns * self._scale
        path = f"M{self._left} {y}H{end:.1f}" + "".join(
            f"M{self._left + ns * self._scale:.1f} {y}v4" for ns in ticks
        )
        self._pieces.append(f'<path d="{path}" stroke="currentColor" stroke-opacity=".4" fill="none"/>')
        for ns in ticks:
            text = "0" if not ns else f"{format_tick(ns / unit_ns, step_ns / unit_ns)} {unit}"
            anchor = ' text-anchor="middle"' if ns else ""
            self._text(
                self._left + ns * self._scale,
                y + 16,
                text,
                f'font-size="11" opacity=".7"{anchor}',
                is_clipped=True,
            )
        self._y += 24

    def _legend(self) -> None:
        x = float(self._left)
        lanes = [(self._host, False), (self._card.device, True)]
        shown = [
            (part, ms)
            for lane, is_device in lanes
            for part, ms in zip(lane, self._numbers.parts(lane), strict=True)
            if not (is_device and part.is_idle)
        ]
        for part, ms in shown:
            text = f"{part.label} {ms} ms"
            width = display_width(text) * _CHAR + 30
            if x + width > self._width and x > self._left:
                x = float(self._left)
                self._y += _LINE
            color = self._color_of(part)
            self._pieces.append(
                f'<rect x="{x:.1f}" y="{self._y + 3:.0f}" width="11" height="11" fill="{color}"/>'
            )
            self._text(x + 16, self._y + 13, text)
            x += width
        self._y += _LINE

    def _idle_lines(self) -> Iterator[tuple[StepPart, str]]:
        least_ns = _NOTHING * self._card.wall_ns
        lane = self._card.device
        idle = [
            (part, ms)
            for part, ms in zip(lane, self._numbers.parts(lane), strict=True)
            if part.is_idle and part.ns >= least_ns
        ]
        for part, ms in sorted(idle, key=lambda one: -one[0].ns):
            place = "" if part.location is None else f": {part.location}"
            text = f"{part.label} {ms} ms{place}"
            yield part, shorten(printable(text), int((self._width - self._left - 16) / _CHAR))

    def _text(self, x: float, y: float, text: str, more: str = "", *, is_clipped: bool = False) -> None:
        if is_clipped and x > self._width - 20:
            return
        fill = "" if "fill=" in more else ' fill="currentColor"'
        gap = f" {more}" if more else ""
        self._pieces.append(f'<text x="{x:.1f}" y="{y:.1f}"{fill}{gap}>{_escape(text)}</text>')


def _round_step(wall_ns: float, most: int) -> float:
    """Return the shortest round time that fits at most ``most`` times into the step."""
    power = 10.0 ** (len(str(int(wall_ns))) - 1)
    return next(
        power * factor for factor in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if wall_ns / (power * factor) <= most
    )


def _ink_on(color: str) -> str:
    """Return black or white, whichever has more contrast (WCAG 2)."""
    red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (red, green, blue)
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#1b1f24" if luminance > _SAME_CONTRAST else "#fff"


def _escape(text: str) -> str:
    return escape(shorten(printable(text), _MAX_TEXT))
