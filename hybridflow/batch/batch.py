"""An immutable table of samples with ragged columns, on Arrow: no padding, zero-copy NumPy views.

Lives where the data is (workers and Ray tasks). The driver holds ``BatchRef`` (ref.py) instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hybridflow.batch.columns import COLUMNS, Column, Over
from hybridflow.batch.plan import RankPlan

_RAGGED = (Over.PROMPT, Over.RESPONSE)


@dataclass(frozen=True)
class Ragged:
    """N rows of different lengths, flat: row i is ``values[offsets[i]:offsets[i + 1]]``.

    ``offsets`` has N + 1 entries, starts at 0, and is what kernels call ``cu_seqlens``.
    """

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Sequence[float] | np.ndarray], dtype: str) -> Ragged:
        lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
        values = np.concatenate([np.asarray(row, dtype=dtype) for row in rows]) if len(rows) else np.empty(0, dtype)
        return cls.from_lengths(values, lengths)

    @classmethod
    def from_lengths(cls, values: np.ndarray, lengths: np.ndarray) -> Ragged:
        offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=offsets[1:])
        if offsets[-1] != len(values):
            raise ValueError(f"{len(values)} values do not fill rows of {offsets[-1]} tokens in all")
        return cls(values, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def row_of(self) -> np.ndarray:
        """For each value, the row that it belongs to. Shape: (total,)."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def select(self, rows: np.ndarray) -> Ragged:
        lengths = self.lengths[rows]
        starts = self.offsets[:-1][rows]
        offsets = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=offsets[1:])
        index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Ragged(self.values[index], offsets)

    def sums(self) -> np.ndarray:
        """Sum of each row, in float64; 0 for an empty row. Shape: (N,)."""
        return np.bincount(self.row_of, weights=self.values, minlength=len(self))


class Batch:
    """N samples, identified by ``sample_id``. Columns are checked against the table in ``columns.py``.

    ``plan`` is the rank's share of the step's micro-batch plan (``hybridflow.batch.plan.RankPlan``) when the driver
    attached one; rows then stand in the plan's order.
    """

    def __init__(self, table: pa.Table, plan: RankPlan | None = None):
        self.table = table
        self.plan = plan

    # -- making ----------------------------------------------------------------------------------------------------
    @classmethod
    def of(cls, sample_id: Sequence[int] | np.ndarray, **columns: Any) -> Batch:
        """Build from NumPy arrays (scalars), ``Ragged`` or lists of rows (ragged), lists of str (text)."""
        arrays = {"sample_id": pa.array(np.asarray(sample_id, dtype=np.int64))}
        for name, values in columns.items():
            arrays[name] = _to_arrow(_column(name), values, len(arrays["sample_id"]))
        return cls(pa.table(arrays))._checked()

    @classmethod
    def empty(cls, columns: Sequence[str]) -> Batch:
        """No samples, but the given columns with their types: the share of a rank that got nothing."""
        given: dict[str, Any] = {
            name: [] if _column(name).dtype == "string" else np.empty(0, _column(name).dtype) for name in columns
        }
        ragged = {name: Ragged.of([], COLUMNS[name].dtype) for name in given if COLUMNS[name].over in _RAGGED}
        return cls.of(np.empty(0, np.int64), **{name: v for name, v in (given | ragged).items() if name != "sample_id"})

    @classmethod
    def concat(cls, batches: Iterable[Batch]) -> Batch:
        tables = [batch.table for batch in batches]
        if not tables:
            raise ValueError("nothing to concatenate: the list of batches is empty")
        names = tables[0].column_names
        for table in tables[1:]:
            if table.column_names != names:
                raise ValueError(f"batches have different columns: {names} and {table.column_names}")
        return cls(pa.concat_tables(tables).combine_chunks())

    # -- reading ---------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return self.table.num_rows

    def __contains__(self, name: str) -> bool:
        return name in self.table.column_names

    @property
    def columns(self) -> list[str]:
        return self.table.column_names

    @property
    def sample_ids(self) -> np.ndarray:
        return self.scalar("sample_id")

    def _array(self, name: str) -> pa.Array:
        if name not in self.table.column_names:
            raise KeyError(f"no column {name!r} in this batch; it has {self.table.column_names}")
        chunks = self.table.column(name).chunks
        return chunks[0] if len(chunks) == 1 else self.table.column(name).combine_chunks()

    def scalar(self, name: str) -> np.ndarray:
        """A column with one value a sample. Shape: (N,)."""
        return self._array(name).to_numpy(zero_copy_only=False)

    def ragged(self, name: str) -> Ragged:
        """A column with one value a token; values and offsets are views of Arrow's memory."""
        array = self._array(name)
        offsets = array.offsets.to_numpy()
        values = array.values.to_numpy()[offsets[0] : offsets[-1]] if len(array) else array.values.to_numpy()[:0]
        return Ragged(values, offsets - offsets[0] if offsets[0] else offsets)

    def text(self, name: str) -> list[str]:
        return self._array(name).to_pylist()

    # -- deriving --------------------------------------------------------------------------------------------------
    def select(self, rows: np.ndarray, columns: Sequence[str] | None = None) -> Batch:
        """The given rows, in the given order; optionally only some columns (``sample_id`` always stays)."""
        table = self.table
        if columns is not None:
            table = table.select(["sample_id", *(name for name in columns if name != "sample_id")])
        return Batch(table.take(pa.array(np.asarray(rows, dtype=np.int64))).combine_chunks())

    def with_columns(self, **columns: Any) -> Batch:
        """This batch with more columns, in this batch's order."""
        table = self.table
        for name, values in columns.items():
            array = _to_arrow(_column(name), values, len(self))
            position = table.column_names.index(name) if name in table.column_names else None
            table = table.append_column(name, array) if position is None else table.set_column(position, name, array)
        return Batch(table, self.plan)._checked()

    def join(self, other: Batch) -> Batch:
        """Columns of both, matched by ``sample_id``; both must hold the same samples (in any order)."""
        rows = match_ids(self.sample_ids, other.sample_ids)
        aligned = other.table.take(pa.array(rows))
        table = self.table
        for name in aligned.column_names:
            if name not in table.column_names:
                table = table.append_column(name, aligned.column(name))
        return Batch(table.combine_chunks(), self.plan)._checked()

    def _checked(self) -> Batch:
        """Itself, if all columns over the same tokens agree on the length of each row; else ValueError."""
        first: dict[Over, tuple[str, np.ndarray]] = {}
        for name in self.columns:
            over = COLUMNS[name].over
            if over not in _RAGGED:
                continue
            lengths = self.ragged(name).lengths
            known, expected = first.setdefault(over, (name, lengths))
            if not np.array_equal(expected, lengths):
                row = int(np.flatnonzero(expected != lengths)[0])
                raise ValueError(
                    f"columns {known!r} and {name!r} both run over each {over.value}, "
                    f"but row {row} has {expected[row]} and {lengths[row]}"
                )
        return self

    def __repr__(self) -> str:
        return f"Batch({len(self)} samples: {', '.join(self.columns)})"


def match_ids(wanted: np.ndarray, have: np.ndarray) -> np.ndarray:
    """For each id of ``wanted``, its position in ``have``; both must be the same set."""
    order = np.argsort(have, kind="stable")
    twice = have[order][1:][np.diff(have[order]) == 0]
    if len(twice):
        raise ValueError(f"sample ids occur twice: {np.unique(twice)[:5].tolist()}")
    position = np.searchsorted(have, wanted, sorter=order)
    rows = order[np.minimum(position, len(order) - 1)] if len(order) else np.empty(0, np.int64)
    if len(wanted) != len(have) or not np.array_equal(have[rows], wanted):
        missing = np.setdiff1d(wanted, have)[:5].tolist()
        extra = np.setdiff1d(have, wanted)[:5].tolist()
        raise ValueError(f"the two batches hold different samples: missing ids {missing}, unexpected ids {extra}")
    return rows.astype(np.int64)


def _column(name: str) -> Column:
    if name not in COLUMNS:
        raise KeyError(f"unknown column {name!r}; known: {', '.join(COLUMNS)} (add yours with register_column)")
    return COLUMNS[name]


def _to_arrow(column: Column, values: Any, count: int) -> pa.Array:
    if column.over is Over.TEXT:
        array = pa.array([str(value) for value in values], type=pa.string())
    elif column.over in _RAGGED:
        ragged = values if isinstance(values, Ragged) else Ragged.of(values, column.dtype)
        if ragged.values.dtype != np.dtype(column.dtype):
            raise TypeError(f"column {column.name!r} holds {column.dtype}, got {ragged.values.dtype}")
        array = pa.ListArray.from_arrays(pa.array(ragged.offsets.astype(np.int32)), pa.array(ragged.values))
    else:
        scalars = np.asarray(values)
        if scalars.dtype != np.dtype(column.dtype):
            if scalars.dtype.kind == "f" and np.dtype(column.dtype).kind == "i":
                raise TypeError(f"column {column.name!r} holds {column.dtype}, got {scalars.dtype}")
            scalars = scalars.astype(column.dtype)
        array = pa.array(scalars)
    if len(array) != count:
        raise ValueError(f"column {column.name!r} has {len(array)} rows, the batch has {count}")
    return array
