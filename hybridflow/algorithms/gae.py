"""Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438), over ragged rows."""

from __future__ import annotations

import numpy as np

from hybridflow.batch.batch import Ragged


def gae(rewards: Ragged, values: Ragged, gamma: float, lam: float) -> tuple[Ragged, Ragged]:
    """Advantage and return of each response token.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lam A_{t+1}         R_t = A_t + V_t

    with V = A = 0 after the last token. ``values[t]`` is the critic's value of the state *before* token t. A response
    that was cut off by its length limit counts as ended there, like one that ended by itself: its score is all that it
    will get, and no value is bootstrapped past the limit.

    Args:
        rewards, values: N rows over the response tokens, total_T values each.
        gamma, lam: discount, and trace decay (1 = Monte Carlo, 0 = one-step TD).

    Returns:
        (advantages, returns), float32, not whitened. Sums run in float64.
    """
    if not np.array_equal(rewards.offsets, values.offsets):
        raise ValueError("rewards and values run over different tokens")
    by_length = np.argsort(-rewards.lengths, kind="stable")
    lengths, ends = rewards.lengths[by_length], rewards.offsets[1:][by_length].astype(np.int64)
    advantages = np.empty(len(rewards.values), np.float64)
    next_advantage, next_value = np.zeros(len(rewards)), np.zeros(len(rewards))
    for from_end in range(int(lengths[0]) if len(lengths) else 0):
        rows = int(np.searchsorted(-lengths, -from_end, side="left"))  # rows longer than from_end: a prefix
        tokens = ends[:rows] - 1 - from_end
        value = values.values[tokens].astype(np.float64)
        delta = rewards.values[tokens] + gamma * next_value[:rows] - value
        next_advantage[:rows] = delta + gamma * lam * next_advantage[:rows]
        next_value[:rows] = value
        advantages[tokens] = next_advantage[:rows]
    returns = (advantages + values.values).astype(np.float32)
    return Ragged(advantages.astype(np.float32), rewards.offsets), Ragged(returns, rewards.offsets)
