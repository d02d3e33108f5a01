"""The words in which a row names its hardware, numbers, schedule and the like -> Lockstep's own names and units.

Each function gives None, or raises Unusable, where the words do not say it; what follows from that is `case`'s matter.
"""

from __future__ import annotations

import re

from engine.validate.rows import Unusable

# As they are written in sources -> the name in the machine catalogue. The first that is found in the text counts.
DEVICES = (
    (r"GB300", "gb300"),
    (r"GB200", "gb200"),
    (r"B300", "b300"),
    (r"B200", "b200"),
    (r"H800", "h800"),
    (r"H200", "h200"),
    (r"H100", "h100"),
    (r"A800", "a800"),
    (r"A100|Ampere", "a100"),
    (r"V100", "v100"),
    (r"RTX ?4090", "rtx4090"),
)
# GPUs that NVLink joins where a host has fewer: racks of trays with 4 (NVIDIA, GB200 and GB300 NVL72 data sheets).
RACKS, TRAY = {"gb200": 72, "gb300": 72}, 4
LINKS = {"2": 6, "3": 12, "4": 18, "5": 18}  # of a device, by the version of NVLink (data sheets)
UNCLEAR = re.compile(r"unclear|unknown|not stated", re.IGNORECASE)
NOT_SAID = re.compile(r"not (stated|published|printed)|unknown|varied|see section", re.IGNORECASE)
PRECISIONS = (
    (r"nvfp4|fp4", "fp4"),
    (r"mxfp8|fp8|float8", "fp8"),
    (r"bf16|bfloat16", "bf16"),
    (r"fp16|float16|half|mixed", "fp16"),
    (r"fp32|float32|tf32", "fp32"),
)
SCHEDULES = (
    (r"zb-?2p", "zb_2p"),
    (r"zb-?h2", "zb_h2"),
    (r"zb-?1p|zb-?h1", "interleaved_zero_bubble"),
    (r"zb-?v", "zbv"),
    (r"dualpipe-?v", "dualpipev"),
    (r"dualpipe", "dualpipe"),
    (r"1f1b-?i\b|interleaved", "interleaved_1f1b"),
    (r"gpipe", "gpipe"),
    (r"1f1b", "1f1b"),
)


def _first(table: tuple[tuple[str, str], ...], text: str) -> str | None:
    return next((name for pattern, name in table if re.search(pattern, text, re.IGNORECASE)), None)


def device(text: str) -> str:
    """The catalogue's name of a device."""
    found = None if UNCLEAR.search(text) else _first(DEVICES, text)
    if found is None:
        raise Unusable("the device is not one that Lockstep knows", text or "none is named")
    return "a100_40" if found == "a100" and memory_size(text) == 40e9 else found


def memory_rate(text: str) -> float | None:
    """Bytes a second of a device's memory, where its name has them: 'H100-SXM 96GB HBM2e 2.4TB/s'."""
    found = re.search(r"HBM\w*\s+(\d+(?:\.\d+)?)\s*TB/s", text)
    return float(found[1]) * 1e12 if found else None


def memory_size(text: str) -> float | None:
    """Bytes of memory, where a device's name has them, as in A100-SXM4-80GB."""
    found = re.search(r"(\d+)\s?GB(?![\w/])", text, re.IGNORECASE) or re.search(r"-(\d+)G\b", text)
    return float(found[1]) * 1e9 if found and float(found[1]) > 8 else None


def power_cap(text: str) -> float | None:
    """Watts that a device is held to, where its name says so: 'H100-SXM 96GB HBM2e 2.4TB/s, 500W cap'."""
    found = re.search(r"(\d+)\s*W cap", text)
    return float(found[1]) if found else None


def network_rate(text: str | None, per_node: int) -> float | None:
    """Bytes a second that each device of a node can send to other nodes; None where it is not said.

    '8x200Gb/s HDR IB per node' is shared by the node's devices; '400Gb/s RDMA per GPU' is each one's own.
    """
    if not text or NOT_SAID.search(text):
        return None
    several = re.search(r"(\d+)\s*x\s*(\d+(?:\.\d+)?)\s*([GT])b", text)
    if several:
        return float(several[1]) * float(several[2]) * _giga(several[3]) / 8 / per_node
    one = re.search(r"(\d+(?:\.\d+)?)\s*([GT])b(?:/s|ps)", text)
    if not one:
        return None
    rate = float(one[1]) * _giga(one[2]) / 8
    return rate if re.search(r"per (gpu|device|chip)", text, re.IGNORECASE) else rate / per_node


def cards(text: str | None) -> int:
    """Network cards of a node, where several are named: 4 of '4x100Gb/s Omni-Path per node'."""
    several = re.search(r"(\d+)\s*x\s*\d+(?:\.\d+)?\s*[GT]b", text or "")
    return int(several[1]) if several else 1


def _giga(prefix: str) -> float:
    return 1e12 if prefix == "T" else 1e9


def interference(notes: str) -> float:
    """How many times slower collectives of several groups are beside each other than alone, where a row says so."""
    found = re.search(r"NCCL interference raises time ~(\d+)\s*%", notes)
    return 1 + float(found[1]) / 100 if found else 1.0


def link_rate(text: str | None) -> float | None:
    """Bytes a second in one direction of a device's links within its node; None where it is not said."""
    found = re.search(r"(\d+(?:\.\d+)?)\s*([GT])B/s", text or "")
    return float(found[1]) * _giga(found[2]) / 2 if found else None  # vendors count both directions


def island(text: str | None) -> int | None:
    """Devices that are joined each to each, without a switch; None where it is not said.

    'NVLink3 (4 links per pair)': the 12 links of a device lead to 3 others (NVIDIA HGX A100 4-GPU), and rings in three
    orders use all of them.
    """
    pairs = re.search(r"NVLink(\d)\s*\((\d+) links per pair\)", text or "")
    return None if not pairs or pairs[1] not in LINKS else LINKS[pairs[1]] // int(pairs[2]) + 1


def precision(text: str | None) -> str | None:
    """The numbers of the matrix products: fp32, bf16, fp16, fp8 or fp4."""
    return _first(PRECISIONS, text) if text else None


def schedule(text: str | None) -> str | None:
    """A schedule's name in Lockstep; None where there is none, or none is said."""
    if not text or text.lower() == "none":
        return None
    found = _first(SCHEDULES, text)
    if found is None:
        raise Unusable("the schedule is not one that Lockstep knows", text)
    return found


def recompute(text: str | None) -> str | None:
    """none, selective or full; None where it is not said."""
    if text is None or NOT_SAID.search(text):
        return None
    lowered = text.lower()
    if "partial" in lowered or "custom" in lowered:
        raise Unusable("what is recomputed is not said exactly", text)
    for name in ("full", "selective", "none"):
        if lowered.startswith(name):
            return name
    if "sac" in lowered:
        return "selective"
    raise Unusable("what is recomputed is not said exactly", text)


def zero_stage(value: object) -> int | None:
    """What replicas share (Rajbhandari et al. 2020): 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
    None where it is not said."""
    if value is None or isinstance(value, int):
        if value is not None and not 0 <= value <= 3:
            raise Unusable("the stage of ZeRO is none from 0 to 3", str(value))
        return value
    text = str(value)
    if re.search(r"not resharded|SHARD_GRAD|ZeRO-2", text, re.IGNORECASE):
        return 2
    if re.search(r"distributed optimizer|ZeRO-1", text, re.IGNORECASE):
        return 1
    if re.search(r"FSDP|FULL_SHARD|ZeRO-3", text, re.IGNORECASE):
        return 3
    raise Unusable("what replicas share is said in words that are not known", text)


def shard_group(value: object) -> int | None:
    """Ranks that share one copy of the model, where it is fewer than all replicas: 'Megatron-FSDP group 64'."""
    found = re.search(r"group (\d+)", str(value or ""))
    return int(found[1]) if found else None
