"""From rows of a batch to a packed micro-batch: tokens end to end, and which of them predict response tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.batch.columns import COLUMNS, Over
from hybridflow.batch.plan import MiniBatch
from workers.megatron.attention import Packed

_TOKEN_COLUMNS = ("prompt_tokens", "response_tokens")


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. T packed tokens, R response tokens (0 only in the stand-in of a rank without rows)."""

    tokens: Tensor
    """(1, T) prompts and responses, end to end."""
    packed: Packed
    targets: Tensor
    """(R,) the response tokens."""
    columns: dict[str, Tensor]
    """The batch's other response columns of the same tokens, (R,) each."""


class Packer:
    """Cuts micro-batches out of one batch.

    Args:
        batch: holds ``prompt_tokens`` and ``response_tokens``; other response columns travel along.
        device: where the tensors go.
        multiple: the number of packed tokens is padded to a multiple of this (TP under sequence parallelism) by one
            more sequence that nothing reads.
    """

    def __init__(self, batch: Batch, device: torch.device, multiple: int = 1):
        self._prompts, self._responses = batch.ragged("prompt_tokens"), batch.ragged("response_tokens")
        self._columns = {
            name: batch.ragged(name).values
            for name in batch.columns
            if name not in _TOKEN_COLUMNS and COLUMNS[name].over is Over.RESPONSE
        }
        self._device, self._multiple = device, multiple
        self._batch = batch

    def mini_batches(self) -> list[MiniBatch]:
        """The plan's, or without a plan one of all rows in one micro-batch."""
        if self._batch.plan is not None:
            return list(self._batch.plan.mini_batches)
        rows = len(self._batch)
        return [MiniBatch(((0, rows),) if rows else (), len(self._responses.values), rows)]

    def rows(self, start: int, stop: int) -> MicroBatch:
        """Rows ``start`` to ``stop``, packed."""
        prompts, responses = self._prompts.lengths[start:stop], self._responses.lengths[start:stop]
        ends = np.cumsum(prompts + responses)
        starts = ends - prompts - responses
        tokens = np.empty(ends[-1], dtype=np.int64)
        prompt_index, response_index = _ranges(starts, prompts), _ranges(starts + prompts, responses)
        first, last = self._responses.offsets[start], self._responses.offsets[stop]
        targets = self._responses.values[first:last]
        tokens[prompt_index] = self._prompts.values[self._prompts.offsets[start] : self._prompts.offsets[stop]]
        tokens[response_index] = targets
        columns = {name: self._tensor(values[first:last]) for name, values in self._columns.items()}
        return self._micro_batch(tokens, np.append(0, ends), response_index - 1, targets, columns)

    def stand_in(self) -> MicroBatch:
        """Two tokens that score nothing: a rank without rows must still take part in the collectives."""
        nothing = np.empty(0, dtype=np.int64)
        return self._micro_batch(np.zeros(2, dtype=np.int64), np.array([0, 2]), nothing, nothing, {})

    def _micro_batch(self, tokens, bounds, predictors, targets, columns) -> MicroBatch:
        padding = -len(tokens) % self._multiple
        if padding:
            tokens = np.append(tokens, np.zeros(padding, dtype=np.int64))
            bounds = np.append(bounds, len(tokens))
        lengths = np.diff(bounds)
        positions = _ranges(np.zeros_like(lengths), lengths)
        longest = int(lengths.max())
        dense = positions + np.repeat(np.arange(len(lengths)) * longest, lengths)
        cu_seqlens = self._tensor(bounds.astype(np.int32))
        packed = Packed(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            positions=self._tensor(positions),
            predictors=self._tensor(predictors),
            dense_index=self._tensor(dense),
        )
        return MicroBatch(self._tensor(tokens)[None], packed, self._tensor(targets.astype(np.int64)), columns)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.tensor(values).to(self._device, non_blocking=True)  # copies: Arrow's memory is read-only


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """arange(starts[0], starts[0] + lengths[0]), then the next, end to end."""
    shift = starts - (np.cumsum(lengths) - lengths)
    return np.arange(lengths.sum()) + np.repeat(shift, lengths)
