"""The plain reference: the Hugging Face model itself, padded, in one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridflow.batch.batch import Batch, Ragged


def random_batch(rows: int = 10, vocabulary: int = 97, seed: int = 0) -> Batch:
    """Prompts and responses of unequal lengths, with columns for the losses."""
    random = np.random.default_rng(seed)

    def ids(low: int, high: int) -> list[list[int]]:
        return [random.integers(0, vocabulary, random.integers(low, high)).tolist() for _ in range(rows)]

    responses = Ragged.of(ids(1, 9), "int32")
    columns = {
        name: Ragged(random.standard_normal(len(responses.values)).astype(np.float32), responses.offsets)
        for name in ("advantages", "returns")
    }
    return Batch.of(np.arange(rows), prompt_tokens=ids(1, 12), response_tokens=responses, **columns)


class HuggingFace:
    """A model, and optionally a value head on its last hidden state."""

    def __init__(self, folder: Path, head: str = "policy", temperature: float = 1.0, dtype=torch.float32):
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        self.head, self.temperature = head, temperature
        hidden = self.model.config.hidden_size
        stored = load_file(folder / "model.safetensors") if head == "value" else {}
        self.value_weight = stored.get("value_head.weight", torch.zeros(1, hidden)).requires_grad_()
        self.value_bias = stored.get("value_head.bias", torch.zeros(1)).requires_grad_()

    def outputs(self, batch: Batch) -> dict[str, Tensor]:
        """Flat over the response tokens, in row order, with gradient."""
        prompts, responses = batch.ragged("prompt_tokens"), batch.ragged("response_tokens")
        lengths = prompts.lengths + responses.lengths
        ids = torch.zeros(len(batch), int(lengths.max()), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row in range(len(batch)):
            ids[row, : lengths[row]] = torch.tensor(np.concatenate([prompts[row], responses[row]]))
            mask[row, : lengths[row]] = 1
        where = [
            (row, prompts.lengths[row] + t - 1) for row in range(len(batch)) for t in range(responses.lengths[row])
        ]
        rows, columns = torch.tensor(where).T
        if self.head == "value":
            hidden = self.model.model(ids, attention_mask=mask).last_hidden_state[rows, columns]
            return {"values": (hidden @ self.value_weight.T + self.value_bias)[:, 0]}
        logits = self.model(ids, attention_mask=mask).logits[rows, columns].float() / self.temperature
        every = logits.log_softmax(-1)
        targets = torch.tensor(responses.values.astype(np.int64))
        return {
            "log_probs": every.gather(-1, targets[:, None])[:, 0],
            "entropy": -(every.exp() * every).sum(-1),
        }

    def parameters(self) -> dict[str, Tensor]:
        found = dict(self.model.named_parameters())  # tied weights once
        if self.head == "value":
            found.pop("lm_head.weight", None)
            found |= {"value_head.weight": self.value_weight, "value_head.bias": self.value_bias}
        return found

    def train(self, batch: Batch, loss, optimizer: torch.optim.Optimizer | None = None, clip: float = 1.0):
        """One step on the whole batch; returns gradients before clipping and their norm."""
        columns = {name: torch.tensor(batch.ragged(name).values) for name in ("advantages", "returns")}
        total, _ = loss(self.outputs(batch), columns)
        parameters = self.parameters()
        for parameter in parameters.values():
            parameter.grad = None
        (total / len(columns["returns"])).backward()
        gradients = {name: parameter.grad.clone() for name, parameter in parameters.items()}
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), clip)
        if optimizer:
            optimizer.step()
        return gradients, float(norm)


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm of the reference, over all tensors together."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    difference = sum((ours[name].double() - theirs[name].double()).square().sum() for name in theirs)
    return float((difference / sum(tensor.double().square().sum() for tensor in theirs.values())).sqrt())
