"""One fit of one scenario under one tool, started by `verdict_peers.py` in a separate process.

    python benchmarks/verdict_peers_fit.py slow_loss ours FOLDER --steps 200

``traceml run`` starts it for TraceML, which needs no line in it. ``fit.json`` in the folder has the steps,
the injected time per step by the faulty code's own clock, and for our tool the report's contents.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCENARIO_FILE = ROOT / "tests" / "scenarios.py"
TEST_STEPS = 40
TOOLS = ("ours", "traceml", "gpuprof_first", "gpuprof_last")
DEFAULT_STEPS = 200


def load_scenarios(steps: int) -> types.ModuleType:
    """Load the tests' scenarios with another number of steps; their line numbers don't change."""
    source = SCENARIO_FILE.read_text()
    line = f"\nNUM_STEPS = {TEST_STEPS}\n"
    if source.count(line) != 1:
        raise SystemExit(f"{SCENARIO_FILE} has no line {line.strip()!r} to be changed")
    module = types.ModuleType("scenarios")
    module.__file__ = str(SCENARIO_FILE)
    sys.modules["scenarios"] = module  # dataclasses need it
    exec(compile(source.replace(line, f"\nNUM_STEPS = {steps}\n"), SCENARIO_FILE, "exec"), module.__dict__)
    return module


def lengthen(training: Any, name: str, steps: int) -> None:
    """Scale a scenario's own epochs or last step, too.

    A scenario about too few steps doesn't change.
    """
    for limit in ("max_epochs", "max_steps"):
        if limit in training.trainer and name != "too_few_steps":
            training.trainer[limit] = training.trainer[limit] * steps // TEST_STEPS


def tool_callback(tool: str, name: str) -> Any:
    """Create a tool's callback as documented; ``None`` for TraceML, which attaches its own."""
    if tool == "ours":
        from lightning_modelprof import ModelProfCallback  # noqa: PLC0415

        return ModelProfCallback()
    if tool.startswith("gpuprof"):
        from gpuprof import LightningCallback  # noqa: PLC0415

        return LightningCallback(run_name=name)
    return None


def callbacks_of(training: Any, tool: str, callback: Any) -> list[Any]:
    """Order the callbacks; ours is between the scenario's own, as in the tests."""
    order = {
        "traceml": [*training.before, *training.after],
        "gpuprof_first": [callback, *training.before, *training.after],
        "gpuprof_last": [*training.before, *training.after, callback],
        "ours": [*training.before, callback, *training.after],
    }
    return order[tool]


def own_report(report: Any) -> dict[str, Any]:
    """Return our report's contents without its tables."""
    found = [finding for finding in report.findings if finding.status.value == "found"]
    return {
        "verdict": report.verdict.kind,
        "headline": report.verdict.summary,
        "findings": [
            {
                "kind": finding.kind,
                "severity": None if finding.severity is None else finding.severity.value,
                "summary": finding.summary,
                "saving_ms": None if finding.saving_ns_per_step is None else finding.saving_ns_per_step / 1e6,
                "place": place_of(finding.locations),
            }
            for finding in found
        ],
    }


def place_of(locations: Any) -> str:
    """Return file, line and function of the first location, and of the slow line inside it."""
    places = []
    place = locations[0] if locations else None
    while place is not None:
        file = None if place.file is None else f"{Path(place.file).name}:{place.line}"
        places.append(" ".join(part for part in (file, place.function or place.module) if part))
        place = getattr(place, "inner", None)
    return " > ".join(places)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario")
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.support.fits import fit_quietly, make_trainer  # noqa: PLC0415

    scenarios = load_scenarios(options.steps)
    [scenario] = [one for one in scenarios.SCENARIOS if one.name == options.scenario]
    costs = scenarios.Costs()
    training = scenario.make(costs, options.folder)
    lengthen(training, scenario.name, options.steps)
    callback = tool_callback(options.tool, scenario.name)
    callbacks = callbacks_of(training, options.tool, callback)
    trainer = make_trainer(options.folder, *callbacks, **training.trainer)
    begin = time.perf_counter()
    fit_quietly(trainer, training.module, training.data, training.val)
    seconds = time.perf_counter() - begin
    steps = trainer.fit_loop.epoch_loop.total_batch_idx + 1
    fit: dict[str, Any] = {
        "steps": steps,
        "injected_ms_per_step": costs.spent_ns / 1e6 / steps,
        "fit_ms_per_step": seconds * 1e3 / steps,
        "other_callbacks": len(training.before) + len(training.after),
    }
    if options.tool == "ours":
        fit["report"] = own_report(callback.report)
    (options.folder / "fit.json").write_text(json.dumps(fit))


if __name__ == "__main__":
    main()
