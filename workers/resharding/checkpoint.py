"""``checkpoint``: through safetensors files in the run folder. Slow and simple: the others must equal it, bitwise."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from workers.resharding.boxes import Box
from workers.resharding.buffers import torch_dtype
from workers.resharding.planner import Intake, Share
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
        for rank in sorted({copy.source for copy in intake.copies}):
            with safe_open(handles[rank], framework="pt") as file:
                blocks = [(key, _box(key)) for key in file.keys()]
                for copy in intake.copies:
                    if copy.source != rank:
                        continue
                    for key, box in blocks:
                        common = box.intersect(copy.piece.box)
                        if common is not None:
                            _copy(file, key, box, common, copy.piece, parameters)

    def close(self) -> None:
        for file in self._files:
            file.unlink(missing_ok=True)
        for folder in {file.parent for file in self._files}:
            with contextlib.suppress(OSError):  # other ranks still have files there
                folder.rmdir()
        self._files = []
