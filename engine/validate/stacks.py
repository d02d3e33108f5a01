"""What a row says of its software -> the properties of it that decide times and are not settings of a layout.

A row names its software in its source, its set or its schedule. Each property is documented there; none is fitted. A
row whose software is not known gets those of today's, which is then listed as inferred.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from engine.cost.kernels import EACH_PARAMETER, FLAT_PARAMETER
from engine.validate.rows import Row


class Stack(NamedTuple):
    name: str
    attention: str  # one of those below
    overlaps: bool  # gradients are reduced, and layers gathered, while others compute
    whole_blocks: bool  # full recomputation repeats a block to its end, as Megatron-LM's checkpoint does
    tp_overlaps: bool  # tokens of tensor ranks travel in parts while products work on others
    one_card: bool  # what leaves a node does so by one of its network cards at a time
    dropout: bool  # of 0.1, as Megatron-LM has it by default (arguments.py), where the model is a GPT
    scatters: bool  # tensor ranks send their own parts of a message between stages (Narayanan et al. 2021, section 4.1)
    by_tensor: bool = False  # what is gathered for replicas is so tensor by tensor
    sequence_parallel: bool = False  # beside tp always, where a row does not say
    every_other: bool = False  # recomputing selectively repeats every other product
    vocabulary: int = 51_200  # where a row does not say: GPT-2's 50,257 tokens, padded as Megatron-LM's examples do
    recompute: str = "none"  # where a row does not say
    keeps_qkv: bool = False  # recomputing in full keeps queries, keys and values as they come from their matrices
    gathers_late: bool = False  # on the way back a layer is gathered when the one before it is through
    reduces_fp32: bool = False  # gradients of bf16 are reduced over replicas in fp32
    stepwise_loss: bool = False  # each operation of the loss is a kernel
    copies_tokens: bool = False  # of tensor ranks, as PyTorch's collectives do along any dimension but the first
    loss: str | None = None  # as PyTorch takes it, of spec.TORCH_LOSSES
    heads_by_exchange: bool = False  # context ranks exchange tokens for heads, and not keys in a ring
    does: tuple[str, ...] = ()  # kernels that only some software has (engine.cost.kernels)
    stepwise_optimizer: bool = False  # each of its operations is a kernel
    each_micro_batch: bool = False  # gradients are reduced after every micro-batch


# Attention that writes its scores; else in one kernel, which never does (Dao et al. 2022, arXiv:2205.14135): as it was
# in 2022, FlashAttention 2 of 2023, and what vendors have for a device since.
SCORES, FIRST, SECOND, LATEST = "scores", "first", "second", "latest"
# Megatron-LM before 2023 and its DeepSpeed fork: scores, softmax and weighted sum are kernels of their own, the softmax
# fused with scale and mask (Narayanan et al. 2021, section 4.2). Gradients are all-reduced when the last micro-batch is
# through (Korthikanti et al. 2022, section 6.3: "data-parallel all-reduce is not overlapped").
EARLY = {
    "attention": SCORES,
    "overlaps": False,
    "whole_blocks": True,
    "tp_overlaps": False,
    "one_card": False,
    "dropout": True,
    "scatters": True,
    "stepwise_loss": True,  # vocab_parallel_cross_entropy; arguments.py: cross_entropy_loss_fusion is off by default
    "reduces_fp32": True,  # arguments.py: "accumulate and all-reduce gradients in fp32 for bfloat16 data type"
}
# Since then FlashAttention is the default, on Hopper and later cuDNN's (NVIDIA, NeMo Framework, "Attention":
# Transformer Engine prefers it there), and communication overlaps.
LATE = EARLY | {"attention": LATEST, "overlaps": True}
# scaled_dot_product_attention takes FlashAttention 2 on devices up to Hopper (torchtitan, models/attention.py).
PYTORCH = LATE | {"attention": SECOND, "whole_blocks": False, "scatters": False, "dropout": False}
PYTORCH |= {"reduces_fp32": False, "stepwise_loss": False}
TORCHTITAN = PYTORCH | {"every_other": True, "reduces_fp32": True, "copies_tokens": True, "does": (EACH_PARAMETER,)}
# Attention is a Triton kernel after the first FlashAttention (attn_impl: triton). On the way back Composer's FSDP
# gathers a layer when the one before it is through (BACKWARD_POST by default: FSDPConfig), and the table's settings do
# not say otherwise (scripts/train/benchmarking). Its trainer keeps gradients of micro-batches to themselves in DDP only
# (composer, trainer/dist_strategy.py: ddp_sync_context), and its AdamW is written out (composer, optim/
# decoupled_weight_decay.py).
FOUNDRY = PYTORCH | {"attention": FIRST, "gathers_late": True, "each_micro_batch": True}
FOUNDRY |= {"does": (FLAT_PARAMETER,), "stepwise_optimizer": True}
NEMO = {"tp_overlaps": True, "sequence_parallel": True, "reduces_fp32": False, "stepwise_loss": False}
# The first whose pattern is found in a row's source, set, schedule, precision and notes.
STACKS = (
    (r"no_scatter_gather", Stack("Megatron-LM of 2021 without scattered messages", **(EARLY | {"scatters": False}))),
    # Parameters are fetched while the layer before computes; each is gathered as a list of shards, which NCCL sends as
    # a broadcast from every rank in turn, so that a node's cards do not work side by side.
    (
        r"DeepSpeed ZeRO-3",
        Stack("DeepSpeed ZeRO-3 of 2021", **(EARLY | {"overlaps": True, "one_card": True}), by_tensor=True),
    ),
    # On Jean Zay NCCL sends all by one of a node's four cards (bigscience, experiments/bandwidth: each channel of its
    # logs is "via NET/IB/1").
    (r"bigscience|Megatron-DeepSpeed", Stack("Megatron-DeepSpeed of 2022", **(EARLY | {"one_card": True}))),
    (r"SC21|2104\.04473|Korthikanti|2205\.05198|5281919420|vTrain", Stack("Megatron-LM before 2023", **EARLY)),
    # Its text is cut by SentencePiece (examples/pretrain_zero_bubble.sh). With a vocabulary of 32,000 the four models
    # have the sizes that they are named after, 1.5, 6.2, 14.6 and 28.3 billion; with GPT-2's two have 14.7 and 28.4.
    (r"Zero Bubble", Stack("Megatron-LM of 2023", **EARLY, vocabulary=32_000)),
    # Its baseline writes scores: FlashAttention is among what MegaScale adds to it (Jiang et al. 2024, section 3.3,
    # arXiv:2402.15627). They are computed again: without, 530B would need more memory than there is.
    (r"MegaScale", Stack("Megatron-LM of 2023", **EARLY, recompute="selective")),
    # Rows in `amp_bf16` ran PyTorch 2.1, a nightly build of August 2023, whose checkpoint stops early (the same results
    # with their images: scripts/train/benchmarking/h100new.md of commit beb8dee).
    (r"llm-foundry.* amp_", Stack("LLM Foundry with PyTorch 2.1", **FOUNDRY)),
    # Rows in `bf16` are of spring 2023, with PyTorch 1.13, whose checkpoint repeats a block to its end.
    (r"llm-foundry", Stack("LLM Foundry with PyTorch 1.13", **(FOUNDRY | {"whole_blocks": True}))),
    # Its selective recomputation by `op` keeps every other product (distributed/activation_checkpoint.py). It reduces
    # gradients in fp32 by default (job_config.py: mixed_precision_reduce). In 2024 the loss was eager, compiled or not
    # (train.py: "compiling loss function causes CUDA errors, turning off for now"); in June 2025 it was compiled
    # (components/loss.py: build_cross_entropy_loss).
    (r"torchtitan.*2025-?06", Stack("TorchTitan of 2025", **TORCHTITAN, loss="compiled")),
    (r"torchtitan", Stack("TorchTitan of 2024", **TORCHTITAN, loss="eager")),
    # Its loss is Megatron-LM's (parallel/tensor_parallel/functional.py: sharded_cross_entropy).
    (r"nanotron", Stack("nanotron", **(PYTORCH | {"stepwise_loss": True}))),
    # Its recipe's script recomputes blocks but for their queries, keys and values (maxtext/configure.sh:
    # POLICY="save_qkv_proj", attention=cudnn_flash_te); XLA leaves out what nothing needs, so the last product.
    (
        r"dgxc-benchmarking.*maxtext",
        Stack("MaxText", **(PYTORCH | {"attention": LATEST}), recompute="full", keeps_qkv=True),
    ),
    # Megatron-Core with all overlaps off, and context ranks that exchange heads (docs/b200/b200_real_repro_guide.md:
    # "non-overlap contract", cp_comm_type=a2a).
    (r"SimuMax", Stack("Megatron-Core without overlap", **(LATE | {"overlaps": False}), heads_by_exchange=True)),
    # NVIDIA's recipes turn Transformer Engine's userbuffers on (tp_comm_overlap), and sequence parallelism beside tp
    # (Megatron-Bridge: sequence_parallel = tensor_model_parallel_size > 1), reduce gradients in bf16 (NeMo,
    # scripts/performance: grad_reduce_in_fp32 = False), and fuse the loss (cross_entropy_loss_fusion).
    (r"dgxc-benchmarking|Megatron-Bridge", Stack("NeMo", **(LATE | NEMO))),
    (r"Megatron-LM", Stack("Megatron-Core", **LATE)),
)
TODAY = Stack("not known", **(LATE | {"stepwise_loss": False}))


def stack_of(row: Row) -> Stack:
    text = " ".join((row.source, row.group, str(row.schedule or ""), str(row.precision or ""), row.notes))
    return next((stack for pattern, stack in STACKS if re.search(pattern, text, re.IGNORECASE)), TODAY)
