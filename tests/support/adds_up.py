"""Check that a report shows one step time, and numbers that add up to the last digit shown."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lightning_modelprof.report.model import Finding, Report, Status
from lightning_modelprof.show.step_card import CORE, MOST_REST, REST, StepNumbers, merge_small, step_card_svg
from lightning_modelprof.show.terminal.screen import Screen
from lightning_modelprof.show.terminal.short import short_lines
from lightning_modelprof.units import digits, percent

RELATIVE = 1e-9
_NUMBER = r"(\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)"


def wrong_sums(report: Report) -> list[str]:
    """Sentences about numbers in the report that don't add up."""
    return [*_of_card(report), *_of_findings(report), *_of_verdict(report), *_of_terminal(report)]


def found(report: Report) -> list[Finding]:
    return [one for one in report.findings if one.status is Status.FOUND]


def _of_card(report: Report) -> Iterator[str]:
    card = report.step_card
    if card is None:
        return
    benchmark = report.summary.benchmark
    cost = None if benchmark is None else benchmark.batch_cost_ns.avg
    if cost is not None and not _same(cost, card.wall_ns):
        yield f"batch_cost {cost} is not the step time {card.wall_ns}"
    rate = None if benchmark is None else benchmark.steps_per_s
    ips = None if rate is None else rate.avg
    if ips is not None and not _same(1e9 / ips, card.wall_ns):
        yield f"1 / ips = {1e9 / ips} is not the step time {card.wall_ns}"
    if card.device and not _same(sum(part.ns for part in card.device), card.wall_ns):
        yield "the device's lane is not as long as the step"
    if card.better_ns > card.wall_ns:
        yield "the best case is longer than the step"
    numbers = StepNumbers(card)
    for parts in (card.host, merge_small(card.host), card.device):
        shown = [float(text.replace(",", "")) for text in numbers.parts(parts)]
        places = len(numbers.step.partition(".")[2])
        if parts and round(sum(one for one in shown if one > 0.99 * 10.0**-places), places) != _number(
            numbers.step
        ):
            yield f"{shown} do not sum to {numbers.step}"
    merged = merge_small(card.host)
    rest_ns = sum(part.ns for part in merged if part.key == REST)
    if rest_ns > MOST_REST * card.wall_ns * (1 + RELATIVE):
        yield f"other is {rest_ns} of {card.wall_ns}"
    core = {part.key for part in card.host if part.key in CORE}
    if not core <= {part.key for part in merged}:
        yield f"{core} are not all named"


def _of_findings(report: Report) -> Iterator[str]:
    card = report.step_card
    for one in found(report):
        texts = (one.title, one.summary, one.action)
        if any("{cost}" in text for text in texts):
            yield f"{one.kind} has a blank: {texts}"
        if one.saving_ns_per_step is None or card is None:
            continue
        if one.share_of == "loop":
            continue
        if not one.whole_ns or not _same(one.whole_ns, card.wall_ns):
            yield f"{one.kind} is of a step of {one.whole_ns}, not {card.wall_ns}"
            continue
        if one.saving_ns_per_step > card.wall_ns * (1 + RELATIVE):
            yield f"{one.kind} saves more than the step"
        inside_ns = sum(part.ns for part in card.host if part.key in one.phases)
        if one.phases and inside_ns and one.saving_ns_per_step > inside_ns * (1 + 1e-6):
            yield f"{one.kind} saves {one.saving_ns_per_step} of phases of {inside_ns}"
        for text in texts:
            for ms, share in re.findall(rf"{_NUMBER} ms per step \(([\d.]+)%\)", text):
                if abs(_number(ms) * 1e6 / card.wall_ns * 100 - float(share)) > _off(ms, share, card.wall_ns):
                    yield f"{one.kind}: {ms} ms is not {share}% of {card.wall_ns / 1e6} ms"
            for before in re.findall(rf"{_NUMBER} → {_NUMBER} ms per step", text):
                if before[0] != digits(card.wall_ns / 1e6):
                    yield f"{one.kind}: before {before[0]} is not the step time {card.wall_ns / 1e6}"


def _off(ms: str, share: str, step_ns: float) -> float:
    """Allowed deviation of a share from the printed milliseconds' share: half of each last digit."""
    half_ms = 0.5 * 10.0 ** -len(ms.partition(".")[2]) if "." in ms else 0.5
    half_share = 0.5 * 10.0 ** -len(share.partition(".")[2]) if "." in share else 0.5
    return half_share + half_ms * 1e6 / step_ns * 100 + 1e-9


def _of_verdict(report: Report) -> Iterator[str]:
    card, verdict = report.step_card, report.verdict
    if verdict is None or card is None or verdict.kind != "input_bound":
        return
    waits = [
        one
        for finding in found(report)
        if finding.kind == "input_bound"
        for one in finding.evidence
        if one.label == "data wait per step"
    ]
    others = [one for one in found(report) if one.share_of == "loop"]
    if (
        len(waits) == 1
        and not others
        and not verdict.summary.startswith(f"{percent(waits[0].value / card.wall_ns)} ")
    ):
        yield f"the verdict says {verdict.summary!r}, the wait is {waits[0].value} of {card.wall_ns}"


def _of_terminal(report: Report) -> Iterator[str]:
    card = report.step_card
    if report.verdict is None or card is None:
        return
    for width in (80, 100, 200):
        screen = Screen(width=width, has_styles=False, has_colours=False)
        lines = short_lines(report, screen, "utf-8")
        text = "\n".join(lines)
        total = re.search(rf"= {_NUMBER} ms", text)
        if total is None or total[1] != StepNumbers(card).step:
            yield f"no step time {StepNumbers(card).step} in {lines[:6]}"
            continue
        best = re.search(rf"all findings are fixed: {_NUMBER} ms", text)
        savings = [one.saving_ns_per_step or 0.0 for one in found(report) if one.share_of == "step"]
        if best is not None and _same(sum(savings), card.saved_ns):  # each counts once
            places = len(total[1].partition(".")[2])
            left = _number(total[1]) - round(sum(savings) / 1e6, places)
            if abs(left - _number(best[1])) > 0.01 * 10.0**-places:
                yield f"{total[1]} less {savings} is not {best[1]}"
    if StepNumbers(card).step not in step_card_svg(card):
        yield "the picture has another step time"


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= RELATIVE * max(abs(one), abs(other))
