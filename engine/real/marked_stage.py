"""PyTorch's pipeline stage -> the same, telling the recorder of each chunk's compute and of each message."""

from torch.distributed.pipelining import PipelineStage

from engine.real.recorder import Recorder


class MarkedStage(PipelineStage):
    """PyTorch's stage, noting each chunk's compute and each message in the order in which it issues them."""

    recorder: Recorder

    def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
        self.forward_began, self.chunk = self.recorder.now(), fwd_chunk_id
        self.recorder.doing = f"forward of microbatch {fwd_chunk_id}"
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.is_last:
            self.end_forward()
        return output

    def end_forward(self) -> None:
        """On the last stage the loss counts as the end of the forward, so its loss function calls this."""
        self.recorder.mark(
            "forward", self.forward_began, self.recorder.now(), stage=self.stage_index, microbatch=self.chunk
        )

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
        kind = "backward" if full_backward else "backward_input"
        with self.recorder.span(kind, stage=self.stage_index, microbatch=bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id, last_backward=False):
        with self.recorder.span("backward_weight", stage=self.stage_index, microbatch=bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

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
            self.recorder.message(
                kind, stage=self.stage_index, microbatch=chunk, payload=payload, peer=op.peer, size=op.tensor.nbytes
            )
        return ops
