"""A file of published measurements -> what of the cost model was fitted, fitted again on its declared rows.

    python -m bench.fit_published FILE

One constant is fitted: the part of a large product's rate that a GPU sustains for hours (`SUSTAINED` in
engine/cost/catalogue.py). Declared rows are those of `engine.validate.compared.FITTED`; no other is looked at. Each
row's plan is made once, and costed again for every value tried.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from engine import modes
from engine.cost.catalogue import SUSTAINED
from engine.job import prepare
from engine.matching import match
from engine.scheduler import schedule
from engine.simulate import durations
from engine.validate.case import case_of
from engine.validate.compared import is_fitted
from engine.validate.metrics import step_seconds
from engine.validate.rows import Unusable, read
from engine.validate.spec_of import machine_of, spec_of

TRIED = np.arange(0.70, 1.001, 0.01)


def main(path: str) -> None:
    rows = []
    for row in read(path).rows:
        try:
            case = case_of(row)
            if is_fitted(case):
                job = prepare(spec_of(case)[0])
                machine = machine_of(case).at(job.spec.precision)
                rows.append((row.id, machine, match(modes.plan(job)), step_seconds(case)))
        except Unusable as why:
            print(f"{row.id} is declared and cannot be used: {why}")
    if not rows:
        sys.exit("the file has none of the declared rows")
    errors = {}
    for value in TRIED:
        found = []
        for _, machine, graph, measured in rows:
            at = replace(machine, flop_rate=machine.flop_rate * value / SUSTAINED)
            end = schedule(graph, durations(graph, at))[1]
            found.append(float(end.max()) / measured.value - 1)
        errors[float(value)] = np.array(found)
    best = min(errors, key=lambda value: np.abs(errors[value]).mean())
    print(f"SUSTAINED {best:.2f} (in the catalogue: {SUSTAINED:.2f}), mean error {np.abs(errors[best]).mean():.1%}")
    for (named, *_), error in zip(rows, errors[best], strict=True):
        print(f"  {named}: {error:+.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
