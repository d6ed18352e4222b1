"""What a process of the reward pool runs: receive a chunk of samples, score one after the other, say so.

    python -m workers.rewards.child FUNCTION SOCKET PAGE PARENT

Talks over the socket with file descriptor SOCKET; shares the memory of descriptor PAGE with the pool, into which it
writes scores and when the running sample began. So the pool needs no message per sample, knows exactly how long one
has been running, and keeps the scores of a process that it has to kill.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

from hybridflow.errors import HybridFlowError
from workers.rewards.functions import RewardFunction, load_function, score_all, score_one

MAX_CHUNK = 1 << 16
STARTED, DONE, SCORES = 0, 1, 2  # places in the page, which is an array of doubles
PAGE_BYTES = 8 * (SCORES + MAX_CHUNK)
_PR_SET_PDEATHSIG = 1

Chunk = tuple[list[str], list[str], list[str]]


def main(name: str, socket: int, page_file: int, parent: int) -> None:
    """Serve until the pool closes its end of the socket, or dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    connection = Connection(socket)
    page = memoryview(mmap.mmap(page_file, PAGE_BYTES)).cast("d")
    try:
        function = load_function(name)
    except HybridFlowError as error:
        error.where = error.where or "reward_model.function"
        connection.send(("refused", error))
        return
    connection.send(("ready", function.batched))
    while True:
        try:
            chunk: Chunk = connection.recv()
        except (EOFError, OSError):
            return
        _score(function, chunk, page, connection)


def _score(function: RewardFunction, chunk: Chunk, page: memoryview, connection: Connection) -> None:
    page[STARTED] = time.monotonic()
    samples = zip(*chunk, strict=True)
    outcomes = score_all(function, *chunk) if function.batched else (score_one(function, *one) for one in samples)
    for index, outcome in enumerate(outcomes):
        page[SCORES + index] = outcome.score
        if outcome.failure:
            connection.send(("failure", index, outcome.failure))
        # This order: the pool blames the sample at DONE only if STARTED is the same before and after it killed us.
        page[STARTED] = time.monotonic()
        page[DONE] = index + 1
    page[STARTED] = 0.0
    connection.send(("done",))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
