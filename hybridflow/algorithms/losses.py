"""Losses over the response tokens of one micro-batch (torch; imported by workers only).

Each takes what the model gave (``outputs``) and the batch's columns of the same tokens (``columns``), flat tensors of
shape (T,), and returns the *sum* of the loss over the tokens, with metrics weighted by tokens. The engine divides the
sum by the mini-batch's global token count, so no cut into micro-batches or ranks changes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridflow.algorithms.kl import LOG_RATIO_LIMIT
from hybridflow.algorithms.registry import Registry
from hybridflow.config.schema import AlgorithmConfig
from hybridflow.telemetry.metrics import Max, Mean, Metric, Min

Tensors = dict[str, Tensor]
LossResult = tuple[Tensor, dict[str, Metric]]
POLICY_LOSSES: Registry[Callable[[Tensors, Tensors, AlgorithmConfig], LossResult]] = Registry(
    "policy loss", "algorithm.name"
)


@POLICY_LOSSES.register("ppo")
def policy_loss(outputs: Tensors, columns: Tensors, config: AlgorithmConfig) -> LossResult:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv 1707.06347) with three options.

        r = exp(clamp(new - old, -20, 20))
        L = max(-A r, -A clip(r, 1 - low, 1 + high))          high = clip_ratio_high or clip_ratio (DAPO, 2503.14476)
        L = min(L, -A dual_clip)   where A < 0                dual clip (Ye et al. 2020, arXiv 1912.09729)
        loss = sum(L - entropy_coef * H)

    Args:
        outputs: ``log_probs`` (T,) with gradient, ``entropy`` (T,) (with gradient if ``entropy_coef`` is not 0).
        columns: ``log_probs`` (T,) before the step's first update, ``advantages`` (T,).
        config: clip_ratio, clip_ratio_high, dual_clip (None = off), entropy_coef.
    """
    advantages = columns["advantages"]
    log_ratio = (outputs["log_probs"] - columns["log_probs"]).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - config.clip_ratio, 1.0 + high)
    loss = torch.maximum(plain, clipped)
    dual = torch.zeros_like(advantages, dtype=torch.bool)
    if config.dual_clip is not None:
        bound = -advantages * config.dual_clip
        dual = (advantages < 0) & (loss > bound)
        loss = torch.where(dual, bound, loss)
    if config.entropy_coef:
        loss = loss - config.entropy_coef * outputs["entropy"]
    with torch.no_grad():
        metrics = _token_means(
            {
                "loss/policy": loss,
                "entropy/mean": outputs["entropy"],
                "policy/clip_fraction": clipped > plain,
                "policy/ratio_mean": ratio,
                "policy/dual_clip_fraction": dual,
                "policy/approx_kl": torch.expm1(log_ratio) - log_ratio,  # k3 of KL(old || new): tokens are old's
            }
        )
        if len(ratio):
            metrics["policy/ratio_max"] = Max(float(ratio.max()))
            metrics["policy/ratio_min"] = Min(float(ratio.min()))
    return loss.sum(), metrics


def value_loss(outputs: Tensors, columns: Tensors, config: AlgorithmConfig) -> LossResult:
    """Half the squared error of the value, clipped around its old value (as in OpenAI's PPO2).

        L = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

    Args:
        outputs: ``values`` (T,) with gradient.
        columns: ``values`` (T,) before the step's first update, ``returns`` (T,).
        config: value_clip = c (None = off).
    """
    values, returns, old = outputs["values"], columns["returns"], columns["values"]
    error = (values - returns).square()
    clipped = torch.zeros_like(error, dtype=torch.bool)
    if config.value_clip is not None:
        bounded = old + (values - old).clamp(-config.value_clip, config.value_clip)
        bounded_error = (bounded - returns).square()
        clipped = bounded_error > error
        error = torch.maximum(error, bounded_error)
    loss = 0.5 * error
    with torch.no_grad():
        metrics = _token_means({"loss/value": loss, "value/clip_fraction": clipped})
    return loss.sum(), metrics


def supervised_loss(outputs: Tensors, columns: Tensors) -> LossResult:
    """Cross-entropy of the given responses: -sum(log_probs). Reads no column.

    Args:
        outputs: ``log_probs`` (T,) with gradient.
    """
    loss = -outputs["log_probs"]
    with torch.no_grad():
        metrics = _token_means({"loss/supervised": loss})
    return loss.sum(), metrics


def _token_means(per_token: Tensors) -> dict[str, Metric]:
    """Token-weighted means; one transfer from the device for all of them."""
    count = len(next(iter(per_token.values())))
    totals = torch.stack([values.detach().sum(dtype=torch.float64) for values in per_token.values()]).tolist()
    return {name: Mean(total, count) for name, total in zip(per_token, totals, strict=True)}
