"""Megatron distributed checkpoints of one engine: weights, optimizer, random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint import CheckpointException

from placement.layout import Coord, Layout
from workers.megatron.model import PackedGPT
from workers.megatron.optimizer import Optimizer


class _SaveInProcess(TorchDistSaveShardedStrategy):
    """Megatron-Core's format, written by this process. Its own writer starts a manager and a process per file, which
    costs seconds, outlives the save and is refused in processes that are daemons; only asynchronous saves need it."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch.distributed.checkpoint.save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=torch.distributed.checkpoint.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(folder: str | Path, model: PackedGPT, optimizer: Optimizer | None, coord: Coord, layout: Layout) -> None:
    """Write a checkpoint into ``folder`` (made if need be; it must be empty). Collective."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    state = _state(model, optimizer, coord, layout, loading=False)
    with _cause_of_failure():
        dist_checkpointing.save(state, str(folder), _SaveInProcess("torch_dist", 1))


def restore(folder: str | Path, model: PackedGPT, optimizer: Optimizer | None, coord: Coord, layout: Layout) -> None:
    """Read what ``save`` wrote. Collective. Under another TP or PP the random state, one per rank, is left as it is."""
    wanted = _state(model, optimizer, coord, layout, loading=True)
    if dist_checkpointing.load_common_state_dict(str(folder))["layout"] != wanted["layout"]:
        del wanted["random"]
    with _cause_of_failure():
        state = dist_checkpointing.load(wanted, str(folder))
    model.load_state_dict(state["model"])
    if optimizer:
        optimizer.load_state_dict(state["optimizer"])
    if "random" in state:
        _set_random_state(state["random"])


@contextmanager
def _cause_of_failure() -> Iterator[None]:
    """PyTorch raises a page of the ranks' tracebacks, as no ``Exception``: say what the first of them raised."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause if isinstance(cause, Exception) else RuntimeError(repr(cause)) from error


def _state(
    model: PackedGPT, optimizer: Optimizer | None, coord: Coord, layout: Layout, *, loading: bool
) -> dict[str, Any]:
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {"model": model.sharded_state_dict(metadata=groups)}
    state["layout"] = [layout.tp, layout.pp]
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
