"""A job under torch's fully_shard that keeps gathered layers until backward."""

from torch.distributed.device_mesh import init_device_mesh

from engine.job import Job
from engine.modes.fsdp.run import sharded_training
from engine.real.training import LocalTraining, Place


def training(job: Job, place: Place) -> LocalTraining:
    mesh = init_device_mesh(place.device.type, (place.world_size,), mesh_dim_names=("fsdp",))
    return sharded_training(job, place, mesh, reshard_after_forward=False)
