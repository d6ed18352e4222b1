"""The model: Megatron-Core's GPT from local layer specs, with packed attention and a head that scores response tokens.

The head looks only at the tokens that predict a response token: neither prompt logits nor padding are ever computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, mappings
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from hybridflow.errors import ConfigError
from placement.layout import Layout
from workers.megatron import lora
from workers.megatron.attention import Packed, PackedAttention, Rotary
from workers.megatron.hf_config import Architecture
from workers.megatron.packing import MicroBatch

Head = Literal["policy", "value"]


@dataclass
class GPTConfig(TransformerConfig):
    """Megatron-Core's config, and what our modules need beside it."""

    use_flash_attn: bool = True
    lora: lora.Lora | None = None


class RMSNorm(torch.nn.RMSNorm):
    """PyTorch's, with the mark by which Megatron-Core sums its gradient over TP under sequence parallelism."""

    def __init__(self, config: GPTConfig, hidden_size: int, eps: float = 1e-6, **_):
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel


class ValueHead(torch.nn.Module):
    """One output per token, in fp32, replicated over TP. Starts at zero: every value is 0 before training."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device))
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.float(), self.weight.float(), self.bias.float())


class PackedGPT(GPTModel):
    """GPT over a packed micro-batch.

    On the last pipeline stage it gives the logits (R, V / TP) of the policy head, or the values (R,) of the value head,
    one row per response token; on others the hidden states for the next stage.
    """

    def __init__(self, config: GPTConfig, architecture: Architecture, head: Head, tp: int):
        spec = _layer_spec(config)
        block = TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=RMSNorm)
        super().__init__(
            config,
            block,
            vocab_size=-(-architecture.vocabulary // tp) * tp,
            max_sequence_length=architecture.positions,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=architecture.tied and head == "policy",
            position_embedding_type="none",  # PackedAttention rotates, once per micro-batch and not per sequence
        )
        self.head = head
        if head == "value" and self.post_process:
            self.output_layer = ValueHead(config)
        device = torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda")
        self.rotary = Rotary(architecture.rope, architecture.head_size, device)

    def forward(self, micro: MicroBatch) -> Tensor:
        packed = micro.packed
        packed.cos_sin = self.rotary(packed.positions, self.config.params_dtype)
        return super().forward(micro.tokens, None, None, packed_seq_params=packed)

    def _postprocess(self, hidden_states: Tensor, packed_seq_params: Packed, **_) -> Tensor:
        if not self.post_process:
            return hidden_states
        hidden, predictors = hidden_states[:, 0], packed_seq_params.predictors
        sequence_parallel, group = self.config.sequence_parallel, self.pg_collection.tp
        if self.head == "value":
            values = self.output_layer(hidden)
            if sequence_parallel:  # each rank goes on with the same whole: nothing to sum in the backward pass
                values = mappings.gather_from_sequence_parallel_region(values, False, group)
            return values[:, 0].index_select(0, predictors)
        if sequence_parallel:
            hidden = mappings.gather_from_sequence_parallel_region(hidden, group=group)
        else:
            hidden = mappings.copy_to_tensor_model_parallel_region(hidden, group=group)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return F.linear(hidden.index_select(0, predictors), weight)


def check_layout(architecture: Architecture, layout: Layout) -> None:
    """Refuse a layout that does not divide the model, or that is not built.

    Raises:
        ConfigError: names the key and the sizes that fit.
    """
    if layout.cp > 1:
        raise ConfigError(f"context parallelism (CP {layout.cp}) is not built", hint="use TP, PP and DP")
    for size, counts in (
        (layout.tp, {"attention heads": architecture.heads, "KV heads": architecture.kv_heads}),
        (layout.tp, {"MLP columns": architecture.ffn}),
        (layout.pp, {"layers": architecture.layers}),
    ):
        for name, count in counts.items():
            if count % size:
                key = "pipeline" if name == "layers" else "tensor"
                fitting = [n for n in range(1, count + 1) if count % n == 0]
                raise ConfigError(
                    f"{key}_model_parallel_size {size} does not divide the model's {count} {name}",
                    hint=f"use one of {', '.join(map(str, fitting[:12]))}",
                    where=f"mcore_config.{key}_model_parallel_size",
                )


def build(
    architecture: Architecture,
    layout: Layout,
    *,
    head: Head,
    dtype: torch.dtype,
    device: torch.device,
    sequence_parallel: bool = False,
    recompute: bool = False,
    use_flash_attn: bool = True,
    adapters: lora.Lora | None = None,
) -> PackedGPT:
    """This rank's part of the model, with weights not yet set. Needs an initialised context."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = GPTConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        ffn_hidden_size=architecture.ffn,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.kv_heads,
        kv_channels=architecture.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        sequence_parallel=sequence_parallel and layout.tp > 1,
        variable_seq_lengths=layout.pp > 1,  # packed micro-batches differ in length
        moe_token_dispatcher_type="alltoall",  # variable lengths insist on it, experts or not
        calculate_per_token_loss=True,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,  # weights are loaded
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        use_flash_attn=use_flash_attn,
        lora=adapters,
        **(full if recompute else {}),
    )
    model = PackedGPT(config, architecture, head, layout.tp)
    _mark_tensor_parallel(model)
    if adapters:
        _train_adapters_only(model)
    return model


def _layer_spec(config: GPTConfig):
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer, attention, mlp = spec.submodules, spec.submodules.self_attention.submodules, spec.submodules.mlp.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = PackedAttention
    if config.lora:
        attention.linear_qkv, attention.linear_proj = lora.LoraQKV, lora.LoraO
        mlp.linear_fc1, mlp.linear_fc2 = lora.LoraGateUp, lora.LoraDown
    return spec


def _mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Megatron-Core marks sharded weights only while it initialises them, which we skip: without the mark the gradient
    norm would count one TP rank's share only."""
    for module in model.modules():
        parallel = isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding)
        if parallel and module.weight is not None:  # a tied output layer has none of its own
            axis = 1 if isinstance(module, RowParallelLinear) else 0
            set_tensor_model_parallel_attributes(module.weight, True, axis, 1)


def _train_adapters_only(model: PackedGPT) -> None:
    for name, parameter in model.named_parameters():
        own_head = model.head == "value" and name.startswith("output_layer.")
        parameter.requires_grad_(lora.is_adapter(name) or own_head)
    if model.pre_process and model.config.recompute_granularity:
        # Recomputation differentiates only through inputs that want a gradient; frozen embeddings give none.
        model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))
