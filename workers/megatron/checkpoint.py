"""Megatron distributed checkpoints of one engine: weights, optimizer, random state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from placement.layout import Coord, Layout
from workers.megatron.model import PackedGPT
from workers.megatron.optimizer import Optimizer


def save(folder: str | Path, model: PackedGPT, optimizer: Optimizer | None, coord: Coord, layout: Layout) -> None:
    """Write a checkpoint into ``folder`` (made if need be; it must be empty). Collective."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(_state(model, optimizer, coord, layout, loading=False), str(folder))


def restore(folder: str | Path, model: PackedGPT, optimizer: Optimizer | None, coord: Coord, layout: Layout) -> None:
    """Read what ``save`` wrote. Collective."""
    state = dist_checkpointing.load(_state(model, optimizer, coord, layout, loading=True), str(folder))
    model.load_state_dict(state["model"])
    if optimizer:
        optimizer.inner.load_state_dict(state["optimizer"])
        optimizer.separate_steps()
    _set_random_state(state["random"])


def _state(
    model: PackedGPT, optimizer: Optimizer | None, coord: Coord, layout: Layout, *, loading: bool
) -> dict[str, Any]:
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {"model": model.sharded_state_dict(metadata=groups)}
    if optimizer:
        state["optimizer"] = optimizer.inner.sharded_state_dict(state["model"], is_loading=loading, metadata=groups)
    shape, offset = (layout.pp, layout.tp), (coord.pp, coord.tp)
    state["random"] = ShardedObject("random", _random_state(), shape, offset, replica_id=coord.dp)
    return state


def _random_state() -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
