"""What the driver holds of a batch: references to column groups in the object store, ids and lengths. Never a token.

Every pool call that writes columns returns a ``BatchRef`` at once; ``join`` puts columns together by ``sample_id``
without touching them. Only lengths are ever waited for, when a plan is made from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from hybridflow.batch.batch import Batch, match_ids
from hybridflow.batch.plan import MicroBatchPlan, Planner, RankPlan


@dataclass(frozen=True)
class Source:
    """Columns that one call wrote. Row i of the batch is row ``row[i]`` of the object ``refs[part[i]]``.

    ``lengths(column)`` waits for the lengths that each part reported for a token column: one array per part.
    """

    columns: tuple[str, ...]
    refs: tuple[Any, ...]
    part: np.ndarray
    row: np.ndarray
    lengths: Callable[[str], list[np.ndarray]]

    def take(self, rows: np.ndarray) -> Source:
        return replace(self, part=self.part[rows], row=self.row[rows])

    def lengths_of(self, column: str) -> np.ndarray:
        parts = self.lengths(column)
        starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
        return np.concatenate(parts)[starts[self.part] + self.row]


@dataclass(frozen=True)
class BatchSlice:
    """A rank's share of a batch as it travels: where its rows lie in the arguments that Ray resolves for the call.

    ``groups``: for each source (columns, argument positions of its parts, part of each row, row within its part).
    """

    sample_ids: np.ndarray
    groups: tuple[tuple[tuple[str, ...], tuple[int, ...], np.ndarray, np.ndarray], ...]
    plan: RankPlan | None

    def assemble(self, arguments: Sequence[Any]) -> Batch:
        """Build the rank's ``Batch`` (in the worker)."""
        pieces = [_gather(group, arguments) for group in self.groups]
        table = pieces[0].table if pieces else Batch.of(self.sample_ids).table
        for piece in pieces[1:]:
            for name in piece.columns:
                if name not in table.column_names:
                    table = table.append_column(name, piece.table.column(name))
        return Batch(table, self.plan)


def _gather(group: tuple[tuple[str, ...], tuple[int, ...], np.ndarray, np.ndarray], arguments: Sequence[Any]) -> Batch:
    columns, positions, part, row = group
    if not positions:
        return Batch.empty(columns)
    if len(positions) == 1:
        return arguments[positions[0]].select(row, columns)
    used = [int(p) for p in np.unique(part)]
    pieces = [arguments[positions[p]].select(row[part == p], columns) for p in used]
    order = np.concatenate([np.flatnonzero(part == p) for p in used])
    return Batch.concat(pieces).select(np.argsort(order), columns)


class BatchRef:
    """N samples whose columns lie elsewhere. Immutable; every operation returns another.

    Args:
        sample_ids: int64, shape (N,).
        sources: who holds which columns.
        planner: how to cut the step into micro-batches, once lengths are known (see ``with_plan``).
        call: the call that made this batch, for its metrics (``hybridflow.pool.Call``).
    """

    def __init__(
        self, sample_ids: np.ndarray, sources: Sequence[Source], planner: Planner | None = None, call: Any = None
    ):
        self.sample_ids = sample_ids
        self.sources = tuple(sources)
        self.planner = planner
        self.call = call
        self._plans: dict[int, MicroBatchPlan] = {}

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __repr__(self) -> str:
        return f"BatchRef({len(self)} samples: {', '.join(self.columns)})"

    @property
    def columns(self) -> list[str]:
        return [name for source in self.sources for name in source.columns if name != "sample_id"]

    @cached_property
    def prompt_lengths(self) -> np.ndarray:
        """Tokens of each prompt; waits for the call that wrote them. Shape: (N,)."""
        return self._lengths("prompt_tokens")

    @cached_property
    def response_lengths(self) -> np.ndarray:
        """Tokens of each response; waits for the call that wrote them. Shape: (N,)."""
        return self._lengths("response_tokens")

    def _lengths(self, column: str) -> np.ndarray:
        return self._source_of(column).lengths_of(column)

    def _source_of(self, column: str) -> Source:
        for source in self.sources:
            if column in source.columns:
                return source
        raise KeyError(f"no column {column!r} in this batch; it has: {', '.join(self.columns)}")

    def join(self, *others: BatchRef) -> BatchRef:
        """Columns of all, matched by ``sample_id``. A column that several have comes from the last one.

        Raises:
            ValueError: the batches do not hold the same samples.
        """
        sources = list(self.sources)
        for other in others:
            rows = match_ids(self.sample_ids, other.sample_ids)
            known = set(self.columns)
            for source in other.sources:
                if any(source.refs == mine.refs for mine in sources):
                    continue
                sources.append(source.take(rows))
            for name in known & set(other.columns) - {"sample_id"}:
                sources = _drop_column_but_last(sources, name)
        joined = BatchRef(self.sample_ids, sources, self.planner)
        joined._plans = self._plans
        return joined

    def select(self, rows: np.ndarray) -> BatchRef:
        rows = np.asarray(rows, dtype=np.int64)
        return BatchRef(self.sample_ids[rows], [source.take(rows) for source in self.sources], self.planner)

    def with_plan(self, planner: Planner) -> BatchRef:
        """The same batch, cut into mini- and micro-batches by ``planner`` in every later call."""
        return BatchRef(self.sample_ids, self.sources, planner)

    def plan(self, dp: int) -> MicroBatchPlan | None:
        """The step's plan for pools of ``dp`` data-parallel ranks (made once for each; waits for lengths)."""
        if self.planner is None:
            return None
        if dp not in self._plans:
            self._plans[dp] = self.planner.plan(self.prompt_lengths, self.response_lengths, dp)
        return self._plans[dp]

    def rows_for(self, shards: int) -> list[np.ndarray]:
        """Rows of each shard: by the plan if there is one, else contiguous and as even as can be."""
        plan = self.plan(shards)
        if plan is not None:
            return list(plan.rows)
        return np.array_split(np.arange(len(self)), shards)

    def slice(
        self, rows: np.ndarray, columns: Sequence[str], first: int, plan: RankPlan | None
    ) -> tuple[BatchSlice, list[Any]]:
        """``(BatchSlice, refs)`` for some rows and columns; ``first``: position of the first ref among the arguments.

        Only objects that hold one of these rows travel.
        """
        refs: list[Any] = []
        groups = []
        for source in self.sources:
            wanted = tuple(name for name in source.columns if name in columns)
            if not wanted:
                continue
            part, row = source.part[rows], source.row[rows]
            used, part = np.unique(part, return_inverse=True)
            positions = tuple(range(first + len(refs), first + len(refs) + len(used)))
            refs.extend(source.refs[p] for p in used)
            groups.append((wanted, positions, part.astype(np.int32), row))
        missing = [name for name in columns if not any(name in group[0] for group in groups)]
        if missing and len(rows):
            raise KeyError(f"the batch has no column {missing[0]!r}; it has: {', '.join(self.columns)}")
        return BatchSlice(self.sample_ids[rows], tuple(groups), plan), refs


def _drop_column_but_last(sources: list[Source], name: str) -> list[Source]:
    holders = [i for i, source in enumerate(sources) if name in source.columns]
    for index in holders[:-1]:
        sources[index] = replace(sources[index], columns=tuple(c for c in sources[index].columns if c != name))
    return sources
