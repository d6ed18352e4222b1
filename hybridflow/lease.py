"""Tenants of one device set take turns: the driver holds the lease and orders sleep and wake when it changes hands.

Nothing here waits. A process runs its calls in the order in which they were submitted, so it is enough to submit, at a
change of tenant, ``sleep`` to the old one and ``wake`` (which waits for that sleep) to the new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Lease:
    """The turn on one device set. A set with one tenant never changes hands."""

    def __init__(self) -> None:
        self._holder: Sequence[Any] | None = None

    def take(self, processes: Sequence[Any]) -> list[Any]:
        """Give the turn to the team with these processes.

        Returns what a call of it must wait for beyond its own queue: references to the wake calls, or nothing when it
        already holds the turn.
        """
        if self._holder is processes:
            return []
        slept = [process.turn.remote("sleep") for process in self._holder or ()]
        self._holder = processes
        return [process.turn.remote("wake", *slept) for process in processes] if slept else []
