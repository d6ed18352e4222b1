"""The driver's connection to Ray: an existing cluster when there is one, else one of its own on this machine."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from hybridflow.config.schema import LauncherConfig
from hybridflow.errors import ConfigError, ResourceError
from placement.device import LOGICAL_DEVICES_PER_NODE, DeviceKind, kind_of, local_gpus

_KNOCK_SECONDS = 10.0


def worker_env(kind: DeviceKind, threads: int) -> dict[str, str]:
    """What every worker process gets. Idle threads wait passively: two thread pools that spin on the same cores made a
    step twenty times slower."""
    env = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    # On CPU, torch's C++ side has one thing to say, at each start: that memory is bound to the NUMA node.
    return env | ({"TORCH_CPP_LOG_LEVEL": "ERROR"} if kind.name == "cpu" else {})


@contextmanager
def connect(launcher: LauncherConfig, *, namespace: str) -> Iterator[DeviceKind]:
    """Connect, give the kind of device the cluster has, and disconnect at the end.

    Inside a submitted job, or with RAY_ADDRESS set, that cluster is used; otherwise a Ray of our own is started here
    and ends with the driver. Connecting inside an already connected process (a notebook, a test) uses that connection.
    """
    check_not_shadowed()
    if ray.is_initialized():
        yield kind_of(ray.cluster_resources())
        return
    # Ray starts workers at nice 15, which starves their imports beside anything else on the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    address = os.environ.get("RAY_ADDRESS")
    try:
        with _sigterm_kept():
            if address:
                _check_reachable(address)
                ray.init(address=address, namespace=namespace, log_to_driver=True, logging_level=logging.ERROR)
            else:
                _start_local(launcher, namespace)
    except Exception as error:  # Ray raises what it likes here, down to a bare Exception on an overloaded machine
        raise ResourceError(
            f"cannot {'connect to ' + address if address else 'start Ray on this machine'}: {error}",
            hint="check RAY_ADDRESS (unset it for a Ray of your own), and RAY_AUTH_MODE=token if it wants a token"
            if address
            else "is the machine overloaded? is the dashboard's port in use (launcher.dashboard=false)? or another Ray "
            "in the way (`ray stop`)?",
            where="ray",
        ) from error
    try:
        yield kind_of(ray.cluster_resources())
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Knock before Ray does: it tries a dead address for minutes, with a page of its own warnings.

    Raises:
        OSError: nobody answers at ``host:port``.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "://" not in address:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """``ray.init`` takes SIGTERM over, to exit at once: whoever had it gets it back, who saves a checkpoint first."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _start_local(launcher: LauncherConfig, namespace: str) -> None:
    gpus = local_gpus()
    logical = {} if gpus else {"hf_device": float(max(launcher.devices or 1, LOGICAL_DEVICES_PER_NODE))}
    ray.init(
        address="local",
        namespace=namespace,
        num_cpus=max(2, os.cpu_count() or 1),
        num_gpus=gpus,
        resources=logical,
        include_dashboard=launcher.dashboard,
        object_store_memory=None if gpus else 512 * 2**20,
        log_to_driver=True,
        logging_level=logging.ERROR,
    )


def check_not_shadowed() -> None:
    """Our packages have plain names; a folder of the user's with the same name must not be imported in their place.

    Raises:
        ConfigError: ``jobs``, ``workers`` or ``placement`` resolves to a folder that is not beside this package.
    """
    home = Path(__file__).resolve().parent.parent
    for name in ("placement", "workers", "jobs"):
        spec = importlib.util.find_spec(name)
        origin = Path(next(iter(spec.submodule_search_locations or [""]))).resolve() if spec else Path()
        if origin.parent != home:
            raise ConfigError(
                f"the package {name!r} that Python finds is {origin}, not HybridFlow's own",
                hint=f"rename that folder, or start in another one (HybridFlow lies in {home})",
                where="sys.path",
            )
