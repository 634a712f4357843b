"""Traces by an outside author, the second set: writes its 15 inputs into a folder.

The author had read the documentation but not the code, and wrote down the correct results before the first
run. `README.md` next to this file has both. The code is the author's, except for its layout.

    python benchmarks/verdicts/second_set.py FOLDER
"""

# ruff: noqa

import gzip, io, json, os, random, sys, tarfile, zipfile

FOLDER = sys.argv[1]
random.seed(7)
BASE = 1782000000000000.0


class T:
    def __init__(
        s,
        host=4100,
        dev=0,
        devidx=0,
        t0=BASE,
        rt=("cuda_runtime", "cudaLaunchKernel"),
        kcat="kernel",
        tid=None,
        stream=7,
        streamkey="stream",
        props=None,
        dist=None,
        corr0=1,
        label="GPU",
        pname="python3",
        flows=True,
    ):
        s.__dict__.update(locals())
        s.tid = tid or host if not isinstance(host, str) else (tid or 501)
        s.ev = []
        s.c = corr0
        s.x = corr0
        for p, l in ((host, "CPU"), (dev, f"{label} {devidx}")):
            s.ev.append(
                {"ph": "M", "name": "process_name", "pid": p, "tid": 0, "ts": t0, "args": {"name": pname}}
            )
            s.ev.append(
                {"ph": "M", "name": "process_labels", "pid": p, "tid": 0, "ts": t0, "args": {"labels": l}}
            )

    def X(s, cat, name, ts, dur, args=None, pid=None, tid=None):
        e = {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": s.host if pid is None else pid,
            "tid": s.tid if tid is None else tid,
            "ts": round(s.t0 + ts, 3),
            "dur": dur,
            "args": args or {},
        }
        s.ev.append(e)
        return e

    def step(s, n, ts, dur):
        s.x += 1
        return s.X("user_annotation", f"ProfilerStep#{n}", ts, dur, {"External id": s.x})

    def op(
        s,
        name,
        ts,
        dur,
        kern=None,
        kts=None,
        kdur=None,
        nested=None,
        stream=None,
        kargs=None,
        kcat=None,
        rtname=None,
        shape=None,
        opcat="cpu_op",
        rtdur=6,
    ):
        """Add an operator, an optional nested one, one launch in the middle and one device event."""
        s.x += 1
        a = {"External id": s.x}
        if shape:
            a["Input Dims"] = shape
            a["Input type"] = ["float"] * len(shape)
        s.X(opcat, name, ts, dur, a)
        if nested:
            s.x += 1
            s.X(
                "cpu_op",
                nested,
                ts + 5,
                dur - 10,
                {"External id": s.x}
                | ({"Input Dims": shape, "Input type": ["float"] * len(shape)} if shape else {}),
            )
        if kern:
            s.launch(ts + dur / 2, kern, kts, kdur, stream, kargs, kcat, rtname, rtdur)

    def launch(s, lts, kern, kts, kdur, stream=None, kargs=None, kcat=None, rtname=None, rtdur=6):
        c = s.c
        s.c += 1
        st = s.stream if stream is None else stream
        s.X(s.rt[0], rtname or s.rt[1], lts, rtdur, {"External id": s.x, "correlation": c})
        if s.flows:
            s.ev.append(
                {
                    "ph": "s",
                    "id": c,
                    "pid": s.host,
                    "tid": s.tid,
                    "ts": round(s.t0 + lts, 3),
                    "cat": "ac2g",
                    "name": "ac2g",
                }
            )
        a = {"External id": s.x, "device": s.devidx, s.streamkey: st, "correlation": c}
        if s.kcat == "kernel" and kcat is None:
            a |= {
                "context": 1,
                "grid": [256, 1, 1],
                "block": [256, 1, 1],
                "registers per thread": 64,
                "shared memory": 0,
            }
        a |= kargs or {}
        s.X(kcat or s.kcat, kern, kts, kdur, a, pid=s.dev, tid=st)
        if s.flows:
            s.ev.append(
                {
                    "ph": "f",
                    "id": c,
                    "pid": s.dev,
                    "tid": st,
                    "ts": round(s.t0 + kts, 3),
                    "cat": "ac2g",
                    "name": "ac2g",
                    "bp": "e",
                }
            )

    def doc(s):
        d = {"schemaVersion": 1}
        if s.props:
            d["deviceProperties"] = s.props
        if s.dist:
            d["distributedInfo"] = s.dist
        d["displayTimeUnit"] = "ms"
        d["baseTimeNanoseconds"] = 0
        d["traceEvents"] = s.ev
        return d


def nv(name, maj, mi, sms, n=1):
    return [
        {
            "id": i,
            "name": name,
            "totalGlobalMem": 80 * 2**30,
            "computeMajor": maj,
            "computeMinor": mi,
            "maxThreadsPerBlock": 1024,
            "maxThreadsPerMultiprocessor": 2048,
            "warpSize": 32,
            "numSms": sms,
        }
        for i in range(n)
    ]


def amd(name, n=1):
    return [
        {
            "id": i,
            "name": name,
            "totalGlobalMem": 192 * 2**30,
            "computeMajor": 9,
            "computeMinor": 4,
            "maxThreadsPerBlock": 1024,
            "maxThreadsPerMultiprocessor": 2048,
            "warpSize": 64,
            "numSms": 304,
        }
        for i in range(n)
    ]


def dump(d):
    return json.dumps(d)


def w(path, b):
    path = FOLDER + "/" + path
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if isinstance(b, str):
        b = b.encode()
    open(path, "wb").write(b)


# ---- 1a: SGLang-like merge, string pids, 3 ranks L40S
evs = []
for r in range(3):
    p = f"[TP{r:02d}-EP{r:02d}] "
    t = T(host=p + str(8101 + r), dev=p + str(r), devidx=r, tid=8101 + r)
    for k in range(5):
        o = k * 8000
        t.step(10 + k, o, 8000)
        for i in range(10):
            q = o + 100 + i * 450
            t.op(
                "aten::linear",
                q,
                100,
                "sm89_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x64",
                q + 70,
                [200, 250, 300][r],
                nested="aten::addmm",
            )
        for i in range(5):
            q = o + 4700 + i * 450
            t.op(
                "aten::gelu",
                q,
                30,
                "void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernel>(int)",
                q + 40,
                40,
            )
        q = o + 7000
        t.op(
            "c10d::allreduce_",
            q,
            60,
            "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            q + 80,
            500,
            stream=30,
            shape=[[4096, 4096]],
        )
    evs += t.ev
w(
    "c01_merged_tp_ep.trace.json.gz",
    gzip.compress(
        dump(
            {
                "schemaVersion": 1,
                "deviceProperties": nv("NVIDIA L40S", 8, 9, 142, 3),
                "displayTimeUnit": "ms",
                "traceEvents": sorted(evs, key=lambda e: e["ts"]),
            }
        ).encode()
    ),
)

# ---- 1b: integer offset pids, both see device 0, AMD, device-bound
evs = []
for r in range(2):
    t = T(
        host=1000000 * r + 777,
        dev=1000000 * r,
        devidx=0,
        rt=("cuda_runtime", "hipModuleLaunchKernel"),
        stream=3,
        tid=777,
        pname=f"rank {r}: python3",
    )
    for k in range(4):
        o = k * 20000
        t.step(4 + k, o, 20000)
        kt = o + 300
        for i in range(8):
            h = o + 100 + i * 200
            cd = [2000, 1900][r]
            t.op(
                "aten::convolution",
                h,
                90,
                "igemm_fwd_gtcx3_nhwc_fp16_bx0_ex1_bt256x128x32",
                kt,
                cd,
                nested="aten::miopen_convolution",
            )
            kt += cd
            t.op("aten::batch_norm", h + 100, 60, "MIOpenBatchNormFwdTrainSpatial", kt, 300)
            kt += 300
    evs += t.ev
w(
    "c02_merged_offset_pids.json",
    dump(
        {
            "schemaVersion": 1,
            "deviceProperties": amd("AMD Instinct MI210"),
            "displayTimeUnit": "ms",
            "traceEvents": evs,
        }
    ),
)

# ---- 2a: Windows + Latin-1 + -nan(ind)
t = T(props=nv("NVIDIA GeForce RTX 4090", 8, 9, 128))
BS = "\x01"  # placeholder for a raw backslash
pth = lambda s: s.replace("\\", BS)
pid = [0]


def py(t, name, ts, dur, par=None):
    pid[0] += 1
    t.X(
        "python_function",
        pth(name),
        ts,
        dur,
        {"Python id": pid[0], "Python parent id": par, "Ev Idx": pid[0]},
    )
    return pid[0]


for k in range(6):
    o = k * 25000
    t.step(20 + k, o, 25000)
    a = py(t, r"C:\Users\Jörg\Projekte\yolo\Main.py(42): train_epoch", o + 10, 24900)
    t.X(
        "user_annotation",
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
        o + 50,
        11250,
        {"External id": 9000 + k},
    )
    b = py(t, r"C:\Users\Jörg\Projekte\yolo\Data.py(88): __getitem__", o + 60, 11200, a)
    c = py(t, r"D:\Daten\unet\Aug.py(118): größe_ändern", o + 80, 10800, b)
    d = py(
        t,
        r"C:\Python311\Lib\site-packages\torch\nn\modules\module.py(1511): _wrapped_call_impl",
        o + 11310,
        200,
        a,
    )
    t.op(
        "aten::cudnn_convolution",
        o + 11350,
        100,
        "sm80_xmma_fprop_implicit_gemm_tf32f32",
        o + 11500,
        12000,
        kargs={"est. achieved occupancy %": "@@", "blocks per SM": 2.0, "warps per SM": 16.0},
    )
s = dump(t.doc()).replace('"@@"', "-nan(ind)").encode("ascii")
s = json.dumps(t.doc(), ensure_ascii=False).replace('"@@"', "-nan(ind)")
s = s.replace("\\u0001", "\\")
assert BS not in s
w("c03_windows_latin1.pt.trace.json", s.encode("latin-1"))

# ---- 2b: GBK, quoted numbers, N/A inf nan Infinity
t = T(host=6600, props=nv("NVIDIA A800-SXM4-80GB", 8, 0, 108))
for k in range(7):
    o = k * 12000
    t.step(k, o, 12000)
    t.op(
        "aten::copy_",
        o + 100,
        60,
        "Memcpy HtoD (Pinned -> Device)",
        o + 200,
        900,
        kcat="gpu_memcpy",
        rtname="cudaMemcpyAsync",
        kargs={"bytes": 4194304, "memory bandwidth (GB/s)": "@inf"},
    )
    t.X("user_annotation", "前向传播", o + 300, 1500, {})
    t.op(
        "aten::mm",
        o + 400,
        80,
        "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_64x3_tn",
        o + 1100,
        6000,
        kargs={"blocks per SM": "@NaN", "warps per SM": "@N/A", "est. achieved occupancy %": "@Infinity"},
    )
    t.X("user_annotation", "损失计算", o + 2000, 700, {})
    t.op(
        "aten::nll_loss",
        o + 2100,
        80,
        "void at::native::nll_loss_forward_reduce_cuda_kernel_2d<float>()",
        o + 7100,
        4200,
        kargs={"blocks per SM": "@-inf", "warps per SM": "@nan"},
    )
for e in t.ev:
    for kk in ("ts", "dur"):
        if kk in e:
            e[kk] = str(e[kk])
    if isinstance(e.get("args", {}).get("correlation"), int):
        e["args"]["correlation"] = str(e["args"]["correlation"])
    if "bytes" in e.get("args", {}):
        e["args"]["bytes"] = str(e["args"]["bytes"])
s = json.dumps(t.doc(), ensure_ascii=False)
for v in ("inf", "NaN", "N/A", "Infinity", "-inf", "nan"):
    s = s.replace(f'"@{v}"', v)
assert '"@' not in s
w("c04_gbk_quoted.pt.trace.json", s.encode("gbk"))

# ---- 3a: MLU, communication visible only as the host's cncl: range
t = T(
    host=321,
    dev="MLU 0",
    rt=("mlu_runtime", "cnInvokeKernel"),
    kcat="mlu_op",
    streamkey="queue",
    stream=2,
    label="MLU",
    dist={"backend": "cncl", "rank": 0, "world_size": 16},
)
for k in range(8):
    o = k * 15000
    t.step(100 + k, o, 15000)
    t.op("aten::bmm", o + 100, 80, "MLUBlockBatchMatMul_half", o + 200, 5000)
    t.op("aten::softmax", o + 300, 80, "MLUSoftmaxForward", o + 5200, 3400)
    t.x += 1
    t.X("user_annotation", "cncl:all_reduce", o + 500, 100, {"External id": t.x})
    t.launch(o + 530, "KernelRingHalf", o + 8600, 5400, stream=9)
w("c05_mlu_cncl.pt.trace.json", dump(t.doc()))

# ---- 3b: unknown accelerator categories, ucc on the host
t = T(
    host=55,
    dev=900,
    rt=("privateuse1_runtime", "vxEnqueueGraph"),
    kcat="vxcore_exec",
    label="VX",
    dist={"backend": "ucc", "rank": 0, "world_size": 4},
)
for k in range(5):
    o = k * 30000
    t.step(k + 1, o, 30000)
    t.X(
        "user_annotation",
        "ucc:all_gather",
        o + 500,
        13500,
        {"External id": 7000 + k, "Input Dims": [[1024, 1024]], "Input type": ["float"]},
    )
    t.op("aten::addmm", o + 14250, 100, "vx_matmul_bf16_t64", o + 14500, 9000)
    t.op("aten::copy_", o + 14400, 50, "vx_dma_d2d", o + 23500, 4500, kcat="vxcore_dma")
w("c06_vxcore_ucc.pt.trace.json", dump(t.doc()))

# ---- 4a: input-bound, 2, 3, 12 steps, B200
for n in (2, 3, 12):
    t = T(props=nv("NVIDIA B200", 10, 0, 148))
    for k in range(n):
        o = k * 40000
        t.step(50 + k, o, 40000)
        t.X(
            "user_annotation",
            "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
            o + 100,
            16000,
            {"External id": 8000 + k},
        )
        for i in range(3):
            t.op(
                "aten::scaled_dot_product_attention",
                o + 16500 + i * 150,
                100,
                "cudnn_generated_fort_native_sdpa_sm100_flash_fprop_f16",
                o + 17000 + i * 6000,
                6000,
            )
    w(f"c07_input_steps{n}.pt.trace.json", dump(t.doc()))
# ---- 4b: RCCL exposed, 2, 3, 12 steps, MI300X
for n in (2, 3, 12):
    t = T(
        rt=("cuda_runtime", "hipExtModuleLaunchKernel"),
        props=amd("AMD Instinct MI300X", 8),
        dist={"backend": "nccl", "rank": 3, "world_size": 8},
        dev=3,
        devidx=3,
    )
    for k in range(n):
        o = k * 50000
        t.step(7 + k, o, 50000)
        for i in range(4):
            t.op(
                "aten::mm",
                o + 200 + i * 150,
                100,
                "Cijk_Alik_Bljk_HHS_BH_MT256x128x64",
                o + 1000 + i * 7000,
                7000,
            )
        t.x += 1
        t.X("user_annotation", "nccl:all_reduce", o + 900, 90, {"External id": t.x})
        t.launch(
            o + 930,
            "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
            o + 29000,
            17500,
            stream=12,
            kargs={
                "Collective name": "allreduce",
                "In msg nelems": 52428800,
                "Out msg nelems": 52428800,
                "Group size": 8,
                "dtype": "BFloat16",
                "Process Group Name": "0",
                "Process Group Description": "default_pg",
                "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
            },
        )
    w(f"c08_rccl_steps{n}.pt.trace.json", dump(t.doc()))


# ---- 5a: Python code in forward, H100
def pyf(t, name, ts, dur, par):
    pid[0] += 1
    a = {"Python id": pid[0], "Python parent id": par, "Ev Idx": pid[0]}
    if name.startswith("nn.Module"):
        a["Python module id"] = 0
    t.X("python_function", name, ts, dur, a)
    return pid[0]


t = T(props=nv("NVIDIA H100 80GB HBM3", 9, 0, 132))
for k in range(10):
    o = k * 16000
    t.step(30 + k, o, 16000)
    a = pyf(t, "/home/u/lm/train.py(12): training_loop", o + 5, 15980, None)
    b = pyf(t, "nn.Module: Decoder_0", o + 100, 8500, a)
    c = pyf(t, "/home/u/lm/model.py(91): forward", o + 110, 8480, b)
    d = pyf(t, "/home/u/lm/model.py(57): build_causal_mask", o + 200, 7200, c)
    pyf(t, "<built-in method extend of list object at 0x7f11d0>", o + 900, 400, d)
    for i in range(6):
        t.op(
            "aten::mm",
            o + 7450 + i * 150,
            100,
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
            o + 7600 + i * 1200,
            1200,
        )
w("c09_python_in_forward.pt.trace.json", dump(t.doc()))
# ---- 5b: lock in forward, MI300X
t = T(host=2222, rt=("cuda_runtime", "hipLaunchKernel"), props=amd("AMD Instinct MI300X"), stream=0)
for k in range(6):
    o = k * 24000
    t.step(1 + k, o, 24000)
    a = pyf(t, "/srv/job/run.py(310): main", o + 5, 23980, None)
    b = pyf(t, "nn.Module: RankModel_0", o + 300, 12600, a)
    c = pyf(t, "/srv/job/rank_model.py(140): forward", o + 310, 12580, b)
    d = pyf(t, "/srv/job/embedding_server.py(77): pull_rows", o + 400, 11600, c)
    e = pyf(t, "/usr/lib/python3.11/queue.py(154): get", o + 420, 11560, d)
    f = pyf(t, "/usr/lib/python3.11/threading.py(295): wait", o + 440, 11520, e)
    pyf(t, "<method 'acquire' of '_thread.lock' objects>", o + 450, 11500, f)
    for i in range(4):
        t.op(
            "aten::addmm",
            o + 12100 + i * 150,
            100,
            "Cijk_Ailk_Bljk_SB_MT128x128x16",
            o + 12400 + i * 2400,
            2400,
        )
w("c10_lock_in_forward.pt.trace.json", dump(t.doc()))

# ---- 6a: straggler rank 2 of 4 (H200), late at the first bucket only
jit = [[random.choice((0, 20, 40, 60)) for _ in range(4)] for _ in range(8)]


def coll(t, o, lts, name, kern, kts, kdur, stream, nel, size, desc="default_pg", cname="allreduce"):
    t.x += 1
    t.X("user_annotation", name, o + lts, 80, {"External id": t.x})
    t.launch(
        o + lts + 30,
        kern,
        o + kts,
        kdur,
        stream=stream,
        kargs={
            "Collective name": cname,
            "In msg nelems": nel,
            "Out msg nelems": nel,
            "Group size": size,
            "dtype": "Float",
            "Process Group Name": "0",
            "Process Group Description": desc,
            "Process Group Ranks": str(list(range(size))),
        },
    )


for r in range(4):
    t = T(
        host=3000 + r,
        dev=r,
        devidx=r,
        t0=BASE + r * 4321,
        props=nv("NVIDIA H200", 9, 0, 132, 4),
        dist={"backend": "nccl", "rank": r, "world_size": 4, "pg_count": 1},
    )
    for k in range(8):
        o = k * 30000
        t.step(60 + k, o, 30000)
        c = [14000, 14000, 20600, 14000][r]
        for i in range(2):
            t.op(
                "aten::mm",
                o + 100 + i * 150,
                100,
                "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NTN",
                o + 300 + i * c / 2,
                c / 2,
            )
        K = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        coll(t, o, 500, "nccl:all_reduce", K, 300 + c, 22900 - 300 - c, 20, 8388608, 4)
        coll(t, o, 650, "nccl:all_reduce", K, 22900 + jit[k][r], 1100 - jit[k][r], 20, 4194304, 4)
        t.op(
            "aten::_fused_adamw_",
            o + 800,
            100,
            "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>()",
            o + 24000,
            4000,
        )
    w(f"c11_straggler/rank{r}.pt.trace.json", dump(t.doc()))
# ---- 6b: three ranks, all late in turn, slow network
for r in range(3):
    t = T(
        host=700 + r,
        dev=0,
        devidx=0,
        t0=BASE + r * 37e6,
        props=nv("NVIDIA A100-SXM4-40GB", 8, 0, 108),
        dist={"backend": "nccl", "rank": r, "world_size": 3},
    )
    for k in range(9):
        o = k * 20000
        t.step(200 + k, o, 20000)
        late = 300 if k % 3 == r else 0
        c = 11400 + late
        t.op(
            "aten::bmm",
            o + 100,
            100,
            "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn",
            o + 250,
            c,
        )
        coll(
            t,
            o,
            300,
            "nccl:_all_gather_base",
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            250 + c,
            18950 - 250 - c,
            17,
            16777216,
            3,
            cname="_allgather_base",
        )
    w(f"c12_no_straggler/node{r}_rank{r}.json.gz", gzip.compress(dump(t.doc()).encode()))


# ---- 7a: three iterations x two ranks flat, tensorboard_trace_handler's names
def it_input(t, k, o):
    t.X("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", o + 50, 5000, {})
    t.op("aten::mm", o + 5100, 100, "ampere_sgemm_128x64_tn", o + 5250, 4400)


def it_host(t, k, o):
    for i in range(20):
        t.op(
            "aten::add",
            o + 100 + i * 490,
            60,
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
            o + 150 + i * 490,
            150,
        )


def it_dev(t, k, o):
    for i in range(3):
        t.op("aten::mm", o + 50 + i * 100, 60, "ampere_sgemm_128x64_tn", o + 150 + i * 3050, 3050)


for j, (f, s0) in enumerate(((it_input, 50), (it_host, 100), (it_dev, 150))):
    for r in range(2):
        t = T(
            host=1101 + r,
            dev=r,
            devidx=r,
            t0=BASE + j * 60e6,
            props=nv("NVIDIA A40", 8, 6, 84, 2),
            dist={"backend": "nccl", "rank": r, "world_size": 2},
        )
        for k in range(6):
            t.step(s0 + k, k * 10000, 10000)
            f(t, k, k * 10000)
        w(f"c13_iterations/gpu03_{1101 + r}.{1782000000123 + j * 60000}.pt.trace.json", dump(t.doc()))

# ---- 7b: the same two XPU ranks as folder, tar.gz, zip, gzip in gzip
docs = []
for r in range(2):
    t = T(
        host=40 + r,
        dev=10 + r,
        devidx=r,
        rt=("xpu_runtime", "urEnqueueKernelLaunch"),
        label="XPU",
        stream=1,
        props=[
            {"id": i, "name": "Intel(R) Data Center GPU Max 1550", "totalGlobalMem": 64 * 2**30}
            for i in range(2)
        ],
        dist={"backend": "xccl", "rank": r, "world_size": 2},
    )
    for k in range(7):
        o = k * 10000
        t.step(11 + k, o, 10000)
        t.X(
            "user_annotation",
            "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
            o + 20,
            400,
            {"External id": 6000 + k},
        )
        t.op("aten::mm", o + 450, 60, "gemm_kernel", o + 700, 4900)
        t.op(
            "aten::relu",
            o + 550,
            60,
            "at::native::xpu::VectorizedElementwiseKernel<4, ReluFunctor>",
            o + 5600,
            3000,
        )
        t.x += 1
        t.X("user_annotation", "xccl:all_reduce", o + 650, 80, {"External id": t.x})
        t.launch(o + 680, "oneccl_allreduce_pcie", o + 8600, 800, stream=2)
    docs.append(dump(t.doc()).encode())
for r in range(2):
    w(f"c14_archives/folder/rank{r}.pt.trace.json", docs[r])
with tarfile.open(FOLDER + "/c14_archives/two.tar.gz", "w:gz") as z:
    for r in range(2):
        i = tarfile.TarInfo(f"prof/rank{r}.pt.trace.json")
        i.size = len(docs[r])
        z.addfile(i, io.BytesIO(docs[r]))
with zipfile.ZipFile(FOLDER + "/c14_archives/two.zip", "w", zipfile.ZIP_DEFLATED) as z:
    for r in range(2):
        z.writestr(f"prof/rank{r}.pt.trace.json.gz", gzip.compress(docs[r]))
for r in range(2):
    w(f"c14_archives/gzgz/rank{r}.pt.trace.json.gz", gzip.compress(gzip.compress(docs[r])))

# ---- 7c: cut off
t = T(host=5151, props=nv("NVIDIA L4", 8, 9, 58))
for k in range(9):
    o = k * 10000
    t.step(k, o, 10000)
    for i in range(30):
        t.op(
            "aten::mul",
            o + 50 + i * 20,
            15,
            "void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>>(int)",
            o + 200 + i * 300,
            300,
        )
b = dump(t.doc()).encode()
cut = b.index(b"ProfilerStep#6") + 9000
w("c15_full.pt.trace.json", b)
w("c15_cut.pt.trace.json", b[:cut])
g = gzip.compress(b)
w("c15_cut.pt.trace.json.gz", g[: int(len(g) * 0.6)])
