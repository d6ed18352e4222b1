"""``checkpoint``: through safetensors files in the run folder. Slow and simple: the others must equal it, bitwise."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from workers.resharding.boxes import Box, Piece
from workers.resharding.buffers import torch_dtype
from workers.resharding.planner import Copy, Intake, Share, narrow
from workers.resharding.protocol import Channel, ReshardingProtocol


class Checkpoint(ReshardingProtocol):
    """Each source rank writes one file an update, a tensor for each block, and removes the file before the last."""

    def __init__(self, channel: Channel):
        super().__init__(channel)
        self._files: list[Path] = []

    def publish(self, share: Share, parameters: Mapping[str, Tensor], version: int) -> str:
        folder = Path(self.channel.folder) / "resharding"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"version-{version}-rank-{share.rank}.safetensors"
        blocks = {}
        for piece, _ in share.pieces:
            value = parameters[piece.parameter][piece.slices].detach()
            blocks[_key(piece.box)] = value.to("cpu", torch_dtype(self.channel.dtype)).contiguous().clone()
        save_file(blocks, path)
        self._files = [*(file for file in self._files if file != path), path]
        while len(self._files) > 1:
            self._files.pop(0).unlink(missing_ok=True)
        return str(path)

    @torch.no_grad()
    def receive(self, intake: Intake, handles: Sequence[str], parameters: Mapping[str, Tensor], version: int) -> None:
        for rank, copies in itertools.groupby(sorted(intake.copies, key=_source), key=_source):
            with safe_open(handles[rank], framework="pt") as file:
                blocks: dict[str, list[Box]] = defaultdict(list)
                for box in map(_box, file.keys()):
                    blocks[box.tensor].append(box)
                for copy in copies:
                    for box in blocks[copy.piece.box.tensor]:
                        _read(file, box, copy.piece, parameters)

    def close(self) -> None:
        for file in self._files:
            file.unlink(missing_ok=True)
        for folder in {file.parent for file in self._files}:
            with contextlib.suppress(OSError):  # other ranks still have files there
                folder.rmdir()
        self._files = []


def _source(copy: Copy) -> int:
    return copy.source


def _read(file: Any, box: Box, piece: Piece, parameters: Mapping[str, Tensor]) -> None:
    """Copy what the block ``box`` of a file holds of ``piece``."""
    common = box.intersect(piece.box)
    if common is not None:
        inside = tuple(slice(a - o, b - o) for a, b, o in zip(common.start, common.stop, box.start, strict=True))
        part = narrow(piece, common)
        parameters[part.parameter][part.slices].copy_(file.get_slice(_key(box))[inside])


def _key(box: Box) -> str:
    """Name of a block in a file: "model.norm.weight[0:128]"."""
    return f"{box.tensor}[{','.join(f'{a}:{b}' for a, b in zip(box.start, box.stop, strict=True))}]"


def _box(key: str) -> Box:
    tensor, _, extents = key.removesuffix("]").rpartition("[")
    bounds = [tuple(map(int, extent.split(":"))) for extent in extents.split(",")]
    return Box(tensor, tuple(start for start, _ in bounds), tuple(stop for _, stop in bounds))
