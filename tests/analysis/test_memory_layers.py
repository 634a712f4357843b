"""Memory over a window by owner: by hand, and compared with a replay of every block."""

from __future__ import annotations

import random

import pytest

from lightning_modelprof.analysis.timeline.memory_layers import LAYERS, MOST_POINTS
from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.memory import summarize_memory
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.build_dashboard_entry import window_profile
from lightning_modelprof.report.charts.memory import window_memory, window_memory_of_run
from lightning_modelprof.run.model_cost import ModelCost, ModelSize, TensorSize
from lightning_modelprof.run.records import Window
from lightning_modelprof.show.tensorboard.profile_blob import pack_profile, unpack_profile
from lightning_modelprof.tensorboard_plugin.selection import Selection
from lightning_modelprof.tensorboard_plugin.views import VIEWS, render
from tests.support.diagnosed import analysis_of, steps_of
from tests.support.traces import event, load, make_trace

PHASES = (("dataloader", 0, 100), ("forward", 100, 300), ("backward", 300, 600), ("optimizer", 600, 900))


def steps(num_steps):
    """Steps of 1000 µs with four phases each; each step's last 100 µs are in no phase."""
    for number in range(num_steps):
        at = 1000 * number
        yield event("user_annotation", f"ProfilerStep#{number}", at, at + 1000)
        for phase, begin, end in PHASES:
            yield event("user_annotation", f"modelprof: {phase}", at + begin, at + end)


def block(ts, size, address, allocated=None, device_type=1):
    args = {"Bytes": size, "Device Type": device_type, "Device Id": 0 if device_type else -1}
    args |= {} if address is None else {"Addr": address}
    args |= {} if allocated is None else {"Total Allocated": allocated, "Total Reserved": 1000}
    return {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": ts, "args": args}


def curve_of(*events):
    (device,) = summarize_memory(build_timeline(make_trace(list(events)))).devices
    return device


def layers_at(curve, ts, begin):
    """The non-empty layers of the slice that contains a moment."""
    place = (round(ts * 1000) - begin * 1000) // curve.part_ns
    return {
        key: values[place] for key, values in zip(LAYERS, curve.layers_bytes, strict=True) if values[place]
    }


def test_layers_by_hand():
    """100 bytes exist; memory a phase leaves is named after it, memory it frees itself is temporary."""
    device = curve_of(
        *steps(2),
        block(50, 8, 1, 108),  # a batch
        block(150, 20, 2, 128),  # lives until backward
        block(200, 40, 3, 168),
        block(250, -40, 3, 128),  # forward's own
        block(350, 10, 4, 138),  # a gradient, until the next step
        block(400, 5, 5, 143),
        block(450, -5, 5, 138),  # backward's own
        block(500, -20, 2, 118),
        block(700, 16, 6, 134),  # stays allocated
        block(950, 3, 7, 137),  # in no phase
        block(1050, -8, 1, 129),
        block(1350, -10, 4, 119),  # backward of another step
        block(1400, -30, 99, 89),  # allocated before the window
    )
    curve = device.curve
    assert (curve.is_whole, curve.joined, curve.has_phases) == (True, "address", True)
    assert curve.peak_bytes == device.peak_allocated_bytes == 168
    seen = {ts: layers_at(curve, ts, 50) for ts in (50, 200, 250, 400, 950, 1400)}
    before = {"before": 100}
    assert seen == {
        50: before | {"batch": 8},
        200: before | {"batch": 8, "activations": 20, "temporary": 40},
        250: before | {"batch": 8, "activations": 20},
        400: before | {"batch": 8, "activations": 20, "gradients": 10, "temporary": 5},
        950: before | {"batch": 8, "gradients": 10, "optimizer_state": 16, "other": 3},
        1400: {"before": 70, "optimizer_state": 16, "other": 3},
    }


def test_peak_may_be_at_window_start():
    device = curve_of(*steps(1), block(50, -90, 1, 10), block(60, 5, 2, 15))
    assert device.curve.peak_bytes == device.peak_allocated_bytes == 100
    assert device.curve.layers_bytes[0][0] == 100


def test_reused_address_is_new_block():
    device = curve_of(*steps(1), block(150, 20, 7, 20), block(160, -20, 7, 0), block(350, 30, 7, 30))
    assert layers_at(device.curve, 350, 150) == {"gradients": 30}


def test_without_counter_only_window_changes_are_known():
    """The CPU: 40 bytes from before are freed, so they existed until then."""
    curve = curve_of(
        *steps(1), block(150, 20, 1, 5, device_type=0), block(350, -40, 9, 7, device_type=0)
    ).curve
    assert not curve.is_whole
    assert layers_at(curve, 150, 150) == {"before": 40, "activations": 20}
    assert layers_at(curve, 350, 150) == {"activations": 20}
    assert curve.peak_bytes == 60


def test_release_without_address_ends_newest_block_of_its_size():
    device = curve_of(
        *steps(1),
        block(150, 20, None, 20),
        block(200, 20, None, 40),
        block(250, -20, None, 20),  # the block of 200, so the other one lives on
        block(350, -20, None, 0),
        block(360, -20, None, -20),
    )
    curve = device.curve
    assert curve.joined == "size"
    assert layers_at(curve, 200, 150)["temporary"] == 20
    assert layers_at(curve, 250, 150)["activations"] == 20


def test_without_phases_there_is_one_layer():
    curve = curve_of(event("cpu_op", "aten::mm", 0, 900), block(150, 20, 1, 120)).curve
    assert not curve.has_phases
    assert layers_at(curve, 150, 150) == {"before": 100, "other": 20}


def replay(events, begin_bytes, is_exact):
    """Layers after each event, block by block, following the definition."""

    def where(ts):
        if not 0 <= ts < 3000:
            return "", -1
        at = ts % 1000
        return next((phase for phase, begin, end in PHASES if begin <= at < end), ""), ts // 1000

    of_phase = {"dataloader": "batch", "forward": "activations", "backward": "gradients"}
    of_phase["optimizer"] = "optimizer_state"
    live, layer = {}, {}
    for place, (_, size, address) in enumerate(events):
        key = address if is_exact else abs(size)
        if size > 0:
            live.setdefault(key, []).append(place)
        else:
            opened = live.get(key)
            begun = opened.pop() if opened else None
            layer[place] = begun
    ended = {begun: place for place, begun in layer.items() if begun is not None}
    named = {}
    for place, (ts, size, _) in enumerate(events):
        if size > 0:
            phase, step = where(ts)
            name = of_phase.get(phase, "other")
            end = ended.get(place)
            if end is not None and name in ("activations", "gradients", "optimizer_state"):
                name = "temporary" if where(events[end][0]) == (phase, step) else name
            named[place] = name
    states, state = [], dict.fromkeys(LAYERS, 0) | {"before": begin_bytes}
    states.append(dict(state))
    for place, (_, size, _) in enumerate(events):
        begun = place if size > 0 else layer[place]
        state["before" if begun is None else named[begun]] += size
        states.append(dict(state))
    return states


@pytest.mark.parametrize("number", range(40))
def test_layers_match_replay(number):
    """Few events, so that each has its own slice; then many events, which share slices."""
    chance = random.Random(number)
    is_exact = number % 2 == 0
    count = 60 if number < 20 else 1500
    live, events, held = {}, [], 5000
    times = sorted(chance.sample(range(-100, 3100), count if count < 3000 else 3000))
    for ts in times:
        if live and chance.random() < 0.48:
            address = chance.choice(list(live))
            events.append((ts, -live.pop(address), address))
        elif chance.random() < 0.05 and held > 100:
            held -= 37
            events.append((ts, -37, 10**6 + ts))  # from before the window
        else:
            address = next(one for one in range(10**5) if one not in live)
            live[address] = chance.choice((8, 16, 37, 64))
            events.append((ts, live[address], address))
    if not is_exact:  # blocks from before have sizes that don't occur in the window
        events = [(ts, size - 1000 if address >= 10**6 else size, address) for ts, size, address in events]
    states = replay(events, 1_000_000, is_exact)
    totals = [sum(state.values()) for state in states]
    device = curve_of(
        *steps(3),
        *(
            block(ts, size, address if is_exact else None, total)
            for (ts, size, address), total in zip(events, totals[1:], strict=True)
        ),
    )
    curve = device.curve
    assert curve.is_whole
    assert curve.peak_bytes == max(totals) == device.peak_allocated_bytes
    begin = events[0][0]
    num_parts = len(curve.layers_bytes[0])
    assert num_parts <= MOST_POINTS
    at = [0, *((ts - begin) * 1000 // curve.part_ns for ts, _, _ in events)]
    for part in range(num_parts):
        inside = [place for place, one in enumerate(at) if one == part]
        place = max(inside, key=lambda one: (totals[one], one)) if inside else None
        if place is None:
            place = max(one for one, where in enumerate(at) if where < part)
        shown = {key: values[part] for key, values in zip(LAYERS, curve.layers_bytes, strict=True)}
        assert shown == states[place]


def test_real_trace_without_addresses_or_counters():
    """V100, torch 1.9: the running sum of the GPU's sizes, which the removed plugin also drew."""
    trace = load("v100_resnet50_workers0")
    facts = TraceFacts(trace)
    events = trace.allocations
    gpu = next(one for one in facts.memory.devices if one.total.name == "GPU 0")
    sizes = events.size_bytes[(events.device_type == 1) & (events.device == 0)]
    sums, level = [], 0
    for size in sizes.tolist():
        level += size
        sums.append(level)
    assert (gpu.curve.is_whole, gpu.curve.joined, gpu.curve.has_phases) == (False, "size", True)
    # Memory from before that the window frees exists until then.
    offset = gpu.curve.layers_bytes[0][0]
    assert gpu.curve.peak_bytes == max(0, *sums) + offset
    chart = window_memory({0: facts})
    assert chart.title.endswith("(GPU 0)")
    assert chart.level == gpu.curve.peak_bytes
    assert (
        max(sum(column) for column in zip(*(one.values for one in chart.series), strict=True)) == chart.level
    )
    assert {"activations", "gradients"} <= {one.key for one in chart.series}


def test_memory_view_shows_chart_once_with_peak():
    """A run's chart and a window's chart share a name."""
    trace = make_trace([*steps(2), block(150, 2**20, 1, 2**20), block(350, -(2**20), 1, 0)])
    profile = window_profile([(trace, TraceFacts(trace))], window=0)
    stored = unpack_profile(pack_profile(profile)[0])
    view = next(one for one in VIEWS if one.key == "memory")
    [document] = render(view, Selection(window=stored, window_tag="modelprof/window_0"))
    [chart] = document["charts"]
    assert chart["id"] == "window_memory"
    assert chart["level"] == {
        "at": pytest.approx(100 / 1.04),
        "label": "peak: 1.00 MiB",
    }  # the axis ends 4% above


def test_model_tensors_of_run_have_separate_layers():
    """100 bytes from before: 40 of parameters, 5 of buffers and 55 of others; state is from the window."""
    events = [*steps(2), block(150, 8, 1, 108), block(700, 30, 2, 138)]
    trace = TraceFacts(make_trace(events))
    sizes = tuple(
        TensorSize(kind=kind, dtype="float32", tensors=1, elements=1, num_bytes=size)
        for kind, size in (("trainable parameters", 40), ("buffers", 5), ("optimizer state", 30))
    )
    window = Window(index=0, first_step=0, last_step=1)
    cost = ModelCost(size=ModelSize(sizes=sizes))
    run = {"cost": cost, "windows": (window,), "facts": {0: trace}}
    chart = window_memory_of_run(analysis_of(steps_of(forward=10), **run))
    last = {one.key: one.values[-1] for one in chart.series}
    assert last == {"parameters": 40, "buffers": 5, "before": 55, "optimizer_state": 30, "activations": 8}
    assert chart.level == sum(last.values())
