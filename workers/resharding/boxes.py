"""Shard maps: what each local parameter holds, in the coordinates of the canonical Hugging Face tensors.

Both engines describe themselves this way, and one map serves loading, export, checksums and resharding. A leaf: imports
nothing of ours, so that both engines may use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """A half-open block of one canonical Hugging Face tensor."""

    tensor: str
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common block, or None where there is none (other tensors never meet)."""
        if self.tensor != other.tensor:
            return None
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(self.tensor, start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None


@dataclass(frozen=True)
class Piece:
    """Where a box lies in a parameter of this rank: at ``offset``, with the box's own shape.

    A parameter may hold several pieces (fused QKV, gate and up); rows that no piece names are padding.
    """

    box: Box
    parameter: str
    offset: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + size) for o, size in zip(self.offset, self.box.shape, strict=True))


ShardMap = list[Piece]
