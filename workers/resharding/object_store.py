"""``object_store``: one flat buffer for each source rank in Ray's object store. Works between any hosts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from workers.resharding.buffers import drain, fill, torch_dtype
from workers.resharding.planner import Intake, Share
from workers.resharding.protocol import ReshardingProtocol


class ObjectStore(ReshardingProtocol):
    """The handle holds an object reference: the buffer lives as long as the driver keeps the call that returned it."""

    def publish(self, share: Share, parameters: Mapping[str, Tensor], version: int) -> tuple[int, Any]:
        buffer = torch.empty(share.numel, dtype=torch_dtype(self.channel.dtype))
        fill(buffer, share, parameters)
        return version, ray.put(buffer.view(torch.uint8).numpy())

    def receive(
        self, intake: Intake, handles: Sequence[tuple[int, Any]], parameters: Mapping[str, Tensor], version: int
    ) -> None:
        drain(intake, parameters, lambda rank: self._weights(ray.get(handles[rank][1])))

    def _weights(self, memory: np.ndarray) -> Tensor:
        with warnings.catch_warnings():  # Ray's arrays are read-only, and we only read
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(memory).view(torch_dtype(self.channel.dtype))
