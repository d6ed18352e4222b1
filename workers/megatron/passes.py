"""Forward and backward passes over micro-batches, through Megatron-Core's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from hybridflow.config.schema import OptimConfig
from hybridflow.errors import WorkerError
from hybridflow.telemetry.metrics import Mean, Metric, merge
from workers.megatron.model import PackedGPT
from workers.megatron.optimizer import Optimizer
from workers.megatron.packing import MicroBatch, Packer
from workers.megatron.vocab_parallel import log_probs_and_entropy

Tensors = dict[str, Tensor]
Loss = Callable[[Tensors, Tensors], tuple[Tensor, dict[str, Metric]]]


class Passes:
    """Scores and trains one model.

    Args:
        model: the rank's part.
        vocabulary: the model's own vocabulary, without padding.
        temperature: divides the logits.
        optim: None freezes the model: no gradient buffers, no optimizer.
        role: under which gradient norm and learning rate are reported.
    """

    def __init__(
        self,
        model: PackedGPT,
        vocabulary: int,
        temperature: float,
        optim: OptimConfig | None,
        device: torch.device,
        role: str,
    ):
        self.role = role
        self.model, self.vocabulary, self.temperature, self.device = model, vocabulary, temperature, device
        self.optimizer: Optimizer | None = None
        self.is_last_stage = parallel_state.is_pipeline_last_stage()
        self._runner: torch.nn.Module = model
        if optim is None:
            model.requires_grad_(False)
            return
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        self._runner = DistributedDataParallel(model.config, ddp_config, model)
        self.optimizer = Optimizer(self._runner, optim, model.config.params_dtype)
        model.config.finalize_model_grads_func = finalize_model_grads
        model.config.grad_scale_func = self.optimizer.inner.scale_loss

    def weights_changed(self) -> None:
        """To be called after the model's weights were set from outside."""
        if self.optimizer:
            self.optimizer.reload_weights()

    # -- scoring -------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def score(self, packer: Packer) -> dict[str, np.ndarray] | None:
        """The head's outputs for every response token of the batch, in row order; None off the last stage."""
        self.model.eval()
        ranges = [micro for mini in packer.mini_batches() for micro in mini.micro_batches]
        micros = [packer.rows(*rows) for rows in ranges] or [packer.stand_in()]
        scored = self._run(micros, lambda micro, out, non_loss_data: self._outputs(micro, out), forward_only=True)
        if not self.is_last_stage:
            return None
        return {name: torch.cat([part[name] for part in scored]).float().cpu().numpy() for name in scored[0]}

    def _outputs(self, micro: MicroBatch, head: Tensor) -> Tensors:
        if self.model.head == "value":
            return {"values": head}
        group = parallel_state.get_tensor_model_parallel_group()
        log_probs, entropy = log_probs_and_entropy(head, micro.targets, self.temperature, self.vocabulary, group)
        return {"log_probs": log_probs, "entropy": entropy}

    # -- training ------------------------------------------------------------------------------------------------------
    def update(self, packer: Packer, loss: Loss, epochs: int, lr: float | None) -> dict[str, Metric]:
        """One optimizer step per mini-batch, ``epochs`` times over; see ``MegatronEngine.update``."""
        if self.optimizer is None:
            raise WorkerError("a frozen engine cannot be updated", hint="give it an optimizer when it is set up")
        if lr is not None:
            self.optimizer.lr = lr
        minis = [[packer.rows(*rows) for rows in mini.micro_batches] for mini in packer.mini_batches()]
        parts: list[dict[str, Metric]] = []
        for epoch in range(epochs):
            for number, micros in enumerate(minis):
                parts += self.accumulate(micros or [packer.stand_in()], loss)
                norm = self.optimizer.step(f"mini-batch {number + 1} of {len(minis)}, epoch {epoch + 1} of {epochs}")
                parts.append({f"grad_norm/{self.role}": Mean(norm, 1), f"lr/{self.role}": Mean(self.optimizer.lr, 1)})
        return merge(parts) if self.is_last_stage else {}

    def accumulate(self, micros: list[MicroBatch], loss: Loss) -> list[dict[str, Metric]]:
        """Put the mini-batch's gradient, over all ranks, into ``main_grad`` of the parameters; returns the metrics."""
        self.model.train()
        self._runner.zero_grad_buffer()
        self.optimizer.inner.zero_grad()
        return self._run(micros, partial(self._loss, loss), forward_only=False)

    def _loss(self, loss: Loss, micro: MicroBatch, head: Tensor) -> tuple[Tensor, Tensor, dict[str, Metric]]:
        outputs, count = self._outputs(micro, head), len(micro.targets)
        if count:
            total, metrics = loss(outputs, micro.columns)
        else:  # nothing to learn from, but the backward pass must run for the collectives in it
            total, metrics = sum(output.sum() for output in outputs.values()) * 0.0, {}
        return total, torch.tensor(count, dtype=torch.int, device=self.device), metrics

    # -- both ----------------------------------------------------------------------------------------------------------
    def _run(self, micros: list[MicroBatch], reduce: Callable, forward_only: bool) -> list:
        """Run the micro-batches through all stages; what ``reduce`` gave for each, on the last stage."""

        def forward_step(iterator: Iterator[MicroBatch], runner: torch.nn.Module):
            micro = next(iterator)
            return runner(micro), partial(reduce, micro)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micros),
            model=[self._runner],
            num_microbatches=len(micros),
            seq_length=1,  # stages tell each other the shapes (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
