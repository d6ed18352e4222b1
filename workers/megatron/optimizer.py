"""Megatron-Core's optimizer (AdamW or SGD over its DDP's gradient buffers), with one step that we can look into.

Weight decay leaves biases and norms alone (parameters of one axis), as Megatron-Core and transformers do. With bfloat16
weights the optimizer keeps fp32 main weights.
"""

from __future__ import annotations

import math

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from hybridflow.config.schema import OptimConfig
from hybridflow.errors import NumericsError

DEFAULT_GRAD_CLIP = 1.0


class Optimizer:
    """One role's optimizer.

    Args:
        ddp: the model in Megatron-Core's DDP.
        optim: name, lr, weight decay, betas, eps, norm to clip to.
        dtype: of the model's weights.
    """

    def __init__(self, ddp: DistributedDataParallel, optim: OptimConfig, dtype: torch.dtype):
        clip = DEFAULT_GRAD_CLIP if optim.grad_clip is None else optim.grad_clip
        config = OptimizerConfig(
            optimizer=optim.name,
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_eps=optim.eps,
            sgd_momentum=0.0,
            clip_grad=clip,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=False,
        )
        self.inner = get_megatron_optimizer(config, [ddp], use_gloo_process_groups=False)
        self.clip = clip
        self._is_adam = optim.name == "adam"
        for part in self.inner.chained_optimizers:
            # Megatron-Core calls it when it loads a checkpoint; SGD has none, and Adam's lacks the step.
            part.init_state_fn = lambda *_: self.prepare_state()
        self.prepare_state()

    @property
    def lr(self) -> float:
        return self.inner.param_groups[0]["lr"]

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self.inner.param_groups:
            group["lr"] = value

    def prepare_state(self) -> None:
        """Make Adam's state before the first step, so that a checkpoint has the same entries at any time."""
        for part in self.inner.chained_optimizers if self._is_adam else ():
            for group in part.optimizer.param_groups if part.optimizer else ():
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    state.setdefault("step", torch.tensor(0.0))
                    state.setdefault("exp_avg", torch.zeros_like(parameter))
                    state.setdefault("exp_avg_sq", torch.zeros_like(parameter))

    def load_state_dict(self, state: dict) -> None:
        """Take what Megatron-Core loaded from a checkpoint, minding two things that it leaves to native Adam: a step
        of 0 is not saved, and all parameters share one step tensor, which each would then increment."""
        if self._is_adam:
            state.get("optimizer", state)["state"].setdefault("common_step", torch.tensor(0.0))
        self.inner.load_state_dict(state)
        for part in self.inner.chained_optimizers if self._is_adam else ():
            for held in part.optimizer.state.values() if part.optimizer else ():
                held["step"] = held["step"].clone()

    @torch.no_grad()
    def step(self, where: str) -> float:
        """Clip and apply the gradients that DDP holds; returns their global norm before clipping.

        Raises:
            NumericsError: the norm is not finite. Weights are left as they were.
        """
        self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        if not math.isfinite(norm):
            raise NumericsError(
                f"the gradient norm is {norm}",
                hint="lower the learning rate, or look for rewards or log-probs that are not finite; "
                "the weights were not changed by this mini-batch",
                where=where,
            )
        for part in self.inner.chained_optimizers if self.clip > 0 else ():
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, self.clip, norm)
        self.inner.step_with_ready_grads()
        return norm

    def reload_weights(self) -> None:
        """Take the model's weights anew into the fp32 main weights."""
        self.inner.reload_model_params()
