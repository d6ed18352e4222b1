"""The base of every role: what a worker knows about itself, and the methods that every role has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from placement.layout import Coord, Layout


@dataclass(frozen=True)
class WorkerContext:
    """What one rank of one role is told when it is made.

    ``peers`` holds the other roles in the same process, by name: with LoRA the reference finds the actor's engine
    there. For roles whose ``needs_process_group`` is true, ``torch.distributed`` is initialised before any engine is
    built: over all ranks of the pool, or over those of one replica where ``group_per_replica`` is true.
    """

    role: str
    coord: Coord = field(default_factory=Coord)
    layout: Layout = field(default_factory=Layout)
    device: str = "cpu"
    run_dir: str = ""
    peers: Mapping[str, Worker] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.coord.rank


class Worker:
    """One rank of a role. Subclasses hold methods marked with ``@transfer``; the driver sees exactly those.

    A marked method may return: nothing; a ``Batch`` (when it declares ``writes``), alone or with a dict of metrics
    (``hybridflow.telemetry.metrics``) or other small values; or any small value.
    """

    needs_process_group: ClassVar[bool] = True
    group_per_replica: ClassVar[bool] = False

    def __init__(self, context: WorkerContext):
        self.context = context

    def sleep(self) -> Any:
        """Give back device memory while another tenant of the same devices works."""

    def wake(self) -> Any:
        """Take back what ``sleep`` gave away."""

    def close(self) -> None:
        """Release files and shared memory; called once, before the process ends."""
