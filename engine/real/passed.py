"""The moments of a pass through a chain of layers and back -> spans, one a layer, or one a piece between waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.real.recorder import Recorder


class Pass:
    """One pass of a batch through a chain of layers and back: moments, turned into spans when the step ends."""

    def __init__(self, recorder: Recorder, stage: int, rank: int | None, microbatch: int):
        self.recorder, self.where = recorder, {"stage": stage, "microbatch": microbatch, "rank": rank}
        self.kind = "backward"  # of the way back, or a half of it
        self.forward: dict[str, list[int]] = {}  # layer: begin, end (ns)
        self.gradients: dict[str, int] = {}  # layer, or "input": when the gradient of its output became known
        self.own_ends: dict[str, int] = {}  # layer: when its backward ended, where something else follows it
        self.recomputed: dict[str, list[int]] = {}  # layer: begin, end (ns)
        self.backward_began = self.backward_ended = 0
        self.waits: list[tuple[int, int]] = []  # from a collective's call to its result (ns), in order
        self.layer = ""
        self.recomputing, self.given = False, ()

    def begin(self, layer: str) -> None:
        self.layer = layer
        self.recorder.doing = f"forward {layer}"
        self.forward[layer] = [self.recorder.now(), 0]

    def end_forward(self) -> None:
        self.forward[self.layer][1] = self.recorder.now()

    def begin_backward(self) -> None:
        self.recorder.go_back(self)
        self.recomputed: dict[str, list[int]] = {}  # layer: begin, end (ns)
        self.backward_began = self.recorder.now()

    def end_backward(self) -> None:
        self.backward_ended = self.recorder.now()

    def gradient_of(self, layer: str) -> None:
        """What comes after the way back, in a later half of it, does not count."""
        if not self.backward_ended:
            self.gradients[layer] = self.recorder.now()

    def end_backward_of(self, layer: str) -> None:
        if not self.backward_ended:
            self.own_ends[layer] = self.recorder.now()

    @property
    def payload(self) -> str:
        """What ranks exchange now."""
        return "gradient" if self.backward_began and not self.recomputing else "activation"

    def begin_recompute(self, layer: str, given: tuple[str, ...]) -> None:
        """`given`: kinds of collectives whose results were kept, and which are called for them alone."""
        self.recorder.doing = f"recompute {layer}"
        self.recomputed[layer] = [self.recorder.now(), 0]
        self.recomputing, self.given = True, given

    def end_recompute(self, layer: str) -> None:
        self.recomputed[layer][1] = self.recorder.now()
        self.recomputing, self.given = False, ()

    def collect(self) -> None:
        layers = list(self.forward)
        for layer, (start, end) in self.forward.items():
            self._mark("forward", layer, start, end)
        if not self.backward_ended:
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
        names = self.recorder.parts(kind, layer)[first:]
        begins, ends = [start, *(w[1] for w in waits)], [*(w[0] for w in waits), end]
        for i, (begin, stop) in enumerate(zip(begins, ends, strict=True)):
            self.recorder.mark(kind, begin, stop, part=names[i] if i < len(names) else layer, **self.where)
