"""Named shared memory of ours in /dev/shm: every name says who owns it, and what dead owners left is swept.

A leaf for both engines: the shared-memory protocol puts weights there, and vLLM its all-reduce buffers.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_OURS = re.compile(r"hybridflow-(\d+)-")


@dataclass(frozen=True)
class Segment:
    """Handle of published weights. It stands here, for the driver unpickles it and must not import torch for it."""

    path: str
    version: int


def segment_name(label: str) -> str:
    """A name for shared memory of this process; ``label`` tells its segments apart."""
    return f"hybridflow-{os.getpid()}-{label}"


def sweep() -> list[str]:
    """Remove segments whose owner no longer lives (it was killed before it could); returns their names."""
    removed = []
    for path in SHARED_MEMORY.glob("hybridflow-*"):
        owner = _OURS.match(path.name)
        if owner and not Path("/proc", owner[1]).exists():
            with contextlib.suppress(OSError):  # another sweep was faster, or another user's segment
                path.unlink()
                removed.append(path.name)
    return removed
