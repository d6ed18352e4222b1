"""Log-probs and entropy of a vocabulary that is cut over the TP ranks, in fp32, in one pass over the logits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class _LogProbsAndEntropy(torch.autograd.Function):
    """With z = logits / temperature, lse = log sum exp z and p = exp(z - lse), all over the whole vocabulary:

    log_prob = z[target] - lse            d/dz_j = [j = target] - p_j
    entropy  = lse - sum_j p_j z_j        d/dz_j = -p_j (z_j - sum_k p_k z_k)
    """

    @staticmethod
    def forward(ctx, logits, targets, temperature, first, group):
        scaled = logits.float() / temperature
        peak = scaled.amax(-1, keepdim=True) if scaled.shape[-1] else scaled.new_full((len(scaled), 1), -torch.inf)
        _all_reduce(peak, group, dist.ReduceOp.MAX)
        exponent = (scaled - peak).exp()
        local = targets - first
        here = (local >= 0) & (local < scaled.shape[-1])
        index = torch.where(here, local, 0).unsqueeze(-1)
        hit = scaled.gather(-1, index).squeeze(-1) * here if scaled.shape[-1] else torch.zeros_like(peak[:, 0])
        sums = torch.stack([exponent.sum(-1), (exponent * scaled).sum(-1), hit])
        _all_reduce(sums, group)
        total, weighted, hit = sums
        lse = peak.squeeze(-1) + total.log()
        mean = weighted / total
        probs = exponent.div_(total.unsqueeze(-1))
        ctx.save_for_backward(scaled, probs, mean, index, here)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)  # most losses use no entropy: its share of the gradient is skipped then
        return hit - lse, lse - mean

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        scaled, probs, mean, index, here = ctx.saved_tensors
        grad = torch.zeros_like(probs)
        if grad_log_probs is not None:
            grad = probs * -grad_log_probs.unsqueeze(-1)
            if scaled.shape[-1]:
                grad.scatter_add_(-1, index, (grad_log_probs * here).unsqueeze(-1))
        if grad_entropy is not None:
            grad.sub_(probs * (scaled - mean.unsqueeze(-1)) * grad_entropy.unsqueeze(-1))
        return grad.div_(ctx.temperature).to(ctx.dtype), None, None, None, None


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup, op=dist.ReduceOp.SUM) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)


def log_probs_and_entropy(
    logits: Tensor, targets: Tensor, temperature: float, vocabulary: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies under softmax(logits / temperature).

    Args:
        logits: (T, V_local) of this TP rank, any float type. Rank r holds vocabulary rows from r * V_local on.
        targets: (T,) ids of the whole vocabulary.
        temperature: divides the logits before the softmax.
        vocabulary: rows of the model's own vocabulary; rows beyond it are padding and have probability 0.
        group: the TP group.

    Returns:
        log-probs (T,) and entropies in nats (T,), fp32, the same on all TP ranks.
    """
    first = group.rank() * logits.shape[-1]
    valid = max(0, min(logits.shape[-1], vocabulary - first))
    return _LogProbsAndEntropy.apply(logits[:, :valid], targets, temperature, first, group)
