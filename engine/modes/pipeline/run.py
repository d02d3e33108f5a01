"""A job through torch.distributed.pipelining: PyTorch's own stages and schedules, with marks around each chunk."""

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup, pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from engine.asking.frozen import goes_back
from engine.job import Job
from engine.modes.pipeline.passes import recomputes, samples_of
from engine.real import models
from engine.real.data import Batches
from engine.real.given_schedule import from_file
from engine.real.layered_stage import LayeredStage
from engine.real.marked_stage import MarkedStage
from engine.real.stage_compiler import compiled
from engine.real.training import Place
from engine.schedules import given
from engine.timeline import NONE

ONE_STAGE = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
SEVERAL_STAGES = {
    "looped_bfs": pipelining.ScheduleLoopedBFS,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}


def training(job: Job, place: Place) -> "Pipeline":
    return Pipeline(job, place, Batches(job, 0, 1, place.device))


class Pipeline:
    """One rank of a pipeline over `group`, by default all ranks."""

    norm_groups: ClassVar = {"pp": None}  # each parameter is on one of its ranks
    stage_class: type[MarkedStage] = MarkedStage

    def __init__(self, job: Job, place: Place, batches: Batches, group: ProcessGroup | None = None):
        self.job, self.recorder, self.batches, self.group = job, place.recorder, batches, group
        spec, whole = job.spec, models.build(job)
        self.stage_class = LayeredStage if recomputes(job) else self.stage_class
        placement = given.layout(spec, job.degree("pp")).placement
        self.chains: dict[int, models.Chain] = {}
        self.stages = [self._stage(whole, stage, place) for stage in placement[dist.get_rank(group)]]
        self.is_first = any(stage.is_first for stage in self.stages)
        self.last = next((stage for stage in self.stages if stage.is_last), None)
        self.optimizer = models.make_optimizer(job, self.held().values())
        # Of gradients that are accumulated torch would divide those of the micro-steps before too: a loss is a part.
        known = {"loss_fn": self._loss, "scale_grads": False}
        if spec.schedule_file is not None:
            self.schedule = from_file(spec, self.stages, **known)
        elif spec.schedule in ONE_STAGE:
            self.schedule = ONE_STAGE[spec.schedule](self.stages[0], spec.microbatches, **known)
        else:  # never with defer_pp_recv: it mixes up messages (docs/decisions/schedules.md)
            self.schedule = SEVERAL_STAGES[spec.schedule](self.stages, spec.microbatches, **known)
        self._agree_on_shapes()

    def _stage(self, whole: models.Chain, stage: int, place: Place) -> MarkedStage:
        job, device = self.job, place.device
        samples = samples_of(job)
        output = self._like_output(stage, samples, device)
        if stage == 0:
            example = self.batches(0)[0][:samples]
        else:
            example = self._like_output(stage - 1, samples, device)
        chain = self.chains[stage] = self.prepared(models.piece(whole, job, stage).to(device))
        module = compiled(chain, example, job.spec.compile_stage or "none")
        shapes = {"input_args": (example,), "output_args": (output,)}
        marked = self.stage_class(module, stage, len(job.stages), device, **shapes, group=self.group)
        marked.recorder = place.recorder
        return marked

    def _agree_on_shapes(self) -> None:
        """What a schedule does in its first pass before it computes, with messages of its own: no step has it then."""
        for stage in self.stages:
            stage.has_backward = True
        one = isinstance(self.schedule, PipelineScheduleSingle)
        (self.schedule._initialize_stage if one else self.schedule._initialize_stages)((), {})

    def prepared(self, chain: models.Chain) -> models.Chain:
        """A stage's layers, before they become a stage; those that are marked one by one know of the recorder."""
        chain.recorder = self.recorder if issubclass(self.stage_class, LayeredStage) else None
        return chain

    def _like_output(self, stage: int, samples: int, device: torch.device) -> torch.Tensor:
        """As what a stage sends: whether its gradient is asked for, PyTorch takes from it."""
        like = {"device": device, "dtype": models.dtype_of(self.job.spec)}
        return torch.zeros(samples, *self.output_of(stage), **like, requires_grad=goes_back(self.job.stages[stage]))

    def output_of(self, stage: int) -> tuple[int, ...]:
        """What leaves a stage on this rank, for one sample."""
        return self.job.stages[stage][-1].output

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = models.loss_of(output, target, self.batches.per_sample)
        loss = loss / (self.job.spec.microbatches * self.job.microsteps)
        self.last.end_forward()
        return loss

    def make_gradients(self, step: int) -> float | None:
        self.optimizer.zero_grad()
        losses = [self._micro_step(step, k) for k in range(self.job.microsteps)]
        return sum(losses) if self.last else None

    def _micro_step(self, step: int, k: int) -> float | None:
        """One of the step's passes through the schedule, with its part of the batch; its gradients are added up."""
        count, first = self.job.microsteps, k * self.job.spec.microbatches
        for stage in self.stages:
            stage.first = first
        if not self.is_first and not self.last:
            return self._pass(None, None)
        with self.recorder.span("load", payload="batch", microbatch=first if count > 1 else NONE):
            batch = self.batches(step, k, count)
            batch = models.ends(*batch, is_first=self.is_first, is_last=self.last is not None)
        return self._pass(*batch)

    def _pass(self, inputs: torch.Tensor | None, targets: torch.Tensor | None) -> float | None:
        losses: list[torch.Tensor] = []
        feed = (inputs,) if self.is_first else ()
        wanted = {"target": targets, "losses": losses} if self.last else {}
        self.schedule.step(*feed, **wanted)
        return torch.stack(losses).sum().item() if losses else None

    def outputs(self, inputs: torch.Tensor | None, samples: int) -> torch.Tensor | None:
        """Stage by stage, and not through `schedule.eval` (see `engine.real.evaluation`)."""
        output = None
        for stage in sorted(self.stages, key=lambda stage: stage.stage_index):
            index, rank_of = stage.stage_index, stage.stage_index_to_group_rank
            if index and rank_of[index - 1] != stage.group_rank:
                like = {"dtype": models.dtype_of(self.job.spec), "device": stage.device}
                output = torch.empty(samples, *self.output_of(index - 1), **like)
                dist.recv(output, group=stage.group, group_src=rank_of[index - 1])
            output = self.chains[index](output if index else inputs)
            if not stage.is_last and rank_of[index + 1] != stage.group_rank:
                dist.send(output, group=stage.group, group_dst=rank_of[index + 1])
        return output if self.last else None

    def held(self) -> dict[str, nn.Parameter]:
        return {name: p for chain in self.chains.values() for name, p in chain.named_parameters()}
