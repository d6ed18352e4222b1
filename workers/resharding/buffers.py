"""Moving weights in and out of flat buffers, as the plan says: what all protocols of memory have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hybridflow.errors import WorkerError
from workers.resharding.planner import Intake, Share


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


@torch.no_grad()
def fill(buffer: Tensor, share: Share, parameters: Mapping[str, Tensor]) -> None:
    """Copy the share's pieces into ``buffer`` (shape: (share.numel,)), cast to its dtype."""
    sources = [parameters[piece.parameter][piece.slices] for piece, _ in share.pieces]
    places = [buffer[at : at + piece.box.numel].view(piece.box.shape) for piece, at in share.pieces]
    if places:
        torch._foreach_copy_(places, sources)


@torch.no_grad()
def drain(intake: Intake, parameters: Mapping[str, Tensor], buffer_of: Callable[[int], Tensor]) -> None:
    """Copy what the intake names into the live parameters; ``buffer_of(rank)`` is a source rank's flat buffer."""
    buffers = {rank: buffer_of(rank) for rank in sorted({copy.source for copy in intake.copies})}
    places, values = [], []
    for copy in intake.copies:
        region, buffer = copy.region, buffers[copy.source]
        block = buffer[region.offset : region.offset + region.box.numel].view(region.box.shape)
        place = parameters[copy.piece.parameter][copy.piece.slices]
        if place.dtype != block.dtype:
            raise WorkerError(
                f"the engine keeps {copy.piece.parameter} as {place.dtype}, the weights come as {block.dtype}",
                hint="rollout.dtype names another type than the engine was started with",
            )
        places.append(place)
        values.append(block[copy.slices])
    if places:
        torch._foreach_copy_(places, values)
