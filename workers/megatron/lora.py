"""LoRA (Hu et al. 2021, arXiv 2106.09685) on Megatron-Core's parallel linear layers: y = W x + (alpha / rank) B A x.

Megatron fuses q/k/v and gate/up into one matrix each; the adapters stay apart, one per Hugging Face module, so that any
subset can be trained and what is exported is an ordinary PEFT adapter. Under TP the large side of each pair is cut like
the layer it belongs to, and the small side is replicated:

    fused columns (q/k/v, gate/up): A (rank, in) replicated, B (out / TP, rank)
    rows (o, down):                 A (rank, in / TP),       B (out, rank) replicated

Parameters are called ``<layer>.lora_A.<module>`` and ``<layer>.lora_B.<module>``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, mappings
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import Parameter, ParameterDict

from hybridflow.errors import ConfigError
from hybridflow.seeds import derive_seed

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
MODULES = (*QKV, "o_proj", *GATE_UP, "down_proj")


@dataclass(frozen=True)
class Lora:
    """What adapters a model gets. ``targets`` are names out of ``MODULES``."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def __post_init__(self):
        unknown = [name for name in self.targets if name not in MODULES]
        if unknown or not self.targets:
            raise ConfigError(
                f"LoRA cannot target {', '.join(map(repr, unknown)) or 'nothing'}",
                hint=f"the model's linear modules are: {', '.join(MODULES)}",
                where="model.target_modules",
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class _LoraLinear:
    """What both kinds share. ``enabled`` is flipped by ``disabled`` below."""

    lora: Lora
    enabled = True
    fused: tuple[str, ...]
    # Axis over which TP cuts each kind of parameter (for checkpoints and for the gradient norm).
    axes: dict[str, int]

    def _adapt(self, config, sizes: dict[str, tuple[int, int]]) -> None:
        """Add adapters of the given (in, out) local sizes for the targeted modules."""
        self.lora, self.sizes = config.lora, sizes
        device = self.weight.device
        self.targets = [name for name in self.fused if name in self.lora.targets]
        self.lora_A, self.lora_B = ParameterDict(), ParameterDict()
        for name in self.targets:
            inputs, outputs = sizes[name]
            pair = {
                "lora_A": torch.zeros(self.lora.rank, inputs, dtype=config.params_dtype, device=device),
                "lora_B": torch.zeros(outputs, self.lora.rank, dtype=config.params_dtype, device=device),
            }
            for kind, value in pair.items():
                parameter = Parameter(value)
                if kind in self.axes:
                    set_tensor_model_parallel_attributes(parameter, True, self.axes[kind], 1)
                else:  # replicated; under sequence parallelism each rank sees the gradient of its tokens only
                    parameter.sequence_parallel = config.sequence_parallel
                getattr(self, kind)[name] = parameter

    def forward(self, input_, *args, **kwargs):
        output, bias = super().forward(input_, *args, **kwargs)
        if self.targets and self.enabled:
            output = output + self._delta(input_)
        return output, bias

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        axes = {f"{kind}.{name}": axis for kind, axis in self.axes.items() for name in self.targets}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {**self.base_axes, **axes},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )

    def _fuse(self, parts: list[Tensor], axis: int) -> Tensor:
        """Put the outputs of the fused modules together as the layer holds them: by group, along ``axis``."""
        apart = [part.unflatten(axis, (self.groups, -1)) for part in parts]
        return torch.cat(apart, dim=axis + 1).flatten(axis, axis + 1)


class _LoraColumn(_LoraLinear, ColumnParallelLinear):
    axes, base_axes = {"lora_B": 0}, {"weight": 0, "bias": 0}

    def _delta(self, x: Tensor) -> Tensor:
        h = F.linear(x, torch.cat([self.lora_A[name] for name in self.targets]))
        if self.sequence_parallel:
            h = mappings.gather_from_sequence_parallel_region(h, group=self.tp_group)
        else:
            h = mappings.copy_to_tensor_model_parallel_region(h, group=self.tp_group)
        low = dict(zip(self.targets, h.split(self.lora.rank, dim=-1), strict=True))
        parts = [
            F.linear(low[name], self.lora_B[name]) if name in low else h.new_zeros(*h.shape[:-1], self.sizes[name][1])
            for name in self.fused
        ]
        return self.lora.scale * self._fuse(parts, h.dim() - 1)

    def delta_weight(self) -> Tensor:
        """(alpha / rank) B A of all fused modules, as this rank holds the weight, in fp32."""
        parts = [
            self.lora_B[name].float() @ self.lora_A[name].float()
            if name in self.targets
            else torch.zeros(self.sizes[name][1], self.input_size, device=self.weight.device)
            for name in self.fused
        ]
        return self.lora.scale * self._fuse(parts, 0)


class LoraQKV(_LoraColumn):
    """``linear_qkv``: per KV group the queries, then key and value."""

    fused = QKV

    def __init__(self, input_size, output_size, *, config, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        tp = self.tp_group.size()
        self.groups = config.num_query_groups // tp
        queries, keys = config.num_attention_heads * config.kv_channels // tp, self.groups * config.kv_channels
        self._adapt(config, {name: (input_size, queries if name == "q_proj" else keys) for name in QKV})


class LoraGateUp(_LoraColumn):
    """``linear_fc1``: gate, then up."""

    fused, groups = GATE_UP, 1

    def __init__(self, input_size, output_size, *, config, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self._adapt(config, dict.fromkeys(GATE_UP, (input_size, self.output_size_per_partition // 2)))


class _LoraRow(_LoraLinear, RowParallelLinear):
    axes, base_axes = {"lora_A": 1}, {"weight": 1}

    def __init__(self, input_size, output_size, *, config, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self._adapt(config, {self.fused[0]: (self.input_size_per_partition, output_size)})

    def _delta(self, x: Tensor) -> Tensor:
        (name,) = self.targets
        h = F.linear(x, self.lora_A[name])
        if self.sequence_parallel:
            h = mappings.reduce_scatter_to_sequence_parallel_region(h, group=self.tp_group)
        else:
            h = mappings.reduce_from_tensor_model_parallel_region(h, group=self.tp_group)
        return self.lora.scale * F.linear(h, self.lora_B[name])

    def delta_weight(self) -> Tensor:
        """(alpha / rank) B A as this rank holds the weight, in fp32."""
        (name,) = self.targets
        return self.lora.scale * (self.lora_B[name].float() @ self.lora_A[name].float())


class LoraO(_LoraRow):
    """``linear_proj`` of the attention."""

    fused = ("o_proj",)


class LoraDown(_LoraRow):
    """``linear_fc2`` of the MLP."""

    fused = ("down_proj",)


def _adapted(model: torch.nn.Module) -> Iterator[tuple[str, _LoraLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, _LoraLinear) and module.targets:
            yield name, module


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def initialize(model: torch.nn.Module, first_layer: int, seed: int) -> None:
    """A as PEFT draws it (uniform, 1 / sqrt(in)), B zero. The same whole A on every layout and rank."""
    tp, rank = 1, 0
    for name, module in _adapted(model):
        tp, rank = module.tp_group.size(), module.tp_group.rank()
        layer = int(name.split(".")[2]) + first_layer
        for target in module.targets:
            local = module.lora_A[target]
            cut = 1 if isinstance(module, RowParallelLinear) else 0
            inputs = local.shape[1] * (tp if cut else 1)
            generator = torch.Generator().manual_seed(derive_seed(seed, "lora", layer, target))
            whole = torch.rand(local.shape[0], inputs, generator=generator).mul_(2).sub_(1).div_(inputs**0.5)
            local.data.copy_(whole.chunk(tp, 1)[rank] if cut else whole)
            module.lora_B[target].data.zero_()


@contextmanager
def disabled(model: torch.nn.Module) -> Iterator[None]:
    """The base model, for as long as the context lasts: what the reference policy computes."""
    modules = [module for _, module in _adapted(model)]
    for module in modules:
        module.enabled = False
    try:
        yield
    finally:
        for module in modules:
            module.enabled = True


@torch.no_grad()
def merged_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Weights of the adapted layers with their adapters added: summed in fp32, rounded once to the layer's type."""
    return {
        f"{name}.weight": (module.weight.float() + module.delta_weight()).to(module.weight.dtype)
        for name, module in _adapted(model)
    }
