"""Rotary embedding and causal attention over packed sequences (THD): no token attends outside its own sequence.

Three kernels, chosen by device: flash-attn's varlen where it is installed, torch's varlen otherwise on CUDA, and on
CPU one SDPA over sequences padded to the longest (1.7 times the speed of a loop over sequences).
"""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from workers.megatron.hf_config import Rope

if torch.cuda.is_available():
    from torch.nn.attention.varlen import varlen_attn

    _VARLEN_ARGUMENTS = inspect.signature(varlen_attn).parameters  # they changed from torch 2.11 to 2.13

    flash_varlen = None
    if importlib.util.find_spec("flash_attn"):
        from flash_attn import flash_attn_varlen_func as flash_varlen


@dataclass
class Packed(PackedSeqParams):
    """Megatron-Core's description of a packed micro-batch, and what this engine adds to it.

    T is the number of packed tokens, S of sequences, R of scored (response) tokens.
    """

    positions: Tensor | None = None
    """(T,) position of each token in its sequence."""
    predictors: Tensor | None = None
    """(R,) packed index of the token whose output predicts each response token."""
    dense_index: Tensor | None = None
    """(T,) place of each token in the (S, longest) padded layout, flattened."""
    cos_sin: tuple[Tensor, Tensor] | None = None
    """(T, 1, head_size) each; set by the model at the start of a forward pass."""

    @property
    def sequences(self) -> int:
        return len(self.cu_seqlens_q) - 1


class Rotary:
    """Cosines and sines of the rotary embedding, as transformers computes them (modeling_rope_utils.py)."""

    def __init__(self, rope: Rope, head_size: int, device: torch.device):
        exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
        frequencies = 1.0 / (rope.base**exponents)
        if rope.kind == "linear":
            frequencies = frequencies / rope.factor
        elif rope.kind == "llama3":
            frequencies = _llama3(frequencies, rope)
        self.frequencies = frequencies.to(device)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions.float()[:, None] * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _llama3(frequencies: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between interpolated."""
    waves = 2 * torch.pi / frequencies
    low = rope.original_positions / rope.low_freq_factor
    high = rope.original_positions / rope.high_freq_factor
    smooth = (rope.original_positions / waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(waves > low, frequencies / rope.factor, frequencies)
    return torch.where((waves <= low) & (waves >= high), between, scaled)


def _rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = cos_sin
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class PackedAttention(MegatronModule):
    """``core_attention`` of a Megatron-Core layer. Takes (T, heads, head_size), gives (T, heads * head_size)."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_):
        super().__init__(config)
        self.scale = softmax_scale or config.kv_channels**-0.5
        on_cuda = torch.cuda.is_available() and config.params_dtype != torch.float32  # the kernels know no fp32
        self.kernel = (_flash if config.use_flash_attn and flash_varlen else _varlen) if on_cuda else _dense

    def forward(self, query, key, value, attention_mask, packed_seq_params: Packed | None = None, **_):
        assert packed_seq_params is not None and packed_seq_params.cos_sin is not None
        query = _rotate(query, packed_seq_params.cos_sin)
        key = _rotate(key, packed_seq_params.cos_sin)
        return self.kernel(query, key, value, packed_seq_params, self.scale).flatten(1)


def _dense(query: Tensor, key: Tensor, value: Tensor, packed: Packed, scale: float) -> Tensor:
    sequences, longest = packed.sequences, packed.max_seqlen_q
    groups = query.shape[1] // key.shape[1]

    def pad(x: Tensor) -> Tensor:
        dense = x.new_zeros(sequences * longest, *x.shape[1:]).index_copy(0, packed.dense_index, x)
        return dense.view(sequences, longest, *x.shape[1:]).transpose(1, 2)

    query, key, value = pad(query), pad(key), pad(value)
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, packed.dense_index)


def _varlen(query: Tensor, key: Tensor, value: Tensor, packed: Packed, scale: float) -> Tensor:
    cu, longest = packed.cu_seqlens_q, packed.max_seqlen_q
    options = {"window_size": (-1, 0)} if "window_size" in _VARLEN_ARGUMENTS else {"is_causal": True}
    groups = query.shape[1] // key.shape[1]
    if "enable_gqa" in _VARLEN_ARGUMENTS:
        options["enable_gqa"] = groups > 1
    elif groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return varlen_attn(query, key, value, cu, cu, longest, longest, scale=scale, **options)


def _flash(query: Tensor, key: Tensor, value: Tensor, packed: Packed, scale: float) -> Tensor:
    cu, longest = packed.cu_seqlens_q, packed.max_seqlen_q
    return flash_varlen(query, key, value, cu, cu, longest, longest, softmax_scale=scale, causal=True)
