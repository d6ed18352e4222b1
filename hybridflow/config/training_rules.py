"""Rules about the length of a run and its portions: steps, batches, tokens, clipping."""

from __future__ import annotations

import math

from hybridflow.config.draft import Draft
from hybridflow.config.layout_rules import actor_dp
from hybridflow.config.ranges import get

USUAL_PROMPT, USUAL_RESPONSE = 1024, 256
USUAL_GRAD_CLIP = 1.0


def run_length(draft: Draft) -> None:
    training = draft.config.training
    if training.total_steps is None and training.num_epochs is None:
        draft.decide("training.num_epochs", 1)
        draft.note("training.num_epochs", "1 pass over the prompts (neither total_steps nor num_epochs is given)")
    elif training.total_steps is not None and training.num_epochs is not None:
        draft.note(
            "training.num_epochs",
            f"the run ends after total_steps ({training.total_steps}) or so many passes over the prompts, "
            "whichever comes first",
        )


def batches(draft: Draft) -> None:
    """Prompts of a step, sequences of a mini-batch, and how many micro-batches that makes."""
    config = draft.config
    n, mini = config.rollout.n, config.training.ppo_mini_batch_size
    prompts = config.data.train_batch_size or math.ceil(mini / n)
    draft.decide("data.train_batch_size", prompts)
    if prompts * n < mini:
        reason = f"a step has {prompts} prompts x {n} responses"
        draft.adjust("training.ppo_mini_batch_size", prompts * n, reason)
        mini = prompts * n
    dp = actor_dp(draft)
    if dp is None:
        return
    if mini < dp:
        draft.refuse(
            "training.ppo_mini_batch_size",
            f"{mini} sequences are fewer than the {dp} data-parallel ranks",
            f"use {dp} or more, or fewer devices",
        )
    micro = config.training.ppo_micro_batch_size_per_gpu
    steps = math.ceil(math.ceil(mini / dp) / micro)
    if config.training.gradient_accumulation_steps is None:
        draft.decide("training.gradient_accumulation_steps", steps)
    draft.adjust(
        "training.gradient_accumulation_steps",
        steps,
        f"{mini} sequences / DP {dp} / at most {micro} at once (it never multiplies the mini-batch)",
    )


def lengths(draft: Draft) -> None:
    """Tokens of a prompt and of a response: together within the model's positions and the token budget."""
    prompt, response = draft.config.data.max_prompt_length, draft.config.rollout.max_response_length
    budget, limit = draft.config.training.ppo_max_token_len_per_gpu, "training.ppo_max_token_len_per_gpu"
    if draft.model and draft.model.positions <= budget:
        budget, limit = draft.model.positions, "the model's positions"
    if prompt is None:
        spare = USUAL_RESPONSE if response is None else response
        prompt = min(USUAL_PROMPT, max(budget - spare, budget // 2 if response is None else 0))
        draft.decide("data.max_prompt_length", prompt)
        if 0 < prompt < USUAL_PROMPT:
            draft.note("data.max_prompt_length", f"{prompt}, for {limit} are {budget} tokens")
    if response is None:
        response = min(USUAL_RESPONSE, budget - prompt)
        draft.decide("rollout.max_response_length", response)
        if 0 < response < USUAL_RESPONSE:
            draft.note("rollout.max_response_length", f"{response}, for {limit} are {budget} tokens")
    if prompt < 1 or response < 1 or prompt + response > budget:
        by_response = draft.is_given("rollout.max_response_length")
        key = "rollout.max_response_length" if by_response else "data.max_prompt_length"
        asked = [
            f"{what} of {count} tokens"
            for name, what, count in (
                ("data.max_prompt_length", "prompts", prompt),
                ("rollout.max_response_length", "responses", response),
            )
            if name not in draft.decided
        ]
        message = f"{' and '.join(asked)} leave no room: {limit} are {budget}"
        draft.refuse(key, message, "shorten them, or raise the limit")


def clipping(draft: Draft) -> None:
    """``training.clip_grad_norm`` and ``*.optim.grad_clip`` are one thing: two different values are an error."""
    shared = draft.config.training.clip_grad_norm
    for key in ("actor.optim.grad_clip", "critic.optim.grad_clip"):
        own = get(draft.config, key)
        if own is not None and shared is not None and own != shared:
            draft.refuse(
                key,
                f"{own} contradicts training.clip_grad_norm {shared}: the two are the same thing",
                "give one of them, or the same value",
            )
        elif own is None:
            draft.decide(key, USUAL_GRAD_CLIP if shared is None else shared)
    actor, critic = (get(draft.config, f"{role}.optim.grad_clip") for role in ("actor", "critic"))
    if shared is None and actor == critic:
        draft.decide("training.clip_grad_norm", actor)


def generation(draft: Draft) -> None:
    """What vLLM would refuse, and what would leave a GPU idle."""
    rollout = draft.config.rollout
    longest = (draft.config.data.max_prompt_length or 0) + (rollout.max_response_length or 0)
    key = "rollout.max_num_batched_tokens"
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        draft.refuse(key, f"{rollout.max_num_batched_tokens} is less than rollout.max_num_seqs {rollout.max_num_seqs}")
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < longest:
        draft.refuse(
            key,
            f"{rollout.max_num_batched_tokens} is less than a sequence of {longest} tokens",
            "raise it, or set rollout.enable_chunked_prefill=true",
        )
    if draft.memory_gb is not None and draft.device_type == "cuda":
        element = {"bfloat16": 2, "float32": 4}[rollout.dtype or draft.config.model.dtype]
        advised = batched_tokens(draft.memory_gb, element)
        if 2 * rollout.max_num_batched_tokens < advised:
            draft.note(
                key,
                f"{rollout.max_num_batched_tokens} may leave the GPU idle: {draft.memory_gb:.0f} GB x 1024 x 0.7 / "
                f"{element} bytes = {advised}",
            )


def batched_tokens(memory_gb: float, bytes_per_element: int) -> int:
    """The tutorial's rule for ``rollout.max_num_batched_tokens`` (A100 80 GB in bf16: 28672)."""
    return int(memory_gb * 1024 * 0.7 / bytes_per_element)
