"""A pool: one role and its processes, as the driver sees them. Its methods are the role's ``@transfer`` methods.

Calling one returns at once: a ``BatchRef`` if the method writes columns, a ``Call`` otherwise. Arguments may be batches
(cut for the ranks by the method's transfer protocol), earlier calls (the ranks receive the list of their collected
results), or plain small values.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from hybridflow.batch.ref import BatchRef, Source
from hybridflow.errors import HybridFlowError, WorkerError
from hybridflow.lease import Lease
from hybridflow.process import Collected, Summary
from hybridflow.telemetry.metrics import Metric, merge
from hybridflow.transfer import ALL, Transfer, TransferProtocol, get_protocol
from hybridflow.worker import Worker
from placement.layout import Coord, Layout

_ROOT_CAUSE_SECONDS = 3.0


class Call:
    """One call of a pool: its ranks' summaries, on their way."""

    def __init__(self, pool: Pool, method: str, summaries: list[Any], collected: list[int]):
        self.pool, self.method = pool, method
        self.summaries = summaries
        self.collected = collected

    @property
    def refs(self) -> list[Any]:
        return [self.summaries[rank] for rank in self.collected]

    @functools.cached_property
    def _all(self) -> list[Summary]:
        return wait_for(self)

    def result(self) -> list[Any]:
        """The collected ranks' values, in rank order; waits for all ranks.

        Raises:
            HybridFlowError: one error that names role, rank, node and cause, if any rank failed.
        """
        return [self._all[rank].value for rank in self.collected]

    def metrics(self) -> dict[str, Metric]:
        """The metrics that the collected ranks report, merged; waits."""
        return merge(value for value in self.result() if value)

    def lengths(self, column: str) -> list[np.ndarray]:
        """Lengths of the rows of a token column, one array for each collected rank; waits."""
        summaries = [self._all[rank] for rank in self.collected]
        return [(s.lengths or {})[column] for s in summaries]

    def spans(self) -> list[tuple[float, float]]:
        """Seconds since the epoch at which each rank began and ended; waits."""
        return [(summary.started, summary.stopped) for summary in self._all]

    def memory_bytes(self) -> int:
        """Resident memory of the largest of the ranks' processes, when each had ended the call; waits."""
        return max(summary.memory_bytes for summary in self._all)

    def span(self) -> tuple[float, float]:
        """From the first rank's beginning to the last one's end."""
        starts, stops = zip(*self.spans(), strict=True)
        return min(starts), max(stops)


class Pool:
    """A role's processes behind its methods. Anything but a ``@transfer`` method is an AttributeError listing them.

    Args:
        role: the role's name.
        worker: the role's class (methods, signatures and docstrings; it is never instantiated here).
        processes: Ray actor handles, rank by rank.
        layout: how the ranks are laid out.
        lease: the turn on the pool's device set; None for CPU pools.
        nodes: for each rank, a reference to its process's ``address()``, read when an error must name the node.
        ready: for each rank, references to what made its process ready; calls wait for them, and tell their errors.
        on_call: told of every call (telemetry).
    """

    def __init__(
        self,
        role: str,
        worker: type[Worker],
        processes: Sequence[Any],
        layout: Layout,
        *,
        lease: Lease | None = None,
        nodes: Sequence[Any] = (),
        ready: Sequence[Sequence[Any]] = (),
        on_call: Callable[[Call], None] | None = None,
    ):
        self.ready = ready or [()] * len(processes)
        self.role, self.processes, self.layout = role, processes, layout
        self.lease, self.nodes, self.on_call = lease, nodes, on_call
        self._methods = {
            name: PoolMethod(self, name, function)
            for name, function in inspect.getmembers(worker, inspect.isfunction)
            if hasattr(function, "transfer")
        }

    def __getattr__(self, name: str) -> PoolMethod:
        methods = self.__dict__.get("_methods", {})
        if name in methods:
            return methods[name]
        raise AttributeError(f"the {self.__dict__.get('role')} pool has no {name!r}; it has: {', '.join(methods)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._methods]

    def __repr__(self) -> str:
        return f"Pool({self.role}: {len(self.processes)} ranks, {self.layout})"

    def place(self, rank: int) -> str:
        node = _node_of(self.nodes[rank]) if rank < len(self.nodes) else "an unknown node"
        return f"{self.role} rank {rank} ({self.layout.coord(rank)}) on {node}"


class PoolMethod:
    """One method of a pool, with the worker method's signature and docstring."""

    def __init__(self, pool: Pool, name: str, function: Callable[..., Any]):
        functools.update_wrapper(self, function)
        self._pool, self._name = pool, name
        signature = inspect.signature(function)
        self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
        self._transfer: Transfer = function.transfer  # type: ignore[attr-defined]

    def __call__(self, *args: Any, after: Call | None = None, **kwargs: Any) -> BatchRef | Call:
        """Call it on all ranks. ``after``: a call (of any pool) that must end before this one begins."""
        self.__signature__.bind(*args, **kwargs)
        pool, protocol = self._pool, get_protocol(self._transfer.protocol)
        rows, batch = self._cut(protocol, [*args, *kwargs.values()])
        waits = [*(after.summaries if after else ()), *(pool.lease.take(pool.processes) if pool.lease else ())]
        returns = 2 if self._transfer.writes else 1
        columns, summaries = [], []
        for coord in pool.layout.coords():
            encoder = _Encoder(protocol, coord, pool.layout, self._transfer.reads, rows)
            encoded = tuple(encoder(arg) for arg in args)
            named = {name: encoder(arg) for name, arg in kwargs.items()}
            refs = (
                pool.processes[coord.rank]
                .call.options(num_returns=returns, name=f"{pool.role}.{self._name}")
                .remote(pool.role, self._name, encoded, named, *encoder.refs, *waits, *pool.ready[coord.rank])
            )
            columns.append(refs[0] if returns == 2 else None)
            summaries.append(refs[1] if returns == 2 else refs)
        call = Call(pool, self._name, summaries, protocol.collected(pool.layout))
        if pool.on_call:
            pool.on_call(call)
        if not self._transfer.writes:
            return call
        return self._written(call, protocol, [columns[rank] for rank in call.collected], rows, batch)

    def _cut(self, protocol: TransferProtocol, values: list[Any]) -> tuple[list[np.ndarray], BatchRef | None]:
        """Rows of each shard of the batch argument (all batch arguments of a call are cut alike)."""
        batch = next((value for value in values if isinstance(value, BatchRef)), None)
        shards = protocol.shards(self._pool.layout)
        if batch is None or not shards:
            return [], batch
        return batch.rows_for(shards), batch

    def _written(
        self, call: Call, protocol: TransferProtocol, refs: list[Any], rows: list[np.ndarray], batch: BatchRef | None
    ) -> BatchRef:
        """The columns a call will have written. Rows are known from what each collected rank was given."""
        columns = self._transfer.writes
        if batch is None:
            ids = [np.asarray(call._all[rank].sample_ids) for rank in call.collected]
            given = np.split(np.arange(sum(map(len, ids))), np.cumsum([len(i) for i in ids])[:-1])
            sample_ids = np.concatenate(ids)
        else:
            coords = [self._pool.layout.coord(rank) for rank in call.collected]
            shards = [protocol.distribute(coord, self._pool.layout) for coord in coords]
            given = [np.arange(len(batch)) if shard == ALL else rows[shard] for shard in shards]
            sample_ids = batch.sample_ids
        part = np.full(len(sample_ids), -1, dtype=np.int32)
        row = np.empty(len(sample_ids), dtype=np.int64)
        for index, share in enumerate(given):
            part[share] = index
            row[share] = np.arange(len(share))
        if (part < 0).any():
            raise ValueError(f"{protocol.name} keeps nobody's result for {(part < 0).sum()} of {len(part)} samples")
        return BatchRef(sample_ids, [Source(columns, tuple(refs), part, row, call.lengths)], call=call)


class _Encoder:
    """Turns one rank's arguments into what travels: placeholders, and the object references they stand for."""

    def __init__(
        self, protocol: TransferProtocol, coord: Coord, layout: Layout, reads: tuple[str, ...], rows: list[np.ndarray]
    ):
        self._protocol, self._coord, self._layout = protocol, coord, layout
        self._reads, self._rows = reads, rows
        self.refs: list[Any] = []

    def __call__(self, value: Any) -> Any:
        if isinstance(value, BatchRef):
            return self._batch(value)
        if isinstance(value, Call):
            first = len(self.refs)
            self.refs.extend(value.refs)
            return Collected(tuple(range(first, len(self.refs))))
        if self._protocol.per_rank:
            if not isinstance(value, (list, tuple)) or len(value) != self._layout.world_size:
                raise TypeError(
                    f"{self._protocol.name} takes a list with one element for each of {self._layout.world_size} ranks"
                )
            return value[self._coord.rank]
        return value

    def _batch(self, batch: BatchRef) -> Any:
        shard = self._protocol.distribute(self._coord, self._layout)
        rows = np.arange(len(batch)) if shard == ALL else self._rows[shard]
        plan = None if shard == ALL else batch.plan(self._protocol.shards(self._layout))
        share, refs = batch.slice(rows, self._reads, len(self.refs), plan.ranks[shard] if plan else None)
        self.refs.extend(refs)
        return share


def _node_of(address: Any) -> str:
    try:
        return ray.get(address, timeout=1.0)["node"]
    except (RayError, TimeoutError):
        return "a node that never answered"


def wait_for(call: Call) -> list[Summary]:
    """Wait for all ranks of a call; at the first failure raise the root cause among them.

    A rank that dies leaves its peers stuck in a collective, or failing with a broken connection a moment later: so the
    first failure is enough to stop waiting, and a death or a worker's own error is preferred as the cause.
    """
    pending = list(call.summaries)
    while pending:
        ready, pending = ray.wait(pending, num_returns=len(pending), timeout=0.2, fetch_local=False)
        failures = _failures(call, ready)
        if failures:
            if pending:
                more, _ = ray.wait(pending, num_returns=len(pending), timeout=_ROOT_CAUSE_SECONDS, fetch_local=False)
                failures.update(_failures(call, more))
            raise min(failures.values(), key=_likelihood_of_root)
    return ray.get(call.summaries)


def _failures(call: Call, refs: list[Any]) -> dict[int, HybridFlowError]:
    failures = {}
    for ref in refs:
        try:
            ray.get(ref)
        except RayTaskError as error:
            failures[call.summaries.index(ref)] = _cause(call, call.summaries.index(ref), error)
        except RayError as error:
            rank = call.summaries.index(ref)
            died = isinstance(error, (RayActorError, OutOfMemoryError, NodeDiedError))
            happened = "the process died during" if died else "an input was lost for"
            failures[rank] = WorkerError(
                f"{happened} {call.method}: {_first_line(error)}",
                hint="out of memory, crashes and lost nodes look like this: see dmesg and the worker's log there",
                where=call.pool.place(rank),
            )
    return failures


def _cause(call: Call, rank: int, error: RayTaskError) -> HybridFlowError:
    cause = error.cause
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    if isinstance(cause, HybridFlowError):
        return cause
    return WorkerError(
        f"{call.method} raised {type(cause).__name__}: {cause}",
        hint="the worker's full log is in the Ray session's logs",
        where=call.pool.place(rank),
    )


def _likelihood_of_root(error: HybridFlowError) -> int:
    text = error.message
    if "process died" in text:
        return 0
    return (
        2 if any(sign in text for sign in ("Connection closed", "Connection reset", "Broken pipe", "Timed out")) else 1
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
