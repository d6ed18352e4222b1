"""The shard map of a vLLM rank, from names and shapes alone (the contract test compares it with live engines)."""

from __future__ import annotations

import numpy as np
import pytest

from hybridflow.errors import ConfigError
from workers.resharding.boxes import Box
from workers.vllm.shard_map import vllm_shard_map

CONFIG = {
    "hidden_size": 8,
    "vocab_size": 70,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 12,
}


def shapes(tp: int, config=CONFIG) -> dict[str, tuple[int, ...]]:
    """Shapes as vLLM makes them."""
    queries = config["num_attention_heads"] // tp * config["head_dim"]
    keys = max(1, config["num_key_value_heads"] // tp) * config["head_dim"]
    layer = "model.layers.0"
    return {
        "model.embed_tokens.weight": (128 // tp, 8),
        f"{layer}.self_attn.qkv_proj.base_layer.weight": (queries + 2 * keys, 8),
        f"{layer}.self_attn.qkv_proj.bias": (queries + 2 * keys,),
        f"{layer}.self_attn.o_proj.weight": (8, queries),
        f"{layer}.self_attn.q_norm.weight": (2,),
        f"{layer}.mlp.gate_up_proj.weight": (24 // tp, 8),
        f"{layer}.mlp.down_proj.weight": (8, 12 // tp),
        f"{layer}.input_layernorm.weight": (8,),
        "model.norm.weight": (8,),
        "lm_head.weight": (128 // tp, 8),
    }


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_all_ranks_together_hold_each_tensor_whole(tp):
    held: dict[str, set] = {}
    for rank in range(tp):
        for piece in vllm_shard_map(shapes(tp), CONFIG, rank, tp):
            rows = range(piece.box.start[0], piece.box.stop[0])
            columns = range(piece.box.start[-1], piece.box.stop[-1]) if len(piece.box.start) == 2 else (0,)
            held.setdefault(piece.box.tensor, set()).update((row, column) for row in rows for column in columns)
    sizes = {name: len(elements) for name, elements in held.items()}
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    assert sizes == {
        "model.embed_tokens.weight": 70 * 8,
        "lm_head.weight": 70 * 8,
        f"{attention}.q_proj.weight": 64,
        f"{attention}.k_proj.weight": 32,
        f"{attention}.v_proj.weight": 32,
        f"{attention}.q_proj.bias": 8,
        f"{attention}.k_proj.bias": 4,
        f"{attention}.v_proj.bias": 4,
        f"{attention}.o_proj.weight": 64,
        f"{attention}.q_norm.weight": 2,
        f"{mlp}.gate_proj.weight": 96,
        f"{mlp}.up_proj.weight": 96,
        f"{mlp}.down_proj.weight": 96,
        "model.layers.0.input_layernorm.weight": 8,
        "model.norm.weight": 8,
    }


def test_kv_heads_are_repeated_where_tp_exceeds_their_number():
    keys = []
    for rank in range(4):
        pieces = vllm_shard_map(shapes(4), CONFIG, rank, 4)
        keys.append(next(p.box for p in pieces if p.box.tensor.endswith("k_proj.weight")))
    name = "model.layers.0.self_attn.k_proj.weight"
    assert keys == [Box(name, (0, 0), (2, 8))] * 2 + [Box(name, (2, 0), (4, 8))] * 2


def test_padding_of_the_vocabulary_belongs_to_no_piece():
    last = [p for p in vllm_shard_map(shapes(2), CONFIG, 1, 2) if p.box.tensor == "lm_head.weight"]
    assert [p.box for p in last] == [Box("lm_head.weight", (64, 0), (70, 8))]
    beyond = vllm_shard_map({"lm_head.weight": (32, 8)}, CONFIG, 3, 4)
    assert beyond == []


def test_fused_parameters_are_filled_without_gaps():
    pieces = [p for p in vllm_shard_map(shapes(2), CONFIG, 1, 2) if "qkv_proj.base_layer" in p.parameter]
    filled = np.zeros(8, dtype=int)
    for piece in pieces:
        filled[piece.slices[0]] += 1
    assert filled.tolist() == [1] * 8
    assert [p.box.start[0] for p in pieces] == [4, 2, 2]


def test_unknown_parameters_and_other_shapes_are_refused():
    with pytest.raises(ConfigError, match=r"experts\.w13_weight"):
        vllm_shard_map({"model.layers.0.mlp.experts.w13_weight": (2, 4, 4)}, CONFIG, 0, 1)
    with pytest.raises(ConfigError, match=r"holds 64 numbers, its config says 128"):
        vllm_shard_map({"model.layers.0.self_attn.qkv_proj.weight": (8, 8)}, CONFIG, 0, 1)
