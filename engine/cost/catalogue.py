"""Devices, links and nodes -> the machines that a person can choose. Every figure has its source beside it.

Peaks are dense, without sparsity, of NVIDIA's data sheets. What a large matmul reaches of them was measured by others,
in bf16 or fp16; where that differs, for shapes as language models have and not for the best ones. Attention in one
kernel reaches of an A100's peak 40 % (between FlashAttention 1 and 2: Dao 2023, arXiv:2307.08691, figures 4 to 6), and
of an H100's 60 % (cuDNN's: Shah et al. 2024, arXiv:2407.08608, figure 5, heads of 128; FlashAttention 2: 35 %). On a
B200 45 % were measured with cuDNN (SimuMax, configs/system/b200_bf16_ceperm.json: 0.87 to 1.2 forward and 0.73 to 0.95
backward, of pairs that no mask spares).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from engine.cost.calibration import ON_GPU, SHIPPED, Calibration, load, num_cores
from engine.cost.hardware import EVERYBODY, Link, Machine, Switch
from engine.cost.local import Local

TERA, GIGA, GIBI = 1e12, 1e9, 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A GPU: dense peaks in TFLOP/s by precision (None: it has no units for it), memory, and multiprocessors."""

    fp32: float  # TF32 where it has tensor cores for it
    fp16: float
    bf16: float | None
    fp8: float | None
    reached: float  # of its peak, by a large matmul
    reached_fp8: float = 0.0
    flash: float  # of its peak in two bytes, by attention in one kernel
    memory: int  # bytes that CUDA has of it
    memory_rate: float  # bytes a second, of the data sheet
    sms: int


# Of the data sheet's memory rate, what a copy of a large array reaches: 1.75 of 2.04 TB/s on an A100, 3.0 of 3.35 on an
# H100 (BabelStream: Deakin et al. 2018, doi 10.1504/IJCSE.2018.095847, and its published results).
MEMORY_REACHED = 0.88
# Seconds from one kernel to the next on a stream that is kept full (Gysi et al. 2019; NVIDIA, "Understanding the
# visualization of overhead and latency in Nsight Systems", 2020: launches of 2 to 5 us).
LAUNCH = 3e-6
# Of the rate that a large matmul reaches alone, what products keep for hours between all others: clocks fall at the
# device's power limit, and operands are not in the cache. Fitted on A100s (docs/decisions).
SUSTAINED = 0.94
# Of devices' rates of large products, the standard deviation beside the mean. On five clusters, four of them V100s,
# devices differ by 8 % on average (Sinha et al. 2022, arXiv:2208.11035, abstract of version 3), which is taken as the
# distance of a box plot's whiskers, 5.4 standard deviations of a normal distribution.
SPREAD = 0.015
# Large products of Blackwell GPUs are as fast as their power limit lets them be, in proportion: cuBLAS's on a GB300 run
# at 617 TFLOP/s at 500 W, and at 1,600 to 2,174 at 1,400 W (facebookexperimental/triton, pull request 2023). TFLOP/s a
# watt in bf16: 1,098 at 1,000 W, the mean of loops that are long enough for the limit (SimuMax, configs/system/
# b200_bf16_ceperm.json; products that end before reach 1,450, and 1,448 to 1,562: arXiv:2604.23466, tables III and IV).
# They sustain it, so `SUSTAINED` is taken out of it. In fp8: 1,963 at 750 W (pytorch/FBGEMM, pull request 4821).
A_WATT, A_WATT_FP8 = 1.098 / SUSTAINED, 1963 / 750
# Seconds of a call of NCCL beside its rounds (graph/tuning.cc: a ring's base latency, 6.6 to 14 us by protocol).
CALL = 8.4e-6
PCIE4 = 25e9  # bytes a second from a host; PCIe 4.0 x16 is 32 GB/s, of which copies from pinned memory reach about 25


def cuda(gibibytes: float) -> int:
    """Of a device's memory what its driver leaves, as PyTorch says where there is too little ("has a total capacity of
    79.15 GiB"; from driver to driver 79.1 to 79.3 of 80): read in public reports of each of these devices. The GB of
    data sheets are 2^30 bytes: an H200's 141 are 139.8 GiB to CUDA, and not 131."""
    return round(gibibytes * GIBI)


DEVICES = {
    # Tesla V100 SXM2/SXM3 data sheet: 15.7 / 125 TFLOP/s, 0.9 TB/s, 80 SMs; no bf16. Megatron-LM's README of 2020 shows
    # 77 TFLOP/s for whole steps; large matmuls reach 80 to 88 % (Jia et al. 2018, arXiv:1804.06826).
    "v100": Device(
        fp32=15.7,
        fp16=125,
        bf16=None,
        fp8=None,
        reached=0.80,
        flash=0.30,
        memory=cuda(31.74),
        memory_rate=0.9 * TERA,
        sms=80,
    ),
    # A100 SXM data sheet: 156 TF32, 312 bf16; 1.555 TB/s (40 GB) or 2.039 TB/s (80 GB); 108 SMs. Measured
    # 267.9 (Bekman, Machine Learning Engineering, compute/accelerator, Maximum Achievable Matmul FLOPS).
    "a100_40": Device(
        fp32=156,
        fp16=312,
        bf16=312,
        fp8=None,
        reached=0.859,
        flash=0.40,
        memory=cuda(39.4),
        memory_rate=1.555 * TERA,
        sms=108,
    ),
    "a100": Device(
        fp32=156,
        fp16=312,
        bf16=312,
        fp8=None,
        reached=0.859,
        flash=0.40,
        memory=cuda(79.2),
        memory_rate=2.039 * TERA,
        sms=108,
    ),
    # H100 SXM data sheet: 494.7 TF32, 989.4 bf16, 1979 fp8; 3.35 TB/s; 132 SMs. Measured 720, and
    # 1280 in fp8 (SemiAnalysis, MI300X vs H100 vs H200, December 2024); 794.5 for the best shape (Bekman).
    "h100": Device(
        fp32=494.7,
        fp16=989.4,
        bf16=989.4,
        fp8=1979,
        reached=0.728,
        reached_fp8=0.647,
        flash=0.60,
        memory=cuda(79.2),
        memory_rate=3.35 * TERA,
        sms=132,
    ),
    # HGX B200 data sheet (a GPU): 1.1 PFLOP/s TF32, 2.25 bf16, 4.5 fp8; 180 GB at 7.7 TB/s; 148 SMs; 1,000 W.
    "b200": Device(
        fp32=1125,
        fp16=2250,
        bf16=2250,
        fp8=4500,
        reached=1000 * A_WATT / 2250,
        reached_fp8=1000 * A_WATT_FP8 / 4500,
        flash=0.45,
        memory=cuda(178.35),
        memory_rate=7.7 * TERA,
        sms=148,
    ),
    # GB200 NVL72 data sheet (a GPU): 1.25 PFLOP/s TF32, 2.5 bf16, 5 fp8; 186 GB at 8 TB/s; 152 SMs; 1,200 W.
    "gb200": Device(
        fp32=1250,
        fp16=2500,
        bf16=2500,
        fp8=5000,
        reached=1200 * A_WATT / 2500,
        reached_fp8=1200 * A_WATT_FP8 / 5000,
        flash=0.45,
        memory=cuda(184.31),
        memory_rate=8 * TERA,
        sms=152,
    ),
    # Ada GPU architecture white paper, GeForce RTX 4090: 82.6 TF32 and 165.2 bf16 with fp32 sums, 330 fp8; 1.008 TB/s;
    # 128 SMs. What a matmul reaches is assumed: cards boost above the clock that the peak is given for.
    "rtx4090": Device(
        fp32=82.6,
        fp16=165.2,
        bf16=165.2,
        fp8=330.3,
        reached=0.95,
        reached_fp8=0.95,
        flash=0.50,
        memory=cuda(23.64),
        memory_rate=1.008 * TERA,
        sms=128,
    ),
}
# H200 SXM data sheet: an H100's units, 141 GB at 4.8 TB/s.
DEVICES["h200"] = replace(DEVICES["h100"], memory=cuda(139.8), memory_rate=4.8 * TERA)
# GB300 NVL72 data sheet (a GPU): as a GB200, with 160 SMs and 279 GB; 1,400 W. HGX B300's: as a B200, with 270 GB, and
# 1,100 W.
DEVICES["gb300"] = replace(
    DEVICES["gb200"],
    memory=cuda(276.5),
    sms=160,
    reached=1400 * A_WATT / 2500,
    reached_fp8=1400 * A_WATT_FP8 / 5000,
)
DEVICES["b300"] = replace(
    DEVICES["b200"],
    memory=cuda(267.69),
    reached=1100 * A_WATT / 2250,
    reached_fp8=1100 * A_WATT_FP8 / 4500,
)

# Bytes a second of a device in one direction. NVLink: links times what NCCL counts for one (graph/topo.h: 20 GB/s on
# SM70 and SM80, 20.6 on SM90), of 25 of the data sheets; on SM100 33.7 of 50, which all-gathers and reduce-scatters of
# 8 B200s reach (SimuMax, b200_bf16_ceperm.json: 0.673 of 900 GB/s), where NCCL counts 40.1. Networks: 95 % of the line
# rate, which is what packet headers and NCCL's protocol leave (NVIDIA nccl-tests on DGX: 185 to 195 GB/s of 8 x 200
# Gb/s).
# Seconds to the first line of 128 bytes, to the first chunk and to the first word of 8 bytes: NCCL's constants of rings
# for its protocols LL128, Simple and LL (graph/tuning.cc: 1.9, 3.4 and 0.6 us over NVLink, 2.5, 5.7 and 1.0 us over
# PCIe, 4, 14 and 2.7 us over a network), and of trees. Of the rate words reach half, and of NVLink no more than its
# llMaxBws: 39, 87.7, 141 and 282 GB/s from Volta to Blackwell; of 8 cards 22.5 GB/s on Ampere and 45 on Hopper, 0.12 of
# their rate. Lines reach 120/128; of A100s' NVLink 0.74, as nccl-tests of 4 to 32 MiB show (177 of 240 GB/s from each
# size to the next, with a process for each of 8 A100s of 80 GB; Azure, AI-benchmarking-guide, ND_A100_v4: 151).
NVLINK2 = Link(1.9e-6, 6 * 20e9, 3.4e-6, 0.6e-6, words=39 / 120, tree=(4.0e-6, 1.25e-6, 0.6e-6))
NVLINK3 = replace(NVLINK2, rate=12 * 20e9, lines=0.74, words=87.7 / 240)
NVLINK4 = replace(NVLINK2, rate=18 * 20.6e9, words=141 / 370.8)
# A800s and H800s have 400 GB/s of it.
NVLINK3_800, NVLINK4_800 = replace(NVLINK3, rate=8 * 20e9, words=0.5), replace(NVLINK4, rate=8 * 20.6e9, words=0.5)
NVLINK5 = replace(NVLINK2, rate=18 * 33.7e9, words=282 / 606.6)
PCIE = Link(2.5e-6, 22e9, 5.7e-6, 1.0e-6, tree=(4.0e-6, 1.9e-6, 1.0e-6))
NETWORK_REACHED = 0.95


def network(gigabits: float) -> Link:
    """A network card of so many Gb/s for each GPU."""
    return Link(
        4.0e-6, NETWORK_REACHED * gigabits * GIGA / 8, 14.0e-6, 2.7e-6, words=0.12, tree=(14.0e-6, 8.5e-6, 5.0e-6)
    )


EDR_HALF, HDR, NDR, XDR = network(50), network(200), network(400), network(800)


# All-reduces in the switches of NVLink 4 and 5, with as many channels as NCCL has there (transport/nvls.cc). What is
# reached and how long a round waits were fitted to one curve each, from 2 MiB on: the sample of 8 H100s in NVIDIA's own
# NCCL benchmark (dgxc-benchmarking, microbenchmark_nccl: rounds of 2, 4, 8 and 16 MiB take 12, 19, 33 and 61 us), and 8
# B200s of Google Cloud's a4 (rounds of 6, 12 and 24 MiB: 21, 30 and 52 us; 0.94 of the 40.1 GB/s a link that NCCL
# counts there). Those of Azure's and Bekman's H200s and of Bekman's B200s were not looked at for it.
SWITCH4, SWITCH5 = Switch(0.91, 5.0e-6, 16, 16), Switch(1.11, 9.6e-6, 24, 32)
SWITCH = {NVLINK4: SWITCH4, NVLINK4_800: SWITCH4, NVLINK5: SWITCH5}

# Of the 18 trays of 4 in an NVLink domain, a job of several gets 16 of each, so that powers of two stay together
# (Slurm, topology/block and sbatch --segment=16; CoreWeave, SUNK, "Topology/Block Scheduling in Slurm").
NVL_BLOCK = 64


def cluster(name: str, device: str, inside: Link, node_size: int, *outer: tuple[int, Link]) -> Machine:
    """Nodes of so many GPUs, joined by `outer`. The rate in fp32 is that in fp16 by the ratio of their peaks."""
    gpu = DEVICES[device]
    gains = {f"{precision}_gain": (getattr(gpu, precision) or gpu.fp32) / gpu.fp32 for precision in ("fp16", "bf16")}
    return Machine(
        name=name,
        flop_rate=SUSTAINED * gpu.reached * gpu.fp32 * TERA,
        peak_flop_rate=gpu.fp32 * TERA,
        memory_rate=MEMORY_REACHED * gpu.memory_rate,
        op_overhead=LAUNCH,
        link_latency=inside.latency,
        link_rate=inside.rate,
        link_chunk=inside.chunk,
        link_word=inside.word,
        link_lines=inside.lines,
        link_words=inside.words,
        link_tree=inside.tree,
        memory_size=gpu.memory,
        node_size=node_size,
        spread=SPREAD,
        outer=outer,
        sms=gpu.sms,
        trees=True,
        call_overhead=CALL,
        switch=SWITCH.get(inside),
        load_rate=PCIE4,
        fp8_gain=gpu.fp8 / gpu.fp32 * gpu.reached_fp8 / gpu.reached if gpu.fp8 else gains["bf16_gain"],
        flash_rate=gpu.flash * gpu.fp16 * TERA,
        **gains,
    )


def of_calibration(made: Calibration) -> Machine:
    """The machine on which Lockstep runs, whose ranks are gloo processes that share its cores. Its single numbers, for
    what looks at no more, are those of one thread and of two ranks."""
    products, halves, messages = (made.curves[name] for name in ("fp32/1", "bf16/1", "send/2"))
    rate = products[-1][0] / products[-1][1]
    return Machine(
        name="local",
        flop_rate=rate,
        memory_rate=made.rates["memory"],
        op_overhead=products[0][1],
        link_latency=messages[0][1],
        link_rate=messages[-1][0] / messages[-1][1],
        bf16_gain=halves[-1][0] / halves[-1][1] / rate,
        cores=num_cores(),
        together=made.together,
        crowded=made.crowded,
        uneven=made.uneven,
        local=Local(made),
    )


def gpus_of_calibration(made: Calibration) -> Machine | None:
    """The GPUs of the machine on which Lockstep runs, by FLOPs and bytes; None where none were measured. One that is
    alone has no link: to another one all would go through their host."""
    measured = {key.removeprefix(ON_GPU): curve for key, curve in made.curves.items() if key.startswith(ON_GPU)}
    if not measured:
        return None
    products, halves, memory = (measured[name] for name in ("fp32/1", "bf16/1", "memory/1"))
    messages = measured.get("send/2", made.curves["send/2"])
    rate = products[-1][0] / products[-1][1]
    return Machine(
        name="local",
        flop_rate=rate,
        memory_rate=memory[-1][0] / memory[-1][1],
        op_overhead=products[0][1],
        link_latency=messages[0][1],
        link_rate=messages[-1][0] / messages[-1][1],
        bf16_gain=halves[-1][0] / halves[-1][1] / rate,
    )


def _catalogue() -> dict[str, Machine]:
    unit = Machine(
        name="unit",
        flop_rate=math.inf,
        memory_rate=math.inf,
        op_overhead=0.0,
        link_latency=0.0,
        link_rate=math.inf,
        unit=True,
    )
    # As pictures of schedules are often drawn: a slot for each pass, forward or backward.
    slots = replace(unit, name="slots", unit_backward=1.0)
    clusters = (
        # DGX-2: 16 GPUs on NVSwitch, 8 cards of 100 Gb/s (EDR) for them (NVIDIA DGX-2 user guide).
        cluster("v100", "v100", NVLINK2, 16, (EVERYBODY, EDR_HALF)),
        # DGX A100: 8 GPUs on NVSwitch, 8 compute cards of 200 Gb/s (HDR); the 320 GB system has 40 GB a GPU.
        cluster("a100", "a100", NVLINK3, 8, (EVERYBODY, HDR)),
        cluster("a100_40", "a100_40", NVLINK3, 8, (EVERYBODY, HDR)),
        # DGX H100 and H200, DGX B200: 8 GPUs on NVSwitch, 8 ports of 400 Gb/s (NDR).
        cluster("h100", "h100", NVLINK4, 8, (EVERYBODY, NDR)),
        cluster("h200", "h200", NVLINK4, 8, (EVERYBODY, NDR)),
        cluster("b200", "b200", NVLINK5, 8, (EVERYBODY, NDR)),
        # GB200 NVL72: 72 GPUs in one NVLink domain, a port of 400 Gb/s (NDR) for each.
        replace(cluster("gb200", "gb200", NVLINK5, 72, (EVERYBODY, NDR)), block=NVL_BLOCK),
        # HGX B300 and GB300 NVL72: the same with a port of 800 Gb/s (XDR).
        cluster("b300", "b300", NVLINK5, 8, (EVERYBODY, XDR)),
        replace(cluster("gb300", "gb300", NVLINK5, 72, (EVERYBODY, XDR)), block=NVL_BLOCK),
        # A800 and H800: A100 and H100 with fewer links.
        cluster("a800", "a100", NVLINK3_800, 8, (EVERYBODY, HDR)),
        cluster("h800", "h100", NVLINK4_800, 8, (EVERYBODY, NDR)),
        # A workstation: 8 cards on PCIe 4.0, and 100 Gb/s Ethernet for all of them.
        cluster("rtx4090", "rtx4090", PCIE, 8, (EVERYBODY, network(100 / 8))),
    )
    return {m.name: m for m in (of_calibration(load(SHIPPED)), *clusters, unit, slots)}


MACHINES = _catalogue()
