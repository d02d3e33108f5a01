"""A job under torch's parallelize_module: linear layers cut by columns, then by rows; all ranks see the whole batch."""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from engine.job import Job
from engine.modes.tensor.plan import parts
from engine.modes.tensor.shards import styles
from engine.real import models
from engine.real.data import Batches
from engine.real.functional import announce
from engine.real.training import LocalTraining, Place

STYLES = {"column": ColwiseParallel, "row": RowwiseParallel}


def training(job: Job, place: Place) -> LocalTraining:
    chain = parallel_chain(job, place, {name: STYLES[style]() for name, style in styles(job).items()})
    place.recorder.parts = lambda kind, layer: parts(job, kind, layer)
    optimizer = models.make_optimizer(job, chain.parameters())
    return LocalTraining(job, place, chain, chain, Batches(job, 0, 1, place.device), optimizer)


def parallel_chain(job: Job, place: Place, plan: dict[str, ParallelStyle]) -> models.Chain:
    """The model with its parameters laid over the ranks as `plan` says, its collectives announced to the recorder."""
    chain = models.build(job).to(place.device)
    chain.recorder = place.recorder
    mesh = init_device_mesh(place.device.type, (place.world_size,), mesh_dim_names=("tp",))
    parallelize_module(chain, mesh, plan)
    chain.watch_first_gradients()
    announce(place.recorder, "tp")
    return chain
