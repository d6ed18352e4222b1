"""A whole PPO step in plain PyTorch: Hugging Face models, padded, one process, loops where a loop is clearer.

Written from the papers, and sharing no line with the system: it is what the system is held against.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.config.schema import AlgorithmConfig, OptimConfig
from tests.numerics.hugging_face import HuggingFace


@dataclass
class PlainStep:
    """What one step of PPO computes: per-token arrays in row order, first gradients, and weights afterwards."""

    log_probs: np.ndarray
    reference_log_probs: np.ndarray
    values: np.ndarray
    advantages: np.ndarray
    returns: np.ndarray
    losses: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def ppo_step(
    policy: Path,
    reference: Path,
    batch: Batch,
    rewards: np.ndarray,
    mini_batches: list[np.ndarray],
    config: AlgorithmConfig,
    optim: OptimConfig,
    kl_coef: float,
) -> PlainStep:
    """One step on given samples; ``mini_batches``: rows of each optimizer step."""
    actor, frozen, critic = HuggingFace(policy), HuggingFace(reference), HuggingFace(policy, head="value")
    lengths = batch.ragged("response_tokens").lengths
    with torch.no_grad():
        old = actor.outputs(batch)["log_probs"].numpy().copy()
        fixed = frozen.outputs(batch)["log_probs"].numpy().copy()
        values = critic.outputs(batch)["values"].numpy().copy()
    advantages, returns = _advantages(lengths, rewards, old, fixed, values, config, kl_coef)
    step = PlainStep(old, fixed, values, advantages, returns)
    for name, model in (("policy", actor), ("value", critic)):
        _train(name, model, step, batch, mini_batches, config, optim)
    return step


def _advantages(lengths, rewards, old, fixed, values, config, kl_coef):
    advantages = np.zeros(len(old))
    start = 0
    for row, length in enumerate(lengths):
        following_advantage = following_value = 0.0
        for t in reversed(range(length)):
            i = start + t
            reward = -kl_coef * (float(old[i]) - float(fixed[i])) + (float(rewards[row]) if t == length - 1 else 0.0)
            delta = reward + config.gamma * following_value - float(values[i])
            following_advantage = delta + config.gamma * config.lam * following_advantage
            following_value = float(values[i])
            advantages[i] = following_advantage
        start += length
    returns = advantages + values
    if config.whiten_advantages:
        mean = sum(advantages) / len(advantages)
        variance = sum((a - mean) ** 2 for a in advantages) / (len(advantages) - 1)
        advantages = (advantages - mean) / np.sqrt(variance + 1e-8)
    return advantages.astype(np.float32), returns.astype(np.float32)


def _train(name, model, step, batch, mini_batches, config, optim):
    parameters = model.parameters()
    if optim.name == "sgd":
        optimizer = torch.optim.SGD(parameters.values(), lr=optim.lr)
    else:
        optimizer = torch.optim.AdamW(
            parameters.values(), lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
        )
    offsets = batch.ragged("response_tokens").offsets
    for epoch in range(config.ppo_epochs):
        for number, rows in enumerate(mini_batches):
            tokens = np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in rows])
            outputs = model.outputs(batch.select(rows))
            loss = (
                _policy_loss(outputs, step, tokens, config)
                if name == "policy"
                else _value_loss(outputs, step, tokens, config)
            )
            optimizer.zero_grad()
            loss.backward()
            if epoch == number == 0:
                step.losses[name] = float(loss)
                step.gradients[name] = {key: parameter.grad.clone() for key, parameter in parameters.items()}
            torch.nn.utils.clip_grad_norm_(parameters.values(), optim.grad_clip)
            optimizer.step()
    step.weights[name] = {key: parameter.detach().clone() for key, parameter in parameters.items()}


def _policy_loss(outputs, step, tokens, config):
    losses = []
    for i, token in enumerate(tokens):
        advantage = float(step.advantages[token])
        ratio = torch.exp(outputs["log_probs"][i] - float(step.log_probs[token]))
        kept = torch.clamp(ratio, 1 - config.clip_ratio, 1 + config.clip_ratio)
        loss = -torch.minimum(ratio * advantage, kept * advantage)
        if config.dual_clip is not None and advantage < 0:
            loss = torch.clamp(loss, max=-advantage * config.dual_clip)
        losses.append(loss - config.entropy_coef * outputs["entropy"][i])
    return torch.stack(losses).mean()


def _value_loss(outputs, step, tokens, config):
    old, target = torch.tensor(step.values[tokens]), torch.tensor(step.returns[tokens])
    value = outputs["values"]
    error = (value - target) ** 2
    if config.value_clip is not None:
        error = torch.maximum(
            error, (old + torch.clamp(value - old, -config.value_clip, config.value_clip) - target) ** 2
        )
    return 0.5 * error.mean()
