"""Who gives which block of which tensor to whom: made once, from the shard maps of both sides. Pure.

Every element of a tensor is published by exactly one source rank, whatever the copies of it on DP and TP replicas; a
source rank's blocks lie one after the other in one flat buffer, and a target rank copies slices of such buffers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybridflow.errors import WorkerError
from workers.resharding.boxes import Box, Piece, ShardMap


@dataclass(frozen=True)
class Region:
    """A block that lies contiguously in a source rank's buffer, from element ``offset`` on."""

    box: Box
    offset: int


@dataclass(frozen=True)
class Share:
    """What one source rank publishes: pieces of its parameters, each at its element of a buffer of ``numel``."""

    rank: int
    numel: int
    pieces: tuple[tuple[Piece, int], ...]


@dataclass(frozen=True)
class Copy:
    """One copy of a target rank: the part ``piece.box`` of a region of source rank ``source``, to ``piece``'s place."""

    source: int
    region: Region
    piece: Piece

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where the part lies within the region."""
        inside = zip(self.piece.box.start, self.piece.box.stop, self.region.box.start, strict=True)
        return tuple(slice(start - first, stop - first) for start, stop, first in inside)


@dataclass(frozen=True)
class Intake:
    """What one target rank copies, source by source."""

    rank: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class ReshardingPlan:
    """``shares[r]`` of source rank r, ``intakes[r]`` of target rank r, and their sizes in elements."""

    shares: tuple[Share, ...]
    intakes: tuple[Intake, ...]

    @property
    def published(self) -> int:
        """Elements that the sources write, over all ranks."""
        return sum(share.numel for share in self.shares)

    @property
    def copied(self) -> int:
        """Elements that the targets copy, over all ranks."""
        return sum(copy.piece.box.numel for intake in self.intakes for copy in intake.copies)

    def describe(self, itemsize: int) -> str:
        ranks = f"{len(self.shares)} -> {len(self.intakes)} ranks"
        megabytes = f"{self.published * itemsize / 1e6:.1f} MB published, {self.copied * itemsize / 1e6:.1f} MB copied"
        return f"{ranks}, {megabytes} an update"


def plan(sources: Sequence[ShardMap], targets: Sequence[ShardMap]) -> ReshardingPlan:
    """Plan the transfer.

    Args:
        sources: shard map of each source (training) rank, in rank order.
        targets: shard map of each target (generation) rank.

    Errors:
        WorkerError: a target needs what no source holds, or sources hold tensors that no target takes.
    """
    owners = _owners(sources)
    wanted = {piece.box.tensor for target in targets for piece in target}
    _check_names(set(owners), wanted)
    shares = _choose(owners, len(sources))
    regions = _regions(shares)
    intakes = [Intake(rank, tuple(_copies(target, regions))) for rank, target in enumerate(targets)]
    _check_covered(targets, intakes)
    return ReshardingPlan(tuple(shares), tuple(intakes))


def _owners(sources: Sequence[ShardMap]) -> dict[str, dict[Box, dict[int, Piece]]]:
    """For each tensor its distinct boxes, each with the ranks that hold it and where."""
    owners: dict[str, dict[Box, dict[int, Piece]]] = defaultdict(lambda: defaultdict(dict))
    for rank, source in enumerate(sources):
        for piece in source:
            owners[piece.box.tensor][piece.box].setdefault(rank, piece)
    return owners


def _choose(owners: dict[str, dict[Box, dict[int, Piece]]], world: int) -> list[Share]:
    """Give each block to one of its holders: the one with the least so far, the lowest rank among equals.

    Blocks of a tensor with the same holders stay together, so that neighbours meet in one region.
    """
    chosen: list[list[Piece]] = [[] for _ in range(world)]
    load = [0] * world
    for boxes in owners.values():
        groups: dict[tuple[int, ...], list[tuple[Box, Box]]] = defaultdict(list)
        for part, box in _disjoint(boxes):
            groups[tuple(sorted(boxes[box]))].append((part, box))
        for holders, blocks in groups.items():
            rank = min(holders, key=lambda holder: (load[holder], holder))
            load[rank] += sum(part.numel for part, _ in blocks)
            chosen[rank].extend(narrow(boxes[box][rank], part) for part, box in blocks)
    shares = []
    for rank, pieces in enumerate(chosen):
        offset, placed = 0, []
        for piece in pieces:
            placed.append((piece, offset))
            offset += piece.box.numel
        shares.append(Share(rank, offset, tuple(placed)))
    return shares


def _disjoint(boxes: Iterable[Box]) -> list[tuple[Box, Box]]:
    """Parts that cover the same elements as ``boxes``, none twice; each with the box that it is a part of."""
    parts: list[tuple[Box, Box]] = []
    active: list[Box] = []  # taken boxes that reach the rows now looked at
    for box in sorted(boxes, key=lambda box: (box.start, box.stop)):
        active = [taken for taken in active if taken.stop[0] > box.start[0]]
        remaining = [box]
        for taken in active:
            remaining = [rest for part in remaining for rest in _subtract(part, taken)]
        parts.extend((part, box) for part in remaining)
        if remaining:
            active.append(box)
    return parts


def _subtract(box: Box, other: Box) -> list[Box]:
    """What is left of ``box`` without ``other``, as disjoint boxes."""
    common = box.intersect(other)
    if common is None:
        return [box]
    rest, start, stop = [], list(box.start), list(box.stop)
    for axis, (low, high) in enumerate(zip(common.start, common.stop, strict=True)):
        if start[axis] < low:
            rest.append(Box(box.tensor, tuple(start), (*stop[:axis], low, *stop[axis + 1 :])))
        if high < stop[axis]:
            rest.append(Box(box.tensor, (*start[:axis], high, *start[axis + 1 :]), tuple(stop)))
        start[axis], stop[axis] = low, high
    return rest


def narrow(piece: Piece, box: Box) -> Piece:
    """The part ``box`` of a piece, which must lie within it."""
    if piece.box == box:
        return piece
    shift = zip(piece.offset, box.start, piece.box.start, strict=True)
    return Piece(box, piece.parameter, tuple(offset + start - first for offset, start, first in shift))


def _regions(shares: Sequence[Share]) -> dict[str, list[tuple[int, Region]]]:
    """Blocks by tensor with their source rank; blocks that follow each other in tensor and buffer become one."""
    regions: dict[str, list[tuple[int, Region]]] = defaultdict(list)
    for share in shares:
        for piece, offset in share.pieces:
            found = regions[piece.box.tensor]
            if found and found[-1][0] == share.rank and _continues(found[-1][1], piece.box, offset):
                last = found[-1][1]
                stop = (piece.box.stop[0], *last.box.stop[1:])
                found[-1] = (share.rank, Region(Box(last.box.tensor, last.box.start, stop), last.offset))
            else:
                found.append((share.rank, Region(piece.box, offset)))
    return regions


def _continues(region: Region, box: Box, offset: int) -> bool:
    same_columns = region.box.start[1:] == box.start[1:] and region.box.stop[1:] == box.stop[1:]
    return same_columns and region.box.stop[0] == box.start[0] and region.offset + region.box.numel == offset


def _copies(target: ShardMap, regions: dict[str, list[tuple[int, Region]]]) -> Iterable[Copy]:
    for piece in target:
        for rank, region in regions[piece.box.tensor]:
            common = piece.box.intersect(region.box)
            if common is not None:
                yield Copy(rank, region, narrow(piece, common))


def _check_names(held: set[str], wanted: set[str]) -> None:
    problems = [f"no source holds {name}" for name in sorted(wanted - held)]
    problems += [f"no target takes {name}" for name in sorted(held - wanted)]
    if problems:
        raise WorkerError(
            f"the two sides hold different models: {_some(problems)}",
            hint="trainer and engine must be built from the same model folder (tied embeddings included)",
        )


def _check_covered(targets: Sequence[ShardMap], intakes: Sequence[Intake]) -> None:
    problems = []
    for rank, (target, intake) in enumerate(zip(targets, intakes, strict=True)):
        got: dict[tuple[str, str], int] = defaultdict(int)
        need: dict[tuple[str, str], int] = defaultdict(int)
        for copy in intake.copies:
            got[copy.piece.box.tensor, copy.piece.parameter] += copy.piece.box.numel
        for piece in target:
            need[piece.box.tensor, piece.parameter] += piece.box.numel
        for (tensor, parameter), numel in need.items():
            if got[tensor, parameter] != numel:
                held = f"{got[tensor, parameter]} of {numel} numbers"
                problems.append(f"sources hold {held} of {tensor} for {parameter} on rank {rank}")
    if problems:
        raise WorkerError(f"the sources do not cover the targets: {_some(problems)}", hint="a training rank is missing")


def _some(problems: list[str]) -> str:
    return "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
