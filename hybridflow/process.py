"""The one Ray actor class: a process that hosts one or more roles of one rank, and runs their methods.

It turns references back into batches before a call, and a call's result into (columns, summary) after it. The columns
stay in the object store; the summary is small and is what the driver reads: lengths, metrics, and when the call ran.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import ray

from hybridflow.batch.batch import Batch
from hybridflow.batch.ref import BatchSlice
from hybridflow.errors import ConfigError, HybridFlowError, ResourceError, WorkerError
from hybridflow.loading import load, load_module
from hybridflow.worker import Worker, WorkerContext
from placement.layout import Coord, Layout

_FULL_BYTES = 1 << 20  # less than this is left of a disk that is called full
_LENGTHS_OF = ("prompt_tokens", "response_tokens")


@dataclass(frozen=True)
class Collected:
    """Placeholder for a ``Call`` given as an argument: its collected results lie at these argument positions."""

    positions: tuple[int, ...]


@dataclass(frozen=True)
class Summary:
    """What the driver learns of one rank's call. Times are seconds since the epoch."""

    value: Any
    started: float
    stopped: float
    memory_bytes: int
    sample_ids: np.ndarray | None = None
    lengths: dict[str, np.ndarray] | None = None


class WorkerProcess:
    """Hosts the roles of one rank of a team. Made by ``hybridflow.start``; user code never touches it."""

    def __init__(self, name: str, rank: int, layout: Layout, run_dir: str):
        self._name, self._rank, self._layout, self._run_dir = name, rank, layout, run_dir
        self._roles: dict[str, Worker] = {}
        self._broken: dict[str, HybridFlowError] = {}  # roles whose setup failed: every later call says why
        self._store: Any = None

    def __repr__(self) -> str:
        return self._name

    # -- being set up ------------------------------------------------------------------------------------------------
    def address(self) -> dict[str, Any]:
        return {"host": ray.util.get_node_ip_address(), "node": socket.gethostname(), "pid": os.getpid()}

    def load_user_code(self, modules: tuple[str, ...]) -> None:
        """Import what the config names under ``register``."""
        for module in modules:
            load_module(module)

    def open_store(self) -> tuple[str, int]:
        """Open the rendezvous store of a process group and hold it: bound to port 0, so no port is probed or raced."""
        dist = load("torch:distributed")
        host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def join_group(self, address: tuple[str, int], rank: int, world_size: int, backend: str) -> None:
        """Initialise ``torch.distributed`` over the ``world_size`` ranks that meet at the store at ``address``."""
        dist = load("torch:distributed")
        host, port = address
        self._store = self._store or dist.TCPStore(host, port, is_master=False)
        # Gloo would pick the interface of the host's name, which need not be reachable: on one node the loopback is,
        # and between nodes the one by which Ray reaches them.
        here = ray.util.get_node_ip_address()
        self._store.set(f"node/{rank}", here)
        nodes = {self._store.get(f"node/{other}").decode() for other in range(world_size)}
        if interface := "lo" if len(nodes) == 1 else _interface_of(here):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        store = dist.PrefixStore("world", self._store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)

    def add_role(self, role: str, worker: str, device: str) -> None:
        """Make the worker of one role; its engine comes with its own ``setup`` call."""
        context = WorkerContext(
            role=role,
            coord=self._coord,
            layout=self._layout,
            device=device,
            run_dir=self._run_dir,
            peers=self._roles,
        )
        self._roles[role] = load(worker)(context)

    @property
    def _coord(self) -> Coord:
        return self._layout.coord(self._rank)

    # -- being called ------------------------------------------------------------------------------------------------
    def call(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *arguments: Any) -> Any:
        """Run ``role.method``. ``arguments`` are the objects that placeholders in ``args`` and ``kwargs`` stand for.

        Returns a ``Summary``, or (``Batch``, ``Summary``) for methods that write columns.
        """
        started = time.time()
        function = getattr(self._roles[role], method)
        if role in self._broken and method != "setup":
            raise self._broken[role]
        try:
            args = tuple(_resolve(arg, arguments) for arg in args)
            kwargs = {name: _resolve(arg, arguments) for name, arg in kwargs.items()}
            given = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, Batch)), None)
            result = function(*args, **kwargs)
            if not function.transfer.writes:
                return Summary(result, started, time.time(), _resident_bytes())
            batch, extras = result if isinstance(result, tuple) else (result, None)
            if batch is None:
                return None, Summary(extras, started, time.time(), _resident_bytes())
            _check_written(batch, function.transfer.writes, given)
            lengths = {name: batch.ragged(name).lengths for name in _LENGTHS_OF if name in batch}
            ids = batch.sample_ids if given is None else None  # else the driver knows them
            return Batch(batch.table), Summary(extras, started, time.time(), _resident_bytes(), ids, lengths)
        except Exception as error:  # noqa: BLE001 - raised again, with its place
            told = self._told(role, method, error)
            if method == "setup":
                self._broken[role] = told
            raise told from (None if told is error else error)

    def turn(self, method: str, *_after: Any) -> None:
        """``sleep`` or ``wake`` every role of this process; ``_after``: what must have happened before."""
        for role, worker in self._roles.items():
            try:
                getattr(worker, method)()
            except Exception as error:  # noqa: BLE001 - raised again, with its place
                told = self._told(role, method, error)
                raise told from (None if told is error else error)

    def close(self) -> None:
        """Close the roles. Ray ends the process afterwards."""
        for worker in self._roles.values():
            worker.close()

    def _told(self, role: str, method: str, error: Exception) -> HybridFlowError:
        """The error with its place; one that is none of ours with the frames that say where it came from."""
        if isinstance(error, HybridFlowError):
            if not (error.where and isinstance(error, ConfigError)):  # a key of the config is place enough
                error.where = ", ".join(filter(None, (self._place(role), error.where)))
            return error
        if _disk_is_full(self._run_dir, error):
            return ResourceError(
                f"cannot write to {self._run_dir}, its disk is full ({method} raised {type(error).__name__}: {error})",
                hint="make room there, or set log_dir to another disk; the run goes on from its last checkpoint",
                where=self._place(role),
            )
        return WorkerError(
            f"{method} raised {type(error).__name__}: {error}\n{_own_frames(error)}",
            hint="the frames above are the worker's own; its full log is in the Ray session's logs",
            where=self._place(role),
        )

    def _place(self, role: str) -> str:
        return f"{role} rank {self._rank} ({self._coord}) on {socket.gethostname()}"

    # -- the control group: answers while a call runs ------------------------------------------------------------------
    @ray.method(concurrency_group="control")
    def ping(self) -> float:
        return time.time()

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        """The Python stacks of all threads, for a run that seems to hang."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"--- {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in sys._current_frames().items()
        )


RemoteProcess: Any = ray.remote(concurrency_groups={"control": 1})(WorkerProcess)  # type: ignore[call-overload]


def _resolve(argument: Any, arguments: tuple[Any, ...]) -> Any:
    if isinstance(argument, BatchSlice):
        return argument.assemble(arguments)
    if isinstance(argument, Collected):
        return [arguments[position].value for position in argument.positions]
    return argument


def _resident_bytes() -> int:
    """Resident memory of this process (0 where there is no /proc)."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _disk_is_full(folder: str, error: Exception) -> bool:
    """Whether a full disk made a call fail. Writers hide it in errors of many kinds: so the disk is asked, too."""
    try:
        return "No space left" in str(error) or shutil.disk_usage(folder).free < _FULL_BYTES
    except OSError:
        return False


def _interface_of(address: str) -> str:
    """The network interface that has this address; "" if none does."""
    held = psutil.net_if_addrs().items()
    return next((name for name, entries in held if any(entry.address == address for entry in entries)), "")


def _check_written(batch: Batch, writes: tuple[str, ...], given: Batch | None) -> None:
    missing = [name for name in writes if name not in batch]
    if missing:
        raise KeyError(f"the method declares that it writes {missing[0]!r}, its batch has: {', '.join(batch.columns)}")
    if given is not None and not np.array_equal(batch.sample_ids, given.sample_ids):
        raise ValueError("the rows of the result are not those of the batch, in their order (see sample_id)")


def _own_frames(error: BaseException) -> str:
    """The last frames of the traceback: enough to see the cause without a page of Ray."""
    return "".join(traceback.format_tb(error.__traceback__)[-4:]).rstrip()
