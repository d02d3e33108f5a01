"""A job under torch's DistributedDataParallel with a ZeroRedundancyOptimizer."""

from torch.distributed.optim import ZeroRedundancyOptimizer

from engine.job import Job
from engine.modes.ddp import run as ddp
from engine.real import models
from engine.real.events import Event
from engine.real.training import LocalTraining, Place

UPDATE = "Optimizer.step#ZeroRedundancyOptimizer.step"


def training(job: Job, place: Place) -> LocalTraining:
    replica = ddp.training(job, place)
    kind, settings = models.optimizer_of(job.spec)
    # The parameters of an owner lie in one tensor, so that it broadcasts once and not once a parameter.
    learn = [each for each in replica.callee.parameters() if each.requires_grad]
    replica.optimizer = ZeroRedundancyOptimizer(learn, optimizer_class=kind, parameters_as_bucket_view=True, **settings)
    place.recorder.identify = identify
    return replica


def identify(event: Event) -> tuple[str, str, str, str]:
    """DDP broadcasts too, but not in the optimizer."""
    if event.kind == "all_reduce":
        return event.kind, "dp", "gradient", ""
    return event.kind, "dp", "weights" if UPDATE in event.inside else "control", ""
