"""PyTorch's pipeline stage -> the same, telling the recorder of each layer's compute, and of what lies between them."""

from collections.abc import Iterator
from contextlib import contextmanager

from engine.real.marked_stage import MarkedStage
from engine.real.passed import Pass
from engine.timeline import NONE


class LayeredStage(MarkedStage):
    """A stage whose layers are marked one by one, since there is communication between them, or each is computed
    again on the way back.

    The weights' half of a backward cannot be told apart by layers, and waits for nobody. A first stage leaves all of
    its backward to that half.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.passes: dict[int, Pass] = {}  # by microbatch, those whose backward is still to come

    def begin_forward(self, chunk: int) -> None:
        super().begin_forward(chunk)
        self.recorder.stage, self.recorder.microbatch = self.stage_index, self.chunk

    def end_forward(self) -> None:
        if passed := self.submod.passed:
            passed.end_forward()
            self.passes[self.chunk] = passed

    @contextmanager
    def going_back(self, kind: str, chunk: int) -> Iterator[None]:
        self.recorder.stage, self.recorder.microbatch = self.stage_index, chunk
        passed = None if self.is_first and kind == "backward_input" else self.passes.pop(chunk, None)
        self.submod.passed = passed
        if passed is None:
            with super().going_back(kind, chunk):
                yield
        else:
            passed.kind = kind
            passed.begin_backward()
            yield
            passed.end_backward()
            self.submod.passed = None
        self.recorder.stage = self.recorder.microbatch = NONE  # what comes next may be of no pass
