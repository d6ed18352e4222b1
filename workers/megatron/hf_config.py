"""Reading a Hugging Face folder's config.json: the architecture, in the numbers that the model needs.

Read as plain JSON (importing transformers would cost seconds in every process). What the engine cannot compute exactly
is refused here, by name, instead of being trained wrongly.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: ``base`` (theta) and, where ``kind`` is not "default", its scaling parameters."""

    base: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True)
class Architecture:
    """A dense decoder of the Llama family. Sizes are of the whole model, before any parallel cut."""

    model_type: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    positions: int
    norm_epsilon: float
    rope: Rope
    tied: bool
    qkv_bias: bool
    qk_norm: bool


def read_architecture(folder: str | Path) -> Architecture:
    """The architecture of the model in ``folder``.

    Raises:
        ConfigError: files are missing (all are named), or the model is of a kind that is not built.
    """
    check_complete(folder)
    config = json.loads((Path(folder) / "config.json").read_text())
    _refuse_unsupported(config, str(folder))
    kind, heads = config["model_type"], config["num_attention_heads"]
    return Architecture(
        model_type=kind,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        positions=config.get("max_position_embeddings", 2048),
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        rope=_rope(config, str(folder)),
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )


def check_complete(folder: str | Path) -> list[Path]:
    """The safetensors files of a model folder, after checking that it and they exist.

    Raises:
        ConfigError: names every file that is missing.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(
            f"there is no model folder {str(folder)!r}",
            hint="give a local Hugging Face folder with config.json and safetensors files",
            where="model.path",
        )
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    index = folder / INDEX_FILE
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing += [name for name in names if not (folder / name).is_file()]
    else:
        names = [WEIGHTS_FILE]
        if not (folder / WEIGHTS_FILE).is_file():
            missing.append(f"{WEIGHTS_FILE} (or {INDEX_FILE} with the files it names)")
    if missing:
        raise ConfigError(
            f"the model folder {str(folder)!r} lacks {', '.join(missing)}",
            hint="download or copy the folder again; weights must be safetensors",
            where="model.path",
        )
    return [folder / name for name in names]


def _rope(config: dict[str, Any], folder: str) -> Rope:
    """Of transformers 5 (``rope_parameters``) or older (``rope_theta`` and ``rope_scaling``)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        _refuse("a rotary embedding over a part of each head", folder)
    if kind == "default":
        return Rope(base)
    if kind == "linear":
        return Rope(base, kind, rope["factor"])
    if kind == "llama3":
        return Rope(
            base,
            kind,
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
    return _refuse(f"rotary embedding of type {kind!r} (built: default, linear, llama3)", folder)


def _refuse_unsupported(config: dict[str, Any], folder: str) -> None:
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        _refuse(f"model type {kind!r} (built: {', '.join(SUPPORTED)})", folder)
    if config.get("hidden_act", "silu") != "silu":
        _refuse(f"activation {config['hidden_act']!r} (built: silu)", folder)
    if config.get("mlp_bias"):
        _refuse("biases in the MLP (mlp_bias)", folder)
    if config.get("attention_bias") and kind != "qwen2":
        _refuse("a bias on the attention's output projection (attention_bias)", folder)
    window = config.get("sliding_window")
    if window is not None and (kind == "mistral" or config.get("use_sliding_window")):
        _refuse(f"sliding-window attention (window {window})", folder)
    if config.get("quantization_config"):
        _refuse("quantized weights (quantization_config)", folder)


def _refuse(what: str, folder: str) -> Any:
    raise ConfigError(
        f"the model in {folder!r} needs {what}, which the training engine does not have",
        hint="choose a dense Llama, Mistral, Qwen2 or Qwen3 model",
        where="model.path",
    )
