"""The driver's side of a resharding: which pool's weights go where. Holds the plan's outcome, never a weight."""

from __future__ import annotations

from typing import Any

import ray

from hybridflow.config.schema import ReshardingConfig
from hybridflow.pool import Call, Pool
from workers.resharding.planner import ReshardingPlan, plan
from workers.resharding.protocol import Channel, choose_resharding


class Resharding:
    """Sends the actor's weights to the rollout pool, update after update.

    The shard maps are fetched and the plan is made here, once. ``send`` submits and does not wait: the handles go from
    one pool's calls to the other's as references.

    Args:
        dtype: of the engine's weights.
        run_dir: for protocols that write files.
        adapter: after the first update only LoRA adapters are sent, as a folder.
    """

    def __init__(
        self,
        actor: Pool,
        rollout: Pool,
        config: ReshardingConfig,
        *,
        dtype: str,
        run_dir: str = "",
        adapter: bool = False,
    ):
        self.actor, self.rollout, self.adapter = actor, rollout, adapter
        self.protocol = choose_resharding(config.protocol, one_host=_one_host(actor, rollout))
        self.dtype = dtype
        maps = actor.shard_map(), rollout.shard_map()
        self.plan: ReshardingPlan = plan(maps[0].result(), maps[1].result())
        channel = Channel(self.protocol, dtype, run_dir)
        opened = (
            actor.open_publisher([channel] * len(self.plan.shares), list(self.plan.shares)),
            rollout.open_receiver([channel] * len(self.plan.intakes), list(self.plan.intakes)),
        )
        for call in opened:
            call.result()
        self._published: Call | None = None
        self._loaded: Call | None = None

    def send(self, version: int) -> Call:
        """Bring the rollout pool to policy ``version``; returns the call that ends it."""
        if self._loaded is None or not self.adapter:
            # Kept until the next update: with the object store the buffers live as long as these references.
            self._published = self.actor.publish_weights(version, merged=not self.adapter, after=self._loaded)
            self._loaded = self.rollout.load_weights(self._published, version)
        if self.adapter:
            folder = self.actor.publish_adapter(version, after=self._loaded)
            self._loaded = self.rollout.load_adapter(folder, version)
        return self._loaded

    def describe(self) -> str:
        """One line for the run card."""
        return f"{self.protocol}, {self.plan.describe(2 if self.dtype == 'bfloat16' else 4)}"


def _one_host(*pools: Any) -> bool:
    addresses = ray.get([address for pool in pools for address in pool.nodes])
    return len({(address["host"], address["node"]) for address in addresses}) == 1
