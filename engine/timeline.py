"""Spans in columns: what happened when, on which rank, simulated or measured. Saved as Parquet, read back unchanged.

Times are seconds from the start of the timeline, bytes are bytes. A timeline never changes the plan it came from;
`key` columns (kind, stage, microbatch, part) are the plan's own words, so the two can be joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.asking.rules import SpecError

NONE = -1  # in integer columns: does not apply


class Span(NamedTuple):
    """One op on one rank. Integers that do not apply are -1; `peer` is a rank; `group` names a mesh axis."""

    rank: int
    lane: str
    kind: str
    step: int
    start: float
    end: float
    stage: int = NONE
    microbatch: int = NONE
    part: str = ""
    payload: str = ""
    group: str = ""
    peer: int = NONE
    bytes: int = 0

    @property
    def duration(self) -> float:
        return self.end - self.start


_TEXT = ("lane", "kind", "part", "payload", "group")
_REAL = ("start", "end")


@dataclass(frozen=True, slots=True)
class Timeline:
    """Columns of equal length, one entry a span; the spans of one rank and lane are in the order in which they ran.

    `memory`: samples (rank, time in seconds, category, bytes), where known. `source`: simulated, measured, imported.
    `stands_for`: for each rank, how many ranks it stands for; 0 where another stands for it, so that it has no spans
    of its own here. Empty: each for itself.
    """

    columns: dict[str, np.ndarray]
    source: str
    world_size: int
    memory: tuple[tuple[int, float, str, int], ...] = field(default=())
    stands_for: tuple[int, ...] = ()

    @property
    def weights(self) -> np.ndarray:
        """How many ranks each rank stands for."""
        return np.array(self.stands_for or (1,) * self.world_size, dtype=np.int64)

    @classmethod
    def of(cls, spans: Iterable[Span], source: str, world_size: int, memory: Iterable = ()) -> Timeline:
        rows = list(spans)
        columns = {
            name: np.array(
                [row[i] for row in rows],
                dtype=object if name in _TEXT else np.float64 if name in _REAL else np.int64,
            )
            for i, name in enumerate(Span._fields)
        }
        return cls(columns, source, world_size, tuple(memory))

    def __len__(self) -> int:
        return len(self.columns["rank"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def spans(self) -> Iterator[Span]:
        """Every span, as plain Python values."""
        lists = [self.columns[name].tolist() for name in Span._fields]
        return (Span(*row) for row in zip(*lists, strict=True))

    def where(self, mask: np.ndarray) -> Timeline:
        return replace(self, columns={k: v[mask] for k, v in self.columns.items()})

    def step(self, step: int) -> Timeline:
        """One step alone, in turn (see `in_turn`), shifted so that it starts at 0."""
        near = self.where((self["step"] == step) | (self["step"] == step - 1)).in_turn()
        part = near.where(near["step"] == step)
        if not len(part):
            return part
        first = part["start"].min()
        columns = dict(part.columns) | {name: part[name] - first for name in _REAL}
        return replace(self, columns=columns, memory=())

    def in_turn(self) -> Timeline:
        """The same with steps that do not overlap: one begins when the one before has ended on every rank.

        A rank that is done early loads its next batch while others still compute. That is no part of the next step's
        time, so what lies before its begin is cut off; what lies there whole keeps its place with no length.
        """
        if not len(self) or (self["step"] == self["step"][0]).all():
            return self
        steps, index = np.unique(self["step"], return_inverse=True)
        ended = np.full(len(steps), -np.inf)
        np.maximum.at(ended, index, self["end"])
        before = np.where(np.diff(steps, prepend=steps[0] - 2) == 1, np.roll(ended, 1), -np.inf)[index]
        columns = dict(self.columns) | {name: np.maximum(self[name], before) for name in _REAL}
        return replace(self, columns=columns)

    def ahead(self, step: int) -> dict[int, float]:
        """Of each rank that computed of a step before it began (see `in_turn`), for how many seconds."""
        earlier, found = self["end"][self["step"] == step - 1], {}
        mine = self.where((self["step"] == step) & (self["lane"] == "compute"))
        if len(earlier):
            cut = np.minimum(mine["end"], earlier.max()) - mine["start"]
            for rank, seconds in zip(mine["rank"].tolist(), cut.tolist(), strict=True):
                if seconds > 0:
                    found[rank] = found.get(rank, 0.0) + seconds
        return found

    def step_seconds(self) -> dict[int, float]:
        """How long each step took, in turn."""
        timeline = self.in_turn()
        steps, index = np.unique(timeline["step"], return_inverse=True)
        first, last = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
        np.minimum.at(first, index, timeline["start"])
        np.maximum.at(last, index, timeline["end"])
        return dict(zip(steps.tolist(), (last - first).tolist(), strict=True))

    @property
    def steps(self) -> list[int]:
        return sorted(set(self["step"].tolist()))

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end; 0 when empty."""
        return float(self["end"].max() - self["start"].min()) if len(self) else 0.0

    def save(self, path: str | Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        # Built from buffers: pa.array would import pandas, which takes longer than all the rest of a short run's end.
        columns = {}
        for name, column in self.columns.items():
            if name in _TEXT:
                encoded = [text.encode() for text in column.tolist()]
                offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
                text, ends = pa.py_buffer(b"".join(encoded)), pa.py_buffer(offsets)
                columns[name] = pa.StringArray.from_buffers(len(encoded), ends, text)
            else:
                kind = pa.float64() if name in _REAL else pa.int64()
                values = np.ascontiguousarray(column, dtype=np.float64 if name in _REAL else np.int64)
                columns[name] = pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])
        table = pa.Table.from_arrays(list(columns.values()), names=list(columns))
        meta = {"source": self.source, "world_size": str(self.world_size)}
        pq.write_table(table.replace_schema_metadata(meta), path)

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Raises SpecError("bad_timeline") for a file that is damaged, or that another program or version wrote."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(path)
            columns = {
                name: np.array(table[name].to_pylist(), dtype=object) if name in _TEXT else table[name].to_numpy()
                for name in Span._fields
            }
            meta = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
            return cls(columns, meta["source"], int(meta["world_size"]))
        except (pa.ArrowException, OSError, KeyError, ValueError):
            raise SpecError("bad_timeline", "run_id", Path(path).parent.name) from None
