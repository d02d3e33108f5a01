"""A job's layers -> the same chain as torch modules, parameter for parameter, from a seed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from engine.asking.masked import LEFT_OUT
from engine.asking.settings import TOKEN_MODELS
from engine.job import Job
from engine.model.shapes import Layer, num_experts
from engine.real.parts import on_parts
from engine.real.passed import Pass
from engine.real.recorder import Recorder
from engine.spec import Spec


class Conv(nn.Conv2d):
    """5x5 convolution, ReLU, 2x2 max pool: [N, in, S, S] -> [N, out, (S-4)/2, (S-4)/2]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(F.relu(super().forward(x)), 2)


class Dense(nn.Linear):
    """Flatten, then linear, then ReLU: [N, ...] -> [N, out]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(super().forward(x.flatten(1)))


class Output(nn.Linear):
    """Flatten, then linear: [N, ...] -> [N, classes]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1))


class Embed(nn.Module):
    """Token and position embedding: [N, context] integers -> [N, context, hidden]."""

    def __init__(self, vocabulary: int, context: int, hidden: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(context, hidden)
        self.places: torch.Tensor | None = None  # of the tokens in their sequence, where it is dealt out

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device) if self.places is None else self.places
        return self.token(tokens) + self.position(places)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[N, heads, context, width], three times -> the same."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """Pre-norm causal attention and MLP, with residuals: [N, context, hidden] -> the same.

    The rows of `qkv` are grouped by head (q, k and v of the first, then of the second), so that a run of its rows is
    a run of whole heads, and a rank that holds only some finds its number of heads in what it computed.
    """

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.head_width = hidden // heads
        self.attention = causal_attention  # another one where a rank has some of the tokens only
        self.norm1 = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.proj = nn.Linear(hidden, hidden, bias=False)
        self.norm2 = nn.RMSNorm(hidden)
        self.add_mlp(hidden)

    def add_mlp(self, hidden: int) -> None:
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        by_head = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_width))  # [N, context, heads, 3, width]
        q, k, v = by_head.transpose(1, 2).unbind(3)
        mixed = self.attention(q, k, v)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def own_part(weight: torch.Tensor) -> torch.Tensor:
    """What this rank has of a weight laid out over tensor ranks. The gradient of one that it has whole is a part, as it
    has a part of what follows."""
    if not isinstance(weight, DTensor):
        return weight
    return weight.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in weight.placements])


class Product(nn.Linear):
    """Of a weight that tensor ranks may share; who calls it sees to what comes in and goes out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, own_part(self.weight))


class Expert(nn.Module):
    """One expert, an MLP as that of a Block: [copies, hidden] -> the same. It is called without copies too: then the
    gradients of its weights are zero, and not None, on every device alike."""

    def __init__(self, hidden: int):
        super().__init__()
        self.up = Product(hidden, 4 * hidden, bias=False)
        self.down = Product(4 * hidden, hidden, bias=False)

    def forward(self, copies: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(copies)))


class Experts(nn.Module):
    """Some experts of a block, by number: [copies, hidden] -> the same, an output of each."""

    def __init__(self, hidden: int, numbers: Iterable[int]):
        super().__init__()
        for e in numbers:
            self.add_module(str(e), Expert(hidden))

    def forward(self, tokens: torch.Tensor, order: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """`order`: of tokens, in which those for the first expert come first, `counts` for each."""
        parts = tokens[order].split(counts.tolist())
        return torch.cat([expert(part) for expert, part in zip(self.children(), parts, strict=True)])


class Scores(torch.autograd.Function):
    """A router's product in fp32, whatever its tokens and weights are in, of which nothing is kept but these, as far as
    the other's gradient is asked for."""

    @staticmethod
    def forward(ctx, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        of_tokens, of_weight = ctx.needs_input_grad
        ctx.save_for_backward(tokens if of_weight else None, weight if of_tokens else None)
        ctx.kinds = tokens.dtype, weight.dtype
        return F.linear(tokens.float(), weight.float())

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        (tokens, weight), (of_tokens, of_weight) = ctx.saved_tensors, ctx.kinds
        return (
            None if weight is None else (gradient @ weight.float()).to(of_tokens),
            None if tokens is None else (gradient.T @ tokens.float()).to(of_weight),
        )


class Router(nn.Linear):
    """[tokens, hidden] -> scores of the experts in fp32: rounded to 8 bits many would be equal, and chance chose."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return Scores.apply(tokens, own_part(self.weight))


def as_it_is(mixture: Callable, x: torch.Tensor) -> torch.Tensor:
    return mixture(x)


class MixtureBlock(Block):
    """A Block whose MLP is a mixture of experts: a router gives each token to `top_k` of them, and their outputs are
    added up, each times the router's probability for it.

    The probabilities are those of a softmax over all experts and are not made to sum to 1 over the chosen ones: so the
    router gets a gradient even where `top_k` is 1. No expert has a limit, and no token is dropped.
    """

    # (block, tokens of each expert) of every forward pass of this process in a step; None: nobody counts.
    routed: ClassVar[list[tuple[str, torch.Tensor]] | None] = None

    def __init__(self, layer: Layer, heads: int, top_k: int):
        self.name, self.num_experts, self.top_k = layer.name, num_experts(layer), top_k
        super().__init__(layer.output[-1], heads)
        self.elsewhere: Callable | None = None  # where experts are on other devices too: called as they are
        self.around = as_it_is  # something else where what comes in, and goes out, is shared out

    def add_mlp(self, hidden: int) -> None:
        self.router = Router(hidden, self.num_experts, bias=False)
        self.experts = Experts(hidden, range(self.num_experts))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.around(self.mixture, x)

    def mixture(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        probabilities, chosen = self.router(tokens).softmax(-1).topk(self.top_k)
        chosen = chosen.flatten()
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self.num_experts)
        if MixtureBlock.routed is not None and not in_backward():  # there, a recomputed forward pass
            MixtureBlock.routed.append((self.name, counts))
        made = (self.elsewhere or self.experts)(tokens, order // self.top_k, counts)
        of_token = made[order.argsort()].unflatten(0, (-1, self.top_k))
        return (of_token * probabilities.to(x.dtype).unsqueeze(-1)).sum(-2).view_as(x)


def in_backward() -> bool:
    """Whether autograd is on its way back: what is computed forward there is computed again."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def counting() -> Iterator[dict[str, list[list[int]]]]:
    """Block -> the tokens that its router gives to each expert, in each of the body's forward passes; known when it
    ends."""
    noted = MixtureBlock.routed = []
    passes: dict[str, list[list[int]]] = {}
    try:
        yield passes
    finally:
        MixtureBlock.routed = None
    for name, counts in noted:
        passes.setdefault(name, []).append(counts.tolist())


class Head(nn.Module):
    """Norm and output layer: [N, context, hidden] -> [N, context, vocabulary]."""

    def __init__(self, hidden: int, vocabulary: int):
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.linear = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def _module(layer: Layer, spec: Spec, *, is_last: bool) -> nn.Module:
    sizes, heads = dict(layer.params), spec.heads
    if spec.model in TOKEN_MODELS:
        if layer.name == "embed":
            return Embed(sizes["token.weight"][0], *sizes["position.weight"])
        if layer.name == "head":
            return Head(*reversed(sizes["linear.weight"]))
        if num_experts(layer):
            return MixtureBlock(layer, heads, spec.top_k)
        return Block(sizes["proj.weight"][0], heads)
    if len(sizes["weight"]) == 4:
        outputs, inputs, *_ = sizes["weight"]
        return Conv(inputs, outputs, 5)
    outputs, inputs = sizes["weight"]
    return (Output if is_last else Dense)(inputs, outputs)


class Chain(nn.Sequential):
    """Layers in a row that note when each begins and ends, forward and backward.

    A layer's backward begins when the gradient of its output is there, and ends when that of its input is.
    """

    def __init__(self, modules: OrderedDict[str, nn.Module]):
        super().__init__(modules)
        self.recorder: Recorder | None = None
        self.passed: Pass | None = None  # the pass whose backward is still to come
        self.stage, self.rank = 0, None
        self.left_out: tuple[str, ...] = ()  # layers that this rank's passes go around
        self.watch_first_gradients()

    def watch_first_gradients(self) -> None:
        """To be called again by who replaces the parameters.

        Where the input needs no gradient, the way back ends with the own gradients of the first layer that is trained.
        Not with the end of `backward`: there DDP waits for its all-reduce, and a wait is not compute.
        """
        first = next(filter(_is_trained, self.children()), nn.Identity())
        for parameter in first.parameters():
            parameter.register_post_accumulate_grad_hook(self._first_gradient)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        recorder = self.recorder
        layers = [(name, layer) for name, layer in self.named_children() if name not in self.left_out]
        if recorder is None or not recorder.recording:
            for _, layer in layers:
                x = layer(x)
            return x
        passed = self.passed = recorder.begin_pass(self.stage, self.rank)
        if x.requires_grad:
            x.register_hook(lambda gradient: passed.gradient_of("input"))
        for name, layer in layers:
            passed.begin(name)
            x = layer(x)
            passed.end_forward()
            if not x.requires_grad:
                passed.stopped.add(name)
            else:
                x.register_hook(lambda gradient, name=name: passed.gradient_of(name))
        return x

    def _first_gradient(self, parameter: torch.Tensor) -> None:
        if self.passed is not None:
            self.passed.gradient_of("input")

    def loss(self, output: torch.Tensor, target: torch.Tensor, per_sample: float | None) -> torch.Tensor:
        """The loss counts as the end of the last layer's forward."""
        loss = loss_of(output, target, per_sample)
        if self.passed is not None:
            self.passed.end_forward()
        return loss

    def backward(self, output: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Backward through the chain's last pass, from `output` (the loss, or what it sent on); of first layers of
        which none is trained there is nothing to do."""
        if self.passed is None or not output.requires_grad:
            _go_back(output, gradient)
            return
        self.passed.begin_backward()
        _go_back(output, gradient)
        self.passed.end_backward()
        self.passed = None


def _is_trained(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def _go_back(output: torch.Tensor, gradient: torch.Tensor | None) -> None:
    if output.requires_grad:
        output.backward(gradient)


_looked_at: list[tuple[Job, Chain]] = []  # a model that was only looked at: whoever builds the same one next has it


def build(job: Job, *, to_look_at: bool = False) -> Chain:
    """The whole model on the CPU; the same seed gives the same weights on every rank."""
    if _looked_at and _looked_at[0][0] is job:
        return _looked_at.pop()[1]
    torch.manual_seed(job.spec.seed)
    spec, last = job.spec, job.layers[-1]
    modules = [(layer.name, _module(layer, spec, is_last=layer is last)) for layer in job.layers]
    for layer, (_, module) in zip(job.layers, modules, strict=True):
        module.requires_grad_(not layer.frozen)
    chain = Chain(OrderedDict(modules)).to(dtype_of(spec))
    if to_look_at:
        _looked_at[:] = [(job, chain)]
    return chain


def dtype_of(spec: Spec) -> torch.dtype:
    """Of weights, gradients, optimizer state, and of what goes into the model and through it."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[spec.precision or "fp32"]


def piece(model: Chain, job: Job, stage: int) -> Chain:
    """The layers of one stage, sharing the model's parameters."""
    names = [layer.name for layer in job.stages[stage]]
    children = dict(model.named_children())
    part = Chain(OrderedDict((name, children[name]) for name in names))
    part.stage = stage
    return part


def ends(
    inputs: torch.Tensor, targets: torch.Tensor, *, is_first: bool, is_last: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of a batch what a device keeps: the inputs with the model's first layers, the targets with its last."""
    return inputs if is_first else None, targets if is_last else None


def loss_of(output: torch.Tensor, target: torch.Tensor, per_sample: float | None = None) -> torch.Tensor:
    """Mean cross entropy in fp32: [N, classes] with [N], or [N, context, vocabulary] with [N, context] -> scalar.
    `per_sample`: where targets are left out, how many a sample has on average, whether or not these samples have."""
    if per_sample is None:
        return F.cross_entropy(output.flatten(0, -2).float(), target.flatten())
    total = F.cross_entropy(output.flatten(0, -2).float(), target.flatten(), ignore_index=LEFT_OUT, reduction="sum")
    return total / (per_sample * len(target))


def make_optimizer(job: Job, parameters) -> torch.optim.Optimizer:
    """Of those parameters that are trained."""
    kind, settings = optimizer_of(job.spec)
    return on_parts(kind, [each for each in parameters if each.requires_grad], **settings)


def optimizer_of(spec: Spec) -> tuple[type[torch.optim.Optimizer], dict[str, float]]:
    """PyTorch's class, and its settings."""
    if spec.optimizer == "sgd":
        return torch.optim.SGD, {"lr": spec.lr, "momentum": 0.9}
    return torch.optim.AdamW, {"lr": spec.lr}
