"""What the ranks run. Imports no transformers: the ranks know the engine only."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch.batch import Batch, Ragged
from hybridflow.batch.plan import Planner, RankPlan
from hybridflow.config.schema import AlgorithmConfig, McoreConfig, ModelConfig, OptimConfig
from hybridflow.errors import NumericsError
from hybridflow.telemetry.metrics import Mean
from hybridflow.worker import WorkerContext
from placement.layout import Layout
from workers.actor import ActorWorker
from workers.critic import CriticWorker
from workers.megatron import shard_map, weights
from workers.megatron.engine import MegatronEngine
from workers.megatron.passes import Loss
from workers.megatron.vocab_parallel import log_probs_and_entropy
from workers.reference import ReferenceWorker

SGD = OptimConfig(name="sgd", lr=0.1, weight_decay=0.0, grad_clip=1.0)
ADAM = OptimConfig(name="adam", lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-3, grad_clip=1.0)
# Without DP the rows stay in the batch's order.
ONE_MINI_BATCH = Planner(mini_batch_size=1000, max_tokens=64, max_sequences=3)


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


def export_and_score(context: WorkerContext, setup: Setup, folder: Path, batch: Batch) -> Any:
    engine = setup.engine(context)
    engine.export(folder)
    return engine.log_probs(share(context, batch, ONE_MINI_BATCH)[0])


def export(context: WorkerContext, setup: Setup, folder: Path) -> None:
    setup.engine(context).export(folder)


def load_another(context: WorkerContext, setup: Setup, other: Path, batch: Batch) -> Any:
    """An engine that is built on one folder and takes the weights of another, then is scored and trained."""
    part, _ = share(context, batch, ONE_MINI_BATCH)
    engine = setup.engine(context)
    engine.load(other)
    scored = engine.log_probs(part)
    engine.update(part, policy_probe)
    return scored, whole_weights(engine)


def fail_to_build(context: WorkerContext, setup: Setup) -> None:
    setup.engine(context)


def two_roles(context: WorkerContext, setup: Setup, other: Layout) -> list[str]:
    """Parameter names of a second engine in this process, which then asks for another layout."""
    setup.engine(context)
    second = dataclasses.replace(setup, head="value").engine(context)
    names = list(second.parameters())
    setup.engine(dataclasses.replace(context, layout=other))
    return names


# -- LoRA --------------------------------------------------------------------------------------------------------------
def train_lora(context: WorkerContext, setup: Setup, batch: Batch, folder: Path) -> dict[str, Any]:
    """Three updates of adapters; what they are then, and what the engine computes with, without and merged."""
    part, _ = share(context, batch, ONE_MINI_BATCH)
    engine = setup.engine(context)
    trained = [name for name, parameter in engine.model.named_parameters() if parameter.requires_grad]
    base = {name: tensor.clone() for name, tensor in engine.parameters().items()}
    before = engine.log_probs(part)
    metrics = engine.update(part, PROBES[setup.head], epochs=3)
    assert all(torch.equal(base[name], tensor) for name, tensor in engine.parameters().items()), "the base moved"
    assert engine.merged().keys() == base.keys()
    engine.export(folder)
    return {
        "trained": trained,
        "before": before,
        "after": engine.log_probs(part),
        "disabled": engine.log_probs(part, adapters=False),
        "adapters": engine.adapters(),
        "norm": metrics.get("grad_norm/actor"),
    }


# -- training ----------------------------------------------------------------------------------------------------------
def first_ratio(context: WorkerContext, setup: Setup, batch: Batch, planner: Planner) -> list[bool]:
    """For each micro-batch of the first mini-batch: are its log-probs in training bitwise those of the scoring?"""
    part, _ = share(context, batch, planner)
    engine = setup.engine(context)
    scored = engine.log_probs(part)
    same: list[bool] = []
    if scored is None:
        scored = (np.zeros(len(part.ragged("response_tokens").values), np.float32),) * 2
    plan = part.plan
    part = part.with_columns(log_probs=Ragged(scored[0], part.ragged("response_tokens").offsets))
    part.plan = plan

    def loss(outputs: dict[str, Tensor], columns: dict[str, Tensor]):
        same.append(torch.equal(outputs["log_probs"], columns["log_probs"]))
        return outputs["log_probs"].sum(), {"same/tokens": Mean(float(len(outputs["log_probs"])), 1)}

    accumulate(engine, part, loss)
    return same


def several_steps(context: WorkerContext, setup: Setup, batch: Batch, planner: Planner) -> Any:
    """Metrics of two epochs with a learning rate of their own, and how often the loss was asked."""
    part, _ = share(context, batch, planner)
    calls = []

    def loss(outputs: dict[str, Tensor], columns: dict[str, Tensor]):
        calls.append(len(columns["advantages"]))
        return policy_probe(outputs, columns)[0], {"loss/policy": Mean(1.0 * len(columns["advantages"]), calls[-1])}

    return setup.engine(context).update(part, loss, epochs=2, lr=0.25), calls


def not_finite(context: WorkerContext, setup: Setup, batch: Batch, planner: Planner) -> str:
    """The error of an update whose second mini-batch has a loss of NaN; weights must stay as the first left them."""
    part, _ = share(context, batch, planner)
    engine = setup.engine(context)
    first = Batch(part.table, RankPlan(part.plan.mini_batches[:1]))
    engine.update(first, policy_probe)
    good = {name: tensor.clone() for name, tensor in engine.parameters().items()}
    engine = setup.engine(context)
    steps = iter(["good"] * len(part.plan.mini_batches[0].micro_batches))

    def loss(outputs: dict[str, Tensor], columns: dict[str, Tensor]):
        total, metrics = policy_probe(outputs, columns)
        return (total if next(steps, "bad") == "good" else total * torch.nan), metrics

    try:
        engine.update(part, loss)
    except NumericsError as error:
        assert all(torch.equal(good[name], tensor) for name, tensor in engine.parameters().items())
        return str(error)
    return "no error"


def vocabulary_shares(context: WorkerContext, logits: Tensor, targets: Tensor, vocabulary: int) -> Any:
    """Log-probs, entropy and this rank's share of the logits' gradient, under temperature 0.5."""
    local = logits.chunk(context.layout.tp, -1)[context.coord.tp].clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(local, targets, 0.5, vocabulary, torch.distributed.group.WORLD)
    (log_probs.sum() + 2.0 * entropy.sum()).backward()
    return log_probs.detach(), entropy.detach(), local.grad


# -- checkpoints -------------------------------------------------------------------------------------------------------
def save_and_go_on(context: WorkerContext, setup: Setup, batch: Batch, folder: Path, steps: int) -> Any:
    """``steps`` updates, a checkpoint, and one more update: local and whole weights after it."""
    part, _ = share(context, batch, ONE_MINI_BATCH)
    engine = setup.engine(context)
    if steps:
        engine.update(part, PROBES[setup.head], epochs=steps)
    engine.save(folder)
    engine.update(part, PROBES[setup.head])
    return {name: parameter.data.clone() for name, parameter in engine.model.named_parameters()}, whole(
        engine, engine.parameters()
    )


def restore_and_go_on(context: WorkerContext, setup: Setup, batch: Batch, folder: Path) -> Any:
    """A fresh engine takes up the checkpoint and does that one update."""
    part, _ = share(context, batch, ONE_MINI_BATCH)
    engine = setup.engine(context)
    engine.update(part, PROBES[setup.head], lr=0.5)  # something that the checkpoint must undo
    engine.restore(folder)
    engine.update(part, PROBES[setup.head])
    return {name: parameter.data.clone() for name, parameter in engine.model.named_parameters()}, whole(
        engine, engine.parameters()
    )


# -- roles -------------------------------------------------------------------------------------------------------------
def roles_together(context: WorkerContext, folder: Path, other: Path, lora_rank: int, batch: Batch) -> dict[str, Any]:
    """Actor, critic and reference in one process, as a pool calls them; the actor is set up twice."""
    peers: dict[str, Any] = {}
    actor, critic, reference = (
        kind(dataclasses.replace(context, role=role, peers=peers))
        for role, kind in (("actor", ActorWorker), ("critic", CriticWorker), ("reference", ReferenceWorker))
    )
    peers |= {"actor": actor, "critic": critic, "reference": reference}
    model, mcore, algorithm = ModelConfig(dtype="float32", lora_rank=lora_rank), McoreConfig(), AlgorithmConfig()
    actor.setup(str(folder), model, mcore, ADAM, algorithm, 1.0, 3)
    critic.setup(str(folder), model, mcore, ADAM, algorithm, 3)
    reference.setup(str(folder), model, mcore, 1.0)
    part, _ = share(context, batch, ONE_MINI_BATCH)
    warmed = [actor.update_supervised(part, lr=0.05) for _ in range(5)]
    actor.export(str(folder.parent / "warmed"))
    actor.setup(str(other), model, mcore, ADAM, algorithm, 1.0, 3)
    critic.load_weights(str(other))
    reference.load_weights(str(other))
    scored = [actor.compute_log_probs(part), reference.compute_log_probs(part), critic.compute_values(part)]
    result: dict[str, Any] = {"warmed": warmed, "shared": reference.engine is None, "scored": scored}
    if scored[0] is not None:
        written = {name: batch.ragged(name) for name, batch in zip(("log_probs", "values"), scored[::2], strict=True)}
        part = Batch(part.with_columns(**written).table, part.plan)
    result["updates"] = [actor.update(part), critic.update(part)]
    result["after"] = [actor.compute_log_probs(part), reference.compute_log_probs(part)]
    result["adapter"] = actor.publish_adapter(1) if lora_rank else None
    return result
