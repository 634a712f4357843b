"""Tests the FLOP counter benchmark: true counts, cells that survive failing tools, and tables."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import flop_peers
import flops
from flop_case import Case, convolution_macs, tensors_in, total
from flop_models import MODELS, Batch, compiled, small
from flop_peers import TOOLS, Reported, Tool, count
from flops import BEGIN, END, Cell

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "flops.md"

# Backward kernels of these models compute unneeded gradients.
MORE_THAN_NEEDED = {"lstm"}
CHEAP = [  # models that need no other package
    "mlp",
    "mobilenet",
    "unet",
    "conv1d and conv3d",
    "fourier layer",
    "lstm",
    "gru, two directions",
    "attention with weights",
    "fused attention",
    "transformer encoder",
    "transformer",
    "einsum attention",
    "embedding bag",
    "control flow",
    "shared layer",
    "dict",
    "dataclass",
    "nested lists",
    "checkpoint, re-entrant",
    "checkpoint",
    "lightning step",
    "autograd function",
]


# ---- True counts


def test_there_are_31_models():
    assert len(MODELS) == 31
    assert set(CHEAP) < set(MODELS)


def test_convolution_macs_match_hand_count():
    # Each of the 3 x 4 output points in 10 channels sums over 2 x 2 points in its group's 3 channels.
    assert convolution_macs(5, 6, 10, (2, 2), (3, 4), groups=2) == 5 * 12 * 10 * 3 * 4


@pytest.mark.parametrize("name", CHEAP)
def test_our_counter_reports_true_macs(name):
    torch.manual_seed(0)
    case = MODELS[name]()
    reported = TOOLS["ours"].count(case)
    assert reported.forward == pytest.approx(case.forward_macs, rel=1e-3)
    if name in MORE_THAN_NEEDED:
        assert reported.backward > case.backward_macs
    else:
        assert reported.backward == pytest.approx(case.backward_macs, rel=1e-3)
    if case.recompute_macs is not None:
        assert reported.recompute == case.recompute_macs


def test_loss_uses_every_output():
    leaf = torch.ones(2, requires_grad=True)
    output = {"a": [leaf, None, (leaf * 2, "text")], "b": Batch(leaf * 3), "c": torch.ones(1)}
    assert [tensor.sum().item() for tensor in tensors_in(output)] == [2, 4, 6, 1]
    assert total(output).item() == 12  # outputs without gradient don't count


# ---- Side effects of tools


def no_count(case):
    return Reported(forward=0)


def changes_modes(case):
    case.model.eval()
    return no_count(case)


def leaves_a_hook(case):
    case.model.first.register_forward_hook(lambda *_: None)
    return no_count(case)


def leaves_a_buffer(case):
    case.model.register_buffer("total_ops", torch.zeros(1))
    return no_count(case)


def trains(case):
    case.loss(case.call()).backward()
    torch.optim.SGD(case.model.parameters(), 0.1).step()
    return no_count(case)


def draws(case):
    torch.rand(1)
    return no_count(case)


def draws_with_numpy(case):
    np.random.rand()
    return no_count(case)


def draws_with_python(case):
    random.random()
    return no_count(case)


def build():
    return small(torch.ones(4, 16))


@pytest.mark.parametrize(
    ("tool", "changed"),
    [
        (no_count, []),
        (changes_modes, ["modes"]),
        (leaves_a_hook, ["hooks"]),
        (leaves_a_buffer, ["state_dict keys", "values"]),
        (trains, ["values", "gradients"]),
        (draws, ["random numbers"]),
        (draws_with_numpy, ["random numbers"]),
        (draws_with_python, ["random numbers"]),
    ],
)
def test_every_change_is_detected(tool, changed):
    answer = count(Tool(label="", package="", count=tool), build)
    assert answer["changed"] == changed
    assert answer["forward"] == 0
    assert answer["truths"] == [4 * 16 * 32 + 4 * 32 * 4, 4 * 16 * 32 + 2 * 4 * 32 * 4]


def test_changes_by_step_itself_are_not_blamed_on_tool():
    def watches(case):
        case.loss(case.call()).backward()  # statistics of norms, gradients
        return no_count(case)

    def spoils(case):
        watches(case)
        case.model[0].weight.grad *= 1.0000002
        return no_count(case)

    for tool, changed in ((watches, []), (spoils, ["gradients"])):
        answer = count(Tool(label="", package="", count=tool, watches=True), MODELS["mobilenet"])
        assert answer["changed"] == changed
    answer = count(Tool(label="", package="", count=watches), MODELS["mobilenet"])
    assert answer["changed"] == ["values", "gradients"]


def test_lost_compilation_is_detected():
    case = build()
    assert not flop_peers.runs_compiled(case)
    answer = count(TOOLS["ours"], lambda: compiled(build(), "aot_eager"))
    assert (answer["forward"], answer["changed"]) == (answer["truths"][0], [])

    def gives_up(case):
        torch.compiler.set_stance("force_eager")
        return no_count(case)

    try:
        answer = count(Tool(label="", package="", count=gives_up), lambda: compiled(build(), "aot_eager"))
    finally:
        torch.compiler.set_stance("default")
    assert answer["changed"] == ["compilation"]


# ---- Cells


def test_tool_that_raises_gives_failing_cell():
    def fails(case):
        case.model.eval()
        raise IndexError("list index\n   out of range")

    answer = count(Tool(label="", package="", count=fails), build)
    cell = flops.cell_of(json.loads(json.dumps(answer)))
    assert (cell.problem, cell.message) == ("fails: IndexError", "list index out of range")
    assert (cell.forward, cell.backward, cell.changed) == (None, None, ("modes",))
    assert cell.truths == tuple(answer["truths"])


@pytest.mark.parametrize(
    ("program", "problem", "message"),
    [
        ("import os; os._exit(7)", "fails: exit code 7", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "fails: exit code -11", ""),
        ("raise SystemError('gone')", "fails: exit code 1", "SystemError: gone"),
        ("pass", "fails: exit code 0", ""),
        ("import time; time.sleep(60)", "fails: over 0.5 s", ""),
    ],
)
def test_tool_that_crashes_or_hangs_loses_only_its_cell(tmp_path, program, problem, message):
    worker = tmp_path / "worker.py"
    worker.write_text(program)
    cell = flops.count_cell("ours", "mlp", 0.5 if "sleep" in program else 60, worker)
    assert (cell.problem, cell.message) == (problem, message)
    assert cell.forward is None


def test_real_cell_is_counted():
    cell = flops.count_cell("ours", "mlp", 120)
    assert cell == Cell(forward=1, backward=1, truths=(17_121_280, 2 * 17_121_280 - 32 * 784 * 512))


@pytest.mark.parametrize("what", ["tool", "model"])
def test_missing_package_is_not_failure(monkeypatch, capsys, what):
    def needs_a_package():
        raise ModuleNotFoundError("No module", name="no_such_package")

    package = "no_such_package" if what == "tool" else "json"
    monkeypatch.setitem(flop_peers.TOOLS, "peer", Tool(label="", package=package, count=no_count))
    monkeypatch.setitem(flop_peers.MODELS, "model", needs_a_package)
    monkeypatch.setattr(sys, "argv", ["flop_peers.py", "peer", "model"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    flop_peers.main()
    cell = flops.cell_of(json.loads(capsys.readouterr().out))
    assert cell == Cell(problem="not installed")


# ---- Tables


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (None, "–"),
        (0, "0"),
        (1, "1"),
        (1.0005, "1"),
        (0.9995, "1"),
        (1.0006, "1.001"),
        (0.9994, "0.999"),
        (0.91111, "0.911"),
        (3.0666, "3.067"),
        (251.03, "251.0"),
        (0.0001, "<0.001"),
    ],
)
def test_ratio_texts(ratio, text):
    assert flops.ratio_text(ratio) == text


def synthetic():
    good = {"truths": (2000, 3000)}
    absent = Cell(problem="not installed")
    return {
        "first": {
            "ours": Cell(forward=1, backward=1.0007, recompute=1024, **good),
            "fvcore": Cell(problem="fails: KeyError", message="'x'", changed=("hooks",), **good),
            "deepspeed": absent,
        },
        "second": {
            "ours": Cell(forward=1.015, backward=1.1, **good),
            "fvcore": Cell(problem="fails: KeyError", message="'x'", **good),
            "deepspeed": absent,
        },
        "third": {
            "ours": Cell(forward=0, backward=0, changed=("values",), **good),
            "fvcore": Cell(forward=0.5, **good),
            "deepspeed": absent,
        },
    }


TOOL_NAMES = ["ours", "fvcore", "deepspeed"]


def test_models_table():
    lines = flops.models_table(synthetic(), TOOL_NAMES).splitlines()
    assert lines == [
        "| model | forward MACs | lightning-modelprof | fvcore | DeepSpeed | backward MACs"
        " | lightning-modelprof, backward | recomputed MACs, ours | changed |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| first | 2,000 | 1 | fails: KeyError | not installed | 3,000 | 1.001 | 1,024 | fvcore: hooks |",
        "| second | 2,000 | 1.015 | fails: KeyError | not installed | 3,000 | 1.100 | – | nothing |",
        "| third | 2,000 | 0 | 0.500 | not installed | 3,000 | 0 | – | lightning-modelprof: values |",
    ]


def test_tools_table():
    lines = flops.tools_table(synthetic(), TOOL_NAMES).splitlines()
    assert lines[2:] == [
        "| lightning-modelprof | 1 | 2 | 0 | 1 | 2 |",
        "| fvcore | 0 | 0 | 2 | – | 2 |",
        "| DeepSpeed | not installed | – | – | – | – |",
    ]


def test_failures_are_listed_once():
    rows = synthetic()
    assert flops.failures(rows, TOOL_NAMES) == ["* fvcore (first; second): `KeyError: 'x'`"]
    rendered = flops.render(rows, TOOL_NAMES)
    assert rendered.count("KeyError: 'x'") == 1
    assert f"torch {torch.__version__}" in rendered
    assert "What failed" not in flops.render({"third": rows["third"]}, TOOL_NAMES)


def test_model_that_cannot_be_built_has_no_true_counts():
    rows = {"bert": dict.fromkeys(TOOL_NAMES, Cell(problem="not installed"))}
    line = flops.models_table(rows, TOOL_NAMES).splitlines()[-1]
    assert line == "| bert | – | not installed | not installed | not installed | – | – | nothing |"


# ---- Document


def test_only_text_between_markers_is_rewritten(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    for generated in ("| new |", "| newer |"):
        flops.write_between_markers(page, generated)
        assert page.read_text() == f"before\n\n{BEGIN}\n\n{generated}\n\n{END}\n\nafter\n"


@pytest.mark.parametrize(
    "text", ["", BEGIN, END, f"{END} {BEGIN}", f"{BEGIN} {BEGIN} {END}", f"{BEGIN} {END} {END}"]
)
def test_page_without_markers_is_unchanged(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=r"page\.md: expected one"):
        flops.write_between_markers(page, "new")
    assert page.read_text() == text


def test_partial_table_is_not_written(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["flops.py", "--only", "mlp", "--write", "page.md"])
    with pytest.raises(SystemExit):
        flops.parse_args()
    assert "the whole table" in capsys.readouterr().err


def test_command_prints_tables(monkeypatch, capsys):
    cells = {"ours": Cell(forward=1, backward=1, truths=(7, 8)), "fvcore": Cell(problem="not installed")}
    monkeypatch.setattr(flops, "count_cell", lambda tool, model, timeout_s: cells[tool])
    monkeypatch.setattr(sys, "argv", ["flops.py", "--only", "mlp", "--tools", "ours", "fvcore"])
    flops.main()
    assert "| mlp | 7 | 1 | not installed | 8 | 1 | – | nothing |" in capsys.readouterr().out


def test_docs_have_every_model_and_tool():
    text = DOCUMENT.read_text()
    generated = text.partition(BEGIN)[2].partition(END)[0]
    lines = generated.splitlines()
    header = next(line for line in lines if line.startswith("| model |"))
    assert all(f"| {tool.label} |" in header for tool in TOOLS.values())
    assert "not installed" not in generated
    rows = lines[lines.index(header) + 2 :]
    assert [line.split(" | ")[0].removeprefix("| ") for line in rows[: len(MODELS)]] == list(MODELS)


def test_case_calls_its_method_and_arguments():
    class Step(nn.Module):
        def other(self, x, scale):
            return x * scale

    case = Case(
        model=Step(),
        args=(torch.ones(2),),
        kwargs={"scale": torch.tensor(3.0)},
        method="other",
        forward_macs=1,
        backward_macs=1,
    )
    expected = torch.tensor([3.0, 3.0])
    assert torch.equal(case.call(), expected)
    assert torch.equal(flop_peers.AsForward(case)(*case.args, *case.kwargs.values()), expected)
