"""Runs cases on several ranks without Ray: processes that are started once, and take one case after the other.

    world.run(case, Layout(tp=2), argument)        # case(context, argument) on each of the layout's ranks

``case`` is a module-level function of a file that imports neither pytest nor transformers; what it returns comes back
as a list, one entry per rank. A case that raises on any rank raises here, with the rank's traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from hybridflow.worker import WorkerContext
from placement.layout import Layout

RANKS = 4
SECONDS = 120


class World:
    """Up to ``RANKS`` processes over gloo. They are forked from one that has imported the engine, once for all."""

    def __init__(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"  # a forked process must not find half of a thread pool
        self._folder = Path(tempfile.mkdtemp(prefix="world-"))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["workers.megatron.engine", "hybridflow.algorithms.losses"])
        self._ranks: list[tuple[Any, Connection]] = []
        self._cases = 0

    def run(self, case: Callable[..., Any], layout: Layout, *arguments: Any, role: str = "actor") -> list[Any]:
        """Run ``case(context, *arguments)`` on every rank of ``layout``; results in rank order."""
        if not self._ranks:
            self._ranks = [self._start(rank) for rank in range(RANKS)]
        self._cases += 1
        store = str(self._folder / f"store-{self._cases}")
        for rank in range(layout.world_size):
            context = WorkerContext(role=role, coord=layout.coord(rank), layout=layout, run_dir=str(self._folder))
            self._ranks[rank][1].send((case, context, store, arguments))
        return self._collect(layout.world_size)

    def close(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            process.join(5)
            process.kill()
        self._ranks = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), name=f"rank {rank}", daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _collect(self, count: int) -> list[Any]:
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks[:count])}
        results: list[Any] = [None] * count
        end = time.monotonic() + SECONDS
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                stuck = sorted(waiting.values())
                self._restart()
                raise TimeoutError(f"ranks {stuck} gave no result within {SECONDS} s")
            for connection in ready:
                rank = waiting.pop(connection)
                error, value = pickle.loads(connection.recv_bytes())
                if error is not None:
                    self._restart()  # its peers may hang in a collective
                    error.add_note(f"on rank {rank}:\n{value}")
                    raise error
                results[rank] = value
        return results

    def _restart(self) -> None:
        for process, connection in self._ranks:
            process.kill()
            connection.close()
        self._ranks = []


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    while True:
        try:
            case, context, store, arguments = connection.recv()
        except EOFError:
            return
        size = context.layout.world_size
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=context.rank, world_size=size)
        try:
            answer = pickle.dumps((None, case(context, *arguments)))
        except BaseException as error:  # noqa: BLE001 - it is raised again in the test
            answer = pickle.dumps((error, traceback.format_exc()))
        connection.send_bytes(answer)
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
