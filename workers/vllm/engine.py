"""The generation engine: vLLM in this process, driven request by request, with weights that we put in ourselves."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridflow.batch.batch import Batch, Ragged
from hybridflow.config.schema import ModelConfig, RolloutConfig
from hybridflow.errors import ConfigError, NumericsError, WorkerError
from hybridflow.seeds import derive_seed
from hybridflow.telemetry.metrics import Max, Mean, Metric, Min
from hybridflow.worker import WorkerContext
from workers.resharding.boxes import ShardMap
from workers.vllm import internals
from workers.vllm.shard_map import vllm_shard_map

_ADAPTER = "policy"
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_MOST_KV_BYTES = 4 << 30
_BLOCK_TOKENS = 32  # of the KV cache: the least that vLLM's CPU attention takes


class GenerationEngine:
    """One rank of one engine replica. All TP ranks of a replica get the same calls with the same arguments.

    The engine starts without weights (only ``config.json`` is read from the model folder) and refuses to generate
    until it has received some, and whenever their version isn't the one that the caller expects.

    Args:
        context: rank and layout; ``torch.distributed`` is initialised over the TP ranks of this replica.
        seed: of all sampling; a sample's own seed also depends on the policy version and its id, on nothing else.
        max_model_len: tokens of the longest prompt plus the longest response.

    Errors:
        ConfigError: what vLLM says about a model, layout or size that it cannot run.
    """

    def __init__(
        self, context: WorkerContext, model: ModelConfig, rollout: RolloutConfig, seed: int, max_model_len: int
    ):
        self.context, self.rollout, self.seed, self.max_model_len = context, rollout, seed, max_model_len
        self.folder = Path(model.path or "")
        self.dtype = rollout.dtype or model.dtype
        self.adapters = model.lora_rank > 0 and rollout.lora == "adapter"
        self.version: int | None = None
        self._weights_loaded = self._asleep = False
        self._adapter: Any = None
        self._config = _read_json(self.folder / "config.json", required=True)
        self._stop_tokens = end_tokens(self.folder)
        self._engine = self._start(model)

    def _start(self, model: ModelConfig) -> Any:
        tp = self.context.layout.tp
        arguments = {
            "model": str(self.folder),
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "generation_config": "vllm",
            "dtype": self.dtype,
            "seed": 0,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.rollout.max_num_seqs,
            "max_num_batched_tokens": self.rollout.max_num_batched_tokens,
            "enable_chunked_prefill": self.rollout.enable_chunked_prefill,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
        }
        if internals.is_cpu():
            self._check_head_size()
            kv_bytes = self.rollout.kv_cache_bytes or default_kv_cache_bytes(
                self._config, self.dtype, self.rollout.max_num_seqs, self.max_model_len, tp
            )
            arguments |= {"enforce_eager": True, "block_size": _BLOCK_TOKENS, "kv_cache_memory_bytes": kv_bytes}
        else:
            arguments |= {"enable_sleep_mode": True, "kv_cache_memory_bytes": self.rollout.kv_cache_bytes}
        if self.adapters:
            rank = next(size for size in _LORA_RANKS if size >= model.lora_rank)
            arguments |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
        try:
            return internals.start(arguments, tensor_parallel_size=tp)
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(
                f"vLLM cannot run {str(self.folder)!r} in this setting: {error}",
                hint="check rollout.* (kv_cache_bytes, too), and that vLLM supports this architecture and head size",
                where=self._place,
            ) from error

    def _check_head_size(self) -> None:
        size, known = head_size(self._config), internals.supported_head_sizes()
        if size not in known:
            raise ConfigError(
                f"the model's attention heads have {size} numbers, vLLM on CPU takes {', '.join(map(str, known))}",
                hint="choose another model, or run the rollout on a GPU",
                where=self._place,
            )

    # -- weights ---------------------------------------------------------------------------------------------------
    def parameters(self) -> dict[str, torch.Tensor]:
        """The live tensors by vLLM's names; call ``weights_changed`` after writing to them."""
        self._check_awake()
        return internals.live_parameters(self._engine)

    def shard_map(self) -> ShardMap:
        """What each live parameter holds, in the coordinates of the Hugging Face tensors."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.parameters().items()}
        return vllm_shard_map(shapes, self._config, self.context.coord.tp, self.context.layout.tp)

    def weights_changed(self, version: int) -> None:
        """Stamp the policy version after all parameters were written, and forget what older weights had cached."""
        self._weights_loaded = True
        self._forget(version)

    def load_adapter(self, folder: str, version: int) -> None:
        """Swap the LoRA adapter (a folder in PEFT's format). The base weights must have been loaded before."""
        if not self.adapters:
            raise WorkerError("this engine takes no adapters", hint="set rollout.lora: adapter and model.lora_rank")
        if not self._weights_loaded:
            raise WorkerError("an adapter came before the base weights", hint="send the base weights once, at start")
        if self._adapter is not None:
            self._engine.remove_lora(self._adapter.lora_int_id)
        self._adapter = internals.LoRARequest(_ADAPTER, 1, folder)
        self._engine.add_lora(self._adapter)
        self._forget(version)

    def _forget(self, version: int) -> None:
        if not self._engine.reset_prefix_cache():
            raise WorkerError("the prefix cache cannot be reset while requests run", hint="finish generation first")
        self.version = version

    # -- generation ------------------------------------------------------------------------------------------------
    def generate(self, batch: Batch, *, version: int, greedy: bool = False) -> tuple[Batch, dict[str, Metric]]:
        """Answer each prompt.

        Args:
            batch: column ``prompt_tokens``.
            version: the policy version that the caller expects to generate with.
            greedy: take the most likely token (evaluation); log-probs are then those of temperature 1.

        Returns:
            Columns ``response_tokens`` (end token included where one came; at least one token),
            ``rollout_log_probs`` (of the distribution that was drawn from, after temperature), ``finish_reason``
            ("stop" or "length") and ``policy_version``, in the batch's order; and metrics.
        """
        self._check_awake()
        self._check_version(version)
        prompts = batch.ragged("prompt_tokens")
        limits = self._response_limits(prompts)
        tokens, offsets = prompts.values.tolist(), prompts.offsets.tolist()
        requests = []
        for row, sample_id in enumerate(batch.sample_ids.tolist()):
            prompt = {"type": "token", "prompt_token_ids": tokens[offsets[row] : offsets[row + 1]]}
            seed = None if greedy else derive_seed(self.seed, "rollout", version, sample_id)
            requests.append((prompt, self._sampling(int(limits[row]), seed)))
        return self._collect(batch, self._run(requests))

    def _run(self, requests: list[tuple[dict, Any]]) -> list[Any]:
        """Each request's completion, in order."""
        outputs: list[Any] = [None] * len(requests)
        try:
            for row, (prompt, parameters) in enumerate(requests):
                self._engine.add_request(str(row), prompt, parameters, lora_request=self._adapter)
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    outputs[int(output.request_id)] = output.outputs[0]
        except BaseException:
            self._engine.abort_request([str(row) for row in range(len(requests))])  # or the next call would get them
            raise
        return outputs

    def _check_version(self, expected: int) -> None:
        if self.version is None:
            raise WorkerError(
                "the engine has received no weights and would generate noise",
                hint="reshard the actor's weights to the rollout pool first",
                where=self._place,
            )
        if self.version != expected:
            raise NumericsError(
                f"the engine holds policy version {self.version}, the step expects {expected}",
                hint="reshard after each update, before generating",
                where=self._place,
            )

    def _response_limits(self, prompts: Ragged) -> np.ndarray:
        """Tokens that each response may have. Shape: (N,)."""
        largest, vocabulary = prompts.values.max(initial=0), self._config["vocab_size"]
        if largest >= vocabulary:
            raise ConfigError(
                f"a prompt holds token id {largest}, the model has {vocabulary} tokens",
                hint="the tokenizer does not belong to this model",
                where=self._place,
            )
        wanted = self.rollout.max_response_length or self.max_model_len
        limits = np.minimum(self.max_model_len - prompts.lengths, wanted)
        wrong = np.flatnonzero((limits < 1) | (prompts.lengths < 1))
        if len(wrong):
            raise ConfigError(
                f"a prompt of {prompts.lengths[wrong[0]]} tokens (row {wrong[0]}) leaves no room for a response in "
                f"sequences of {self.max_model_len} tokens",
                hint="prompts have 1 to data.max_prompt_length tokens; see data.overlong",
            )
        return limits

    def _sampling(self, max_tokens: int, seed: int | None) -> Any:
        return internals.SamplingParams(
            temperature=0.0 if seed is None else self.rollout.temperature,
            seed=seed,
            max_tokens=max_tokens,
            stop_token_ids=self._stop_tokens,
            logprobs=0,
            flat_logprobs=True,
            skip_clone=True,  # made for one request: vLLM need not copy it deeply
            detokenize=False,
            output_kind=internals.RequestOutputKind.FINAL_ONLY,
        )

    def _collect(self, batch: Batch, outputs: list[Any]) -> tuple[Batch, dict[str, Metric]]:
        lengths = np.fromiter((len(output.token_ids) for output in outputs), np.int64, len(outputs))
        log_probs = np.fromiter((p for output in outputs for p in output.logprobs.logprobs), np.float32)
        tokens = np.fromiter((t for output in outputs for t in output.token_ids), np.int32)
        if not np.isfinite(log_probs).all():
            raise NumericsError(
                f"{int((~np.isfinite(log_probs)).sum())} generated tokens have no finite log-prob",
                hint="the weights of this policy version hold infinities or NaN",
                where=self._place,
            )
        reasons = [output.finish_reason for output in outputs]
        result = Batch.of(
            batch.sample_ids,
            response_tokens=Ragged.from_lengths(tokens, lengths),
            rollout_log_probs=Ragged.from_lengths(log_probs, lengths),
            finish_reason=reasons,
            policy_version=np.full(len(batch), self.version, dtype=np.int64),
        )
        metrics: dict[str, Metric] = {
            "response/length_mean": Mean(float(lengths.sum()), len(lengths)),
            "response/length_max": Max(float(lengths.max(initial=0))),
            "response/length_min": Min(float(lengths.min(initial=lengths.max(initial=0)))),
            "response/clipped_fraction": Mean(float(reasons.count("length")), len(reasons)),
        }
        return result, metrics

    # -- residency -------------------------------------------------------------------------------------------------
    def sleep(self) -> None:
        """Free the KV cache (and on CUDA move the weights to host memory) until ``wake``."""
        self._engine.reset_prefix_cache()
        if internals.is_cpu():
            internals.discard_kv_pages(self._engine)
        else:
            self._engine.sleep(level=1)
        self._asleep = True

    def wake(self) -> None:
        if not internals.is_cpu():
            self._engine.wake_up()
        self._asleep = False

    def _check_awake(self) -> None:
        if self._asleep:
            raise WorkerError("the engine is asleep", hint="wake the rollout pool before it is used", where=self._place)

    @property
    def _place(self) -> str:
        return f"rollout {self.context.coord}"

    def close(self) -> None:
        internals.stop(self._engine)


def end_tokens(folder: Path) -> list[int]:
    """Ids that end a response: those of generation_config.json, else of config.json (either may list several)."""
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        if ids is not None:
            return sorted(set(ids)) if isinstance(ids, list) else [ids]
    return []


def head_size(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def default_kv_cache_bytes(config: Mapping[str, Any], dtype: str, sequences: int, tokens: int, tp: int) -> int:
    """Room for ``sequences`` of ``tokens`` each, up to 4 GiB or an eighth of the host's memory, but always for one."""
    kv_heads = max(1, config.get("num_key_value_heads", config["num_attention_heads"]) // tp)
    itemsize = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    block = 2 * config["num_hidden_layers"] * kv_heads * head_size(config) * itemsize * _BLOCK_TOKENS
    blocks_of_one = -(-tokens // _BLOCK_TOKENS) + 1
    most = min(_MOST_KV_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8)
    return max(min(sequences * blocks_of_one * block, most), (blocks_of_one + 1) * block)


def _read_json(path: Path, required: bool = False) -> dict[str, Any]:
    if path.is_file():
        return json.loads(path.read_text())
    if required:
        raise ConfigError(f"there is no {path.name} in {str(path.parent)!r}", hint="model.path names a model folder")
    return {}
