"""The numbers that each key may hold, as one table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from hybridflow.config.problems import Problem
from hybridflow.config.schema import Config

_LIMITS: dict[str, tuple[Callable[[Any], bool], dict[str, tuple[str, ...]]]] = {
    "at least 1": (
        lambda value: value >= 1,
        {
            "training": (
                *("total_steps", "num_epochs", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "log_interval"),
                *("ppo_max_token_len_per_gpu", "gradient_accumulation_steps"),
            ),
            "mcore_config": ("tensor_model_parallel_size", "pipeline_model_parallel_size"),
            "algorithm": ("ppo_epochs", "kl_ctrl.horizon"),
            "rollout": (
                *("tensor_model_parallel_size", "replicas", "max_num_batched_tokens", "max_num_seqs", "n"),
                *("max_response_length", "kv_cache_bytes"),
            ),
            "reward_model": ("processes",),
            "data": ("train_batch_size", "max_prompt_length"),
            "checkpoint": ("keep_last_k",),
            "launcher": ("devices", "threads"),
            "warmup": ("batch_size",),
        },
    ),
    "0 or more": (
        lambda value: value >= 0,
        {
            "model": ("lora_rank",),
            "training": ("eval_interval", "clip_grad_norm"),
            "algorithm": ("entropy_coef", "kl_ctrl.kl_coef"),
            "actor.optim": ("lr", "weight_decay", "grad_clip"),
            "critic.optim": ("lr", "weight_decay", "grad_clip"),
            "data": ("validation_size",),
            "checkpoint": ("save_interval",),
            "launcher": ("wait_seconds",),
            "warmup": ("steps", "lr"),
        },
    ),
    "above 0": (
        lambda value: value > 0,
        {
            "model": ("lora_alpha",),
            "rollout": ("temperature",),
            "algorithm": ("clip_ratio", "clip_ratio_high", "value_clip", "kl_ctrl.target_kl"),
            "actor.optim": ("eps",),
            "critic.optim": ("eps",),
            "reward_model": ("timeout_seconds",),
        },
    ),
    "from 0 to 1": (
        lambda value: 0 <= value <= 1,
        {"algorithm": ("gamma", "lam"), "reward_model": ("max_failure_fraction",)},
    ),
    "above 1 (null turns it off)": (lambda value: value > 1, {"algorithm": ("dual_clip",)}),
    "two numbers from 0 to below 1": (
        lambda value: all(0 <= beta < 1 for beta in value),
        {"actor.optim": ("betas",), "critic.optim": ("betas",)},
    ),
}


def get(config: Config, key: str) -> Any:
    """The value at a dotted key."""
    return functools.reduce(getattr, key.split("."), config)


def replaced(config: Config, key: str, value: Any) -> Config:
    """The config with another value at a dotted key."""

    def within(block: Any, name: str, *rest: str) -> Any:
        return dataclasses.replace(block, **{name: within(getattr(block, name), *rest) if rest else value})

    return within(config, *key.split("."))


def out_of_range(config: Config) -> list[Problem]:
    """A problem for each number that its key cannot hold."""
    return [
        Problem(f"{block}.{name}", f"must be {wish}, but is {value}")
        for wish, (fits, blocks) in _LIMITS.items()
        for block, names in blocks.items()
        for name in names
        if (value := get(config, f"{block}.{name}")) is not None and not fits(value)
    ]
