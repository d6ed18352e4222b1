"""The generation side of a resharding, as the rollout role uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workers.resharding.planner import Intake
from workers.resharding.protocol import Channel, get_resharding

if TYPE_CHECKING:
    from torch import Tensor


class Receiver:
    """The target end of one generation rank: its intake of the plan, and the protocol that carries it."""

    def __init__(self, channel: Channel, intake: Intake):
        self.intake = intake
        self._end = get_resharding(channel.protocol)(channel)

    def receive(self, handles: Sequence[Any], parameters: Mapping[str, Tensor], version: int) -> None:
        """Copy this rank's intake into the live parameters. ``handles``: those of all source ranks, in rank order."""
        self._end.receive(self.intake, handles, parameters, version)

    def close(self) -> None:
        self._end.close()
