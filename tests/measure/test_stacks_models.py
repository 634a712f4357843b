"""The callback works with compiled, sharded and third-party models.

Tests skip optional packages that aren't installed; the extra ``test`` installs them all.
"""

from __future__ import annotations

import importlib
import json
import socket

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from tests.support import warm
from tests.support.fits import (
    Net,
    fit_quietly,
    flops_of,
    loader,
    make_callback,
    make_trainer,
    our_warnings,
    steps_of,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:(?!ModelProfCallback)"),
]


# torch.compile


class Layers(torch.nn.Sequential):
    """torch.compile skips the forward of torch's own containers."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


class Compiled(Net):
    """Compiled in part or in place; with ``breaks``, Dynamo breaks the graph in the middle."""

    def __init__(self, how, backend, breaks):
        super().__init__()
        self.layers = Layers(*self.layers)
        self.breaks = breaks
        if how == "part":
            self.layers = torch.compile(self.layers, backend=backend)
        elif how == "in place":
            self.layers.compile(backend=backend)

    def training_step(self, batch, batch_idx):  # Dynamo can't follow Lightning's log
        loss = self.loss(batch)
        if self.breaks:
            torch._dynamo.graph_break()
        return 2 * loss


@pytest.mark.parametrize("how", ["part", "in place", "whole", "whole with a break"])
def test_callback_keeps_compiled_graphs(tmp_path, how):
    counters = importlib.import_module("torch._dynamo.utils").counters  # imported by name: it takes a second
    backend, seen = "aot_eager", []
    callback = make_callback(tmp_path, active=4, skip_first=2, flops=True)
    for callbacks in ((), (callback,)):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(6)
        module = Compiled(how, backend, breaks="break" in how)
        fitted = torch.compile(module, backend=backend) if "whole" in how else module
        fit_quietly(make_trainer(tmp_path, *callbacks), fitted, loader(63))  # the last batch is smaller
        kinds = ("frames", "stats", "graph_break", "unimplemented", "inductor")
        dynamo = {kind: dict(counters[kind]) for kind in kinds}
        seen.append((dynamo, [parameter.detach().clone() for parameter in module.parameters()]))
    (bare, weights), (measured, measured_weights) = seen
    assert measured == bare
    assert bare["stats"]["unique_graphs"] >= 2  # one for the last batch
    assert sum(bare["graph_break"].values()) == (2 if "break" in how else 0)
    assert all(torch.equal(a, b) for a, b in zip(weights, measured_weights, strict=True))
    assert callback.run.info.status == "finished"
    assert flops_of(callback)["forward"] == 2 * 2 * (8 * 16 + 16)


# Sharded models


RANK = """
import sys, json
from pathlib import Path
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from tests.support.fits import Net, fit_quietly, loader, make_callback, make_trainer
from lightning_modelprof.inspect.flops.count import added_up

class Sharded(Net):
    def configure_model(self):
        from torch.distributed.fsdp import fully_shard
        if not hasattr(self, "is_sharded"):
            self.is_sharded = True
            mesh = self.device_mesh["data_parallel"]
            for layer in (self.layers[0], self.layers[3], self):
                fully_shard(layer, mesh=mesh)

class Split(Net):
    def configure_model(self):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
        parallelize_module(self.layers, self.device_mesh["tensor_parallel"], plan)

torch.set_num_threads(1)
found = {}
for kind in (Sharded, Split):
    sizes = {"data_parallel_size": 2 if kind is Sharded else 1}
    sizes["tensor_parallel_size"] = 2 // sizes["data_parallel_size"]
    weights = []
    folder = Path(kind.__name__)
    callback = make_callback(folder, active=3, skip_first=2, flops=True)
    data = loader(64 if kind is Sharded else 32)  # 16 batches for each rank
    for callbacks in ((), (callback,)):
        torch.manual_seed(2)
        module = kind()
        strategy = ModelParallelStrategy(**sizes, process_group_backend="gloo")
        fit_quietly(make_trainer(folder, *callbacks, strategy=strategy, devices=2), module, data)
        weights.append([parameter.full_tensor().tolist() if hasattr(parameter, "full_tensor")
                        else parameter.tolist() for parameter in module.parameters()])
    cost, setup = callback.run.ranks[0].model_cost, callback.run.ranks[0].setup
    found[kind.__name__] = {
        "is_equal": weights[0] == weights[1],
        "model": callback.run.info.model,
        "module": setup.module.function,
        "is_library": setup.module.is_library,
        "hooks": sorted(setup.module_hooks),
        "setup_notes": setup.notes,
        "flops": added_up(cost.count).flops,
        "modules": [(one.path, one.type_name, one.parameters) for one in cost.modules],
        "sizes": {one.kind: one.elements for one in cost.size.sizes},
        "timed": [one.path for one in cost.times.times],
        "windows": [window.recorded_steps for window in callback.run.ranks[0].windows],
        "status": callback.run.info.status,
        "ranks": len(callback.run.rank_steps),
    }
rank = int(sys.argv[1])
Path(f"rank{rank}.json").write_text(json.dumps(found))
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """The results of two ranks, each its own process, which Lightning adopts."""
    folder = tmp_path_factory.mktemp("sharded")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "NODE_RANK": "0"}
    script = folder / "train.py"  # a file, because code run by `python -c` has no source file
    script.write_text(RANK)
    ranks = [
        warm.start(RANK, rank, cwd=folder, env={**common, "LOCAL_RANK": rank}, file=script)
        for rank in ("0", "1")
    ]
    done = [process.wait(120) for process in ranks]
    assert [one.returncode for one in done] == [0, 0], "".join(one.stderr[-3000:] for one in done)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


FORWARD = 2 * 2 * (8 * 16 + 16)  # FLOPs of Net for a batch of 2
BACKWARD = 2 * 2 * (8 * 16 + 2 * 16)  # without the gradient of its input


@pytest.mark.parametrize(("kind", "share"), [("Sharded", 1), ("Split", 2)])
def test_model_sharded_by_torch(sharded, kind, share):
    """FSDP computes the whole model on each rank, tensor parallelism only the rank's part."""
    for rank in sharded:
        found = rank[kind]
        assert found["is_equal"]
        assert (found["model"], found["module"], found["is_library"]) == (kind, kind, False)
        assert not any("reshard" in hook for hook in found["hooks"])
        assert "training_step" in found["hooks"]
        assert found["setup_notes"] == []
        assert found["flops"] == {"forward": FORWARD // share, "backward": BACKWARD // share}
        layers = [["", kind, 0], ["layers", "Sequential", 0], ["layers.0", "Linear", 144]]
        assert found["modules"][:3] == layers
        assert "layers.3" in found["timed"]
        assert found["windows"] == [[4, 5, 6]]
        assert found["status"] == "finished"
        assert found["ranks"] == (2 if rank is sharded[0] else 0)  # rank 0 collects from all
    held = [rank[kind]["sizes"]["trainable parameters"] for rank in sharded]
    assert sum(held) == 161 if kind == "Sharded" else held == [81, 81]  # both ranks have the last bias


def test_lightning_fsdp_requires_gpu(tmp_path):
    """Lightning rejects it on a CPU, so it can be tested only on a GPU."""
    with pytest.raises(ValueError, match="strategy `fsdp` requires a GPU"):
        make_trainer(tmp_path, strategy="fsdp", devices=2)


# Third-party models

L, B, T, E, F, V = 2, 4, 8, 16, 32, 64  # layers, batch, positions, width, feed-forward, vocabulary
RANK_OF_LORA = 2


def gpt2(transformers):
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=T, n_embd=E, n_layer=L, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def llama(transformers):
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=E, intermediate_size=F, num_hidden_layers=L, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def bert(transformers):
    config = transformers.BertConfig(
        vocab_size=V, hidden_size=E, intermediate_size=F, num_hidden_layers=L, num_attention_heads=2
    )
    return transformers.BertForSequenceClassification(config)


CORE = 2 * B * T**2 * E  # scores and weighted sum
PROJECTION = B * T * E**2
MODELS = {
    # multiply-adds of the forward; GPT-2's feed-forward is four times as wide, Llama's has three products
    gpt2: L * (4 * PROJECTION + CORE + 8 * PROJECTION) + B * T * E * V,
    llama: L * (4 * PROJECTION + CORE + 3 * B * T * E * F) + B * T * E * V,
    bert: L * (4 * PROJECTION + CORE + 2 * B * T * E * F) + B * E * E + B * E * 2,
}


class Language(LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        is_classifier = "Classification" in type(self.model).__name__
        loss = self.model(input_ids=batch, labels=batch[:, 0] % 2 if is_classifier else batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit_language(folder, make):
    """Fit with and without the callback and check that the weights are equal."""
    words = torch.randint(0, V, (10 * B, T), generator=torch.Generator().manual_seed(1))
    callback = make_callback(
        folder, active=2, skip_first=2, flops=True, samples_fn=torch.numel, unit="tokens", terminal=False
    )
    weights = []
    for callbacks in ((), (callback,)):
        torch.manual_seed(8)
        module = Language(make())
        fit_quietly(make_trainer(folder, *callbacks), module, DataLoader(words, batch_size=B))
        weights.append(list(module.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    return callback, module


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_transformers_models(tmp_path, model):
    transformers = pytest.importorskip("transformers", reason="needs the transformers library")
    with our_warnings() as messages:
        callback, module = fit_language(tmp_path, lambda: model(transformers))
    assert messages == []
    forward = 2 * MODELS[model]
    flops = flops_of(callback)
    # The first layer's input comes from an embedding, so backward is twice forward.
    assert (flops["forward"], flops["backward"]) == (forward, 2 * forward)
    cost = callback.run.ranks[0].model_cost
    assert cost.count.errors == ()
    assert sum(one.parameters for one in cost.modules) == sum(p.numel() for p in module.parameters())
    assert {one.path for one in cost.modules} == {path for path, _ in module.named_modules()}
    assert steps_of(callback).samples.tolist() == [B * T] * 10
    assert callback.report.verdict is not None


def test_lora_model(tmp_path):
    """Only a small part is trained; counts, sizes and modules reflect that."""
    transformers = pytest.importorskip("transformers", reason="needs the transformers library")
    peft = pytest.importorskip("peft", reason="needs peft")
    lora = peft.LoraConfig(r=RANK_OF_LORA, target_modules=["q_proj", "v_proj"])
    with our_warnings() as messages:
        callback, module = fit_language(
            tmp_path, lambda: peft.get_peft_model(llama(transformers), lora, autocast_adapter_dtype=False)
        )
    assert messages == []

    half = B * T * E * RANK_OF_LORA  # multiply-adds of one of an adapter's two matrices
    forward = MODELS[llama] + L * 2 * 2 * half
    # Frozen weights have no gradients. Gradients flow down to the first layer's adapters, whose own input
    # needs none: of its projections only the output projection passes one on.
    feed_forward = 3 * B * T * E * F
    backward = B * T * E * V + L * (feed_forward + PROJECTION + 2 * CORE)
    backward += (L - 1) * (3 * PROJECTION + 2 * 4 * half) + 2 * 3 * half
    flops = flops_of(callback)
    assert (flops["forward"], flops["backward"]) == (2 * forward, 2 * backward)

    trained = L * 2 * 2 * E * RANK_OF_LORA
    frozen = sum(p.numel() for p in module.parameters()) - trained
    cost = callback.run.ranks[0].model_cost
    sizes = {one.kind: one.elements for one in cost.size.sizes}
    assert (sizes["trainable parameters"], sizes["frozen parameters"]) == (trained, frozen)
    assert sizes["gradients"] == trained
    assert sizes["optimizer state"] == 2 * trained + 2 * L * 2  # moments, and a step count per tensor
    assert sum(one.trainable for one in cost.modules) == trained
    assert sum(one.parameters for one in cost.modules) == trained + frozen
    assert callback.run.ranks[0].setup.num_trainable_tensors == 2 * L * 2
