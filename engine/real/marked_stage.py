"""PyTorch's pipeline stage -> the same, telling the recorder of each chunk's compute and of each message."""

from contextlib import AbstractContextManager

from torch.distributed.pipelining import PipelineStage

from engine.real.recorder import Recorder


class MarkedStage(PipelineStage):
    """PyTorch's stage, noting each chunk's compute and each message in the order in which it issues them."""

    recorder: Recorder
    first = 0  # microbatches of the step's earlier passes through the schedule

    def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
        self.begin_forward(fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.is_last:
            self.end_forward()
        return output

    def begin_forward(self, chunk: int) -> None:
        self.chunk = self.first + chunk
        self.recorder.pace.begin("forward", self.stage_index, self.chunk)
        self.forward_began = self.recorder.moment()
        self.recorder.doing = f"forward of microbatch {self.chunk}"

    def end_forward(self) -> None:
        """On the last stage the loss counts as the end of the forward, so its loss function calls this."""
        self.recorder.pace.complete("forward", self.stage_index, self.chunk)
        self.recorder.mark(
            "forward", self.forward_began, self.recorder.moment(), stage=self.stage_index, microbatch=self.chunk
        )

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
        kind = "backward" if full_backward else "backward_input"
        with self.going_back(kind, self.first + bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id, last_backward=False):
        with self.going_back("backward_weight", self.first + bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def going_back(self, kind: str, chunk: int) -> AbstractContextManager:
        """Around a backward of a chunk, or half of one."""
        return self.recorder.span(kind, stage=self.stage_index, microbatch=chunk)

    def get_fwd_recv_ops(self, fwd_chunk_id):
        return self._noted(super().get_fwd_recv_ops(fwd_chunk_id), "recv", "activation", fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id):
        return self._noted(super().get_fwd_send_ops(fwd_chunk_id), "send", "activation", fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id):
        return self._noted(super().get_bwd_recv_ops(bwd_chunk_id), "recv", "gradient", bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id):
        return self._noted(super().get_bwd_send_ops(bwd_chunk_id), "send", "gradient", bwd_chunk_id)

    def _noted(self, ops, kind: str, payload: str, chunk: int):
        for op in ops:
            where = {
                "stage": self.stage_index,
                "microbatch": self.first + chunk,
                "peer": self.recorder.coordinate(op.peer, "pp"),
            }
            self.recorder.message(kind, payload=payload, size=op.tensor.nbytes, **where)
        return ops
