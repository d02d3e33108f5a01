"""A spec of a scale model (`paced`) -> its rules, checked; its factor in words."""

from __future__ import annotations

from engine.asking.rules import SpecError, closest
from engine.asking.settings import MODE_SETTINGS
from engine.cost.machine import MACHINES
from engine.spec import Spec

NEVER_PACED = ("data_parallel",)  # its devices are threads of one process, which cannot sleep each for itself
MINIATURE = ("hidden", "heads", "context", "experts", "top_k", "bucket_mb", "global_batch")  # settings that are smaller
TABLE = "paced.table"  # in the run folder while it runs: what ranks tell each other
# A checkpoint would be the miniature's, and so would an epoch: it has fewer samples in a batch.
UNPACED = ("save_every", "resume", "epochs")


def check_paced(spec: Spec) -> Spec:
    """The rules of a scale model that need no plan; the machine that is predicted for is the one that is pictured."""
    if spec.paced is None:
        if spec.dilation is not None:
            raise SpecError("dilation_of_paced", "dilation", spec.dilation)
        return spec
    known = [name for name, one in MACHINES.items() if not one.cores]
    if spec.paced not in MACHINES:
        raise SpecError("unknown_name", "paced", spec.paced, suggest=closest(spec.paced, known))
    if spec.paced not in known:
        raise SpecError("paced_machine", "paced", spec.paced, suggest=known)
    if spec.mode in NEVER_PACED:
        good = [mode for mode in MODE_SETTINGS if mode not in NEVER_PACED]
        raise SpecError("paced_mode", "mode", spec.mode, suggest=good)
    if spec.machine not in ("local", spec.paced):
        raise SpecError("exclusive", "machine", spec.machine, suggest=[spec.paced], other="paced")
    for name in UNPACED:
        if getattr(spec, name) is not None:
            raise SpecError("does_not_apply", name, getattr(spec, name), to="a scale model (paced)")
    if not spec.record:
        raise SpecError("paced_records", "record", False, suggest=[True])
    if spec.device == "cuda":
        raise SpecError("paced_device", "device", spec.device, suggest=["cpu"])
    return spec.with_(machine=spec.paced)


def ratio(factor: float) -> str:
    """1 : 850 of a model that is 850 times slower than what it shows, 22 : 1 of one that is faster."""
    return f"1 : {short(factor)}" if factor >= 1 else f"{short(1 / factor)} : 1"


def short(factor: float) -> str:
    """Three digits, without an exponent: 2,900."""
    return f"{float(f'{factor:.3g}'):,.10g}"
