"""``shared_memory``: one file in /dev/shm for each source rank, written in place at each update. One host."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hybridflow.errors import NumericsError, ResourceError
from workers.resharding.buffers import drain, fill, torch_dtype
from workers.resharding.planner import Intake, Share
from workers.resharding.protocol import Channel, ReshardingProtocol
from workers.resharding.segments import SHARED_MEMORY, Segment, segment_name, sweep

_HEADER_BYTES = 64
_WRITING = -1


class SharedMemory(ReshardingProtocol):
    """The file starts with the version of its weights (-1 while they are written), so no torn read goes unnoticed."""

    def __init__(self, channel: Channel):
        super().__init__(channel)
        self._own: tuple[Path, np.ndarray] | None = None
        self._mapped: dict[str, np.ndarray] = {}

    def publish(self, share: Share, parameters: Mapping[str, Tensor], version: int) -> Segment:
        itemsize = torch_dtype(self.channel.dtype).itemsize
        path, memory = self._own = self._own or _create(share, _HEADER_BYTES + share.numel * itemsize)
        header = memory[:8].view(np.int64)
        header[0] = _WRITING
        fill(self._weights(memory), share, parameters)
        header[0] = version
        return Segment(str(path), version)

    def receive(
        self, intake: Intake, handles: Sequence[Segment], parameters: Mapping[str, Tensor], version: int
    ) -> None:
        drain(intake, parameters, lambda rank: self._weights(self._checked(handles[rank], version)))
        for rank in {copy.source for copy in intake.copies}:
            self._checked(handles[rank], version)

    def close(self) -> None:
        self._mapped.clear()
        if self._own:
            with contextlib.suppress(FileNotFoundError):
                self._own[0].unlink()
        self._own = None

    def _checked(self, segment: Segment, version: int) -> np.ndarray:
        if segment.path not in self._mapped:
            self._mapped[segment.path] = np.memmap(segment.path, dtype=np.uint8, mode="r+")
        memory = self._mapped[segment.path]
        found = int(memory[:8].view(np.int64)[0])
        if found != version:
            raise NumericsError(
                f"the shared weights are of version {found}, version {version} was to be received",
                hint="receive an update before the next one is published",
                where=segment.path,
            )
        return memory

    def _weights(self, memory: np.ndarray) -> Tensor:
        return torch.from_numpy(memory[_HEADER_BYTES:]).view(torch_dtype(self.channel.dtype))


def _create(share: Share, size: int) -> tuple[Path, np.ndarray]:
    sweep()
    path = SHARED_MEMORY / segment_name(f"weights-{uuid.uuid4().hex[:8]}-{share.rank}")
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)  # fails here and now, not by SIGBUS at some later write
    except OSError as error:
        path.unlink()
        raise ResourceError(
            f"/dev/shm has no room for {size / 1e6:.0f} MB of weights: {error.strerror}",
            hint="give the container more shared memory (docker: --shm-size), or set resharding.protocol: object_store",
        ) from error
    finally:
        os.close(descriptor)
    return path, np.memmap(path, dtype=np.uint8, mode="r+")
