"""Resharding protocols: how the plan is carried out. Light to import, for the driver looks names up here.

A protocol is a class with three methods; one object of it lives in each source and in each target rank. Register your
own in a file that the config names under ``register`` (it is imported in the driver and in every process):

    class Mine(ReshardingProtocol): ...
    register_resharding("mine", Mine)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridflow.errors import ConfigError
from hybridflow.loading import load
from workers.resharding.planner import Intake, Share

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Channel:
    """What both ends know.

    Args:
        protocol: its registered name.
        dtype: of the engine's weights ("bfloat16" or "float32"). The trainer's are cast to it once, while they are
            published, so that no wider number than the engine keeps is ever moved.
        folder: a folder of the run, for protocols that write files.
    """

    protocol: str
    dtype: str
    folder: str = ""


class ReshardingProtocol:
    """One end of a transfer. Subclasses are built with the channel alone."""

    def __init__(self, channel: Channel):
        self.channel = channel

    def publish(self, share: Share, parameters: Mapping[str, Tensor], version: int) -> Any:
        """Source side: make the share available; returns a small picklable handle."""
        raise NotImplementedError(f"{type(self).__name__} must define publish")

    def receive(self, intake: Intake, handles: Sequence[Any], parameters: Mapping[str, Tensor], version: int) -> None:
        """Target side: copy into the live parameters. ``handles`` are those of all source ranks, in rank order."""
        raise NotImplementedError(f"{type(self).__name__} must define receive")

    def close(self) -> None:
        """Remove what this end created."""


_PROTOCOLS: dict[str, type[ReshardingProtocol] | str] = {
    "shared_memory": "workers.resharding.shared_memory:SharedMemory",
    "object_store": "workers.resharding.object_store:ObjectStore",
    "checkpoint": "workers.resharding.checkpoint:Checkpoint",
}


def register_resharding(name: str, protocol: type[ReshardingProtocol] | str) -> None:
    """Make a protocol known by its name: a class, or "module:Class" which is loaded in the workers only."""
    if _PROTOCOLS.setdefault(name, protocol) is not protocol:
        raise ConfigError(f"resharding protocol {name!r} is already registered", hint="choose another name")


def get_resharding(name: str) -> type[ReshardingProtocol]:
    check_resharding(name)
    found = _PROTOCOLS[name]
    return load(found) if isinstance(found, str) else found


def check_resharding(name: str) -> None:
    if name not in _PROTOCOLS:
        raise ConfigError(
            f"unknown resharding protocol {name!r}",
            hint=f"registered are auto, {', '.join(sorted(_PROTOCOLS))}; name the file of your own under register",
            where="resharding.protocol",
        )


def choose_resharding(name: str, *, one_host: bool) -> str:
    """What ``auto`` means here: shared memory where all ranks are on one host, else the object store."""
    if name == "auto":
        return "shared_memory" if one_host else "object_store"
    check_resharding(name)
    return name
