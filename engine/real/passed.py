"""The moments of a pass through a chain of layers and back -> spans, one a layer, or one a piece between waits.

Of a scale model these are also the moments at which a layer, or a piece of it, may begin, and may be over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.real.recorder import Recorder


class Pass:
    """One pass of a batch through a chain of layers and back: moments, turned into spans when the step ends."""

    def __init__(self, recorder: Recorder, stage: int, rank: int | None, microbatch: int):
        self.recorder, self.where = recorder, {"stage": stage, "microbatch": microbatch, "rank": rank}
        self.kind = "backward"  # of the way back, or a half of it
        self.forward: dict[str, list[int]] = {}  # layer: begin, end (moments)
        self.stopped: set[str] = set()  # layers through which nothing goes back: none up to them is trained
        self.gradients: dict[str, int] = {}  # layer, or "input": when the gradient of its output became known
        self.own_ends: dict[str, int] = {}  # layer: when its backward ended, where something else follows it
        self.recomputed: dict[str, list[int]] = {}  # layer: begin, end (moments)
        self.backward_began = self.backward_ended = 0
        self.waits: list[tuple[int, int]] = []  # from a collective's call to its result, in order
        self.layer = ""
        self.recomputing, self.given = False, ()
        self.at = (stage, microbatch)
        self.going_on, self.piece = ("", ""), 0  # (kind, layer), and how often it has waited
        self.waited_before = 0  # it was computed again

    def begin(self, layer: str) -> None:
        self.layer = layer
        self.recorder.doing = f"forward {layer}"
        self._enter("forward", layer)
        self.forward[layer] = [self.recorder.moment(), 0]

    def end_forward(self) -> None:
        self.pause()  # of the last layer this is asked twice: its loss counts as its end
        self.forward[self.layer][1] = self.recorder.moment()

    @property
    def ways_back(self) -> list[str]:
        """The layers that go back, in the order of forward."""
        return [layer for layer in self.forward if layer not in self.stopped]

    def begin_backward(self) -> None:
        self.recorder.go_back(self)
        self.recomputed: dict[str, list[int]] = {}  # layer: begin, end (moments)
        self._enter(self.kind, self.layer)
        self.backward_began = self.recorder.moment()

    def end_backward(self) -> None:
        for first in self.ways_back[:1]:
            self._leave(self.kind, first)
        self.backward_ended = self.recorder.moment()

    def gradient_of(self, layer: str) -> None:
        """What comes after the way back, in a later half of it, does not count."""
        if self.backward_ended:
            return
        if self.recorder.pace.active:
            self._take_turns(layer)
        self.gradients[layer] = self.recorder.moment()

    def end_backward_of(self, layer: str) -> None:
        if not self.backward_ended:
            self._leave(self.kind, layer)
            self.own_ends[layer] = self.recorder.moment()

    @property
    def payload(self) -> str:
        """What ranks exchange now."""
        return "gradient" if self.backward_began and not self.recomputing else "activation"

    def begin_recompute(self, layer: str, given: tuple[str, ...]) -> None:
        """`given`: kinds of collectives whose results were kept, and which are called for them alone."""
        self.recorder.doing = f"recompute {layer}"
        self.waited_before = self.piece
        self._enter("recompute", layer)
        self.recomputed[layer] = [self.recorder.moment(), 0]
        self.recomputing, self.given = True, given

    def end_recompute(self, layer: str) -> None:
        self._leave("recompute", layer)
        self.recomputed[layer][1] = self.recorder.moment()
        self.recomputing, self.given = False, ()
        self._enter(self.kind, layer, self.waited_before)

    # --- a scale model --------------------------------------------------------------------------------------------

    def _take_turns(self, layer: str) -> None:
        """On the way back: return when the layer after this one may be over, and this one may begin."""
        layers = self.ways_back
        place = 0 if layer == "input" else layers.index(layer) + 1
        if place < len(layers):
            self._leave(self.kind, layers[place])
            if layer != "input":
                self._enter(self.kind, layer)

    def _enter(self, kind: str, layer: str, piece: int = 0) -> None:
        """Return when a layer, or what is left of it after it has waited so often, may begin."""
        self.going_on, self.piece = (kind, layer), piece
        self._begin()

    def _begin(self) -> None:
        """The piece that goes on, or what is computed again before it."""
        pace, (kind, layer) = self.recorder.pace, self.going_on
        if not pace.active:
            return
        names = {word: self._pieces(word, layer) for word in (kind, "recompute")}
        own = (kind, *self.at, names[kind][min(self.piece, len(names[kind]) - 1)])
        again = ("recompute", *self.at, names["recompute"][0])
        goes_back = kind not in ("forward", "recompute")
        first = goes_back and layer not in self.recomputed and pace.place(*again) < pace.place(*own)
        pace.begin(*(again if first else own))

    def _leave(self, kind: str, layer: str) -> None:
        """Return when all of a layer's pieces may be over."""
        if self.recorder.pace.active:
            self.recorder.pace.complete(kind, *self.at, self._pieces(kind, layer)[-1])

    def pause(self) -> None:
        """Return when the piece that goes on may be over: the layer then waits for others."""
        if self.recorder.pace.active:
            names = self._pieces(*self.going_on)
            self.recorder.pace.complete(self.going_on[0], *self.at, names[min(self.piece, len(names) - 1)])

    def resume(self) -> None:
        """Return when the next piece may begin."""
        self.piece += 1
        self._begin()

    def _pieces(self, kind: str, layer: str) -> tuple[str, ...]:
        return self.recorder.pieces(kind, layer) or (layer,)

    # --- spans ----------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        layers = self.ways_back
        for layer, (start, end) in self.forward.items():
            self._mark("forward", layer, start, end)
        if not self.backward_ended or not layers:
            return
        start = self.backward_began
        for layer, before in zip(reversed(layers), [*reversed(layers[:-1]), "input"], strict=True):
            end = self.gradients.get(before, self.backward_ended)
            if layer in self.own_ends:  # it begins when its gradient is there, and waits before and after are not its
                start, end = self.gradients[layer], self.own_ends[layer]
            first = 0
            if layer in self.recomputed:
                begun, done = self.recomputed[layer]
                self._mark("recompute", layer, begun, done)
                early = [wait for wait in self.waits if start <= wait[0] <= begun]  # for what needs nothing of it
                if early:
                    self._mark(self.kind, layer, start, early[-1][0])
                first, start = len(early), max(done, early[-1][1] if early else 0)
            self._mark(self.kind, layer, start, end, first)
            start = end

    def _mark(self, kind: str, layer: str, start: int, end: int, first: int = 0) -> None:
        """What a layer computed, cut where it waited: a wait is not compute. `first`: pieces marked already."""
        waits = [wait for wait in self.waits if start <= wait[0] and wait[1] <= end]
        names = self.recorder.pieces(kind, layer)[first:]
        begins, ends = [start, *(w[1] for w in waits)], [*(w[0] for w in waits), end]
        for i, (begin, stop) in enumerate(zip(begins, ends, strict=True)):
            self.recorder.mark(kind, begin, stop, part=names[i] if i < len(names) else layer, **self.where)
