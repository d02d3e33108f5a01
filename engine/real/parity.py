"""The first steps of a run and the same steps on one device -> how far losses, gradients and parameters are apart.

Rank 0 trains the reference from the same weights on the same global batches and sends it to all; every rank compares
what it holds. That each parameter was compared by somebody is checked, so a forgotten one cannot pass. What differs
from one device by design is held to a simulation of that design instead, just as closely.
"""

from __future__ import annotations

import json
import math
import re

import torch
import torch.distributed as dist

from engine.job import Job
from engine.real.parts import copy
from engine.real.reference import Trained, by_design, one_device, simulated
from engine.real.training import Place, Training, whole_of_each
from engine.spec import Spec


def tolerance(spec: Spec) -> dict[str, float]:
    """fp32 sums in another order differ in the last bits; a missing or doubled reduction is off by far more than this.

    SGD moves a weight by lr x gradient, so parameters agree as gradients do. AdamW divides a gradient by its own size,
    so a rounding difference in a tiny gradient moves a weight by a part of lr: a fifth of it, over the steps compared,
    is allowed. (A wrong gradient moves most weights by about lr in each step.) The gradients of later steps then are
    those of slightly other weights, and 1 % of a tensor's largest entry is allowed. A norm is off by no more than the
    gradients are.
    """
    if spec.precision == "bf16":
        return _tolerance_of_bf16(spec)
    if spec.compress == "fp16":
        allowed = _tolerance_of_fp16(spec)
    elif spec.optimizer == "sgd":
        allowed = {"loss_max_abs_diff": 1e-4, "grad_max_rel_diff": 1e-3, "param_max_abs_diff": 1e-4}
    else:
        allowed = {"loss_max_abs_diff": 1e-4, "grad_max_rel_diff": 1e-2, "param_max_abs_diff": 0.2 * spec.lr + 1e-6}
    return allowed | ({"norm_max_rel_diff": allowed["grad_max_rel_diff"]} if spec.clip is not None else {})


def _tolerance_of_fp16(spec: Spec) -> dict[str, float]:
    """Each rank's gradients are rounded to 11 bits, u = 2^-11, and so is each of the sums over n ranks: n + 1 roundings
    in all, of numbers that may be some 4 times as large as their average, since ranks partly cancel each other.

    With momentum 0.9 three steps move a weight by 6 lr times a gradient of 1. AdamW may take a gradient near 0 for its
    opposite, and go 2 lr astray.
    """
    gradient = 4 * (spec.devices + 1) * 2.0**-11
    weight = 6 * spec.lr * gradient if spec.optimizer == "sgd" else 2 * spec.lr
    return {"loss_max_abs_diff": 1e-3, "grad_max_rel_diff": gradient, "param_max_abs_diff": weight}


def _tolerance_of_bf16(spec: Spec) -> dict[str, float]:
    """The reference computes in bf16 too, but sums in another order, and each result is rounded to 8 bits: u = 2^-9.

    Where a model has kinks (ReLU, the four candidates of a max pool), up to 4 u of its units lie so near to one that
    rounding decides their side, and what these add to a gradient is there or not: of a tensor's norm about sqrt(4 u),
    of which twice is allowed, 18 %. A single entry may be mostly of such a unit, so it may be off by as much as the
    largest entry is large. Over all gradients kinks are many and even out: their norm is off by the rounding of a few
    sums, 8 u. A logit of size 2 is rounded by 2 u in each of three layers, and a loss is off by that, 6 u. A weight
    near 1 may be rounded to its neighbour, 2^-7 away; AdamW may also take a gradient near 0 for its opposite, and go
    2 lr astray.

    A token between two experts is such a unit too, and goes as a whole: of an expert's n tokens 4 u n, or one.
    """
    u, near = 2.0**-9, 4 * 2.0**-9
    if spec.experts:
        near = max(near, spec.experts / (spec.global_batch * spec.context * spec.top_k))
    allowed = {
        "loss_max_abs_diff": 6 * u,
        "grad_max_rel_diff": 1.0,
        "param_max_abs_diff": 2.0**-7 + (2 * spec.lr if spec.optimizer == "adamw" else 0),
        "grad_norm_rel_diff": 2 * near**0.5,
    }
    return allowed | ({"norm_max_rel_diff": 8 * u} if spec.clip is not None else {})


class Parity:
    def __init__(self, job: Job, place: Place, training: Training):
        self.job, self.place, self.training = job, place, training
        self.steps = job.parity_steps
        self.losses: list[float | None] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.routed: list[dict[str, list[list[int]]]] = []  # block -> tokens of each expert, in each pass
        self.norms: list[float | None] = []

    def keep_norm(self, step: int, norm: float | None) -> None:
        """Of all gradients, before they were clipped; None where they are not."""
        if step < self.steps:
            self.norms.append(norm)

    def keep_gradients(self, step: int, loss: float | None, routed: dict[str, list[list[int]]]) -> None:
        if step < self.steps:
            self.losses.append(loss)
            self.routed.append(routed)
            held = self.training.held().items()
            self.gradients.append({name: copy(p.grad) for name, p in held if p.grad is not None})

    def compare(self) -> None:
        """Collective: every rank calls it after step `steps - 1`. Rank 0 writes parity.json."""
        why = by_design(self.job)
        known = [None]
        if self.place.rank == 0:
            known = [
                [
                    one_device(self.job, self.steps, self.place.run_dir),
                    *(simulated(self.job, self.steps) if why else ()),
                ]
            ]
        if self.place.world_size > 1:
            dist.broadcast_object_list(known)
        reference, *of_ranks = known[0]
        mine = [self._report(reference), *(self._report(each) for each in of_ranks[self.place.rank :][:1])]
        reports = [mine]
        if self.place.world_size > 1:
            reports = [None] * self.place.world_size if self.place.rank == 0 else None
            dist.gather_object(mine, reports)
        if self.place.rank == 0:
            names, allowed = sorted(reference.parameters), tolerance(self.job.spec)
            first = [each[0] for each in reports]
            result = verdict(first, reference.losses, names, self.steps, allowed)
            apart = first[:: self.job.routing_alike]
            both = zip(zip(*(report["routed"] for report in apart), strict=True), reference.routed, strict=True)
            strays = sum(strayed(ranks, wanted) for ranks, wanted in both)
            if strays and not result["ok"]:
                result["reason"] += f"; {strays} tokens went to another expert than on one device"
            if why:
                means = [sum(losses) / len(of_ranks) for losses in zip(*(r.losses for r in of_ranks), strict=True)]
                exact = verdict([each[1] for each in reports], means, names, self.steps, allowed)
                result = design(result, exact, why)
            (self.place.run_dir / "parity.json").write_text(json.dumps(result))
        self.gradients.clear()

    def _report(self, reference: Trained) -> dict:
        """How far what this rank holds is from a reference; collective where it holds shards."""
        held = self.training.held()
        each = {name: [p, *(kept[name] for kept in self.gradients if name in kept)] for name, p in held.items()}
        mine = whole_of_each(each)
        scales = [sizes(gradients) for gradients in reference.gradients]
        pairs = [
            (gradient, wanted[name], scale[name])
            for name, (_, *gradients) in mine.items()
            if gradients  # none of a frozen layer, whose parameters are to stay as they were
            for gradient, wanted, scale in zip(gradients, reference.gradients, scales, strict=True)
        ]
        norms = zip(self.norms, reference.norms, strict=True)
        return {
            "held": sorted(mine),
            "losses": self.losses,
            "routed": self.routed,
            "grad": max((relative(mine, wanted) for mine, wanted, _ in pairs), default=0.0),
            "apart": max((apart(mine, wanted, scale) for mine, wanted, scale in pairs), default=0.0),
            "norm": max((_relative_to(mine, wanted) for mine, wanted in norms if wanted), default=None),
            "param": max((_largest(mine[n][0] - reference.parameters[n]) for n in mine), default=0.0),
        }


def _largest(tensor: torch.Tensor) -> float:
    """The largest absolute value; NaN anywhere is infinitely wrong."""
    value = tensor.abs().max().item() if tensor.numel() else 0.0
    return math.inf if math.isnan(value) else value


def relative(mine: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference over the tensor, relative to the reference's largest entry."""
    scale = _largest(reference)
    if not math.isfinite(scale):
        return math.inf
    return _largest(mine - reference) / scale if scale else (0.0 if not _largest(mine) else math.inf)


def sizes(gradients: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of each gradient the norm; of an expert's, the quadratic mean over the block's experts, as some get few."""
    alike: dict[str, list[str]] = {}
    for name in gradients:
        alike.setdefault(re.sub(r"(?<=\.experts\.)\d+", "", name), []).append(name)
    norms = {name: torch.linalg.vector_norm(gradient.float()).item() for name, gradient in gradients.items()}
    return {n: math.hypot(*map(norms.get, names)) / len(names) ** 0.5 for names in alike.values() for n in names}


def apart(mine: torch.Tensor, reference: torch.Tensor, scale: float) -> float:
    """The norm of the difference, relative to `scale`."""
    difference = torch.linalg.vector_norm((mine - reference).float()).item()
    if math.isnan(difference) or math.isnan(scale):
        return math.inf
    return difference / scale if scale else (0.0 if not difference else math.inf)


def _relative_to(mine: float | None, reference: float) -> float:
    """Without a norm of its own a rank is infinitely wrong."""
    return math.inf if mine is None else _distance(mine, reference) / reference


def _distance(a: float, b: float) -> float:
    """NaN on either side is infinitely far: a comparison with NaN is never true, so it must not reach `max`."""
    difference = abs(a - b)
    return math.inf if math.isnan(difference) else difference


def verdict(reports: list[dict], losses: list[float], names: list[str], steps: int, allowed: dict[str, float]) -> dict:
    """Every rank's report against the reference -> the parity of a run (see the README for its keys)."""
    held = {name for report in reports for name in report["held"]}
    worst = {
        "loss_max_abs_diff": max((_distance(_mean_loss(reports, s), losses[s]) for s in range(steps)), default=0.0),
        "grad_max_rel_diff": max(report["grad"] for report in reports),
        "param_max_abs_diff": max(report["param"] for report in reports),
    }
    if "grad_norm_rel_diff" in allowed:
        worst["grad_norm_rel_diff"] = max(report["apart"] for report in reports)
    norms = [report["norm"] for report in reports if report.get("norm") is not None]
    if norms:
        worst["norm_max_rel_diff"] = max(norms)
    reasons = [
        f"{name} is {value:.3g}, more than {allowed[name]:.0e}"
        for name, value in worst.items()
        if not value <= allowed[name]
    ]
    if missing := sorted(set(names) - held):
        reasons.append(f"no rank holds {', '.join(missing)}")
    shown = {name: value if math.isfinite(value) else None for name, value in worst.items()}
    return {"ok": not reasons, **shown, "tolerance": allowed, "reason": "; ".join(reasons) or None, "steps": steps}


def design(result: dict, exact: dict, why: str) -> dict:
    """A run that is not to equal one device: its distance from that is told and not judged, and whether it equals what
    its design comes to is. It is never simply right, but it can be wrong."""
    if exact["ok"]:
        return result | {"ok": None, "reason": why, "exact": exact}
    reason = f"not what its design comes to: {exact['reason']}"
    return result | {"ok": False, "reason": reason, "exact": exact}


def strayed(ranks: list[dict[str, list[list[int]]]], reference: dict[str, list[list[int]]]) -> int:
    """Tokens that ranks gave to other experts than one device did in a step, at least. Where two experts' scores for a
    token are equal but for the last bits, a sum in another order can choose the other one, and that is no fault."""
    apart = 0
    for block, wanted in reference.items():
        got = [sum(counts) for counts in zip(*(row for rank in ranks for row in rank.get(block, ())), strict=True)]
        apart += sum(abs(a - sum(b)) for a, b in zip(got, zip(*wanted, strict=True), strict=True))
    return apart // 2


def _mean_loss(reports: list[dict], step: int) -> float:
    """Every rank that computes a loss sees as many samples as any other, so the mean over ranks is the global mean."""
    known = [report["losses"][step] for report in reports if report["losses"][step] is not None]
    return sum(known) / len(known)
