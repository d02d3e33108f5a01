"""A job through torch.distributed.pipelining: PyTorch's own stages and schedules, with marks around each chunk."""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from engine.job import Job
from engine.real import models
from engine.real.data import Batches
from engine.real.recorder import Recorder
from engine.real.training import Place

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def training(job: Job, place: Place) -> "Pipeline":
    return Pipeline(job, place)


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

    def backward_one_chunk(self, bwd_chunk_id, *args, **kwargs):
        with self.recorder.span("backward", stage=self.stage_index, microbatch=bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

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


class Pipeline:
    def __init__(self, job: Job, place: Place):
        self.job, self.recorder, stage = job, place.recorder, place.rank
        self.chain = models.piece(models.build(job), job, stage).to(place.device)
        self.optimizer = models.make_optimizer(job, self.chain.parameters())
        self.batches = Batches(job, 0, 1, place.device)
        samples = job.spec.global_batch // job.spec.microbatches
        output = torch.zeros(samples, *job.stages[stage][-1].output, device=place.device, requires_grad=True)
        if stage == 0:
            example = self.batches(0)[0][:samples]
        else:
            shape = job.stages[stage - 1][-1].output
            example = torch.zeros(samples, *shape, device=place.device, requires_grad=True)
        self.stage = MarkedStage(
            self.chain, stage, place.world_size, place.device, input_args=(example,), output_args=(output,)
        )
        self.stage.recorder = place.recorder
        self.schedule = SCHEDULES[job.spec.schedule](self.stage, job.spec.microbatches, loss_fn=self._loss)
        # The first pass through a schedule also agrees on shapes; it is run once before any step is counted.
        self._pass(*self.batches(0))

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = models.loss_of(output, target)
        self.stage.end_forward()
        return loss

    def make_gradients(self, step: int) -> float | None:
        self.optimizer.zero_grad()
        if self.stage.is_first or self.stage.is_last:
            with self.recorder.span("load", payload="batch"):
                inputs, targets = self.batches(step)
            return self._pass(inputs, targets)
        return self._pass(None, None)

    def _pass(self, inputs: torch.Tensor | None, targets: torch.Tensor | None) -> float | None:
        losses: list[torch.Tensor] = []
        feed = (inputs,) if self.stage.is_first else ()
        wanted = {"target": targets, "losses": losses} if self.stage.is_last else {}
        self.schedule.step(*feed, **wanted)
        return torch.stack(losses).mean().item() if losses else None

    def held(self) -> dict[str, nn.Parameter]:
        return dict(self.chain.named_parameters())
