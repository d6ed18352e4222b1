"""What the contract tests of the generation engine look at, collected in processes of its own by one engine start each.

Not a test file: ``test_vllm.py`` starts these functions with ``multiprocessing`` (the engine changes its process, and
the test process must stay clean) and asserts on the plain facts that they return.
"""

from __future__ import annotations

import json
import os
import socket
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import numpy as np
import torch
import torch.distributed as dist

from hybridflow.batch.batch import Batch
from hybridflow.config.schema import ModelConfig, RolloutConfig
from hybridflow.worker import WorkerContext
from placement.layout import Layout
from workers.megatron.hf_config import read_architecture
from workers.megatron.shard_map import weight_map
from workers.resharding.adapter import write_adapter
from workers.resharding.boxes import Box, Piece, ShardMap
from workers.resharding.planner import plan
from workers.resharding.protocol import Channel
from workers.resharding.publish import Publisher
from workers.resharding.receive import Receiver

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 250,  # no multiple of 64: both engines pad it, each in its way
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]  # (TP, PP) of the trainer
PROTOCOLS = ["shared_memory", "object_store", "checkpoint"]
LAYER = (
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
    "input_layernorm.weight",
    "pre_mlp_layernorm.weight",
)


# -- models -----------------------------------------------------------------------------------------------------------
def make_model(folder: Path, kind: str, *, tied: bool, seed: int) -> Any:
    """A small random model of Hugging Face, saved to ``folder``."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **SIZES, tie_word_embeddings=tied, eos_token_id=[7, 9])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias") or "norm" in name:  # not zeros and ones, or a lost one would not be noticed
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    return model


def canonical(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())  # a tied lm_head is no parameter of its own


# -- the trainer, simulated by its pure shard maps --------------------------------------------------------------------
def megatron_rank(folder: Path, tp: int, pp: int, tp_rank: int, pp_rank: int) -> ShardMap:
    """The shard map of one Megatron rank."""
    architecture = read_architecture(folder)
    layers = architecture.layers // pp
    each = list(LAYER)
    each += ["self_attention.linear_qkv.bias"] if architecture.qkv_bias else []
    each += [f"self_attention.{x}_layernorm.weight" for x in "qk"] if architecture.qk_norm else []
    names = [f"decoder.layers.{layer}.{name}" for layer in range(layers) for name in each]
    if pp_rank == 0:
        names.append("embedding.word_embeddings.weight")
    if pp_rank == pp - 1:
        names += ["decoder.final_layernorm.weight", *([] if architecture.tied and pp == 1 else ["output_layer.weight"])]
    return weight_map(architecture, names, tp=tp, tp_rank=tp_rank, first_layer=pp_rank * layers)


def fill(shards: ShardMap, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A rank's parameters (just large enough) that hold what its map says."""
    ends: dict[str, np.ndarray] = {}
    for piece in shards:
        end = np.add(piece.offset, piece.box.shape)
        ends[piece.parameter] = np.maximum(ends.get(piece.parameter, end), end)
    parameters = {name: torch.full(tuple(end), float("nan")) for name, end in ends.items()}
    for piece in shards:
        parameters[piece.parameter][piece.slices] = tensors[piece.box.tensor][piece.box.slices].detach()
    return parameters


def whole_map(tensors: dict[str, torch.Tensor]) -> ShardMap:
    boxes = [Box(name, (0,) * value.dim(), tuple(value.shape)) for name, value in tensors.items()]
    return [Piece(box, box.tensor, (0,) * len(box.start)) for box in boxes]


class Trainer:
    """Simulated training ranks on one side, the live engine rank on the other, one protocol between them."""

    def __init__(self, engine: Any, protocol: str, sources: list[ShardMap], run_dir: str):
        self.engine, self.sources = engine, sources
        maps: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(maps, engine.shard_map())
        made = plan(sources, maps)
        channel = Channel(protocol, engine.dtype, f"{run_dir}/rank{dist.get_rank()}")
        self.publishers = [Publisher(channel, share) for share in made.shares]
        self.receiver = Receiver(channel, made.intakes[dist.get_rank()])

    def send(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        values = [fill(source, tensors) for source in self.sources]
        handles = [p.publish(value, version) for p, value in zip(self.publishers, values, strict=True)]
        self.receiver.receive(handles, self.engine.parameters(), version)
        self.engine.weights_changed(version)

    def close(self) -> None:
        for end in [*self.publishers, self.receiver]:
            end.close()


def wrong_elements(engine: Any, tensors: dict[str, torch.Tensor]) -> int:
    """Numbers in the live engine that differ, in any bit, from the whole tensors cut by the engine's map."""
    live, wrong = engine.parameters(), 0
    for piece in engine.shard_map():
        wrong += int((live[piece.parameter][piece.slices] != tensors[piece.box.tensor][piece.box.slices]).sum())
    return wrong


def matrix(engine: Any, folder: Path, model: Any, run_dir: str) -> dict[str, int]:
    """Every layout through every protocol: wrong numbers in the engine afterwards. Weights differ for each cell."""
    wrong = {}
    for index, (protocol, (tp, pp)) in enumerate((p, layout) for p in PROTOCOLS for layout in LAYOUTS):
        tensors = {name: value.detach() + 0.001 * (index + 1) for name, value in canonical(model).items()}
        ranks = [megatron_rank(folder, tp, pp, t, p) for p in range(pp) for t in range(tp)]
        trainer = Trainer(engine, protocol, ranks, run_dir)
        trainer.send(tensors, index)
        trainer.close()
        wrong[f"{protocol} TP{tp} PP{pp}"] = wrong_elements(engine, tensors)
    return wrong


# -- generating and comparing -----------------------------------------------------------------------------------------
def prompts(count: int, length: int = 6, seed: int = 0) -> Batch:
    random = np.random.default_rng(seed)
    rows = [random.integers(10, 250, size=length + row % 4).astype(np.int32) for row in range(count)]
    return Batch.of(100 + np.arange(count), prompt_tokens=rows)


def hf_error(model: Any, batch: Batch, result: Batch, temperature: float = 1.0) -> float:
    """Largest difference of the rollout's log-probs and those of the Hugging Face model."""
    worst = 0.0
    asked, answered = batch.ragged("prompt_tokens"), result.ragged("response_tokens")
    log_probs = result.ragged("rollout_log_probs")
    for row in range(len(batch)):
        prompt, response = asked[row].tolist(), answered[row].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(expected - log_probs[row]).max()))
    return worst


def is_greedy(model: Any, batch: Batch, result: Batch) -> bool:
    for row in range(len(batch)):
        prompt, response = batch.ragged("prompt_tokens")[row].tolist(), result.ragged("response_tokens")[row].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        if logits.argmax(-1).tolist() != response:
            return False
    return True


def rows_of(result: Batch, column: str = "response_tokens") -> list[list]:
    ragged = result.ragged(column)
    return [ragged[row].tolist() for row in range(len(result))]


def message(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 (the test asserts on whatever it is)
        return f"{type(error).__name__}: {error}"
    return "no error"


# -- processes --------------------------------------------------------------------------------------------------------
def join(folder: Path, rank: int, world: int) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)


def make_engine(folder: Path, rank: int, world: int, *, lora_rank: int = 0, **rollout: Any) -> Any:
    from workers.vllm.engine import GenerationEngine

    layout = Layout(tp=world)
    context = WorkerContext(role="rollout", coord=layout.coord(rank), layout=layout)
    model = ModelConfig(path=str(folder), dtype="float32", lora_rank=lora_rank)
    settings = RolloutConfig(**{"max_response_length": 12, "max_num_seqs": 64, **rollout})
    return GenerationEngine(context, model, settings, seed=3, max_model_len=96)


def single(folder: Path, ray_address: str) -> dict[str, Any]:
    """One engine of TP 1: what we touch of vLLM, the matrix, and how it generates. Llama, untied."""
    import ray

    ray.init(address=ray_address, logging_level="error")
    join(folder, 0, 1)
    group, ports = dist.group.WORLD, []
    bind = socket.socket.bind
    socket.socket.bind = lambda self, address: (ports.append(address), bind(self, address))[1]
    model = make_model(folder, "llama", tied=False, seed=0)
    narrow = folder.with_name("narrow")
    narrow.mkdir()
    (narrow / "config.json").write_text(json.dumps({**SIZES, "head_dim": 16, "model_type": "llama"}))
    no_engine = [message(make_engine, path, 0, 1) for path in (narrow, folder.with_name("missing"))]
    engine = make_engine(folder, 0, 1, temperature=0.7)
    socket.socket.bind = bind
    facts = {"ports": [a for a in ports if isinstance(a, tuple)], "same_group": dist.group.WORLD is group}
    facts |= {"no_engine": no_engine, **_internals(engine)}
    facts["no_weights"] = message(engine.generate, prompts(2), version=0)
    facts["matrix"] = matrix(engine, folder, model, str(folder))
    trainer = Trainer(engine, "shared_memory", [whole_map(canonical(model))], str(folder))
    trainer.send(canonical(model), 20)
    facts |= _generation(engine, model)
    facts |= _new_weights(engine, trainer, model)
    facts |= _residency(engine)
    trainer.close()
    engine.close()
    facts["group_after_close"] = int(_sum_of_ones())
    facts |= _adapters(folder.with_name("qwen3"))
    return facts


def _sum_of_ones() -> float:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones.item()


def _internals(engine: Any) -> dict[str, Any]:
    from vllm import _custom_ops, envs
    from vllm.model_executor.layers import utils

    from workers.vllm import internals

    executor, storages = engine._engine.model_executor, internals.kv_storages(engine._engine)
    return {
        "multiprocessing": envs.VLLM_ENABLE_V1_MULTIPROCESSING,
        "onednn": _custom_ops._supports_onednn,
        "amx": utils.check_cpu_sgl_kernel(64, 64, torch.bfloat16),
        "dynamo_disabled": torch._dynamo.config.disable,
        "executor": type(executor).__name__,
        "dist_ident": os.environ["VLLM_DIST_IDENT"],
        "left_in_shm": [path.name for path in Path("/dev/shm").glob(f"{executor.shared_memory_ident}*")],
        "empty_parameters": [name for name, value in engine.parameters().items() if value.numel() == 0],
        "kv_storages": len(storages),
        "logprobs_mode": engine._engine.vllm_config.model_config.logprobs_mode,
        "prefix_caching": engine._engine.vllm_config.cache_config.enable_prefix_caching,
    }


def _generation(engine: Any, model: Any) -> dict[str, Any]:
    batch = prompts(32)
    result, metrics = engine.generate(batch, version=20)
    again, _ = engine.generate(batch.select(np.arange(31, 10, -2)), version=20)
    greedy, _ = engine.generate(batch, version=20, greedy=True)
    long = Batch.of([0], prompt_tokens=[np.full(96, 11, dtype=np.int32)])
    foreign = Batch.of([0], prompt_tokens=[np.full(4, 250, dtype=np.int32)])
    nothing, _ = engine.generate(batch.select(np.arange(0)), version=20)
    return {
        "responses": rows_of(result),
        "reasons": result.text("finish_reason"),
        "versions": result.scalar("policy_version").tolist(),
        "ids": result.sample_ids.tolist(),
        "some_again": rows_of(again),
        "error_at_temperature": hf_error(model, batch, result, 0.7),
        "greedy": is_greedy(model, batch, greedy),
        "greedy_error": hf_error(model, batch, greedy),
        "truncated": metrics["response/clipped_fraction"].value,
        "nothing": len(nothing),
        "foreign": message(engine.generate, foreign, version=20),
        "no_room": message(engine.generate, long, version=20),
        "stale": message(engine.generate, batch, version=21),
    }


def _new_weights(engine: Any, trainer: Trainer, model: Any) -> dict[str, Any]:
    """Prompts long enough to be cached, before and after an update; the seed follows the version."""
    batch = prompts(8, length=70)
    before, _ = engine.generate(batch, version=20)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    trainer.send(canonical(model), 21)
    after, _ = engine.generate(batch, version=21)
    trainer.send(canonical(model), 22)
    other, _ = engine.generate(batch, version=22)
    return {
        "error_after_update": hf_error(model, batch, after, 0.7),
        "changed": rows_of(before) != rows_of(after),
        "other_seed_other_version": rows_of(after) != rows_of(other),
        "old_version": message(engine.generate, batch, version=21),
    }


def _residency(engine: Any) -> dict[str, Any]:
    from workers.vllm import internals

    batch = prompts(16)
    before, _ = engine.generate(batch, version=22)
    (storage,) = internals.kv_storages(engine._engine)
    cache = torch.empty(0, dtype=torch.uint8).set_(storage)
    used, resident = int(cache.count_nonzero()), _resident()
    engine.sleep()
    freed, left = resident - _resident(), int(cache.count_nonzero())
    asleep = message(engine.generate, batch, version=22), message(engine.parameters)
    engine.wake()
    after, _ = engine.generate(batch, version=22)
    return {
        "kv_used": used,
        "kv_left": left,
        "freed": freed,
        "asleep": asleep,
        "same_after_wake": rows_of(before) == rows_of(after),
    }


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _adapters(folder: Path) -> dict[str, Any]:
    """A second engine in the same process, with adapters. Qwen3: q and k norms."""
    folder.mkdir()
    model = make_model(folder, "qwen3", tied=False, seed=1)
    engine = make_engine(folder, 0, 1, lora_rank=4)
    facts = {"adapter_before_base": message(engine.load_adapter, str(folder), 0)}
    trainer = Trainer(engine, "shared_memory", [megatron_rank(folder, 1, 1, 0, 0)], str(folder))
    trainer.send(canonical(model), 0)
    facts["lora_wrong"] = wrong_elements(engine, canonical(model))
    batch, errors = prompts(8), []
    base = {name: value.detach().clone() for name, value in canonical(model).items()}
    for version in range(3):
        if version:
            path = _adapter(folder / "adapter", model, base, version)
            engine.load_adapter(path, version)
        result, _ = engine.generate(batch, version=version)
        errors.append(hf_error(model, batch, result))
    trainer.close()
    engine.close()
    return {**facts, "lora_errors": errors}


def _adapter(folder: Path, model: Any, base: dict[str, torch.Tensor], version: int) -> str:
    """Write a random adapter on q, k, v, o, and merge it into the Hugging Face model."""
    torch.manual_seed(version)
    tensors, parameters = {}, canonical(model)
    for name, weight in base.items():
        if any(f"{part}_proj" in name for part in "qkvo") and "self_attn" in name:
            a, b = torch.randn(4, weight.shape[1]) * 0.2, torch.randn(weight.shape[0], 4) * 0.2
            tensors[name.removesuffix(".weight")] = (a, b)
            parameters[name].data.copy_(weight + 8 / 4 * b @ a)
    return write_adapter(folder, tensors, rank=4, alpha=8)


def pair(folder: Path, ray_address: str, rank: int) -> dict[str, Any]:
    """One rank of an engine of TP 2. Qwen2, tied: biases, and no lm_head of its own."""
    import ray

    ray.init(address=ray_address, logging_level="error")
    join(folder, rank, 2)
    if rank == 0:
        make_model(folder, "qwen2", tied=True, seed=2)
    dist.barrier()
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = make_engine(folder, rank, 2)
    facts = {"matrix": matrix(engine, folder, model, str(folder))} | _internals(engine)
    trainer = Trainer(engine, "shared_memory", [whole_map(canonical(model))], str(folder))
    trainer.send(canonical(model), 30)
    batch = prompts(16)
    result, _ = engine.generate(batch, version=30)
    facts |= {"responses": rows_of(result), "error": hf_error(model, batch, result)}
    trainer.close()
    engine.close()
    facts["group_after_close"] = int(_sum_of_ones())
    return facts


def run(pipe: Any, function: Any, *args: Any) -> None:
    """In the child: send (facts, None) or (None, traceback)."""
    try:
        pipe.send((function(*args), None))
    except BaseException:  # noqa: BLE001 (goes to the parent)
        pipe.send((None, traceback.format_exc()))
    os._exit(0)  # vLLM's and Ray's exit handlers have nothing to add, and take seconds
