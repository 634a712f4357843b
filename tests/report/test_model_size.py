"""A model's memory, compared with hand-derived bytes, and the records of its modules."""

from __future__ import annotations

import copy
import os
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.ao.nn import quantized as ao
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing._internal.two_tensor import TwoTensor

from lightning_modelprof.inspect.modules import modules as packed_weights
from lightning_modelprof.inspect.modules.model_size import model_size
from lightning_modelprof.inspect.modules.modules import module_records
from lightning_modelprof.report.model import Unit
from lightning_modelprof.report.tables.run.model_size import model_size_table, total_size
from lightning_modelprof.run.model_cost import ModelSize, ModuleRecord, TensorSize

TRAINABLE, FROZEN, GRADIENTS, STATE, BUFFERS = (
    "trainable parameters",
    "frozen parameters",
    "gradients",
    "optimizer state",
    "buffers",
)
PACKED = "packed weights"
NO_GRADIENTS = "no gradients at this moment"
NO_OPTIMIZER = "no optimizer was given, so its state is unknown"


def rows(size):
    return {(r.kind, r.dtype): (r.tensors, r.elements, r.num_bytes) for r in size.sizes}


def step(model, optimizer, x):
    model(x).float().sum().backward()
    optimizer.step()


# ---- Parameters, gradients, state and buffers


def test_only_parameters_exist_before_first_step():
    # Weight 4 x 3 and bias 4: 16 elements of 4 bytes.
    size = model_size(nn.Linear(3, 4), [torch.optim.AdamW(nn.Linear(1, 1).parameters())])
    assert rows(size) == {(TRAINABLE, "float32"): (2, 16, 64)}
    assert size.notes[:2] == (NO_GRADIENTS, "no optimizer state at this moment")
    assert size.lazy == size.tied == ()


def test_adamw_after_a_step():
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, torch.ones(2, 3))
    # Two moments of 16 elements, and one float32 step counter per parameter.
    size = model_size(model, [optimizer])
    assert rows(size) == {
        (TRAINABLE, "float32"): (2, 16, 64),
        (GRADIENTS, "float32"): (2, 16, 64),
        (STATE, "float32"): (6, 34, 136),
    }
    assert size.notes == ()
    assert total_size(size) == TensorSize(kind="total", dtype="", tensors=10, elements=66, num_bytes=264)


def test_sgd_with_momentum_and_half_the_gradients():
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer, torch.ones(2, 3))
    model.bias.grad = None
    size = model_size(model, [optimizer, optimizer])  # passing it twice adds nothing
    assert rows(size)[STATE, "float32"] == (2, 16, 64)
    assert rows(size)[GRADIENTS, "float32"] == (1, 12, 48)
    assert size.notes == ("1 of 2 trainable parameters have no gradient at this moment",)


def test_sgd_without_momentum_notes_missing_state():
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, torch.ones(2, 3))
    size = model_size(model, [optimizer])
    assert (STATE, "float32") not in rows(size)
    assert size.notes == ("no optimizer state at this moment",)
    model.zero_grad(set_to_none=True)
    assert model_size(model).notes == (NO_GRADIENTS, NO_OPTIMIZER)


def test_nested_optimizer_state_is_counted():
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shared = torch.zeros(3, dtype=torch.float64)
    optimizer.state[model.weight] = {
        "history": [torch.zeros(2), (torch.zeros(5, dtype=torch.uint8), {"deep": shared})],
        "table": shared,  # again: counts once
        "itself": model.weight,  # a parameter already
        "steps": 3,
        "name": "text",
    }
    assert {k: v for k, v in rows(model_size(model, [optimizer])).items() if k[0] == STATE} == {
        (STATE, "float32"): (1, 2, 8),
        (STATE, "float64"): (1, 3, 24),
        (STATE, "uint8"): (1, 5, 5),
    }


def test_lbfgs_history_is_counted():
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(4, 2)) - 1).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    state = next(iter(optimizer.state.values()))
    held = [state["d"], state["prev_flat_grad"], state["H_diag"], *state["ro"]]
    held += [*state["old_dirs"], *state["old_stps"]]
    tensors = {id(t): t for t in held if isinstance(t, torch.Tensor)}
    found = rows(model_size(model, [optimizer]))[STATE, "float32"]
    assert state["old_dirs"]
    assert found[0] >= len(tensors)
    assert found[1] >= sum(t.numel() for t in tensors.values())


def test_optimizer_of_parameter_copies_is_noted():
    model = nn.Linear(3, 4).half()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    assert model_size(model, [optimizer]).notes[-1] == (
        "the optimizers update 2 tensors that aren't parameters of the model (16 elements);"
        " only their state is counted"
    )


def test_mixed_dtypes_and_frozen_parameters():
    # LoRA: a frozen half-precision weight 8 x 8, and trainable factors 8 x 2 and 2 x 8 in float32.
    model = nn.Module()
    model.base = nn.Linear(8, 8, bias=False).half().requires_grad_(False)
    model.down, model.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
    model.scale = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
    size = model_size(model)
    assert [(r.kind, r.dtype) for r in size.sizes] == [
        (TRAINABLE, "float32"),
        (FROZEN, "bfloat16"),
        (FROZEN, "float16"),
    ]
    assert rows(size) == {
        (TRAINABLE, "float32"): (2, 32, 128),
        (FROZEN, "bfloat16"): (1, 2, 4),
        (FROZEN, "float16"): (1, 64, 128),
    }


def test_half_precision_model_with_gradients():
    model = nn.Linear(3, 4, dtype=torch.bfloat16)
    model(torch.ones(2, 3, dtype=torch.bfloat16)).float().sum().backward()
    assert rows(model_size(model)) == {
        (TRAINABLE, "bfloat16"): (2, 16, 32),
        (GRADIENTS, "bfloat16"): (2, 16, 32),
    }


def test_persistent_and_other_buffers_are_counted():
    model = nn.BatchNorm1d(5)  # weight, bias; mean, variance; a count in int64
    model.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool), persistent=False)
    model.register_buffer("phases", torch.ones(2, dtype=torch.complex64))
    model.register_buffer("nothing", None)
    assert rows(model_size(model)) == {
        (TRAINABLE, "float32"): (2, 10, 40),
        (BUFFERS, "bool"): (1, 9, 9),
        (BUFFERS, "complex64"): (1, 2, 16),
        (BUFFERS, "float32"): (2, 10, 40),
        (BUFFERS, "int64"): (1, 1, 8),
    }


def test_model_without_tensors_is_empty():
    size = model_size(nn.ReLU())
    assert size.sizes == ()
    assert size.notes == (NO_GRADIENTS, NO_OPTIMIZER)


# ---- Names


def test_tied_embedding_counts_once():
    model = nn.Module()
    model.embedding, model.head = nn.Embedding(10, 4), nn.Linear(4, 10)
    model.head.weight = model.embedding.weight
    size = model_size(model)
    assert rows(size) == {(TRAINABLE, "float32"): (2, 50, 200)}
    assert size.tied == ("head.weight",)


def test_module_under_two_names_counts_once():
    layer = nn.BatchNorm1d(2)
    size = model_size(nn.Sequential(OrderedDict(first=layer, second=layer)))
    assert rows(size)[TRAINABLE, "float32"] == (2, 4, 16)
    assert size.tied == tuple(
        f"second.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    )


def test_compiled_child_is_tied_under_its_own_name():
    model = nn.Module()
    model.net = nn.Linear(2, 2)
    model.fast = torch.compile(model.net)
    assert model_size(model).tied == ("fast.weight", "fast.bias")
    assert model_size(torch.compile(nn.Linear(2, 2))).tied == ()


def test_wrapper_exposing_inner_parameters_is_not_tied():
    model = nn.Module()
    model._fsdp_wrapped_module = nn.Linear(2, 2)
    model.weight = model._fsdp_wrapped_module.weight
    model.alias = model.weight
    size = model_size(model)
    assert rows(size) == {(TRAINABLE, "float32"): (2, 6, 24)}
    assert size.tied == ("alias",)


def test_lazy_parameters_are_named_but_not_counted():
    size = model_size(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1), nn.LazyBatchNorm1d()))
    assert rows(size)[TRAINABLE, "float32"] == (2, 5, 20)
    assert size.lazy == (
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
        "2.running_mean",
        "2.running_var",
    )


# ---- Bytes come from storages


def test_views_of_one_storage_count_it_once():
    flat = torch.zeros(100)
    model = nn.Module()
    model.first, model.second = nn.Parameter(flat[:10]), nn.Parameter(flat[10:30])
    size = model_size(model)
    # 30 elements; the whole storage of 100 counts once.
    assert rows(size) == {(TRAINABLE, "float32"): (2, 30, 400)}
    assert size.notes[-1] == "1 tensors share memory with earlier ones; shared memory counts once"


def test_expanded_and_empty_tensors_count_stored_bytes():
    model = nn.Module()
    model.register_buffer("wide", torch.ones(1).expand(1000))
    model.register_buffer("empty", torch.zeros(0))
    assert rows(model_size(model)) == {(BUFFERS, "float32"): (2, 1000, 4)}


def test_parameters_sharing_storage_have_separate_gradients():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight.data = model[0].weight.data
    model(torch.ones(1, 2)).sum().backward()
    assert rows(model_size(model)) == {
        (TRAINABLE, "float32"): (2, 8, 16),
        (GRADIENTS, "float32"): (2, 8, 32),
    }


def test_shared_storage_counts_with_first_kind():
    flat = torch.zeros(8)
    model = nn.Module()
    model.frozen, model.live = nn.Parameter(flat[:4], requires_grad=False), nn.Parameter(flat[4:])
    assert rows(model_size(model)) == {
        (TRAINABLE, "float32"): (1, 4, 32),
        (FROZEN, "float32"): (1, 4, 0),
    }


def test_freed_storage_holds_nothing():
    model = nn.Linear(3, 4, bias=False)
    model.weight.untyped_storage().resize_(0)  # as in sharding between uses
    assert rows(model_size(model)) == {(TRAINABLE, "float32"): (1, 12, 0)}


@pytest.mark.parametrize("dtype", ["uint4", "float8_e4m3fn", "float4_e2m1fn_x2"])
def test_small_dtypes_count_stored_bytes(dtype):
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    model = nn.Module()
    model.register_buffer("packed", torch.empty(6, dtype=getattr(torch, dtype)))
    assert rows(model_size(model)) == {(BUFFERS, dtype): (1, 6, 6)}


# ---- Tensors of other kinds


def test_sparse_gradient_counts_stored_values():
    model = nn.Embedding(1000, 4, sparse=True)
    model(torch.tensor([3, 5])).sum().backward()
    size = model_size(model)
    # Two rows of four float32 values and two int64 row numbers: 32 + 16 bytes.
    assert rows(size)[GRADIENTS, "float32"] == (1, 8, 48)
    assert "1 sparse tensors count their stored values as elements" in size.notes


@pytest.mark.filterwarnings("ignore:Sparse")
def test_compressed_sparse_buffer_counts_indices():
    model = nn.Module()
    eye = torch.sparse_csr_tensor(torch.arange(4), torch.arange(3), torch.ones(3), (3, 3))
    model.register_buffer("eye", eye)
    # Four row pointers and three columns (int64) and three values (float32): 32 + 24 + 12 bytes.
    assert rows(model_size(model)) == {(BUFFERS, "float32"): (1, 3, 68)}


def test_tensor_subclass_counts_inner_tensors():
    model = nn.Module()
    model.register_buffer("both", TwoTensor(torch.zeros(3), torch.zeros(3)))
    assert rows(model_size(model)) == {(BUFFERS, "float32 in TwoTensor"): (1, 3, 24)}


def test_user_subclass_sees_no_calls():
    calls = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            calls.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    model = nn.Module()
    model.register_buffer("watched", torch.zeros(3).as_subclass(Watched))
    model.weight = nn.Parameter(torch.zeros(2).as_subclass(Watched))
    calls.clear()
    assert rows(model_size(model)) == {
        (TRAINABLE, "float32"): (1, 2, 8),
        (BUFFERS, "float32"): (1, 3, 12),
    }
    module_records(model)
    assert calls == []


def test_nested_tensor_counts_all_inner_tensors():
    model = nn.Module()
    values = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    model.register_buffer("jagged", values)
    size = model_size(model)
    # 18 float32 values and three int64 offsets, plus whatever else it keeps.
    kept = [getattr(values, name) for name in values.__tensor_flatten__()[0]]
    assert rows(size) == {
        (BUFFERS, "float32 in NestedTensor"): (1, 18, sum(t.untyped_storage().nbytes() for t in kept))
    }
    assert rows(size)[BUFFERS, "float32 in NestedTensor"][2] >= 72 + 24


def test_tensor_without_visible_storage_is_estimated():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no mkldnn")
    model = nn.Module()
    model.register_buffer("opaque", torch.ones(3).to_mkldnn())
    size = model_size(model)
    assert rows(size) == {(BUFFERS, "float32"): (1, 3, 12)}
    assert size.notes[-1] == "1 tensors have no visible storage; their bytes are elements × element size"


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_fake_and_meta_tensors_count_needed_bytes(kind):
    if kind == "meta":
        model = nn.Linear(3, 4, device="meta")
    else:
        with FakeTensorMode():
            model = nn.Linear(3, 4)
    size = model_size(model)
    assert rows(size) == {(TRAINABLE, "float32"): (2, 16, 64)}
    assert size.notes[-1] == "2 fake or meta tensors count the bytes they would need"


@pytest.mark.filterwarnings("ignore")  # torch.ao is deprecated
def test_dynamically_quantized_weights_are_counted():
    model = nn.Sequential(*(nn.Linear(8, 4) for _ in range(5)), nn.LayerNorm(4))
    model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    size = model_size(model)
    assert rows(size) == {
        (TRAINABLE, "float32"): (2, 8, 32),
        (PACKED, "qint8"): (5, 5 * 32, 5 * 32),
        (PACKED, "float32"): (5, 5 * 4, 5 * 16),
    }
    assert size.notes[-1].startswith("packed weights are quantized for inference and not trainable")
    records = {record.path: (record.parameters, record.trainable) for record in module_records(model)}
    assert records["0._packed_params"] == (36, 0)
    assert records["5"] == (8, 8)


GATES = 4 * 6  # of an LSTM with 6 features
QUANTISED = [
    # module, elements and bytes of its weights, elements of its biases
    (lambda: ao.Linear(8, 4), "qint8", 32, 32, 4),
    (lambda: ao.Conv1d(3, 4, 5), "qint8", 60, 60, 4),
    (lambda: ao.Conv2d(4, 6, 3, groups=2), "qint8", 6 * 2 * 9, 6 * 2 * 9, 6),
    (lambda: ao.ConvTranspose2d(3, 4, 3), "qint8", 108, 108, 4),
    (lambda: ao.Embedding(10, 8), "quint8", 80, 80, 0),
    (lambda: ao.EmbeddingBag(10, 8), "quint8", 80, 80, 0),
    (lambda: ao.dynamic.Linear(8, 4, dtype=torch.float16), "float16", 32, 64, 4),
    (lambda: ao.dynamic.LSTM(8, 6), "qint8", GATES * (8 + 6), GATES * (8 + 6), 2 * GATES),
    (lambda: ao.dynamic.GRUCell(8, 6), "qint8", 18 * (8 + 6), 18 * (8 + 6), 2 * 18),
]


@pytest.mark.filterwarnings("ignore")  # torch deprecates quantized dtypes
@pytest.mark.parametrize(("make", "dtype", "elements", "num_bytes", "biases"), QUANTISED)
def test_weights_of_quantized_modules(make, dtype, elements, num_bytes, biases):
    model = nn.Sequential(make())
    found = rows(model_size(model))
    assert found[PACKED, dtype][1:] == (elements, num_bytes)
    assert (found[PACKED, "float32"][1:] if biases else (0, 0)) == (biases, 4 * biases)
    assert {kind for kind, _ in found} == {PACKED}
    records = module_records(model)
    assert sum(record.parameters for record in records) == elements + biases
    assert sum(record.trainable for record in records) == 0


def test_unreadable_packed_weights_are_named(monkeypatch):
    monkeypatch.setattr(packed_weights, "_unpacked", lambda packed: 1 / 0)
    model = nn.Sequential(nn.Linear(4, 4))
    model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    size = model_size(model)
    assert size.sizes == ()
    assert size.notes[-1] == (
        "no row includes quantized weights packed outside parameters and buffers: 0._packed_params"
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_module_is_not_quantized():
    size = model_size(torch.jit.script(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))))
    assert rows(size) == {(TRAINABLE, "float32"): (4, 161, 644)}
    assert not any("packed" in note for note in size.notes)


def test_weight_only_int8_counts_as_buffers():
    model = nn.Module()
    model.register_buffer("weight", torch.zeros(8, 4, dtype=torch.int8))
    model.register_buffer("scale", torch.ones(8, dtype=torch.bfloat16))
    model.bias = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    assert rows(model_size(model)) == {
        (TRAINABLE, "bfloat16"): (1, 8, 16),
        (BUFFERS, "bfloat16"): (1, 8, 16),
        (BUFFERS, "int8"): (1, 32, 32),
    }
    assert module_records(model)[0].parameters == 8


@pytest.mark.filterwarnings("ignore")  # torch deprecates quantized dtypes
def test_channel_quantized_tensor_includes_scales():
    model = nn.Module()
    scales, zeros = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    model.register_buffer("q", torch.quantize_per_channel(torch.ones(4, 3), scales, zeros, 0, torch.qint8))
    scale_bytes = model.q.q_per_channel_scales().element_size() * 4
    zero_bytes = model.q.q_per_channel_zero_points().element_size() * 4
    assert rows(model_size(model)) == {(BUFFERS, "qint8"): (1, 12, 12 + scale_bytes + zero_bytes)}


@pytest.fixture
def mesh():
    """A mesh of two processes, of which this is the first; its shards need no communication."""
    store_module = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    before = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=store_module.FakeStore())
    try:
        yield torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    finally:
        torch.distributed.destroy_process_group()
        assert before == {name: os.environ.get(name) for name in before}


def test_shard_of_this_process_counts(mesh):
    tensor = pytest.importorskip("torch.distributed.tensor")
    model = nn.Linear(3, 4, bias=False)
    shard = tensor.DTensor.from_local(torch.zeros(2, 3), mesh, [tensor.Shard(0)], run_check=False)
    model.weight = nn.Parameter(shard)
    size = model_size(model)
    assert rows(size) == {(TRAINABLE, "float32"): (1, 6, 24)}
    assert "1 sharded tensors count the 6 elements in this process, of 12 in all" in size.notes
    assert module_records(model) == (ModuleRecord(path="", type_name="Linear", parameters=12, trainable=12),)


def test_fully_sharded_model_after_step(mesh):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has it elsewhere")
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    fsdp.fully_shard(model[0], mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, torch.ones(2, 4))
    # This process has half of 24 + 6 + 12 + 2 elements, two moments of each, and four full step counters.
    size = model_size(model, [optimizer])
    assert rows(size) == {
        (TRAINABLE, "float32"): (4, 22, 88),
        (GRADIENTS, "float32"): (4, 22, 88),
        (STATE, "float32"): (12, 48, 192),
    }
    assert size.notes[0] == "16 sharded tensors count the 88 elements in this process, of 176 in all"
    assert [(r.type_name, r.parameters) for r in module_records(model)] == [
        ("Sequential", 0),
        ("Linear", 30),
        ("ReLU", 0),
        ("Linear", 14),
    ]


def test_flat_shard_is_noted():
    class FullyShardedDataParallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self._fsdp_wrapped_module = module
            self._flat_param = nn.Parameter(torch.zeros(7))

    model = FullyShardedDataParallel(nn.ReLU())
    size = model_size(model)
    assert rows(size) == {(TRAINABLE, "float32"): (1, 7, 28)}
    assert size.notes[-1] == "with FSDP, parameters are the flat shards in this process"
    assert module_records(model) == (ModuleRecord(path="", type_name="ReLU", parameters=7, trainable=7),)


def test_counting_changes_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, torch.randn(2, 3))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict())), torch.get_rng_state()
    pickled, num_states = pickle.dumps(model), len(optimizer.state)
    model_size(model, [optimizer])
    module_records(model)
    after = (model.state_dict(), optimizer.state_dict()), torch.get_rng_state()
    assert torch.equal(before[1], after[1])
    assert pickle.dumps(model) == pickled
    assert len(optimizer.state) == num_states
    assert all(torch.equal(before[0][0][key], value) for key, value in after[0][0].items())
    assert before[0][0].keys() == after[0][0].keys()


def test_counting_runs_no_kernels():
    """A dispatch mode sees every operator: only views of sparse parts, no kernel and no copy."""
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, torch.ones(2, 3))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    with Watch():
        model_size(model, [optimizer])
        module_records(model)
    assert set(seen) <= {"aten._indices.default", "aten._values.default", "aten.detach.default"}


# ---- Module records


def test_modules_are_ordered_with_their_own_parameters():
    model = nn.Sequential(OrderedDict(body=nn.Sequential(nn.Linear(3, 4), nn.ReLU()), head=nn.Linear(4, 2)))
    model.head.bias.requires_grad_(False)
    assert [(r.path, r.type_name, r.parameters, r.trainable) for r in module_records(model)] == [
        ("", "Sequential", 0, 0),
        ("body", "Sequential", 0, 0),
        ("body.0", "Linear", 16, 16),
        ("body.1", "ReLU", 0, 0),
        ("head", "Linear", 10, 8),
    ]


def test_tied_parameters_count_in_first_module():
    model = nn.Module()
    model.embedding, model.head = nn.Embedding(10, 4), nn.Linear(4, 10)
    model.head.weight = model.embedding.weight
    model.again = model.embedding
    assert {r.path: r.parameters for r in module_records(model)} == {"": 0, "embedding": 40, "head": 10}


def test_parameter_under_two_names_counts_once():
    model = nn.Module()
    model.one = nn.Parameter(torch.zeros(3))
    model.other = model.one
    assert module_records(model) == (ModuleRecord(path="", type_name="Module", parameters=3, trainable=3),)


def test_lazy_modules_have_no_count():
    records = module_records(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)))
    assert [(r.parameters, r.trainable) for r in records] == [(0, 0), (None, None), (5, 5)]


def test_wrappers_have_no_record_of_their_own():
    inner = nn.Sequential(OrderedDict(body=checkpoint_wrapper(nn.Linear(3, 4)), head=nn.Linear(4, 2)))
    expected = [("", "Sequential", 0), ("body", "Linear", 16), ("head", "Linear", 10)]
    for model in (inner, torch.compile(inner)):
        assert [(r.path, r.type_name, r.parameters) for r in module_records(model)] == expected
    inner.head = torch.compile(inner.head)
    assert [(r.path, r.type_name, r.parameters) for r in module_records(inner)] == expected


@pytest.mark.parametrize("order", [("net", "fast"), ("fast", "net")])
def test_wrapper_and_its_original_are_one_module(order):
    net = nn.Linear(2, 2)
    both = {"net": net, "fast": torch.compile(net)}
    model = nn.Module()
    for name in order:
        setattr(model, name, both[name])
    assert [(r.path, r.type_name, r.parameters) for r in module_records(model)] == [
        ("", "Module", 0),
        (order[0], "Linear", 6),
    ]


def test_records_count_each_parameter_once():
    model = nn.Transformer(8, 2, 1, 1, 16)
    assert sum(r.parameters for r in module_records(model)) == sum(p.numel() for p in model.parameters())
    size = model_size(model)
    assert rows(size)[TRAINABLE, "float32"][1] == sum(p.numel() for p in model.parameters())


# ---- The table


def test_table_has_total():
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, torch.ones(2, 3))
    table = model_size_table(model_size(model, [optimizer]), "")
    assert table.rows == (
        (TRAINABLE, "float32", 2, 16, 64),
        (GRADIENTS, "float32", 2, 16, 64),
        (STATE, "float32", 6, 34, 136),
        ("total", "", 10, 66, 264),
    )
    assert table.columns[-1].unit is Unit.BYTES
    assert table.absent_reason is None
    assert table.notes == ()


def test_table_names_uncounted_tensors():
    size = ModelSize(
        sizes=(TensorSize(kind=TRAINABLE, dtype="float32", tensors=1, elements=2, num_bytes=8),),
        lazy=("late.weight",),
        tied=tuple(f"head{i}.weight" for i in range(17)),
        notes=("no gradients at this moment",),
    )
    assert model_size_table(size, "").notes == (
        "Tied to tensors above and not counted again: head0.weight, head1.weight, head2.weight,"
        " head3.weight, head4.weight and 12 more.",
        "Not counted because they have no size yet: late.weight.",
        "No gradients at this moment.",
    )


@pytest.mark.parametrize(
    ("size", "note", "reason"),
    [
        (None, "counting was switched off", "counting was switched off"),
        (None, "", "model size wasn't counted"),
        (ModelSize(sizes=()), "", "the model has no parameters and no buffers"),
        (ModelSize(sizes=(), lazy=("0.weight",)), "", "no tensor has a size yet"),
    ],
)
def test_table_without_sizes_gives_reason(size, note, reason):
    table = model_size_table(size, note)
    assert table.rows == ()
    assert table.absent_reason == reason
