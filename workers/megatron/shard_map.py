"""Which part of which Hugging Face tensor each Megatron parameter of a rank holds (see workers/resharding/boxes.py).

Megatron's own layouts: q, k and v are fused and interleaved by KV group; gate and up are fused; the vocabulary is
padded to a multiple of TP; a pipeline stage counts its layers from 0; a tied output layer on the last stage is a second
copy of the embedding. The value head's tensors are called ``value_head.weight`` and ``value_head.bias``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from workers.megatron.hf_config import Architecture
from workers.resharding.boxes import Box, Piece, ShardMap

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_REPLICATED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
_LORA_HOME = {"self_attention": "self_attn", "mlp": "mlp"}


@dataclass(frozen=True)
class _Mapper:
    """One rank's view: TP size and rank, and the model's number of its first layer."""

    architecture: Architecture
    tp: int
    rank: int
    first_layer: int

    def pieces(self, name: str) -> Iterator[Piece]:
        a = self.architecture
        if name == "embedding.word_embeddings.weight":
            yield from self._vocabulary(name, EMBEDDING)
        elif name == "output_layer.weight":
            yield from self._vocabulary(name, EMBEDDING if a.tied else OUTPUT)
        elif name == "decoder.final_layernorm.weight":
            yield _piece(name, "model.norm.weight", (0,), (a.hidden,))
        elif name.startswith("decoder.layers."):
            _, _, layer, rest = name.split(".", 3)
            yield from self._layer(name, f"model.layers.{int(layer) + self.first_layer}.", rest)
        else:
            raise KeyError(f"no Hugging Face name is known for parameter {name!r}")

    def _vocabulary(self, name: str, tensor: str) -> Iterator[Piece]:
        rows = -(-self.architecture.vocabulary // self.tp)
        start = self.rank * rows
        stop = min(start + rows, self.architecture.vocabulary)
        if stop > start:  # the last ranks of a tiny vocabulary hold padding only
            yield _piece(name, tensor, (start, 0), (stop, self.architecture.hidden))

    def _layer(self, name: str, prefix: str, rest: str) -> Iterator[Piece]:
        a = self.architecture
        if rest in _REPLICATED:
            size = a.head_size if "self_attention" in rest else a.hidden
            yield _piece(name, prefix + _REPLICATED[rest], (0,), (size,))
        elif rest.startswith("self_attention.linear_qkv."):
            yield from self._qkv(name, prefix, rest.rsplit(".", 1)[1])
        elif rest == "self_attention.linear_proj.weight":
            yield self._columns(name, prefix + "self_attn.o_proj.weight", a.heads * a.head_size)
        elif rest == "mlp.linear_fc2.weight":
            yield self._columns(name, prefix + "mlp.down_proj.weight", a.ffn)
        elif rest == "mlp.linear_fc1.weight":
            rows = a.ffn // self.tp
            for i, part in enumerate(("gate_proj", "up_proj")):
                box = ((self.rank * rows, 0), ((self.rank + 1) * rows, a.hidden))
                yield _piece(name, f"{prefix}mlp.{part}.weight", *box, offset=(i * rows, 0))
        else:
            raise KeyError(f"no Hugging Face name is known for parameter {name!r}")

    def _qkv(self, name: str, prefix: str, kind: str) -> Iterator[Piece]:
        """Local rows, for each KV group: its queries, its key, its value."""
        a = self.architecture
        groups, queries, d = a.kv_heads // self.tp, a.heads // a.kv_heads * a.head_size, a.head_size
        columns = (a.hidden,) if kind == "weight" else ()
        zero = (0,) * len(columns)
        for local in range(groups):
            group, row = self.rank * groups + local, local * (queries + 2 * d)
            for part, rows, offset in (("q", queries, row), ("k", d, row + queries), ("v", d, row + queries + d)):
                start, stop = (group * rows, *zero), ((group + 1) * rows, *columns)
                yield _piece(name, f"{prefix}self_attn.{part}_proj.{kind}", start, stop, offset=(offset, *zero))

    def _columns(self, name: str, tensor: str, inputs: int) -> Piece:
        width = inputs // self.tp
        return _piece(name, tensor, (0, self.rank * width), (self.architecture.hidden, (self.rank + 1) * width))


def _piece(parameter: str, tensor: str, start, stop, offset=None) -> Piece:
    return Piece(Box(tensor, start, stop), parameter, offset or (0,) * len(start))


def weight_map(
    architecture: Architecture, names: Iterable[str], *, tp: int = 1, tp_rank: int = 0, first_layer: int = 0
) -> ShardMap:
    """Pieces of the trunk's and the policy head's parameters.

    Args:
        names: the rank's parameter names (those of its pipeline stage).
        first_layer: the model's number of the stage's layer 0.
    """
    mapper = _Mapper(architecture, tp, tp_rank, first_layer)
    return [piece for name in names for piece in mapper.pieces(name)]


def value_head_map(architecture: Architecture) -> ShardMap:
    """Pieces of the value head, which every TP rank of the last stage holds whole."""
    return [
        _piece("output_layer.weight", "value_head.weight", (0, 0), (1, architecture.hidden)),
        _piece("output_layer.bias", "value_head.bias", (0,), (1,)),
    ]


def adapter_map(
    shapes: dict[str, tuple[int, ...]], cuts: dict[str, int], *, tp_rank: int = 0, first_layer: int = 0
) -> ShardMap:
    """Pieces of LoRA parameters; their tensors are called ``<Hugging Face module>.lora_A`` and ``.lora_B``.

    Args:
        shapes: local shape of each adapter parameter.
        cuts: the axis that TP cuts, of those that are not replicated.
    """
    pieces = []
    for name, shape in shapes.items():
        _, _, layer, home, _, kind, module = name.split(".")
        tensor = f"model.layers.{int(layer) + first_layer}.{_LORA_HOME[home]}.{module}.{kind}"
        start = tuple(tp_rank * size if axis == cuts.get(name) else 0 for axis, size in enumerate(shape))
        pieces.append(_piece(name, tensor, start, tuple(s + size for s, size in zip(start, shape, strict=True))))
    return pieces
