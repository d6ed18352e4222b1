"""Rules about models, rewards, data, algorithm names and trackers, and keys without effect."""

from __future__ import annotations

import importlib.util

import numpy as np

from hybridflow.algorithms.advantages import ADVANTAGE_ESTIMATORS
from hybridflow.algorithms.kl import kl_estimate
from hybridflow.config.draft import Draft
from hybridflow.config.ranges import get
from hybridflow.data.sources import is_file, unreadable
from hybridflow.errors import ConfigError
from hybridflow.loading import check_defines

ALGORITHMS = ("ppo",)
RESHARDING_PROTOCOLS = ("auto", "shared_memory", "object_store", "checkpoint")


def model(draft: Draft) -> None:
    config = draft.config
    if config.model.path is None:
        draft.refuse("model.path", "no model is given", "add model.path=<a local Hugging Face folder>")
    if config.rollout.dtype is None:
        draft.decide("rollout.dtype", config.model.dtype)
    if draft.device_type == "cpu":
        draft.adjust("model.use_flash_attn", False, "CPU has no flash attention; PyTorch's SDPA takes its place")
    if draft.model and draft.critic_model and draft.critic_model.vocab != draft.model.vocab:
        draft.refuse(
            "critic.path",
            f"the critic's vocabulary has {draft.critic_model.vocab} tokens, the actor's {draft.model.vocab}",
            "the two must share a tokenizer",
        )


def lora(draft: Draft) -> None:
    config = draft.config.model
    if config.lora_rank == 0:
        return
    known = draft.model.linear_modules if draft.model else None
    missing = [] if known is None else [name for name in config.target_modules if name not in known]
    if missing:
        draft.refuse(
            "model.target_modules",
            f"the model has no {', '.join(missing)}",
            f"its linear modules are: {', '.join(known or ())}",
        )
    if not config.target_modules:
        draft.refuse("model.target_modules", "LoRA without a target trains nothing", "name some, or set lora_rank=0")


def algorithm(draft: Draft) -> None:
    config = draft.config.algorithm
    if config.name not in ALGORITHMS:
        draft.refuse("algorithm.name", f"there is no algorithm {config.name!r}", f"known: {', '.join(ALGORITHMS)}")
    for check in (
        lambda: ADVANTAGE_ESTIMATORS[config.adv_estimator],
        lambda: kl_estimate(np.zeros(0), np.zeros(0), config.kl_penalty),
    ):
        try:
            check()
        except ConfigError as error:
            draft.refuse_as(error.where, error)
    protocol = draft.config.resharding.protocol
    if protocol not in RESHARDING_PROTOCOLS and not draft.config.register:
        draft.refuse(
            "resharding.protocol",
            f"there is no protocol {protocol!r}",
            f"known: {', '.join(RESHARDING_PROTOCOLS)}; name the file of your own under `register`",
        )


def reward(draft: Draft) -> None:
    config = draft.config.reward_model
    if config.path is not None:
        draft.refuse(
            "reward_model.path",
            f"scoring by a model ({config.path}) is not built yet",
            "use reward_model.function=path/to/file.py:name, or leave both out for the task's verifier",
        )
    elif config.function is None:
        draft.note("reward_model", f"{config.name} without a path: the task's verifier scores the responses")
    else:
        module, _, name = config.function.partition(":")
        if not name:
            hint = "write path/to/file.py:name or package.module:name"
            draft.refuse("reward_model.function", f"{config.function!r} does not name a function", hint)
        elif module.endswith(".py"):
            try:
                check_defines(config.function)
            except ConfigError as error:
                draft.refuse_as("reward_model.function", error)


def data(draft: Draft) -> None:
    if draft.config.data.train is None:
        draft.note("data.train", "none given: the prompts are the built-in task's")
    for key in ("data.train", "data.validation", "warmup.data"):
        value = get(draft.config, key)
        for name in (value,) if isinstance(value, str) else value or ():
            if is_file(name) and (error := unreadable(name)):
                draft.refuse_as(key, error)


def run_folder(draft: Draft) -> None:
    name = draft.config.exp_name
    if name in ("", ".", "..") or "/" in name:
        draft.refuse("exp_name", f"{name!r} is not the name of a folder", "log_dir says where runs go")


def wandb(draft: Draft) -> None:
    config = draft.config.wandb
    if config.mode is None and config.project is not None and draft.given is not None:
        draft.decide("wandb.mode", "offline")
        draft.note("wandb.mode", "offline, for a project is given; `wandb sync` uploads the run")
    elif config.mode is None:
        draft.decide("wandb.mode", "disabled")
    if draft.config.wandb.mode != "disabled" and importlib.util.find_spec("wandb") is None:
        draft.adjust("wandb.mode", "disabled", "the package wandb is not installed")
    if config.project is None:
        draft.decide("wandb.project", "hybridflow")


def without_effect(draft: Draft) -> None:
    """A key that the user gave, but that another one switches off, is said."""
    if draft.given is None:
        return
    config = draft.config
    off = {
        "model.lora_rank is 0": (config.model.lora_rank == 0, "model.lora_alpha model.target_modules rollout.lora"),
        "algorithm.kl_ctrl.type is fixed": (
            config.algorithm.kl_ctrl.type == "fixed",
            "algorithm.kl_ctrl.target_kl algorithm.kl_ctrl.horizon",
        ),
        "warmup.steps is 0": (config.warmup.steps == 0, "warmup.batch_size warmup.lr warmup.data"),
        "actor.optim.name is sgd": (config.actor.optim.name == "sgd", "actor.optim.betas actor.optim.eps"),
        "critic.optim.name is sgd": (config.critic.optim.name == "sgd", "critic.optim.betas critic.optim.eps"),
        "wandb.mode is disabled": (config.wandb.mode == "disabled", "wandb.project"),
    }
    for reason, (holds, keys) in off.items():
        for key in keys.split() if holds else ():
            if draft.is_given(key):
                draft.note(key, f"{get(config, key)} has no effect: {reason}")
