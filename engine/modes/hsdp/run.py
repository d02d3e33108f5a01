"""A job under torch's fully_shard on a mesh of replicas x shards."""

from torch.distributed.device_mesh import init_device_mesh

from engine.job import Job
from engine.modes.fsdp.run import sharded_training
from engine.real.training import LocalTraining, Place


def training(job: Job, place: Place) -> LocalTraining:
    mesh = init_device_mesh(place.device.type, (job.spec.dp, job.spec.fsdp), mesh_dim_names=("dp", "fsdp"))
    return sharded_training(job, place, mesh, reshard_after_forward=True)
