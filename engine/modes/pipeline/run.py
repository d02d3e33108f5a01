"""A job through torch.distributed.pipelining: PyTorch's own stages and schedules, with marks around each chunk."""

from typing import ClassVar

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from engine import schedules
from engine.job import Job
from engine.real import models
from engine.real.data import Batches
from engine.real.recorder import Recorder
from engine.real.training import Place

ONE_STAGE = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
SEVERAL_STAGES = {
    "looped_bfs": pipelining.ScheduleLoopedBFS,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}


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


class Pipeline:
    norm_groups: ClassVar = {"pp": None}  # each parameter is on one of its ranks

    def __init__(self, job: Job, place: Place):
        self.job, self.recorder = job, place.recorder
        spec, whole = job.spec, models.build(job)
        placement = schedules.placement(spec.schedule, place.world_size, spec.stages_per_rank)
        self.batches = Batches(job, 0, 1, place.device)
        self.stages = [self._stage(whole, stage, place) for stage in placement[place.rank]]
        self.is_first = any(stage.is_first for stage in self.stages)
        self.last = next((stage for stage in self.stages if stage.is_last), None)
        self.optimizer = models.make_optimizer(job, self.held().values())
        if spec.schedule in ONE_STAGE:
            self.schedule = ONE_STAGE[spec.schedule](self.stages[0], spec.microbatches, loss_fn=self._loss)
        else:  # never with defer_pp_recv: it mixes up messages (docs/decisions/schedules.md)
            self.schedule = SEVERAL_STAGES[spec.schedule](self.stages, spec.microbatches, loss_fn=self._loss)
        # The first pass through a schedule also agrees on shapes; it is run once before any step is counted.
        self._pass(*self.batches(0))

    def _stage(self, whole: models.Chain, stage: int, place: Place) -> MarkedStage:
        job, device = self.job, place.device
        like = {"device": device, "dtype": models.dtype_of(job.spec), "requires_grad": True}
        samples = job.spec.global_batch // job.spec.microbatches
        output = torch.zeros(samples, *job.stages[stage][-1].output, **like)
        if stage == 0:
            example = self.batches(0)[0][:samples]
        else:
            shape = job.stages[stage - 1][-1].output
            example = torch.zeros(samples, *shape, **like)
        chain = models.piece(whole, job, stage).to(device)
        marked = MarkedStage(chain, stage, len(job.stages), device, input_args=(example,), output_args=(output,))
        marked.recorder = place.recorder
        return marked

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = models.loss_of(output, target)
        self.last.end_forward()
        return loss

    def make_gradients(self, step: int) -> float | None:
        self.optimizer.zero_grad()
        if self.is_first or self.last:
            with self.recorder.span("load", payload="batch"):
                inputs, targets = self.batches(step)
            return self._pass(inputs, targets)
        return self._pass(None, None)

    def _pass(self, inputs: torch.Tensor | None, targets: torch.Tensor | None) -> float | None:
        losses: list[torch.Tensor] = []
        feed = (inputs,) if self.is_first else ()
        wanted = {"target": targets, "losses": losses} if self.last else {}
        self.schedule.step(*feed, **wanted)
        return torch.stack(losses).mean().item() if losses else None

    def held(self) -> dict[str, nn.Parameter]:
        return {name: p for stage in self.stages for name, p in stage.submod.named_parameters()}
