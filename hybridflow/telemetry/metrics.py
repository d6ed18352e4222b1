"""Metrics that many ranks report and the driver reduces once: each says how it is to be reduced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Mean:
    """A weighted mean: ``total / count`` over all ranks and micro-batches (never a mean of means)."""

    total: float
    count: float

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else float("nan")


@dataclass(frozen=True)
class Sum:
    total: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    @property
    def value(self) -> float:
        return self.total


@dataclass(frozen=True)
class Max:
    largest: float

    def merge(self, other: Max) -> Max:
        return Max(max(self.largest, other.largest))

    @property
    def value(self) -> float:
        return self.largest


@dataclass(frozen=True)
class Min:
    smallest: float

    def merge(self, other: Min) -> Min:
        return Min(min(self.smallest, other.smallest))

    @property
    def value(self) -> float:
        return self.smallest


Metric = Mean | Sum | Max | Min


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge what several ranks or micro-batches report; a name must have one kind everywhere."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            known = merged.get(name)
            if known is not None and type(known) is not type(metric):
                raise TypeError(f"metric {name!r} is reported as {type(known).__name__} and {type(metric).__name__}")
            merged[name] = metric if known is None else known.merge(metric)  # type: ignore[arg-type]
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}
