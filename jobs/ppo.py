"""PPO (Schulman et al. 2017, arXiv 1707.06347) for language models, as one page.

The driver holds handles of pools and references to columns. A call returns at once, and Ray runs it when its inputs are
there; all that is waited for is ids and lengths, from which a batch is cut. Calls of pools on disjoint devices overlap;
those on shared devices take turns in this order.

    python -m jobs.ppo --config-name ppo_7b_mcore model.path=my/model training.total_steps=10
    ray job submit --working-dir . -- python -m jobs.ppo --config-name demo
"""

from __future__ import annotations

import sys

from hybridflow.algorithms.kl import make_kl_controller
from hybridflow.run import Run
from jobs.launch import run_job
from jobs.setup import Roles, set_up


def train(run: Run) -> None:
    """Generate, score, estimate advantages, update, send the weights; again and again."""
    config = run.config
    roles = set_up(run)
    kl = make_kl_controller(config.algorithm.kl_ctrl)
    if state := run.restore([roles.actor, roles.critic]):
        kl.load_state_dict(state["kl"])
    with run.phase("reshard"):
        roles.weights.send(version=run.first_step - 1)
    run.wait()  # why the first weights did not arrive is said here, not by a rollout that lacks them
    evaluate(run, roles, run.first_step - 1)

    for step in run.steps():
        with run.phase("generate"):
            batch = roles.data.prompts(step)
            batch = batch.join(roles.rollout.generate(batch, version=step - 1)).with_plan(run.planner(step))
        with run.phase("score"):
            batch = batch.join(
                roles.actor.compute_log_probs(batch),
                roles.reference.compute_log_probs(batch),
                roles.critic.compute_values(batch),
                roles.reward.compute_rewards(batch),
            )
        with run.phase("advantages"):
            advantages = roles.data.compute_advantages(batch, kl_coef=kl.coef)
            batch = batch.join(advantages)
        with run.phase("update"):
            roles.critic.update(batch)
            roles.actor.update(batch)
        with run.phase("reshard"):
            roles.weights.send(version=step)
        with run.phase("record"):
            roles.data.record(batch, step)
        run.finish_step(step, batch)
        kl.update(advantages.call.metrics()["kl/actor_reference"].value, len(batch))

        if run.due(config.training.eval_interval, step) or step == run.total_steps:
            evaluate(run, roles, step)
        run.save(step, [roles.actor, roles.critic], {"kl": kl.state_dict()})

    run.export(roles.actor)


def evaluate(run: Run, roles: Roles, step: int) -> None:
    """Mean reward on the held-out prompts, sampled as in training; ``step``: updates that the policy has seen."""
    with run.phase("evaluate"):
        batch = roles.data.validation_prompts()
        if not len(batch):
            return
        batch = batch.join(roles.rollout.generate(batch, version=step))
        batch = batch.join(roles.reward.compute_rewards(batch))
        roles.data.record_validation(batch, step)
        run.finish_evaluation(step)


def main(argv: list[str] | None = None) -> int:
    """Run PPO as the command line says; returns the exit code."""
    return run_job(train, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
