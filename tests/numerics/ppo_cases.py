"""A PPO step on the engines, as the pools call them; run on the ranks of a ``World``."""

from __future__ import annotations

import dataclasses
from typing import Any

from hybridflow.algorithms.losses import policy_loss, value_loss
from hybridflow.batch.batch import Batch
from hybridflow.batch.plan import Planner
from hybridflow.config.schema import AlgorithmConfig
from hybridflow.worker import WorkerContext
from tests.numerics.megatron_cases import Setup, accumulate, share, whole_gradients, whole_weights
from workers.megatron.engine import MegatronEngine


def scores(context: WorkerContext, policy: Setup, reference: Setup, batch: Batch, planner: Planner) -> Any:
    """(rows, log-probs, reference log-probs, values) of this rank's share; None off the last stage."""
    part, rows = share(context, batch, planner)
    log_probs = policy.engine(context).log_probs(part)
    fixed = dataclasses.replace(reference, optim=None).engine(context).log_probs(part)
    values = dataclasses.replace(policy, head="value").engine(context).values(part)
    return None if log_probs is None else (rows, log_probs[0], fixed[0], values)


def update(
    context: WorkerContext, setup: Setup, batch: Batch, planner: Planner, config: AlgorithmConfig
) -> dict[str, Any]:
    """Gradients of the first mini-batch, its metrics, and whole weights after all mini-batches and epochs."""
    part, _ = share(context, batch, planner)
    engine: MegatronEngine = setup.engine(context)
    function = policy_loss if setup.head == "policy" else value_loss

    def loss(outputs, columns):
        return function(outputs, columns, config)

    first = accumulate(engine, part, loss)
    engine.passes.optimizer.inner.prepare_grads()
    gradients = whole_gradients(engine)
    metrics = engine.update(part, loss, epochs=config.ppo_epochs)
    return {"first": first, "gradients": gradients, "weights": whole_weights(engine), "metrics": metrics}
