"""A file of published measurements -> what of the cost model was fitted, fitted again on its declared rows.

    python -m bench.fit_published FILE

Two constants were fitted: the part of a large product's rate that a GPU sustains (`SUSTAINED`), and the part of a large
copy's rate that norms, activations and sums reach (`ELEMENTWISE`). Both at once, by least squares: one after the other
stops where neither alone is better, and the mean of absolute errors has a kink for each of the few rows. Declared rows
are those of `engine.validate.compared.FITTED`; no other is looked at. Each row's plan is made once, and costed again
for each pair of values.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import numpy as np

from engine import modes
from engine.cost import matmul
from engine.cost.catalogue import SUSTAINED
from engine.cost.matmul import ELEMENTWISE
from engine.graph.scheduler import schedule
from engine.job import prepare
from engine.simulation import durations, matched
from engine.validate.case import case_of
from engine.validate.compared import FITTED, is_fitted
from engine.validate.metrics import step_seconds
from engine.validate.rows import Unusable, read
from engine.validate.spec_of import machine_of, spec_of

TRIED = {"SUSTAINED": np.arange(0.80, 1.001, 0.01), "ELEMENTWISE": np.arange(0.50, 1.001, 0.05)}


def declared(path: str) -> list[tuple]:
    """(id, machine, graph, measured seconds) of each declared row."""
    rows = []
    for row in read(path).rows:
        if row.group not in {group for group, _ in FITTED}:
            continue
        try:
            case = case_of(row)
            if is_fitted(case):
                job = prepare(spec_of(case)[0])
                machine = machine_of(case).placed(case.devices).at(job.spec.precision)
                rows.append((row.id, machine, matched(modes.plan(job), machine), step_seconds(case).value))
        except Unusable as why:
            print(f"{row.id} is not used: {why}")
    return rows


def errors(rows: list[tuple], constants: dict[str, float]) -> np.ndarray:
    matmul.ELEMENTWISE = constants["ELEMENTWISE"]
    matmul.kernel_seconds.cache_clear()
    matmul.kernels_seconds.cache_clear()
    found = []
    for _, machine, graph, measured in rows:
        at = replace(machine, flop_rate=machine.flop_rate * constants["SUSTAINED"] / SUSTAINED)
        found.append(float(schedule(graph, durations(graph, at))[1].max()) / measured - 1)
    return np.array(found)


def main(path: str) -> None:
    rows = declared(path)
    if not rows:
        sys.exit("the file has none of the declared rows")
    catalogue = {"SUSTAINED": SUSTAINED, "ELEMENTWISE": ELEMENTWISE}
    pairs = [dict(zip(TRIED, map(float, values), strict=True)) for values in itertools.product(*TRIED.values())]
    best = min(pairs, key=lambda pair: np.square(errors(rows, pair)).sum())
    found = errors(rows, best)
    for name, value in best.items():
        print(f"{name} {value:.2f} (in the cost model: {catalogue[name]:.2f})")
    now = np.abs(errors(rows, catalogue)).mean()
    print(f"mean error of {len(rows)} rows {np.abs(found).mean():.1%}; as the cost model is, {now:.1%}")
    for (named, *_), error in zip(rows, found, strict=True):
        print(f"  {named}: {error:+.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
