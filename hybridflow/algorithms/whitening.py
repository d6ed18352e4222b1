"""Whitening: shift and scale to mean 0 and variance 1."""

from __future__ import annotations

import numpy as np

EPSILON = 1e-8


def whiten(values: np.ndarray) -> np.ndarray:
    """(x - mean) / sqrt(var + 1e-8), with the unbiased variance (n - 1), as in PPO's usual implementations.

    Call it once over all response tokens of the whole step: ranks that whitened their own shares would each use
    another scale. Equal values, and a single one, become 0.

    Args:
        values: (T,).

    Returns:
        (T,), float32; moments are taken in float64.
    """
    if len(values) < 2:
        return np.zeros(len(values), np.float32)
    wide = values.astype(np.float64)
    white: np.ndarray = (wide - wide.mean()) / np.sqrt(wide.var(ddof=1) + EPSILON)
    return white.astype(np.float32)
