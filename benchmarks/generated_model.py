"""The operators, kernels and copies of a generated trace's training step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from kineto_json import COMMUNICATION_STREAM, COMPUTE_STREAM

BATCH, LENGTH, WIDTH, HEADS = 8, 512, 1024, 16
BLOCKS = 12
BUCKET_BLOCKS = 3
"""Number of blocks whose gradients one all-reduce covers."""


@dataclass(frozen=True, slots=True)
class Work:
    """Device work: a kernel, a copy or a set.

    Attributes:
        category: as in the file.
        name: as in the file.
        about_ns: approximate duration, within a tenth.
        stream: that it runs on.
        args: Kineto's fields after the correlation.
        size_bytes: of a copy or set.
    """

    category: str
    name: str
    about_ns: int
    stream: int
    args: str
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """A runtime or driver call on the CPU, with the work it starts, if any."""

    name: str
    cbid: int
    work: Work | None = None
    category: str = "cuda_runtime"


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory allocated inside an operator; negative if released."""

    size_bytes: int
    on_device: bool = True


@dataclass(frozen=True, slots=True)
class Op:
    """An operator or annotation, with its contents.

    Attributes:
        name: as in the file.
        parts: in order.
        inputs: its inputs as JSON fields, as torch writes them.
        backward: what autograd runs for it; such an operator has a sequence number and a flow arrow.
        category: as in the file.
    """

    name: str
    parts: tuple[Op | Launch | Allocation, ...] = ()
    inputs: str = ""
    backward: tuple[Op, ...] = ()
    category: str = "cpu_op"


def _kernel(
    name: str,
    about_ns: int,
    grid: int,
    block: int,
    *,
    registers: int = 32,
    occupancy: int = 100,
    stream: int = COMPUTE_STREAM,
    collective: str = "",
) -> Work:
    """Make a kernel with all of Kineto's fields."""
    per_sm = grid / 108
    args = (
        f',      "registers per thread": {registers},      "shared memory": {16 * block},'
        f'      "blocks per SM": {per_sm:.6f},      "warps per SM": {per_sm * block / 32:.6f},'
        f'      "grid": [{grid}, 1, 1],      "block": [{block}, 1, 1],'
        f'      "est. achieved occupancy %": {occupancy},      "occupancy": {{'
        f'        "activeBlocksPerMultiprocessor": {max(1, 2048 // block)},'
        f'        "limitingFactors": "WARPS",'
        f'        "blockLimitRegs": {65536 // (registers * block)},        "blockLimitSharedMem": 32,'
        f'        "blockLimitWarps": {2048 // block},        "blockLimitBlocks": 32,'
        f'        "blockLimitBarriers": 32,        "allocatedRegistersPerBlock": {registers * block},'
        f'        "allocatedSharedMemPerBlock": {16 * block}      }},'
        f'      "graph id": 0, "graph node id": 0{collective}'
    )
    return Work("kernel", name, about_ns, stream, args)


def _transfer(category: str, name: str, about_ns: int, size_bytes: int) -> Work:
    return Work(category, name, about_ns, COMPUTE_STREAM, ', "graph id": 0, "graph node id": 0', size_bytes)


def _launch_kernel(work: Work) -> Launch:
    return Launch("cudaLaunchKernel", 211, work)


def _inputs(*dims: list[int], dtype: str = "c10::BFloat16", extra: tuple[str, ...] = ()) -> str:
    """Return the fields that ``record_shapes`` adds: tensors of these shapes, then these concrete values."""
    strides = [[prod(shape[axis + 1 :]) for axis in range(len(shape))] for shape in dims]
    concrete = [""] * len(dims) + list(extra)
    kinds = [dtype] * len(dims) + ["Scalar"] * len(extra)
    none: list[list[int]] = [[] for _ in extra]
    return (
        f'"Concrete Inputs": {json.dumps(concrete)}, "Input type": {json.dumps(kinds)},'
        f' "Input Strides": {json.dumps(strides + none)}, "Input Dims": {json.dumps([*dims, *none])}'
    )


def _autograd(name: str, *parts: Op | Launch | Allocation, inputs: str = "") -> Op:
    """Make the operator that autograd's thread shows for a graph node."""
    return Op(f"autograd::engine::evaluate_function: {name}", (Op(name, parts, inputs),))


_ACCUMULATE = _autograd(
    "torch::autograd::AccumulateGrad",
    Op("aten::detach", (Op("detach", (), _inputs([WIDTH, WIDTH])),), _inputs([WIDTH, WIDTH])),
)

_ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, {0}, std::array<char*, {1}ul> >(int, {0},"
    " std::array<char*, {1}ul>)"
)
_ADD = _ELEMENTWISE.format("at::native::CUDAFunctor_add<c10::BFloat16>", 3)
_GELU = _ELEMENTWISE.format(
    "at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&, at::native::GeluType)::{lambda()#2}"
    "::operator()() const::{lambda()#4}::operator()() const::{lambda(c10::BFloat16)#1}",
    2,
)
_FILL = _ELEMENTWISE.format("at::native::FillFunctor<float>", 1)
_GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_{}"
_NORM = (
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float,"
    " c10::BFloat16 const*, c10::BFloat16 const*, c10::BFloat16 const*, float*, float*, c10::BFloat16*)"
)
_FLASH = (
    "void pytorch_flash::flash_{0}_kernel<pytorch_flash::Flash_{0}_kernel_traits<64, 128, 128, 4, false,"
    " false, cutlass::bfloat16_t, pytorch_flash::Flash_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >,"
    " false, true, false, false, true, true, false, false>(pytorch_flash::Flash_{0}_params)"
)
_ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous"
    " namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous"
    " namespace)::FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>, float const*, double,"
    " double, double, double, double, bool, float const*, float const*>(at::native::(anonymous"
    " namespace)::FusedOptimizerTensorListMetadata<4>)"
)

_TOKENS = [BATCH, LENGTH, WIDTH]
_BYTES = 2 * BATCH * LENGTH * WIDTH


def _linear(inner: int, outer: int) -> Op:
    """A linear layer; cuBLAS launches through the driver."""
    rows = BATCH * LENGTH
    gemm_ns = inner * outer * rows // 100_000  # at 200 TFLOP/s
    weight = [outer, inner]
    turn = Op(
        "aten::t",
        (
            Op(
                "aten::transpose",
                (Op("aten::as_strided", (), _inputs(weight, extra=("[1, 1]", "[1, 1]", ""))),),
                _inputs(weight, extra=("0", "1")),
            ),
        ),
        _inputs(weight),
        (_autograd("TBackward0", Op("aten::t", (), _inputs(weight))), _ACCUMULATE),
    )

    def multiply(kind: str, *shapes: list[int]) -> Op:
        launch = Launch(
            *(
                "cuLaunchKernel",
                307,
                _kernel(_GEMM.format(kind), gemm_ns, 512, 128, registers=128, occupancy=25),
            ),
            category="cuda_driver",
        )
        return Op("aten::mm", (Allocation(2 * shapes[0][0] * shapes[1][1]), launch), _inputs(*shapes))

    backward = _autograd(
        "AddmmBackward0",
        multiply("nn", [rows, outer], weight),
        multiply("nt", [outer, rows], [rows, inner]),
        Op(
            "aten::sum",
            (
                Allocation(2 * outer),
                _launch_kernel(
                    _kernel(
                        "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16,"
                        " at::native::func_wrapper_t<c10::BFloat16, at::native::sum_functor<c10::BFloat16,"
                        " float, c10::BFloat16>::operator()(at::TensorIterator&)"
                        "::{lambda(float, float)#1}>, unsigned int, c10::BFloat16, 4, 4> >",
                        *(9_000, 16, 512),
                        occupancy=31,
                    )
                ),
            ),
            _inputs([rows, outer], extra=("[0]", "True", "")),
        ),
        Allocation(-2 * rows * outer),
        inputs=_inputs([rows, outer]),
    )
    forward = Op(
        "aten::addmm",
        (
            Allocation(2 * rows * outer),
            Launch("cudaMemsetAsync", 51, _transfer("gpu_memset", "Memset (Device)", 1_300, 4 * outer)),
            Launch(
                "cudaLaunchKernelExC",
                *(430, _kernel(_GEMM.format("tn"), gemm_ns, 512, 128, registers=128, occupancy=25)),
            ),
        ),
        _inputs([outer], [rows, inner], [inner, outer], extra=("1", "1")),
        (backward, _ACCUMULATE),
    )
    return Op("aten::linear", (turn, forward), _inputs([BATCH, LENGTH, inner], weight, [outer]))


def _norm() -> Op:
    def kernel(name: str, about_ns: int) -> Launch:
        return _launch_kernel(_kernel(name, about_ns, BATCH * LENGTH, 128, occupancy=88))

    backward = _autograd(
        "NativeLayerNormBackward0",
        Op(
            "aten::native_layer_norm_backward",
            (
                Op("aten::empty_like", (Op("aten::empty_strided", (Allocation(_BYTES),)),), _inputs(_TOKENS)),
                kernel(_NORM.replace("norm_kernel", "norm_grad_input_kernel"), 31_000),
                kernel(_NORM.replace("norm_kernel", "norm_gamma_beta_grad_kernel"), 18_000),
            ),
            _inputs(_TOKENS, _TOKENS, extra=("[1024]",)),
        ),
        Allocation(-_BYTES),
    )
    inner = Op(
        "aten::native_layer_norm",
        (
            *(
                Op("aten::empty", (Allocation(size),), _inputs(extra=("[8, 512]", "15")))
                for size in (_BYTES, 16384)
            ),
            kernel(_NORM, 19_000),
        ),
        _inputs(_TOKENS, [WIDTH], [WIDTH], extra=("[1024]", "1.0e-05")),
        (backward, _ACCUMULATE, _ACCUMULATE),
    )
    return Op(
        "aten::layer_norm", (inner,), _inputs(_TOKENS, [WIDTH], [WIDTH], extra=("[1024]", "1.0e-05", "True"))
    )


def _attention() -> Op:
    heads = [BATCH, HEADS, LENGTH, WIDTH // HEADS]

    def flash(direction: str, about_ns: int) -> tuple[Allocation, Launch]:
        kernel = _kernel(_FLASH.format(direction), about_ns, 512, 128, registers=255, occupancy=12)
        return Allocation(_BYTES), _launch_kernel(kernel)

    backward = _autograd(
        "ScaledDotProductFlashAttentionBackward0",
        Op(
            "aten::_scaled_dot_product_flash_attention_backward",
            (
                Op(
                    "aten::_flash_attention_backward",
                    flash("bwd", 160_000),
                    _inputs(heads, heads, heads, heads),
                ),
            ),
            _inputs(heads, heads, heads, heads),
        ),
        Allocation(-_BYTES),
    )
    inner = Op(
        "aten::_scaled_dot_product_flash_attention",
        (Op("aten::_flash_attention_forward", flash("fwd", 60_000), _inputs(heads, heads, heads)),),
        _inputs(heads, heads, heads, extra=("0.0", "True", "False", "")),
        (backward,),
    )
    return Op("aten::scaled_dot_product_attention", (inner,), _inputs(heads, heads, heads))


def _elementwise(name: str, node: str, kernel: str, width: int) -> Op:
    shape = [BATCH, LENGTH, width]
    about_ns = 22_000 * width // WIDTH
    work = _kernel(kernel, about_ns, 4096, 128)
    backward_work = _kernel(kernel.replace("at::native::", "at::native::backward_", 1), about_ns, 4096, 128)
    backward = _autograd(
        node,
        Op(
            f"{name}_backward",
            (Allocation(_BYTES * width // WIDTH), _launch_kernel(backward_work)),
            _inputs(shape, shape),
        ),
        Allocation(-_BYTES * width // WIDTH),
    )
    return Op(
        name, (Allocation(_BYTES * width // WIDTH), _launch_kernel(work)), _inputs(shape, shape), (backward,)
    )


def forward_pass() -> Iterator[Op]:
    """Yield the operators of all layers, in forward order."""
    for _ in range(BLOCKS):
        yield from (_norm(), _linear(WIDTH, 3 * WIDTH), _attention(), _linear(WIDTH, WIDTH))
        yield _elementwise("aten::add", "AddBackward0", _ADD, WIDTH)
        yield from (_norm(), _linear(WIDTH, 4 * WIDTH))
        yield _elementwise("aten::gelu", "GeluBackward0", _GELU, 4 * WIDTH)
        yield _linear(4 * WIDTH, WIDTH)
        yield _elementwise("aten::add", "AddBackward0", _ADD, WIDTH)


def all_reduce(world_size: int) -> Op:
    """Make a collective as DDP starts it, with torch's fields on the operator and the kernel."""
    elements = BUCKET_BLOCKS * 12 * WIDTH * WIDTH
    ranks = list(range(world_size))
    fields = (
        f'"Collective name": "allreduce",{{0}}"In msg nelems": {elements},{{0}}'
        f'"Out msg nelems": {elements},{{0}}"Group size": {world_size},{{0}}'
        f'"dtype": "BFloat16",{{0}}"Process Group Name": "0",{{0}}'
        f'"Process Group Description": "default_pg",{{0}}"Process Group Ranks": "{ranks}"'
    )
    kernel = _kernel(
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        *(900_000, 24, 512),
        registers=96,
        occupancy=25,
        stream=COMMUNICATION_STREAM,
        collective="," + fields.format(""),
    )
    params = Op(
        "record_param_comms",
        (Launch("cudaLaunchKernelExC", 430, kernel),),
        f"{fields.format(' ')}, {_inputs([elements])}",
    )
    return Op(
        "c10d::allreduce_",
        (Op("nccl:all_reduce", (params,), category="user_annotation"),),
        _inputs([elements], extra=("", "", "-1")),
    )


def _copy(name: str, work: Work, *more: Launch) -> tuple[Op | Launch | Allocation, ...]:
    return (Op("aten::copy_", (Launch(name, 41, work), *more), _inputs(_TOKENS, _TOKENS, extra=("True",))),)


FETCH = Op(
    "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
    tuple(
        Op("aten::stack", (Allocation(8 * LENGTH, on_device=False),), _inputs([LENGTH], dtype="long"))
        for _ in "ab"
    ),
    category="user_annotation",
)
TO_DEVICE = tuple(
    Op(
        "aten::to",
        (
            Op(
                "aten::_to_copy",
                (
                    Op("aten::empty_strided", (Allocation(8 * BATCH * LENGTH),)),
                    *_copy(
                        "cudaMemcpyAsync",
                        _transfer("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 4_000, 8 * BATCH * LENGTH),
                    ),
                ),
                _inputs([BATCH, LENGTH], dtype="long", extra=("4", "0", "0", "", "True", "")),
            ),
            Allocation(-8 * LENGTH, on_device=False),
        ),
        _inputs([BATCH, LENGTH], dtype="long"),
    )
    for _ in "ab"
)
ZERO_GRAD = Op(
    "Optimizer.zero_grad#AdamW.zero_grad", (Allocation(-8 * BATCH * LENGTH),), category="user_annotation"
)
LOSS = (
    Op(
        "aten::cross_entropy_loss",
        (
            Op(
                "aten::nll_loss_forward",
                (
                    Allocation(4),
                    _launch_kernel(
                        _kernel(
                            "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d"
                            "<float, float, long>(float*, float*, float const*, long const*, float const*,"
                            " bool, long, long, long, long)",
                            *(6_000, 1, 32),
                            occupancy=1,
                        )
                    ),
                ),
                _inputs([BATCH * LENGTH, WIDTH], [BATCH * LENGTH], dtype="float", extra=("1", "-100")),
                (
                    _autograd(
                        "NllLossBackward0",
                        Op(
                            "aten::zero_",
                            (
                                Op(
                                    "aten::fill_",
                                    (
                                        Launch(
                                            "cudaMemsetAsync",
                                            *(
                                                51,
                                                _transfer("gpu_memset", "Memset (Device)", 5_000, 4 * _BYTES),
                                            ),
                                        ),
                                        _launch_kernel(_kernel(_FILL, 3_000, 1, 128, occupancy=0)),
                                    ),
                                ),
                            ),
                        ),
                    ),
                ),
            ),
        ),
        _inputs([BATCH * LENGTH, WIDTH], [BATCH * LENGTH], dtype="float"),
    ),
)
OPTIMIZER_STEP = Op(
    "Optimizer.step#AdamW.step",
    tuple(
        Op(
            "aten::_fused_adamw_",
            tuple(
                _launch_kernel(_kernel(_ADAM, 45_000, 320, 512, registers=64, occupancy=50)) for _ in "abcd"
            ),
            _inputs(
                *([[WIDTH, WIDTH]] * 12), extra=("0.001", "0.9", "0.999", "0.01", "1e-08", "False", "False")
            ),
        )
        for _ in range(BLOCKS)
    ),
    category="user_annotation",
)
ITEM = Op(
    "aten::item",
    (
        Op(
            "aten::_local_scalar_dense",
            (
                Launch(
                    "cudaMemcpyAsync",
                    *(41, _transfer("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 1_800, 4)),
                ),
                Launch("cudaStreamSynchronize", 131),
            ),
            _inputs([], dtype="float"),
        ),
    ),
    _inputs([], dtype="float"),
)
