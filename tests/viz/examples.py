"""Settings -> a predicted timeline; a few words -> one span; two small plans. For the tests of the figures."""

from engine import modes
from engine.asking.settings import DATA_MODES
from engine.cost.machine import machine
from engine.job import prepare
from engine.plan import Mesh, Plan, Program
from engine.simulation import simulate
from engine.spec import Spec
from engine.timeline import Span


def predicted(mode, devices, machine_name="local", **settings):
    settings.setdefault("global_batch", 240 if mode in DATA_MODES else 64)
    job = prepare(Spec(mode=mode, devices=devices, **settings))
    simulation = simulate(modes.plan(job), machine(machine_name))
    return simulation.plan, job.layers, simulation.timeline


def message(kind, rank, peer, start, end, *, lane="pp:0>1", microbatch=0, payload="activation", step=0):
    return Span(rank, lane, kind, step, start, end, rank, microbatch, "", payload, "pp", peer, 400)


def compute(kind, rank, start, end, *, microbatch=0, part="", step=0):
    return Span(rank, "compute", kind, step, start, end, 0, microbatch, part)


def all_reduce(rank, start, end, part="bucket0", step=0):
    return Span(rank, "dp", "all_reduce", step, start, end, -1, -1, part, "gradient", "dp", -1, 800)


TWO = Plan(Mesh(("pp",), (2,)), (Program((), (0,), {"parameters": 30}), Program((), (1,), {"parameters": 60})), (0, 1))
REPLICAS = Mesh(("dp",), (4,))
