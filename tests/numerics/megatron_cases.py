"""What the ranks run. Imports no transformers: the ranks know the engine only."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.batch.plan import Planner
from hybridflow.config.schema import McoreConfig, ModelConfig, OptimConfig
from hybridflow.worker import WorkerContext
from workers.megatron import shard_map, weights
from workers.megatron.engine import MegatronEngine
from workers.megatron.passes import Loss

SGD = OptimConfig(name="sgd", lr=0.1, weight_decay=0.0, grad_clip=1.0)
ADAM = OptimConfig(name="adam", lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-3, grad_clip=1.0)
ONE_MINI_BATCH = Planner(mini_batch_size=1000, max_tokens=64, max_sequences=3, seed=1)


@dataclasses.dataclass(frozen=True)
class Setup:
    """How to build an engine."""

    folder: Path
    head: str = "policy"
    optim: OptimConfig | None = SGD
    dtype: str = "float32"
    temperature: float = 1.0
    sequence_parallel: bool = False
    recompute: bool = False
    lora_rank: int = 0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")

    def engine(self, context: WorkerContext) -> MegatronEngine:
        model = ModelConfig(
            path=str(self.folder),
            dtype=self.dtype,
            enable_gradient_checkpointing=self.recompute,
            lora_rank=self.lora_rank,
            lora_alpha=2.0 * self.lora_rank,
            target_modules=self.targets,
        )
        return MegatronEngine(
            context,
            head=self.head,
            model=model,
            mcore=McoreConfig(sequence_parallel=self.sequence_parallel),
            optim=self.optim,
            temperature=self.temperature,
            seed=7,
        )


def share(context: WorkerContext, batch: Batch, planner: Planner) -> tuple[Batch, np.ndarray]:
    """This rank's rows of a batch, with its plan, as a pool would give them; and which rows they are."""
    lengths = batch.ragged("prompt_tokens").lengths, batch.ragged("response_tokens").lengths
    plan = planner.plan(*lengths, context.layout.dp)
    rows = plan.rows[context.coord.dp]
    part = batch.select(rows)
    part.plan = plan.ranks[context.coord.dp]
    return part, rows


def policy_probe(outputs: dict[str, Tensor], columns: dict[str, Tensor]):
    """A loss with a gradient through log-probs and entropy."""
    return -(columns["advantages"] * outputs["log_probs"]).sum() - 0.1 * outputs["entropy"].sum(), {}


def value_probe(outputs: dict[str, Tensor], columns: dict[str, Tensor]):
    return 0.5 * (outputs["values"] - columns["returns"]).square().sum(), {}


PROBES: dict[str, Loss] = {"policy": policy_probe, "value": value_probe}


def whole(engine: MegatronEngine, local: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole Hugging Face tensors on rank 0, from what each rank holds under its parameters' names."""
    pieces = engine.shard_map()
    if "output_layer.bias" in local:
        pieces = pieces + shard_map.value_head_map(engine.architecture)
    replica = engine.coord.dp > 0
    return dict(weights.gather([] if replica else pieces, local))


def whole_weights(engine: MegatronEngine) -> dict[str, Tensor]:
    return whole(engine, {name: parameter.data for name, parameter in engine.model.named_parameters()})


def accumulate(engine: MegatronEngine, batch: Batch, loss: Loss) -> list[dict]:
    """Forward and backward over the first mini-batch of the batch's plan, without a step."""
    packer = engine._packer(batch)
    micros = [packer.rows(*rows) for rows in packer.mini_batches()[0].micro_batches]
    return engine.passes.accumulate(micros or [packer.stand_in()], loss)


def whole_gradients(engine: MegatronEngine) -> dict[str, Tensor]:
    return whole(engine, {name: parameter.main_grad for name, parameter in engine.model.named_parameters()})


# -- cases -------------------------------------------------------------------------------------------------------------
def score(context: WorkerContext, setup: Setup, batch: Batch, planner: Planner = ONE_MINI_BATCH) -> Any:
    """(rows, log-probs and entropies or values) of this rank."""
    part, rows = share(context, batch, planner)
    engine = setup.engine(context)
    return rows, engine.log_probs(part) if setup.head == "policy" else engine.values(part)


def train(
    context: WorkerContext,
    setup: Setup,
    batch: Batch,
    planner: Planner = ONE_MINI_BATCH,
    steps: int = 1,
    nudge: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Whole gradients of the first mini-batch, its norm, and whole weights after ``steps`` updates on the batch."""
    part, _ = share(context, batch, planner)
    engine = setup.engine(context)
    loss = PROBES[setup.head]
    accumulate(engine, part, loss)
    engine.passes.optimizer.inner.prepare_grads()
    norm = float(engine.passes.optimizer.inner.get_grad_norm())
    gradients = whole_gradients(engine)
    metrics = engine.update(part, loss, epochs=steps)
    return {"gradients": gradients, "norm": norm, "weights": whole_weights(engine), "metrics": metrics}


def export(context: WorkerContext, setup: Setup, folder: Path) -> None:
    setup.engine(context).export(folder)
