"""Tiny Hugging Face folders for tests, written by transformers itself, so that they are what users have."""

from __future__ import annotations

from pathlib import Path

# No pad token: with one, transformers drops the gradient of its embedding (padding_idx), even where it is real text.
TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_model(
    folder: str | Path,
    kind: str = "llama",
    *,
    tied: bool = False,
    seed: int = 0,
    scale: float = 0.1,
    max_shard_size: str | int = "1GB",
    dtype: str = "float32",
    **sizes,
) -> Path:
    """Write a model with random weights (norms and biases too) and give its folder.

    Args:
        kind: "llama", "mistral", "qwen2" or "qwen3".
        scale: standard deviation of the weights (of norms: around 1).
        max_shard_size: a small one gives several safetensors files and an index.
        sizes: override ``TINY`` (head size at least 32, for vLLM).
    """
    import torch
    import transformers

    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    options = {**TINY, "tie_word_embeddings": tied, **sizes}
    if kind == "mistral":
        options["sliding_window"] = None
    if kind == "qwen2":  # its head size follows from the hidden size
        del options["head_dim"]
        options["hidden_size"] = sizes.get("hidden_size", 128)
    config = getattr(transformers, f"{names[kind]}Config")(**options)
    model = getattr(transformers, f"{names[kind]}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(1.0 + noise if "norm" in name else noise)
    model = model.to(getattr(torch, dtype))
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return Path(folder)
