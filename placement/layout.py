"""How the ranks of a pool are laid out: sizes of the parallel axes, and the coordinates of a rank.

Rank order is Megatron-Core's default ("tp-cp-ep-dp-pp"): TP varies fastest, then CP, then DP, and PP slowest.
"""

from __future__ import annotations

from dataclasses import dataclass

from placement.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes of one pool. ``micro_dp`` splits a training DP rank's share once more, for a
    generation engine whose model-parallel size is smaller than training's (HybridFlow paper, section 5.1)."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    micro_dp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp * self.micro_dp

    @property
    def model_size(self) -> int:
        """Ranks that together hold one copy of the model."""
        return self.tp * self.pp * self.cp

    def coord(self, rank: int) -> Coord:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        rest, micro_dp = divmod(rest, self.micro_dp)
        pp, dp = divmod(rest, self.dp)
        return Coord(rank=rank, tp=tp, cp=cp, dp=dp, pp=pp, micro_dp=micro_dp)

    def coords(self) -> list[Coord]:
        return [self.coord(rank) for rank in range(self.world_size)]

    @classmethod
    def for_world(cls, world_size: int, *, tp: int = 1, pp: int = 1, cp: int = 1, where: str = "layout") -> Layout:
        """The layout that fills ``world_size`` ranks: DP is what TP x PP x CP leaves."""
        model = tp * pp * cp
        if world_size < 1 or world_size % model:
            raise ConfigError(
                f"{world_size} devices cannot be cut into model copies of TP {tp} x PP {pp} x CP {cp} = {model}",
                hint=f"use a multiple of {model} devices, or sizes whose product divides {world_size}",
                where=where,
            )
        return cls(tp=tp, pp=pp, cp=cp, dp=world_size // model)

    def __str__(self) -> str:
        names = ("tp", "pp", "cp", "dp", "micro_dp")
        return " ".join(f"{n.upper()}{getattr(self, n)}" for n in names if n in ("tp", "dp") or getattr(self, n) > 1)


@dataclass(frozen=True)
class Coord:
    """Where one rank stands on each axis of its pool's layout."""

    rank: int = 0
    tp: int = 0
    pp: int = 0
    cp: int = 0
    dp: int = 0
    micro_dp: int = 0

    def __str__(self) -> str:
        return f"dp={self.dp} tp={self.tp} pp={self.pp}"
