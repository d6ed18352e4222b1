"""What the parameters of a vLLM rank hold, for dense Llama, Mistral, Qwen2 and Qwen3: pure, needs no vLLM.

vLLM fuses q, k, v into ``qkv_proj`` and gate, up into ``gate_up_proj``; cuts columns of ``o_proj`` and ``down_proj``;
pads the vocabulary; repeats KV heads where TP exceeds their number; drops a tied ``lm_head``; and with LoRA inserts
``base_layer`` into the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.errors import ConfigError
from workers.resharding.boxes import Box, Piece, ShardMap

_REPLICATED = ("input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm")


def vllm_shard_map(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], tp_rank: int, tp_size: int
) -> ShardMap:
    """The shard map of one rank.

    Args:
        shapes: shape of each live parameter, by vLLM's name.
        config: the model's config.json.

    Errors:
        ConfigError: a parameter that none of the supported architectures has, or one of an unexpected shape.
    """
    rules = _Rules(config, tp_rank, tp_size)
    return [piece for name, shape in shapes.items() for piece in rules.pieces(name, shape)]


class _Rules:
    def __init__(self, config: Mapping[str, Any], tp_rank: int, tp_size: int):
        self.rank, self.tp = tp_rank, tp_size
        self.hidden, self.vocab = config["hidden_size"], config["vocab_size"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads") or self.heads
        self.head_size = config.get("head_dim") or self.hidden // self.heads
        self.ffn = config["intermediate_size"]

    def pieces(self, name: str, shape: tuple[int, ...]) -> list[Piece]:
        module, _, kind = name.replace(".base_layer.", ".").rpartition(".")
        parent, _, layer = module.rpartition(".")
        tail = shape[1:]
        if layer == "qkv_proj":
            parts = [("q_proj", *self._q_rows()), ("k_proj", *self._kv_rows()), ("v_proj", *self._kv_rows())]
            pieces = _stacked(name, parent, parts, kind, tail)
        elif layer == "gate_up_proj":
            size = self.ffn // self.tp
            rows = (self.rank * size, (self.rank + 1) * size)
            pieces = _stacked(name, parent, [("gate_proj", *rows), ("up_proj", *rows)], kind, tail)
        elif layer in ("embed_tokens", "lm_head"):
            start = self.rank * shape[0]
            stop = min(start + shape[0], self.vocab)
            return [Piece(Box(f"{module}.{kind}", (start, 0), (stop, self.hidden)), name, (0, 0))] * (stop > start)
        elif layer in ("o_proj", "down_proj") and kind == "weight":
            columns = (self.heads * self.head_size if layer == "o_proj" else self.ffn) // self.tp
            box = Box(f"{module}.weight", (0, self.rank * columns), (self.hidden, (self.rank + 1) * columns))
            pieces = [Piece(box, name, (0, 0))]
        elif layer in _REPLICATED or layer in ("o_proj", "down_proj"):
            pieces = [Piece(Box(f"{module}.{kind}", (0,) * len(shape), shape), name, (0,) * len(shape))]
        else:
            raise ConfigError(
                f"the engine has a parameter {name!r} of shape {shape} that has no place in the shard map",
                hint="supported are dense Llama, Mistral, Qwen2 and Qwen3",
            )
        self._check(name, shape, pieces)
        return pieces

    def _q_rows(self) -> tuple[int, int]:
        rows = self.heads // self.tp * self.head_size
        return self.rank * rows, (self.rank + 1) * rows

    def _kv_rows(self) -> tuple[int, int]:
        heads = max(1, self.kv_heads // self.tp)
        first = self.rank * heads if self.kv_heads >= self.tp else self.rank // (self.tp // self.kv_heads)
        return first * self.head_size, (first + heads) * self.head_size

    def _check(self, name: str, shape: tuple[int, ...], pieces: list[Piece]) -> None:
        named = sum(piece.box.numel for piece in pieces)
        size = 1
        for extent in shape:
            size *= extent
        if named != size:
            raise ConfigError(
                f"{name!r} of shape {shape} holds {size} numbers, its config says {named}",
                hint="the model folder's config.json and the engine disagree",
            )


def _stacked(
    name: str, parent: str, parts: list[tuple[str, int, int]], kind: str, tail: tuple[int, ...]
) -> list[Piece]:
    """Pieces of a parameter whose rows are those of several tensors, one after the other."""
    pieces, row = [], 0
    for layer, start, stop in parts:
        box = Box(f"{parent}.{layer}.{kind}", (start, *(0 for _ in tail)), (stop, *tail))
        pieces.append(Piece(box, name, (row, *(0 for _ in tail))))
        row += stop - start
    return pieces
