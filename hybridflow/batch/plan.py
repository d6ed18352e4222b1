"""The micro-batch plan of a step: mini-batches first, then shares for the DP ranks, then packing to the token budget.

Made once a step from the lengths alone, and used by every pool of the same DP size for every call of the step. So no
rank fetches what it does not need, and the first mini-batch is computed with the very same cuts before and during
the update: its ratio is exactly 1.

The arithmetic. A step has N sequences. They are shuffled (by seed) and cut into mini-batches of ``mini_batch_size``
sequences over all DP ranks (the last one may be smaller); one mini-batch is one optimizer step. A mini-batch is dealt
to the DP ranks, balanced by tokens; a rank's share is cut into micro-batches, each closing at ``max_sequences``
sequences or before ``max_tokens`` tokens, whichever comes first. Losses are divided by the mini-batch's global counts,
so none of these cuts changes a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step of one rank: row ranges of its micro-batches, and the global counts losses divide by."""

    micro_batches: tuple[tuple[int, int], ...]
    response_tokens: int
    sequences: int


@dataclass(frozen=True)
class RankPlan:
    """The share of one DP rank. Row ranges count in the order in which the rank receives its rows."""

    mini_batches: tuple[MiniBatch, ...]

    @property
    def micro_batches(self) -> list[tuple[int, int]]:
        return [micro for mini in self.mini_batches for micro in mini.micro_batches]


@dataclass(frozen=True)
class MicroBatchPlan:
    """``rows[dp]``: the batch rows of each DP rank, in order; ``ranks[dp]``: how that rank cuts them."""

    rows: tuple[np.ndarray, ...]
    ranks: tuple[RankPlan, ...]


@dataclass(frozen=True)
class Planner:
    """How to cut a step; ``plan`` may be asked for several DP sizes.

    Args:
        mini_batch_size: sequences of one optimizer step, over all DP ranks.
        max_tokens: prompt and response tokens of one micro-batch on one rank.
        max_sequences: sequences of one micro-batch on one rank.
        seed: of the shuffle before mini-batches are cut; None keeps the order.
    """

    mini_batch_size: int
    max_tokens: int
    max_sequences: int
    seed: int | None = None

    def plan(self, prompt_lengths: np.ndarray, response_lengths: np.ndarray, dp: int) -> MicroBatchPlan:
        lengths = (prompt_lengths + response_lengths).astype(np.int64)
        self._check(lengths)
        order = np.arange(len(lengths))
        if self.seed is not None:
            order = np.random.default_rng(self.seed).permutation(len(lengths))
        rows: list[list[int]] = [[] for _ in range(dp)]
        minis: list[list[MiniBatch]] = [[] for _ in range(dp)]
        for start in range(0, len(order), self.mini_batch_size):
            mini = order[start : start + self.mini_batch_size]
            tokens = int(response_lengths[mini].sum())
            for rank, share in enumerate(_deal(mini, lengths, dp)):
                micros = self._pack(lengths[share], len(rows[rank]))
                rows[rank].extend(share)
                minis[rank].append(MiniBatch(micros, tokens, len(mini)))
        return MicroBatchPlan(
            tuple(np.asarray(share, dtype=np.int64) for share in rows), tuple(RankPlan(tuple(m)) for m in minis)
        )

    def _pack(self, lengths: np.ndarray, first: int) -> tuple[tuple[int, int], ...]:
        micros, start, tokens = [], 0, 0
        for row, length in enumerate(lengths):
            if row > start and (tokens + length > self.max_tokens or row - start == self.max_sequences):
                micros.append((first + start, first + row))
                start, tokens = row, 0
            tokens += int(length)
        if start < len(lengths):
            micros.append((first + start, first + len(lengths)))
        return tuple(micros)

    def _check(self, lengths: np.ndarray) -> None:
        if len(lengths) and lengths.max() > self.max_tokens:
            row = int(lengths.argmax())
            raise ConfigError(
                f"a sequence of {lengths[row]} tokens (row {row}) does not fit a micro-batch of {self.max_tokens}",
                hint=f"raise training.ppo_max_token_len_per_gpu to {lengths[row]} or more, or shorten prompts or "
                "rollout.max_response_length",
                where="training.ppo_max_token_len_per_gpu",
            )


def _deal(rows: np.ndarray, lengths: np.ndarray, dp: int) -> list[np.ndarray]:
    """Deal rows to DP ranks, longest first to the rank with the fewest tokens; each keeps the original order."""
    if dp == 1:
        return [rows]
    load = np.zeros(dp, dtype=np.int64)
    owner = np.empty(len(rows), dtype=np.int64)
    for position in np.argsort(-lengths[rows], kind="stable"):
        owner[position] = load.argmin()
        load[owner[position]] += lengths[rows[position]]
    return [rows[owner == rank] for rank in range(dp)]
