"""The order of the prompts: a pure function of (seed, epoch, index). No state, so nothing to save or to get wrong."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hybridflow.seeds import derive_seed


@dataclass(frozen=True)
class Sampler:
    """Which rows a step gets.

    All epochs are laid end to end, each a permutation of its own; step k takes the k-th ``batch_size`` places. So the
    last, partial step of an epoch runs on into the next one, and neither the number of workers nor a resume changes
    what a step sees.

    Args:
        length: rows of the dataset.
        batch_size: rows of a step.
        seed: of the order.
    """

    length: int
    batch_size: int
    seed: int

    def step(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(group ids, rows) of a step, counted from 1. ``group_id = epoch * length + index``. Shapes: (batch_size,)."""
        if step < 1:
            raise ValueError(f"steps are counted from 1, got {step}")
        group_ids = np.arange((step - 1) * self.batch_size, step * self.batch_size, dtype=np.int64)
        epochs, index = np.divmod(group_ids, self.length)
        rows = np.empty_like(index)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            rows[here] = _permutation(self.length, self.seed, int(epoch))[index[here]]
        return group_ids, rows

    def steps(self, epochs: int) -> int:
        """Steps that it takes to see every row ``epochs`` times."""
        return -(-epochs * self.length // self.batch_size)


@lru_cache(maxsize=8)
def _permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    order = np.random.default_rng(derive_seed(seed, "order", epoch)).permutation(length)
    order.setflags(write=False)
    return order
