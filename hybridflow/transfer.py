"""Transfer protocols: how a pool call scatters its arguments over the ranks and gathers their results.

A protocol is two functions over a rank's coordinates (HybridFlow paper, table 3):

    distribute(coord, layout) -> which shard of a batch argument this rank gets, or ALL for the whole of it
    collect(coord, layout)    -> whether this rank's result is kept

Arguments that are no batches go to every rank as they are, except under ALL_TO_ALL, where each argument is a list with
one element per rank. Register another protocol in a file of your own (named in the config under ``register``):

    register_protocol(TransferProtocol("LAST_STAGE", lambda c, l: ALL, lambda c, l: c.pp == l.pp - 1))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from placement.layout import Coord, Layout

ALL = -1
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class TransferProtocol:
    """See the module's docstring. ``per_rank``: arguments are lists with one element for each rank."""

    name: str
    distribute: Callable[[Coord, Layout], int]
    collect: Callable[[Coord, Layout], bool]
    per_rank: bool = False

    def shards(self, layout: Layout) -> int:
        """Number of shards a batch is cut into (0: it is not cut)."""
        return max(self.distribute(coord, layout) for coord in layout.coords()) + 1

    def collected(self, layout: Layout) -> list[int]:
        return [coord.rank for coord in layout.coords() if self.collect(coord, layout)]


@dataclass(frozen=True)
class Transfer:
    """What ``@transfer`` declares of a worker method."""

    protocol: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


PROTOCOLS: dict[str, TransferProtocol] = {}


def register_protocol(protocol: TransferProtocol) -> TransferProtocol:
    """Make a protocol known by its name. A name can be taken only once."""
    if protocol.name in PROTOCOLS:
        raise ValueError(f"transfer protocol {protocol.name!r} is already registered")
    PROTOCOLS[protocol.name] = protocol
    return protocol


def get_protocol(name: str) -> TransferProtocol:
    if name not in PROTOCOLS:
        raise KeyError(f"unknown transfer protocol {name!r}; registered: {', '.join(sorted(PROTOCOLS))}")
    return PROTOCOLS[name]


def transfer(
    protocol: str, *, reads: tuple[str, ...] = (), writes: tuple[str, ...] = ()
) -> Callable[[Function], Function]:
    """Declare a worker method callable through its pool.

    Args:
        protocol: name of a registered transfer protocol.
        reads: batch columns the method needs; only these travel to the rank.
        writes: batch columns it returns; non-empty means that the method returns a ``Batch``.
    """

    def mark(function: Function) -> Function:
        function.transfer = Transfer(protocol, tuple(reads), tuple(writes))  # type: ignore[attr-defined]
        return function

    return mark


def _last_stage_leader(coord: Coord, layout: Layout) -> bool:
    return coord.tp == 0 and coord.cp == 0 and coord.pp == layout.pp - 1


def _micro_dp(coord: Coord, layout: Layout) -> int:
    return coord.dp * layout.micro_dp + coord.micro_dp


for _protocol in (
    TransferProtocol("ONE_TO_ALL", lambda c, l: ALL, lambda c, l: True),
    TransferProtocol("3D_PROTO", lambda c, l: c.dp, _last_stage_leader),
    TransferProtocol("3D_ALL_MICRO_DP", _micro_dp, _last_stage_leader),
    TransferProtocol("3D_PP_ONLY", lambda c, l: ALL, lambda c, l: c.tp == 0 and c.cp == 0 and c.dp == 0),
    TransferProtocol("DP_PROTO", lambda c, l: c.rank, lambda c, l: True),
    TransferProtocol("ALL_TO_ALL", lambda c, l: c.rank, lambda c, l: True, per_rank=True),
):
    register_protocol(_protocol)
