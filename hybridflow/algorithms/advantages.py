"""From scores to advantages: KL penalty, estimator, whitening. One pure function over the whole step's columns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hybridflow.algorithms.gae import gae
from hybridflow.algorithms.kl import kl_estimate
from hybridflow.algorithms.registry import Registry
from hybridflow.algorithms.whitening import whiten
from hybridflow.batch.batch import Batch, Ragged
from hybridflow.config.schema import AlgorithmConfig
from hybridflow.errors import NumericsError
from hybridflow.telemetry.metrics import Max, Mean, Metric, Min

# (batch, per-token rewards, config) -> (advantages, returns), all over the response tokens, neither whitened
Estimator = Callable[[Batch, Ragged, AlgorithmConfig], tuple[Ragged, Ragged]]
ADVANTAGE_ESTIMATORS: Registry[Estimator] = Registry("advantage estimator", "algorithm.adv_estimator")


@ADVANTAGE_ESTIMATORS.register("gae")
def _gae(batch: Batch, rewards: Ragged, config: AlgorithmConfig) -> tuple[Ragged, Ragged]:
    return gae(rewards, batch.ragged("values"), config.gamma, config.lam)


def compute(batch: Batch, config: AlgorithmConfig, kl_coef: float) -> tuple[Batch, dict[str, Metric]]:
    """Advantages and returns of a step.

        r_t = -kl_coef * kl_t, plus the response's score at its last token
        advantages, returns = estimator(r, values);   advantages are whitened afterwards, returns stay

    The last token is found by the lengths, never by an id, so pad = eos models need no care.

    Args:
        batch: all samples of the step. Reads ``response_tokens`` (lengths only), ``reward``, ``log_probs``; ``values``
            (gae); ``reference_log_probs`` unless ``kl_coef`` is 0; ``rollout_log_probs`` for a metric, if present.
        config: reads adv_estimator, kl_penalty, gamma, lam, whiten_advantages.
        kl_coef: what the KL controller says in this step.

    Returns:
        A batch of ``advantages`` and ``returns`` (rows as in ``batch``), and metrics.

    Raises:
        NumericsError: a reward is not finite (failed samples are to be dropped before), or an advantage is not.
    """
    scores = batch.scalar("reward")
    _require_finite("reward", scores, batch.sample_ids)
    rewards, kl_metrics = _token_rewards(batch, scores, config, kl_coef)
    advantages, returns = ADVANTAGE_ESTIMATORS[config.adv_estimator](batch, rewards, config)
    _require_finite("advantages", advantages.sums(), batch.sample_ids)
    metrics = {
        **_reward_metrics(scores),
        "reward/with_kl_mean": mean_of(rewards.sums()),
        **kl_metrics,
        **_token_metrics(batch, advantages, returns),
    }
    if config.whiten_advantages:
        advantages = Ragged(whiten(advantages.values), advantages.offsets)
    return Batch.of(batch.sample_ids, advantages=advantages, returns=returns), metrics


def mean_of(values: np.ndarray) -> Mean:
    """The metric of an array's mean."""
    return Mean(float(values.sum(dtype=np.float64)), len(values))


def _token_rewards(
    batch: Batch, scores: np.ndarray, config: AlgorithmConfig, kl_coef: float
) -> tuple[Ragged, dict[str, Metric]]:
    response = batch.ragged("response_tokens")
    rewards = np.zeros(len(response.values), np.float32)
    metrics: dict[str, Metric] = {"kl/coefficient": Mean(kl_coef, 1)}
    if kl_coef or "reference_log_probs" in batch:
        log_probs, reference = batch.ragged("log_probs").values, batch.ragged("reference_log_probs").values
        kl = kl_estimate(log_probs, reference, config.kl_penalty)
        rewards -= np.float32(kl_coef) * kl
        metrics["kl/actor_reference"] = mean_of(kl)
    spoken = response.lengths > 0  # an empty response has no token that could carry its score
    rewards[response.offsets[1:][spoken] - 1] += scores[spoken]
    return Ragged(rewards, response.offsets), metrics


def _reward_metrics(scores: np.ndarray) -> dict[str, Metric]:
    if not len(scores):
        return {}
    return {
        "reward/mean": mean_of(scores),
        "reward/std": _std_of(scores),
        "reward/max": Max(float(scores.max())),
        "reward/min": Min(float(scores.min())),
    }


def _token_metrics(batch: Batch, advantages: Ragged, returns: Ragged) -> dict[str, Metric]:
    """Over the response tokens; advantages are not whitened yet (afterwards mean and deviation say nothing)."""
    if not len(returns.values):
        return {}
    metrics: dict[str, Metric] = {
        "advantages/mean": mean_of(advantages.values),
        "advantages/std": _std_of(advantages.values),
        "advantages/min": Min(float(advantages.values.min())),
        "advantages/max": Max(float(advantages.values.max())),
        "returns/mean": mean_of(returns.values),
        "returns/std": _std_of(returns.values),
    }
    if "values" in batch:
        values = batch.ragged("values").values
        metrics["values/mean"] = mean_of(values)
        if (spread := float(returns.values.var(dtype=np.float64))) > 0:
            left = float((returns.values - values).var(dtype=np.float64))
            metrics["values/explained_variance"] = Mean(1.0 - left / spread, 1)
    if "rollout_log_probs" in batch:
        trainer, rollout = batch.ragged("log_probs").values, batch.ragged("rollout_log_probs").values
        gap = np.abs(trainer - rollout)
        metrics["mismatch/abs_log_prob"] = mean_of(gap)
        metrics["mismatch/abs_log_prob_max"] = Max(float(gap.max()))
        metrics["mismatch/kl"] = mean_of(kl_estimate(rollout, trainer, "k3"))  # the tokens are the rollout's draws
    return metrics


def _std_of(values: np.ndarray) -> Mean:
    return Mean(float(values.std(dtype=np.float64)), 1)


def _require_finite(name: str, values: np.ndarray, sample_ids: np.ndarray) -> None:
    bad = sample_ids[~np.isfinite(values)]
    if len(bad):
        raise NumericsError(
            f"{name} of {len(bad)} samples is not finite, first ids: {', '.join(map(str, bad[:5].tolist()))}",
            hint="drop failed samples before advantages are computed, and see their lines in samples.jsonl",
            where="advantages",
        )
