"""Before the first step: engines in the roles' processes, the supervised warm-up, the weights' way to the rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.pool import Pool
from hybridflow.run import Run
from jobs.warmup import warm_up, warmed_folder
from workers.resharding.link import Resharding


@dataclass(frozen=True)
class Roles:
    """PPO's pools, set up, and the link that carries the actor's weights to the rollout."""

    actor: Pool
    critic: Pool
    reference: Pool
    reward: Pool
    rollout: Pool
    data: Pool
    weights: Resharding


def set_up(run: Run) -> Roles:
    """Build every engine, warm the actor up if asked, and link it to the rollout."""
    config = run.config
    pools = {role: run[role] for role in ("actor", "critic", "reference", "reward", "rollout", "data")}
    found = _build(run, pools)
    run.recorder.note(_describe(found))
    if config.training.num_epochs:
        run.limit_steps(math.ceil(config.training.num_epochs * found["prompts"] / config.data.train_batch_size))
    if config.warmup.steps:
        _warm_up(run, pools)
    run.wait()  # whatever could not be built is said here, before weights are asked of it
    weights = Resharding(
        pools["actor"],
        pools["rollout"],
        config.resharding,
        dtype=config.rollout.dtype or config.model.dtype,
        run_dir=str(run.path),
        adapter=bool(config.model.lora_rank) and config.rollout.lora == "adapter",
    )
    run.recorder.note(f"weights: {weights.describe()}")
    if run.verbose:
        layout = pools["actor"].layout
        run.recorder.note(f"HybridEngine initialized with TP={layout.tp}, SP={config.mcore_config.sequence_parallel}")
    return Roles(**pools, weights=weights)


def _build(run: Run, pools: Mapping[str, Pool]) -> Mapping[str, Any]:
    """Set every role up; returns what the data role found.

    All calls are submitted before any is waited for, so that processes import and build side by side; where devices are
    shared the rollout engine comes first and alone.
    """
    config, model, rollout = run.config, run.config.model, run.config.rollout
    counts = pools["data"].setup(
        config.data,
        model.path,
        n=rollout.n,
        seed=config.seed,
        algorithm=config.algorithm,
        warmup=config.warmup if run.checkpoint is None else None,
        resumed_step=run.first_step - 1,
    )
    pools["reward"].setup(config.reward_model, model.path, config.data)
    longest = config.data.max_prompt_length + rollout.max_response_length
    pools["rollout"].setup(model, rollout, seed=config.seed, max_model_len=longest)
    _set_up_actor(run, model.path if run.checkpoint is None or not config.warmup.steps else str(warmed_folder(run)))
    critic, reference = config.critic.path or model.path, config.reference.path or model.path
    mcore = config.mcore_config
    pools["critic"].setup(critic, model, mcore, config.critic.optim, config.algorithm, config.seed)
    pools["reference"].setup(reference, model, mcore, rollout.temperature)
    return counts.result()[0]


def _warm_up(run: Run, pools: Mapping[str, Pool]) -> None:
    """Warm the actor up (a resumed run has done so), and give what came of it to those who start from it."""
    config = run.config
    warmup = warm_up(run, pools["actor"], pools["data"]) if run.checkpoint is None else None
    warmed = str(warmed_folder(run))
    if warmup:
        _set_up_actor(run, warmed)
    written = warmup.written if warmup else None
    if not config.critic.path:
        pools["critic"].load_weights(warmed, after=written)
    # Also where it has a folder of its own: the actor whose engine it may have shared is another one now.
    pools["reference"].load_weights(config.reference.path or warmed, after=written)
    if warmup:
        run.recorder.note(warmup.describe())


def _set_up_actor(run: Run, path: str) -> None:
    config = run.config
    run["actor"].setup(
        path,
        config.model,
        config.mcore_config,
        config.actor.optim,
        config.algorithm,
        config.rollout.temperature,
        config.seed,
    )


def _describe(counts: Mapping[str, Any]) -> str:
    """What the data role found, in one line."""
    told = [f"{counts['prompts']} prompts", f"{counts['validation']} held out"]
    told += [f"{counts[name]} {name}" for name in ("overlong", "truncated", "empty", "demonstrations") if counts[name]]
    return f"data: {', '.join(told)}; longest prompt {counts['longest_prompt']} tokens"
