"""One cell of the table of ``flops.py``: one tool counts one model, in its own process.

    python benchmarks/flop_peers.py TOOL MODEL

It prints one line of JSON: the multiply-adds that the tool reports, the truths, and what the tool changed.
Each tool is called with its defaults, as documented. Of its metrics, the one nearest to multiply-adds of
contractions counts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flop_case import Case
from flop_models import MODELS
from torch import nn

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A tool's figures.

    Attributes:
        forward: multiply-adds.
        backward: multiply-adds; ``None`` if the tool counts none.
        recompute: multiply-adds of a repeated forward; ``None`` if the tool doesn't report it separately.
    """

    forward: float
    backward: float | None = None
    recompute: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that counts.

    Attributes:
        label: in the table.
        package: that provides it.
        count: calls it.
        watches: whether it watches a user's step. Changes made by the step then aren't changes by the tool.
    """

    label: str
    package: str
    count: Callable[[Case], Reported]
    watches: bool = False


class AsForward(nn.Module):
    """A user's wrapper around a model, for tools that only take modules with ``forward``.

    Tensor keyword arguments become positional, because some tools accept no others.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model, self.method, self.names = case.model, case.method, list(case.kwargs)

    def forward(self, *args: Any) -> Any:
        first = len(args) - len(self.names)
        run = self.model if self.method == "forward" else getattr(self.model, self.method)
        return run(*args[:first], **dict(zip(self.names, args[first:], strict=True)))


def with_forward(case: Case) -> nn.Module:
    """Return the model itself if it can be called directly."""
    return case.model if case.method == "forward" else AsForward(case)


def ours(case: Case) -> Reported:
    from lightning_modelprof.inspect.flops.count import count_flops  # noqa: PLC0415

    macs = count_flops(with_forward(case), *case.args, loss_fn=case.loss, **case.kwargs).macs
    return Reported(
        forward=macs.get("forward", 0), backward=macs.get("backward", 0), recompute=macs.get("recompute")
    )


def fvcore(case: Case) -> Reported:
    """Its "flops" are multiply-adds; it only takes positional arguments."""
    from fvcore.nn import FlopCountAnalysis  # noqa: PLC0415

    model = AsForward(case) if case.kwargs else with_forward(case)
    return Reported(forward=FlopCountAnalysis(model, (*case.args, *case.kwargs.values())).total())


def flop_counter_mode(case: Case) -> Reported:
    """It wraps the step and reports FLOPs, two per multiply-add."""
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415

    with FlopCounterMode(display=False) as counter:
        output = case.call()
        forward = counter.get_total_flops()
        case.loss(output).backward()
    return Reported(forward=forward / 2, backward=(counter.get_total_flops() - forward) / 2)


def deepspeed(case: Case) -> Reported:
    """It reports FLOPs, multiply-adds and parameters."""
    from deepspeed.profiling.flops_profiler import get_model_profile  # noqa: PLC0415

    model, kwargs = with_forward(case), dict(case.kwargs)
    _, macs, _ = get_model_profile(
        model, args=list(case.args), kwargs=kwargs, print_profile=False, as_string=False
    )
    return Reported(forward=macs)


def torchinfo(case: Case) -> Reported:
    """It reports ``total_mult_adds``; keyword arguments are passed as a dict of inputs."""
    from torchinfo import summary  # noqa: PLC0415

    inputs: Any = dict(case.kwargs) if case.kwargs else list(case.args)
    return Reported(forward=summary(with_forward(case), input_data=inputs, verbose=0).total_mult_adds)


TOOLS = {
    "ours": Tool(label="lightning-modelprof", package="lightning_modelprof", count=ours),
    "fvcore": Tool(label="fvcore", package="fvcore", count=fvcore),
    "flop_counter_mode": Tool(
        label="FlopCounterMode", package="torch", count=flop_counter_mode, watches=True
    ),
    "deepspeed": Tool(label="DeepSpeed", package="deepspeed", count=deepspeed),
    "torchinfo": Tool(label="torchinfo", package="torchinfo", count=torchinfo),
}


# ---- Side effects of a tool


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return everything that a tool must not change, named as in the table."""
    modules, state = list(model.modules()), model.state_dict()
    hooks = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    return {
        "modes": [module.training for module in modules],
        "hooks": [[len(getattr(module, name)) for name in hooks] for module in modules],
        "state_dict keys": list(state),
        "values": [value.detach().clone() for value in [*model.parameters(), *model.buffers()]],
        "gradients": [
            None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()
        ],
        "random numbers": [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()],
    }


def same(one: Any, other: Any) -> bool:
    """Compare bit by bit; lists element by element."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def runs_compiled(case: Case) -> bool:
    """Whether the model still runs its compiled code, according to torch's profiler."""
    with torch.profiler.profile() as window:
        case.call()
    return any("Compiled Region" in event.name for event in window.events())


def seed() -> None:
    """Seed all generators, so that twins are built and run with the same random numbers."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def count(tool: Tool, build: Callable[[], Case]) -> dict[str, Any]:
    """Let a tool count a model, and compare the model before and after, even if the tool fails.

    Returns:
        The fields of :class:`Reported`, or ``failed`` and ``message`` if the tool raised; ``truths`` (forward
        and backward); ``changed``: names from :func:`state_of`, and "compilation", of what the tool changed.
        If the tool watches a step, the reference is the state after the same step without the tool.
    """
    build()  # imports dependencies first, because some packages draw random numbers during import
    if tool.watches:
        seed()
        twin = build()
        twin.loss(twin.call()).backward()
        expected = state_of(twin.model)
    seed()
    case = build()
    if not tool.watches:
        expected = state_of(case.model)
    try:
        with quiet():
            answer = asdict(tool.count(case))
    except (Exception, SystemExit) as error:
        answer = {"failed": type(error).__name__, "message": " ".join(str(error).split())}
    changed = []
    if not (tool.watches and "failed" in answer):  # an interrupted step has no twin
        found = state_of(case.model)
        changed = [word for word, value in expected.items() if not same(value, found[word])]
    if hasattr(case.model, "_orig_mod") and not runs_compiled(case):
        changed.append("compilation")
    return {**answer, "truths": [case.forward_macs, case.backward_macs], "changed": changed}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the tool, because the answer must be the only output."""
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def main() -> None:
    name, model = sys.argv[1:]
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    tool = TOOLS[name]
    if importlib.util.find_spec(tool.package) is None:
        answer = {"not_installed": tool.package}
    else:
        try:
            answer = count(tool, MODELS[model])
        except ModuleNotFoundError as error:  # of a model, such as transformers
            answer = {"not_installed": error.name}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
