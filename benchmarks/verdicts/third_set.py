"""Traces by an outside author, the third set: writes its inputs into a folder.

The author had read the documentation, but neither the code nor the second set. The last three replace c03,
c09 and c10, whose expectations were wrong. The code is the author's, except for its layout.

    python benchmarks/verdicts/third_set.py FOLDER
"""

# ruff: noqa

import sys

"""15 inputs, times in us. Each correct value follows from the constants here (EXPECTED.md)."""
import json, gzip, io, os, random, shutil, tarfile, zipfile

OUT = sys.argv[1]
B = 1788200000000000.0


class T:
    def __init__(
        s,
        pid=4100,
        dev=0,
        gpid=None,
        rank=None,
        world=None,
        name="NVIDIA H100 80GB HBM3",
        maj=9,
        sms=132,
        label="GPU",
        rt="cuda_runtime",
        kcat="kernel",
        ccat="gpu_memcpy",
        mcat="gpu_memset",
        launch="cudaLaunchKernel",
        base=B,
        tid=None,
        backend="nccl",
    ):
        s.__dict__.update({k: v for k, v in locals().items() if k != "s"})
        s.gpid = dev if gpid is None else gpid
        s.tid = tid or 4100
        s.ev = []
        s.c = 0
        s.x = 0
        s.props = [
            dict(
                id=dev,
                name=name,
                totalGlobalMem=85017493504,
                computeMajor=maj,
                computeMinor=0,
                maxThreadsPerBlock=1024,
                maxThreadsPerMultiprocessor=2048,
                regsPerBlock=65536,
                warpSize=32,
                sharedMemPerBlock=49152,
                numSms=sms,
            )
        ]
        s.M("process_name", pid, name="python")
        s.M("process_labels", pid, labels="CPU")
        if label:
            s.M("process_name", s.gpid, name="python")
            s.M("process_labels", s.gpid, labels=f"{label} {dev}")

    def M(s, n, pid, **a):
        s.ev.append(dict(ph="M", name=n, pid=pid, tid=0, ts=s.base, args=a))

    def X(s, cat, name, t, d, pid=None, tid=None, **a):
        s.ev.append(
            dict(
                ph="X",
                cat=cat,
                name=name,
                pid=s.pid if pid is None else pid,
                tid=s.tid if tid is None else tid,
                ts=round(s.base + t, 3),
                dur=round(d, 3),
                args=a,
            )
        )

    def step(s, n, t, d):
        s.X("user_annotation", f"ProfilerStep#{n}", t, d - 5)

    def op(s, name, t, d, tid=None, cat="cpu_op", **a):
        s.x += 1
        s.X(cat, name, t, d, tid=tid, **{"External id": s.x, **a})
        return s.x

    def run(s, name, t, kt, kd, stream=7, tid=None, what="k", ld=10, call=None, ext=None, **a):
        """Add a runtime call at t (ld long) that launches a device event at kt."""
        s.c += 1
        c = s.c
        e = s.x if ext is None else ext
        tid = s.tid if tid is None else tid
        s.X(s.rt, call or s.launch, t, ld, tid=tid, **{"External id": e, "cbid": 211, "correlation": c})
        s.ev.append(dict(ph="s", id=c, pid=s.pid, tid=tid, ts=s.base + t, cat="ac2g", name="ac2g"))
        cat = dict(k=s.kcat, c=s.ccat, m=s.mcat)[what]
        s.X(
            cat,
            name,
            kt,
            kd,
            pid=s.gpid,
            tid=stream,
            **{"External id": e, "device": s.dev, "context": 1, "stream": stream, "correlation": c, **a},
        )
        s.ev.append(
            dict(ph="f", id=c, pid=s.gpid, tid=stream, ts=s.base + kt, cat="ac2g", name="ac2g", bp="e")
        )

    def doc(s):
        d = dict(schemaVersion=1, deviceProperties=s.props, displayTimeUnit="ms", baseTimeNanoseconds=0)
        if s.rank is not None:
            d["distributedInfo"] = dict(
                backend=s.backend,
                rank=s.rank,
                world_size=s.world,
                pg_count=1,
                pg_config=[
                    dict(pg_name="0", pg_desc="default_pg", pg_size=s.world, ranks=list(range(s.world)))
                ],
            )
        d["traceEvents"] = s.ev
        return d


def J(d, **k):
    return json.dumps(d, **k).encode()


def put(path, data):
    p = f"{OUT}/{path}"
    os.makedirs(os.path.dirname(p), exist_ok=True)
    open(p, "wb").write(data)
    assert len(data) < 2e6, path


def coll(
    s, t, kt, kd, name, cname, n, dtype="Float", op="c10d::allreduce_", stream=20, rng="nccl:all_reduce", **k
):
    s.op(op, t, 60)
    s.op(rng, t + 5, 50, cat="user_annotation")
    s.run(
        name,
        t + 20,
        kt,
        kd,
        stream=stream,
        **{
            "Collective name": cname,
            "In msg nelems": n,
            "Out msg nelems": n,
            "Group size": s.world,
            "dtype": dtype,
            "Process Group Name": "0",
            "Process Group Description": "default_pg",
            "Process Group Ranks": str(list(range(s.world))),
        },
        **k,
    )


AR = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

# c01: three ranks (AMD) merged, integer pids, ids collide. 5 steps x 20 ms, 3 matmuls of 6.0/6.1/6.2 ms, allreduce to 19.6 ms.
ts = [
    T(
        pid=4100 + r,
        dev=r,
        gpid=r,
        rank=0,
        world=3,
        name="AMD Instinct MI250X",
        sms=104,
        launch="hipLaunchKernel",
        tid=4100 + r,
    )
    for r in range(3)
]
for r, s in enumerate(ts):
    for i in range(5):
        t = i * 20000
        s.step(7 + i, t, 20000)
        d = 6000 + 100 * r
        for j in range(3):
            s.op("aten::mm", t + 20 + 100 * j, 60)
            s.run("Cijk_Ailk_Bljk_HHS_BH_MT128x128", t + 30 + 100 * j, t + 60 + j * (d + 5), d)
        e = t + 60 + 3 * (d + 5)
        coll(
            s,
            t + 400,
            e + 5,
            t + 19600 - (e + 5),
            "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
            "allreduce",
            1 << 20,
        )
m = ts[0].doc()
m["deviceProperties"] = [p for s in ts for p in s.props]
m["traceEvents"] = sorted([e for s in ts for e in s.ev], key=lambda e: e["ts"])
put("c01/all_ranks.json", J(m))

# c02: two nodes merged, pid + 1000000*rank, both device 0. 6 steps x 16 ms: fetch 6 ms, conv 7.5 (rank 0) / 7.9 ms (rank 1), adam 1.0.
ts = [T(pid=777 + 1000000 * r, dev=0, gpid=1000000 * r, rank=r, world=2, tid=777) for r in range(2)]
for r, s in enumerate(ts):
    for i in range(6):
        t = i * 16000
        s.step(40 + i, t, 16000)
        s.op(
            "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
            t + 10,
            6000,
            cat="user_annotation",
        )
        s.op("aten::convolution", t + 6030, 80)
        s.run("sm90_xmma_fprop_implicit_gemm_bf16", t + 6050, t + 6100, 7500 + 400 * r)
        s.op("aten::_fused_adam_", t + 6150, 80)
        s.run("multi_tensor_apply_kernel_adam", t + 6170, t + 14100, 1000)
        s.op("aten::item", t + 15100, 20)
        s.X("cuda_runtime", "cudaDeviceSynchronize", t + 6300, 8790, correlation=9000 + i)
m = ts[0].doc()
del m["distributedInfo"]
m["traceEvents"] = ts[0].ev + ts[1].ev
put("c02/merged.json.gz", gzip.compress(J(m)))

# c03: Windows, BOM, CRLF, backslashes that don't start an escape. 8 steps x 25 ms: kernel 15 ms, python function 9.6 ms fills the gap.
s = T(pid=9912, name="NVIDIA GeForce RTX 4090", maj=8, sms=128, tid=9912)
for i in range(8):
    t = i * 25000
    s.step(i, t, 25000)
    s.X(
        "python_function",
        "D:@Proj@Modell@haupt.py(31): gitter_bauen",
        t + 10,
        9600,
        **{"Python id": i + 1, "Python parent id": None},
    )
    s.op("aten::addmm", t + 9650, 90)
    s.run("ampere_sgemm_128x64_tn", t + 9680, t + 9700, 15000)
    s.X("cuda_runtime", "cudaDeviceSynchronize", t + 9800, 14910, correlation=900 + i)
put(
    "c03/win.pt.trace.json",
    b"\xef\xbb\xbf" + J(s.doc(), indent=1).replace(b"@", b"\\").replace(b"\n", b"\r\n"),
)

# c04: Intel XPU, GBK names, quoted numbers, N/A inf nan -inf Infinity NaN. 7 steps x 12 ms: gemm 8.4 ms, oneCCL 3 ms exposed.
s = T(
    pid=51,
    name="Intel(R) Data Center GPU Max 1550",
    maj=0,
    sms=128,
    label="XPU",
    rt="xpu_runtime",
    launch="urEnqueueKernelLaunch",
    rank=1,
    world=4,
    backend="xccl",
    tid=51,
)
for i in range(7):
    t = i * 12000
    s.step(3 + i, t, 12000)
    s.op("模型::矩阵乘", t + 20, 90)
    s.run(
        "gemm_kernel_矩阵",
        t + 40,
        t + 100,
        8400,
        **{
            "est. achieved occupancy %": "@NA",
            "blocks per SM": "@inf",
            "warps per SM": "@nan",
            "memory bandwidth (GB/s)": "@-inf",
        },
    )
    coll(
        s,
        t + 200,
        t + 8510,
        3000,
        "oneccl_allreduce_sum_f32",
        "allreduce",
        1 << 18,
        rng="xccl:all_reduce",
        **{"est. achieved occupancy %": "@Infinity", "warps per SM": "@NaN"},
    )
for e in s.ev:
    for k in ("ts", "dur"):
        if k in e:
            e[k] = f"{e[k]:.3f}"
    for k in ("correlation", "External id", "stream", "device"):
        if k in e.get("args", {}):
            e["args"][k] = str(e["args"][k])
b = json.dumps(s.doc(), ensure_ascii=False)
for w, v in (
    ('"@NA"', "N/A"),
    ('"@inf"', "inf"),
    ('"@nan"', "nan"),
    ('"@-inf"', "-inf"),
    ('"@Infinity"', "Infinity"),
    ('"@NaN"', "NaN"),
):
    b = b.replace(w, v)
put("c04/gbk.json", b.encode("gbk"))

# c05: Cambricon MLU, categories of its own. 4 steps x 30 ms: HtoD 1.2, set 0.3, conv 20 + relu 7.
s = T(
    pid=300,
    name="MLU370-X8",
    maj=0,
    sms=32,
    label="MLU",
    rt="mlu_runtime",
    kcat="mlu_kernel",
    ccat="mlu_memcpy",
    mcat="mlu_memset",
    launch="cnInvokeKernel",
    tid=300,
)
for i in range(4):
    t = i * 30000
    s.step(100 + i, t, 30000)
    s.op("aten::copy_", t + 10, 40)
    s.run(
        "Memcpy HtoD (Pinned -> Device)",
        t + 20,
        t + 50,
        1200,
        what="c",
        call="cnrtMemcpyAsync",
        bytes=12000000,
    )
    s.op("aten::zero_", t + 100, 40)
    s.run("Memset (Device)", t + 110, t + 1255, 300, what="m", call="cnrtMemsetAsync", bytes=4096)
    s.op("aten::cudnn_convolution", t + 200, 40)
    s.run("MLUUnion4ConvForward", t + 210, t + 1560, 20000)
    s.op("aten::relu", t + 300, 40)
    s.run("MLUBlockActivation", t + 310, t + 21565, 7000)
put("c05/mlu.trace.json", J(s.doc()))

# c06: one rank, NVIDIA L4; the launching thread is in flagcx:all_reduce for 8 of 20 ms, the GPU works 11.5 ms.
s = T(pid=82, name="NVIDIA L4", maj=8, sms=58, rank=0, world=2, backend="flagcx", tid=82)
for i in range(6):
    t = i * 20000
    s.step(i, t, 20000)
    s.op("aten::linear", t + 20, 200)
    s.run("cutlass_80_tensorop_bf16_s16816gemm", t + 40, t + 60, 11500)
    s.X("cuda_runtime", "cudaStreamSynchronize", t + 250, 11315, correlation=700 + i)
    s.op("c10d::allreduce_", t + 11590, 8010)
    s.op("flagcx:all_reduce", t + 11595, 8000, cat="user_annotation")
    s.op("aten::copy_", t + 19650, 60)
    s.run(
        "Memcpy HtoD (Pinned -> Device)",
        t + 19670,
        t + 19700,
        200,
        what="c",
        call="cudaMemcpyAsync",
        bytes=1 << 20,
    )
put("c06/rank0.json", J(s.doc()))

# c07: AMD, .item() in each step, then 3.7 ms without a launch. 12 ms: kernel 8 ms. Recorded for 2, 3, 12 steps.
for n in (2, 3, 12):
    s = T(pid=5, name="AMD Instinct MI300X", sms=304, launch="hipLaunchKernel", tid=5)
    for i in range(n):
        t = i * 12000
        s.step(20 + i, t, 12000)
        s.op("aten::mm", t + 100, 80)
        s.run("Cijk_Ailk_Bljk_BBS_BH_MT256x128", t + 120, t + 200, 8000)
        s.op("aten::item", t + 300, 7960)
        s.op("aten::_local_scalar_dense", t + 310, 7940)
        s.run(
            "Memcpy DtoH (Device -> Host)",
            t + 320,
            t + 8205,
            10,
            what="c",
            call="hipMemcpyWithStream",
            ld=7900,
            bytes=4,
        )
        for j in range(12):
            s.op("aten::add" if j % 2 else "aten::mul", t + 8270 + j * 300, 290)  # on the CPU
    put(f"c07/steps{n}.json", J(s.doc()))

# c08: CPU only, 2, 3, 12 steps of 40 ms: fetch 14 ms, forward 10, backward 15.
for n in (2, 3, 12):
    s = T(pid=66, label=None, tid=66)
    s.props = []
    rnd = random.Random(8)
    t = 0
    for i in range(n):
        j = 1 + 0.04 * (-1) ** i
        s.step(i, t, 40000 * j)
        s.op(
            "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
            t + 10,
            14000 * j,
            cat="user_annotation",
        )
        s.op("aten::linear", t + 14100 * j, 10000 * j)
        s.op("aten::addmm", t + 14150 * j, 9900 * j)
        s.op("autograd::engine::evaluate_function: AddmmBackward0", t + 24200 * j, 15000 * j)
        s.op("AddmmBackward0", t + 24220 * j, 14900 * j)
        s.op("aten::mm", t + 24300 * j, 14700 * j)
        t += 40000 * j
    d = s.doc()
    del d["deviceProperties"]
    put(f"c08/steps{n}.json", J(d))

# c09: A100; 5.2 of 14 ms wait for a lock, under names whose address differs in every step; kernel 8.5 ms.
s = T(pid=1234, name="NVIDIA A100-SXM4-80GB", maj=8, sms=108, tid=1234)
k = 0
for i in range(9):
    t = i * 14000
    s.step(500 + i, t, 14000)
    k += 3
    s.X(
        "python_function",
        "threading.py(327): wait",
        t + 20,
        5260,
        **{"Python id": k, "Python parent id": None},
    )
    s.X(
        "python_function",
        f"<built-in method acquire of _thread.lock object at 0x7f3a{i * 7919 + 4096:08x}>",
        t + 40,
        5200,
        **{"Python id": k + 1, "Python parent id": k},
    )
    s.op("aten::bmm", t + 5300, 60)
    s.run("ampere_bf16_s16816gemm_bf16_128x128", t + 5320, t + 5400, 8500)
    s.X("cuda_runtime", "cudaDeviceSynchronize", t + 5400, 8510, correlation=8000 + i)
put("c09/lock.json.gz", gzip.compress(J(s.doc())))

# c10: MI300X; in backward, on autograd's thread, a CPU operator (aten::unique_consecutive, 6 ms) stands between two kernels. 15 ms.
s = T(pid=77, name="AMD Instinct MI300X", sms=304, launch="hipLaunchKernel", tid=77)
for i in range(5):
    t = i * 15000
    s.step(i, t, 15000)
    W = 990
    s.op("aten::mm", t + 20, 60)
    s.run("Cijk_fwd_MT128", t + 30, t + 60, 3000)
    s.X("cpu_op", "autograd::engine::evaluate_function: EdgesBackward", t + 120, 9100, tid=W)
    s.X("cpu_op", "EdgesBackward", t + 130, 9080, tid=W)
    s.X("cpu_op", "aten::unique_consecutive", t + 3080, 6000, tid=W)
    s.op("aten::mm", t + 9090, 60, tid=W)
    s.run("Cijk_bwd_MT128", t + 9100, t + 9130, 5750, tid=W)
    s.X("cuda_runtime", "hipDeviceSynchronize", t + 9300, 5590, correlation=6000 + i)
put("c10/edges.json", J(s.doc()))

# c11: 4 ranks, clocks 3.7 s apart; rank 2 computes 16 ms, the others 12; all-reduce needs 1 ms. 10 steps x 18 ms.
for r in range(4):
    s = T(pid=2000 + r, dev=r % 2, gpid=r % 2, rank=r, world=4, base=B + 3.7e6 * (r // 2), tid=2000 + r)
    for i in range(10):
        t = i * 18000
        s.step(10 + i, t, 18000)
        c = 16000 if r == 2 else 12000
        s.op("aten::mm", t + 20, 60)
        s.run("nvjet_hsh_128x256", t + 30, t + 60, c / 2)
        s.op("aten::mm", t + 100, 60)
        s.run("nvjet_hsh_64x256", t + 110, t + 65 + c / 2, c / 2)
        coll(s, t + 300, t + 75 + c, 17075 - 75 - c, AR, "allreduce", 1 << 22)
    put(f"c11/host{r // 2}_{r}.pt.trace.json.gz", gzip.compress(J(s.doc())))

# c12: 3 ranks, FSDP; in step i rank i % 3 is late by 0.6 ms, so no rank is a straggler. 9 steps x 14 ms; transfer 3.6 ms, compute 9.6 (late: 10.2).
for r in range(3):
    s = T(
        pid=3000 + r,
        dev=r,
        gpid=r,
        rank=r,
        world=3,
        name="NVIDIA A100-SXM4-40GB",
        maj=8,
        sms=108,
        tid=3000 + r,
    )
    for i in range(9):
        t = i * 14000
        s.step(i, t, 14000)
        c = 9500 + (600 if i % 3 == r else 0)
        s.op("aten::mm", t + 20, 60)
        s.run("ampere_bf16_s16816gemm_bf16_256x128", t + 30, t + 60, c)
        coll(
            s,
            t + 300,
            t + 65 + c,
            1600 + 10100 - c,
            "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "reduce_scatter_tensor_coalesced".replace("_coalesced", ""),
            1 << 22,
            op="c10d::_reduce_scatter_base_",
            rng="nccl:_reduce_scatter_base",
        )
        coll(
            s,
            t + 400,
            t + 11775,
            2000,
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "all_gather_into_tensor",
            1 << 22,
            op="c10d::_allgather_base_",
            rng="nccl:_all_gather_base",
        )
    put(f"c12/rank{r}.json", J(s.doc()))


# c13: tar.gz of iteration_100 (INPUT, 45%), iteration_200 (item, SYNC 40%), iteration_1000 (DEVICE 94%).
def it(kind, first, base):
    s = T(pid=4, rank=0, world=1, base=base, name="NVIDIA L40S", maj=8, sms=142, tid=4)
    for i in range(5):
        t = i * 10000
        s.step(first + i, t, 10000)
        h = 20
        if kind == "input":
            s.op(
                "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
                t + 10,
                4500,
                cat="user_annotation",
            )
            h = 4520
        d = dict(input=5380, sync=5800, dev=9400)[kind]
        s.op("aten::linear", t + h, 50)
        s.run("cutlass_tensorop_f16_gemm", t + h + 10, t + h + 40, d)
        if kind == "sync":
            s.op("aten::item", t + 100, 5800)
            s.op("aten::_local_scalar_dense", t + 110, 5780)
            s.run(
                "Memcpy DtoH (Device -> Pinned)",
                t + 120,
                t + 5865,
                5,
                what="c",
                call="cudaMemcpyAsync",
                bytes=4,
            )
            s.X("cuda_runtime", "cudaStreamSynchronize", t + 140, 5740, correlation=3000 + i)
            for j in range(4):
                s.op("aten::sub", t + 5910 + 1010 * j, 1000)
        elif kind == "dev":
            s.X("cuda_runtime", "cudaDeviceSynchronize", t + 100, 9370, correlation=3000 + i)
        else:
            s.X("cuda_runtime", "cudaDeviceSynchronize", t + 4600, 5350, correlation=3000 + i)
    return J(s.doc())


bio = io.BytesIO()
with tarfile.open(fileobj=bio, mode="w:gz") as tf:
    for mt, (n, kind) in enumerate(((1000, "dev"), (200, "sync"), (100, "input"))):
        d = it(kind, n - 5, B + n * 1e6)
        ti = tarfile.TarInfo(f"run/profile_traces/iteration_{n}/rank0_trace.json")
        ti.size = len(d)
        ti.mtime = 1788200000 + mt
        tf.addfile(ti, io.BytesIO(d))
put("c13/run.tar.gz", bio.getvalue())

# c14: zip with a note, a macOS fork, rank 0 as .json.gz, rank 1 gzip in gzip. 6 steps x 10 ms: compute 8.0, exposed comm 0.8, idle 1.2.
bio = io.BytesIO()
with zipfile.ZipFile(bio, "w", zipfile.ZIP_DEFLATED) as z:
    z.writestr("job/README.txt", "recorded on Monday\n")
    for r in range(2):
        s = T(pid=600 + r, dev=r, gpid=r, rank=r, world=2, name="Tesla T4", maj=7, sms=40, tid=600 + r)
        for i in range(6):
            t = i * 10000
            s.step(i, t, 10000)
            s.op("mylib::matmul", t + 1140, 60)
            s.run("turing_h1688gemm_256x64", t + 1150, t + 1175, 8000)
            coll(s, t + 1250, t + 9180, 800, AR, "allreduce", 1 << 20)
            s.op("mylib::sample", t + 10, 1100)
        d = gzip.compress(J(s.doc()))
        d = gzip.compress(d) if r else d
        z.writestr(f"job/rank{r}.pt.trace.json.gz", d)
        z.writestr(f"__MACOSX/job/._rank{r}.pt.trace.json.gz", b"\0\5\x16\7\0\2\0\0Mac OS X" + bytes(80))
put("c14/job.zip", bio.getvalue())

# c15: 12 steps x 22 ms, fetch 9 ms, kernel 12.8 ms; the file ends in the middle of an event of the tenth step (#9).
s = T(pid=31, tid=31, name="NVIDIA V100-SXM2-32GB", maj=7, sms=80)
for i in range(12):
    t = i * 22000
    s.step(i, t, 22000)
    s.op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", t + 10, 9000, cat="user_annotation")
    s.op("aten::linear", t + 9020, 80)
    s.run("volta_h884gemm_256x128", t + 9040, t + 9080, 12800)
    s.X("cuda_runtime", "cudaDeviceSynchronize", t + 9150, 12750, correlation=4000 + i)
b = J(s.doc())
i = b.index(b"ProfilerStep#9")
i = b.index(b"volta", i) + 9
put("c15/cut.pt.trace.json", b[:i])


# Replacements, without a synchronization in each step.
s = T(pid=9912, name="NVIDIA GeForce RTX 4090", maj=8, sms=128, tid=9912)
for i in range(8):
    t = i * 25000
    s.step(i, t, 25000)
    s.X(
        "python_function",
        "D:@Proj@Modell@haupt.py(31): gitter_bauen",
        t + 10,
        23990,
        **{"Python id": i + 1, "Python parent id": None},
    )
    s.op("aten::addmm", t + 24050, 90)
    s.run("ampere_sgemm_128x64_tn", t + 24080, t + 24100, 15000)
put(
    "c03b/win.pt.trace.json",
    b"\xef\xbb\xbf" + J(s.doc(), indent=1).replace(b"@", b"\\").replace(b"\n", b"\r\n"),
)
s = T(pid=1234, name="NVIDIA A100-SXM4-80GB", maj=8, sms=108, tid=1234)
k = 0
for i in range(9):
    t = i * 14000
    s.step(500 + i, t, 14000)
    k += 3
    s.X(
        "python_function",
        "threading.py(327): wait",
        t + 20,
        13000,
        **{"Python id": k, "Python parent id": None},
    )
    s.X(
        "python_function",
        f"<built-in method acquire of _thread.lock object at 0x7f3a{i * 7919 + 4096:08x}>",
        t + 40,
        12950,
        **{"Python id": k + 1, "Python parent id": k},
    )
    s.op("aten::bmm", t + 13100, 60)
    s.run("ampere_bf16_s16816gemm_bf16_128x128", t + 13120, t + 13200, 8500)
put("c09b/lock.json.gz", gzip.compress(J(s.doc())))
s = T(pid=77, name="AMD Instinct MI300X", sms=304, launch="hipLaunchKernel", tid=77)
for i in range(5):
    t = i * 10500
    s.step(i, t, 10500)
    W = 990
    s.op("aten::mm", t + 20, 60)
    s.run("Cijk_fwd_MT128", t + 30, t + 60, 3000)
    s.X("cpu_op", "autograd::engine::evaluate_function: EdgesBackward", t + 120, 9100, tid=W)
    s.X("cpu_op", "EdgesBackward", t + 130, 9080, tid=W)
    s.X("cpu_op", "aten::unique_consecutive", t + 3080, 6000, tid=W)
    s.op("aten::mm", t + 9090, 60, tid=W)
    s.run("Cijk_bwd_MT128", t + 9100, t + 9130, 900, tid=W)
put("c10b/edges.json", J(s.doc()))
