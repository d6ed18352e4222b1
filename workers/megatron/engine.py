"""One rank of a Megatron-Core model: scores batches, trains on them, and moves its weights in and out."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.config.schema import McoreConfig, ModelConfig, OptimConfig
from hybridflow.errors import ConfigError
from hybridflow.telemetry.metrics import Metric
from hybridflow.worker import WorkerContext
from workers.megatron import checkpoint, lora, shard_map, weights
from workers.megatron.context import initialize
from workers.megatron.hf_config import read_architecture
from workers.megatron.model import Head, build, check_layout
from workers.megatron.packing import Packer
from workers.megatron.passes import Loss, Passes
from workers.resharding.boxes import ShardMap


class MegatronEngine:
    """See the module's docstring. All ranks of the pool make it, and call its methods, together.

    Args:
        context: the rank's coordinates, layout and device; ``torch.distributed`` must be initialised.
        head: "policy" (log-probs) or "value".
        model: path of the Hugging Face folder whose weights are loaded, dtype, LoRA, recomputation.
        mcore: sequence parallelism (TP and PP come from the context's layout).
        optim: of the trainable weights; None freezes the engine.
        temperature: log-probs are log_softmax(logits / temperature).
        seed: of the run.

    Raises:
        ConfigError: a model that is missing, half there or not supported; a layout that does not divide it.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        head: Head,
        model: ModelConfig,
        mcore: McoreConfig,
        optim: OptimConfig | None,
        temperature: float = 1.0,
        seed: int = 0,
    ):
        if model.path is None:
            raise ConfigError("no model folder is given", hint="set model.path", where="model.path")
        self.layout, self.coord = context.layout, context.coord
        self.head = head
        self.architecture = read_architecture(model.path)
        check_layout(self.architecture, self.layout)
        self.device = initialize(self.layout, seed, context.device)
        trains_adapters = model.lora_rank > 0 and optim is not None
        self.lora = lora.Lora(model.lora_rank, model.lora_alpha, model.target_modules) if trains_adapters else None
        self.model = build(
            self.architecture,
            self.layout,
            head=head,
            dtype=getattr(torch, model.dtype),
            device=self.device,
            sequence_parallel=mcore.sequence_parallel,
            recompute=model.enable_gradient_checkpointing and optim is not None,
            use_flash_attn=model.use_flash_attn,
            adapters=self.lora,
        )
        self._first_layer = self.coord.pp * (self.architecture.layers // self.layout.pp)
        self.passes = Passes(self.model, self.architecture.vocabulary, temperature, optim, self.device, context.role)
        self.load(model.path)
        if self.lora:
            lora.initialize(self.model, self._first_layer, seed)
            self.passes.weights_changed()

    # -- weights -------------------------------------------------------------------------------------------------------
    def parameters(self) -> dict[str, Tensor]:
        """The live local weights in the model's dtype, by Megatron name; with LoRA the base (see ``merged``)."""
        return {
            name: parameter.data
            for name, parameter in self.model.named_parameters()
            if not lora.is_adapter(name) and not self._is_value_head(name)
        }

    def merged(self) -> dict[str, Tensor]:
        """``parameters()`` with LoRA's adapters added to their layers (summed in fp32, rounded once)."""
        return self.parameters() | (lora.merged_weights(self.model) if self.lora else {})

    def shard_map(self) -> ShardMap:
        """What ``parameters()`` and ``merged()`` of this rank hold, in Hugging Face tensors."""
        return shard_map.weight_map(
            self.architecture,
            self.parameters(),
            tp=self.layout.tp,
            tp_rank=self.coord.tp,
            first_layer=self._first_layer,
        )

    def adapters(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The whole LoRA matrices (A, B) by Hugging Face module name, on rank 0 (elsewhere empty). Collective."""
        found = {name: p for name, p in self.model.named_parameters() if lora.is_adapter(name)}
        cuts = {name: p.partition_dim for name, p in found.items() if getattr(p, "tensor_model_parallel", False)}
        shapes = {name: tuple(p.shape) for name, p in found.items()}
        pieces = shard_map.adapter_map(shapes, cuts, tp_rank=self.coord.tp, first_layer=self._first_layer)
        local = {name: p.data for name, p in found.items()}
        whole = dict(weights.gather(self._unless_replica(pieces), local))
        modules = dict.fromkeys(name.rpartition(".")[0] for name in whole)
        return {module: (whole[f"{module}.lora_A"], whole[f"{module}.lora_B"]) for module in modules}

    def load(self, folder: str | Path) -> None:
        """Read the weights of a Hugging Face folder; a value head too if it has one, else that starts at zero."""
        pieces, local = self.shard_map(), self.parameters()
        head = self._value_head()
        if head and "value_head.weight" in weights.stored_tensors(folder):
            pieces, local = pieces + shard_map.value_head_map(self.architecture), local | head
        elif head:
            for parameter in head.values():
                parameter.zero_()
        weights.read(folder, pieces, local)
        self.folder = Path(folder)
        self.passes.weights_changed()

    def export(self, folder: str | Path) -> None:
        """Write a Hugging Face folder (with LoRA: merged; with a value head: its tensors beside). Collective."""
        pieces, local, head = self.shard_map(), self.merged(), self._value_head()
        if head:
            pieces, local = pieces + shard_map.value_head_map(self.architecture), local | head
        weights.export(self._unless_replica(pieces), local, self.folder, folder)

    def _value_head(self) -> dict[str, Tensor]:
        return {name: p.data for name, p in self.model.named_parameters() if self._is_value_head(name)}

    def _is_value_head(self, name: str) -> bool:
        return self.head == "value" and name.startswith("output_layer.")

    def _unless_replica(self, pieces: ShardMap) -> ShardMap:
        return pieces if self.coord.dp == 0 and self.coord.cp == 0 else []

    # -- passes --------------------------------------------------------------------------------------------------------
    def _packer(self, batch: Batch) -> Packer:
        return Packer(batch, self.device, self.layout.tp if self.model.config.sequence_parallel else 1)

    def log_probs(self, batch: Batch, *, adapters: bool = True) -> tuple[np.ndarray, np.ndarray] | None:
        """Log-probs and entropies (nats) of the response tokens, flat in row order, fp32; None off the last stage.

        Args:
            batch: ``prompt_tokens``, ``response_tokens``; cut into micro-batches by its plan.
            adapters: False computes the base model under LoRA (the reference policy).
        """
        with nullcontext() if adapters else lora.disabled(self.model):
            scored = self.passes.score(self._packer(batch))
        return scored and (scored["log_probs"], scored["entropy"])

    def values(self, batch: Batch) -> np.ndarray | None:
        """values[t], of the state before response token t, flat in row order, fp32; None off the last stage."""
        scored = self.passes.score(self._packer(batch))
        return scored and scored["values"]

    def update(self, batch: Batch, loss: Loss, epochs: int = 1, lr: float | None = None) -> dict[str, Metric]:
        """Train: one optimizer step per mini-batch of the batch's plan (without a plan: one step).

        The gradient of a step is that of the loss's sum over all ranks, divided by the mini-batch's response tokens
        over all ranks.

        Args:
            loss: (outputs, columns) of one micro-batch -> (sum over its tokens, metrics).
            epochs: passes over all mini-batches.
            lr: learning rate from now on; None keeps it.

        Returns:
            the loss's metrics, ``grad_norm/<role>`` and ``lr/<role>``, merged over all steps; {} off the last stage.

        Raises:
            NumericsError: a gradient norm is not finite; names the mini-batch.
        """
        return self.passes.update(self._packer(batch), loss, epochs, lr)

    # -- checkpoints ---------------------------------------------------------------------------------------------------
    def save(self, folder: str | Path) -> None:
        """Write weights, optimizer and random state as a Megatron distributed checkpoint. Collective."""
        checkpoint.save(folder, self.model, self.passes.optimizer, self.coord, self.layout)

    def restore(self, folder: str | Path) -> None:
        """Read what ``save`` wrote; training then goes on bit for bit (same layout). Collective."""
        checkpoint.restore(folder, self.model, self.passes.optimizer, self.coord, self.layout)
