"""Megatron-Core's process groups and random state, over the ``torch.distributed`` world that the pool made.

They are one per process: all Megatron roles of a process share them, so they must ask for the same layout.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from hybridflow.errors import ConfigError, WorkerError
from hybridflow.seeds import derive_seed
from placement.layout import Layout

_AXES = {
    "tp": parallel_state.get_tensor_model_parallel_world_size,
    "pp": parallel_state.get_pipeline_model_parallel_world_size,
    "cp": parallel_state.get_context_parallel_world_size,
    "dp": parallel_state.get_data_parallel_world_size,
}


def initialize(layout: Layout, seed: int, device: str) -> torch.device:
    """Make (or join) the groups of this process and return its torch device.

    Args:
        layout: the pool's; its world must be the one that ``torch.distributed`` was initialised with.
        seed: of the run; ranks of different TP and PP coordinates derive different states from it.
        device: "cpu" or a name of a CUDA device.

    Raises:
        WorkerError: ``torch.distributed`` is not initialised, or has another world size.
        ConfigError: another role of this process asked for another layout.
    """
    if not dist.is_initialized() or dist.get_world_size() != layout.world_size:
        world = dist.get_world_size() if dist.is_initialized() else 0
        raise WorkerError(
            f"the layout {layout} needs a process group of {layout.world_size} ranks, this process has {world}",
            hint="torch.distributed must be initialised over the pool's ranks before the engine is built",
        )
    on_cuda = torch.device(device).type == "cuda" and torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # not all cores: ranks share them
    if parallel_state.model_parallel_is_initialized():
        _check_same(layout)
    else:
        parallel_state.initialize_model_parallel(
            layout.tp, layout.pp, context_parallel_size=layout.cp, create_gloo_process_groups=False
        )
        model_parallel_cuda_manual_seed(derive_seed(seed, "megatron") % 2**31)
    return torch.device(device) if on_cuda else torch.device("cpu")


def _check_same(layout: Layout) -> None:
    for axis, size in _AXES.items():
        if size() != getattr(layout, axis):
            raise ConfigError(
                f"this process already runs with {axis} {size()}, a second role asks for {getattr(layout, axis)}",
                hint="roles that share a process need one layout; set fuse: false to give each its own processes",
                where="mcore_config",
            )
