"""Text -> the layers that are not trained, as in fine-tuning: they keep their weights, and have no gradients.

Through a frozen layer the gradient of what came in goes back to layers before it that are trained. Where there are none
nothing goes back: autograd keeps nothing of those layers, and nobody waits for a gradient of their output.

A product's gradient for its input needs its weight, and that of its weight its input. So a frozen layer keeps no input
of a product that nothing else needs: what norms put out, and what an MLP's last matrix takes. The first trained layer,
behind those of which nothing goes back, keeps nothing for its input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from engine.asking.rules import SpecError
from engine.model.decoder import Decoder
from engine.model.shapes import Layer
from engine.spec import Spec

SCHEDULES = ("gpipe", "1f1b")  # one stage a device, every backward whole


def names(spec: Spec) -> tuple[str, ...]:
    return tuple(name.strip() for name in spec.freeze.split(",")) if spec.freeze else ()


def mark(spec: Spec, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The layers, of which those that are frozen know it. SpecError where one is not there, or none is left."""
    frozen = names(spec)
    if spec.freeze is None:
        return layers
    known = [layer.name for layer in layers]
    if not set(frozen) < set(known):
        wanted = [name for name in known if name in frozen] or known
        suggest = [",".join(wanted[: len(known) - 1])] if len(known) > 1 else []
        raise SpecError("bad_freeze", "freeze", spec.freeze, suggest=suggest, layers=", ".join(known))
    first = next(i for i, name in enumerate(known) if name not in frozen)
    marked = [replace(layer, frozen=layer.name in frozen, stops=i < first) for i, layer in enumerate(layers)]
    followed = zip(marked, [*marked[1:], None], strict=True)
    saved = [_saved(spec, layer, after, is_first=i == first > 0) for i, (layer, after) in enumerate(followed)]
    return tuple(
        replace(layer, saved=size, products=layer.products * (layer.products < size))
        for layer, size in zip(marked, saved, strict=True)
    )


def _saved(spec: Spec, layer: Layer, after: Layer | None, *, is_first: bool) -> int:
    """Bytes that a layer keeps of a sample, of which some or others are frozen. `is_first`: nothing goes back before
    it."""
    if layer.stops:
        return layer.output_bytes if after and not after.stops and _keeps_input(spec, after) else 0
    saved = layer.saved - (_for_weights(spec, layer) if layer.frozen else 0)
    if is_first and not layer.frozen:
        saved -= _for_input(spec, layer)
    is_pooled = len(layer.params[0][1]) == 4  # what else a layer puts out its own kernel keeps, or the next one's
    return saved - (layer.output_bytes if is_pooled and after and after.frozen and len(after.params[0][1]) == 2 else 0)


def _keeps_input(spec: Spec, layer: Layer) -> bool:
    """Whether the first layer that is trained does: a product's weight needs it, and to be computed again all do. What
    a norm's weight needs it makes itself."""
    again = spec.recompute == "full" or (spec.recompute == "selective" and layer.products > 0)
    return again or not _for_input(spec, layer)


def _for_input(spec: Spec, layer: Layer) -> int:
    """What a norm at a layer's beginning, taken in steps, keeps for the gradient of its input alone."""
    if not any(name.startswith("norm") for name, _ in layer.params) or (sizes := Decoder.of(spec, layer.item)).fused:
        return 0
    return sizes.scale_saved()


def _for_weights(spec: Spec, layer: Layer) -> int:
    """What a layer of a decoder keeps for the gradients of its weights alone: of norms all but what their inputs need;
    of each token, or of each of its copies for experts, the input of the last matrix, and experts' inputs."""
    shapes = dict(layer.params)
    norms = sum(name.startswith("norm") for name in shapes)
    if not norms:
        return 0
    sizes = Decoder.of(spec, layer.item)
    widths = [shapes[name][0] for name in ("up.weight", "shared.up.weight") if name in shapes]
    if "experts.0.up.weight" in shapes:
        widths += [spec.top_k * sum(shapes["experts.0.up.weight"])]
    return norms * (sizes.norm_saved() - sizes.scale_saved()) + layer.item * sizes.context * sum(widths)


def check(spec: Spec) -> None:
    """Rules that join it with other settings, of a spec whose defaults are filled in."""
    if spec.freeze is None:
        return
    for other, without in (("leave_out", (None,)), ("compress", (None, "none")), ("compile_stage", (None, "none"))):
        if getattr(spec, other) not in without:
            raise SpecError("exclusive", "freeze", spec.freeze, other=other.replace("_", "-"))
    if spec.schedule not in (None, *SCHEDULES):
        raise SpecError("schedule_of_frozen", "schedule", spec.schedule, suggest=SCHEDULES)
    if spec.schedule_file is not None:
        raise SpecError("exclusive", "freeze", spec.freeze, other="schedule-file")
    if spec.receives == "early":
        raise SpecError("exclusive", "freeze", spec.freeze, other="receives early")


def trained(layers: Iterable[Layer]) -> list[Layer]:
    return [layer for layer in layers if not layer.frozen]


def goes_back(layers: Sequence[Layer]) -> bool:
    """Whether the gradient of what the last of these layers puts out is asked for."""
    return not layers[-1].stops
