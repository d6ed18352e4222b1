"""The training side of a resharding, as the actor's role uses it:

    @transfer("ONE_TO_ALL")
    def shard_map(self) -> ShardMap:                     # of every rank; canonical Hugging Face names
        return self.engine.shard_map()

    @transfer("ALL_TO_ALL")
    def open_publisher(self, channel, share):            # once
        self.publisher = Publisher(channel, share)

    @transfer("ONE_TO_ALL")
    def publish_weights(self, version):                  # every rank, after each update; returns a small handle
        return self.publisher.publish(self.engine.parameters(), version)

    @transfer("ONE_TO_ALL")
    def publish_adapter(self, version):                  # only with rollout.lora: adapter. Collective; every rank
        return write_adapter(...) on rank 0, else None   # returns the folder or None (workers/resharding/adapter.py)

    def close(self):
        self.publisher.close()

``parameters`` maps the shard map's parameter names to tensors of the shapes that the map describes (LoRA merged into
them where ``rollout.lora`` is "merged"). The driver's link calls both ``after=`` the call that loaded the weights
before: so weights are never overwritten while they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workers.resharding.planner import Share
from workers.resharding.protocol import Channel, get_resharding

if TYPE_CHECKING:
    from torch import Tensor


class Publisher:
    """The source end of one training rank: its share of the plan, and the protocol that carries it."""

    def __init__(self, channel: Channel, share: Share):
        self.share = share
        self._end = get_resharding(channel.protocol)(channel)

    def publish(self, parameters: Mapping[str, Tensor], version: int) -> Any:
        """Make this rank's share available to the generation side; returns a small picklable handle."""
        return self._end.publish(self.share, parameters, version)

    def close(self) -> None:
        self._end.close()
