"""What a Hugging Face model folder holds, read with the standard library alone: shapes, layer names, completeness."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError

SUPPORTED_TYPES = ("llama", "mistral", "qwen2", "qwen3")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class ModelInfo:
    """The facts of a model that the config is checked against.

    Args:
        path: the folder, as given; model_type: Hugging Face's name of the architecture.
        layers, heads, kv_heads, hidden, intermediate, vocab: sizes; positions: longest sequence, in tokens.
        linear_modules: names of the linear layers inside a block ("q_proj", ...), as LoRA targets name them.
        parameters: number of weights in the files.
    """

    path: str
    model_type: str
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    intermediate: int
    vocab: int
    positions: int
    linear_modules: tuple[str, ...] = ()
    parameters: int = 0


def read_model_folder(path: str, key: str = "model.path") -> ModelInfo:
    """Check that ``path`` holds a whole model (config, tokenizer, all weight files) and read its facts.

    Raises:
        ConfigError: no such folder, files missing (each is named), or an architecture that we cannot train.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {path!r}", hint=_missing_folder_hint(path, folder), where=key)
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        missing.append(f"a tokenizer ({' or '.join(TOKENIZER_FILES)})")
    weights, missing_weights = _weight_files(folder)
    missing += missing_weights
    if missing:
        raise ConfigError(
            f"the model folder {path!r} lacks {', '.join(missing)}",
            hint="finish the download, or give a folder that `save_pretrained` has written",
            where=key,
        )
    config = _read_json(folder / "config.json", key)
    names: set[str] = set()
    parameters = 0
    for file in weights:
        for tensor, shape in _safetensors_shapes(file, key).items():
            parameters += _product(shape)
            if len(shape) == 2 and (match := re.search(r"layers\.\d+\..*?(\w+)\.weight$", tensor)):
                names.add(match[1])
    return _facts(path, config, tuple(sorted(names)), parameters, key)


def _facts(path: str, config: dict[str, Any], modules: tuple[str, ...], parameters: int, key: str) -> ModelInfo:
    model_type = str(config.get("model_type"))
    if model_type not in SUPPORTED_TYPES:
        raise ConfigError(
            f"{path!r} holds a model of type {model_type!r}",
            hint=f"supported: {', '.join(SUPPORTED_TYPES)}",
            where=key,
        )
    try:
        return ModelInfo(
            path=path,
            model_type=model_type,
            layers=int(config["num_hidden_layers"]),
            heads=int(config["num_attention_heads"]),
            kv_heads=int(config.get("num_key_value_heads") or config["num_attention_heads"]),
            hidden=int(config["hidden_size"]),
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            positions=int(config["max_position_embeddings"]),
            linear_modules=modules,
            parameters=parameters,
        )
    except KeyError as error:
        raise ConfigError(
            f"config.json of {path!r} has no {error.args[0]!r}", hint="take it from the model's origin", where=key
        ) from error


def _missing_folder_hint(path: str, folder: Path) -> str:
    if folder.exists():
        return "this is a file: give the folder that holds config.json"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return f"if this is a name on a model hub, download it first (`hf download {path} --local-dir <folder>`) and "\
            "give the folder"  # fmt: skip
    return "give the path of a local Hugging Face folder"


def _weight_files(folder: Path) -> tuple[list[Path], list[str]]:
    """The safetensors files of the folder, and what is missing of them."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(_read_json(index, "model.path").get("weight_map", {}).values()))
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        return [folder / shard for shard in shards if shard not in missing], missing or ([] if shards else ["weights"])
    if (single := folder / "model.safetensors").is_file():
        return [single], []
    other = [file.name for pattern in ("*.safetensors", "*.bin", "*.pt") for file in sorted(folder.glob(pattern))]
    found = f" (found {other[0]} without an index)" if other else ""
    return [], [f"weights (model.safetensors){found}"]


def _read_json(file: Path, key: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}", hint="fetch the file anew", where=key) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no JSON object", hint="fetch the file anew", where=key)
    return content


def _safetensors_shapes(file: Path, key: str) -> dict[str, list[int]]:
    """Shapes by tensor name, from the header (length as little-endian u64, then JSON); checks the file's length."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError("it is cut off")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if file.stat().st_size < end:
            raise ValueError(f"it is cut off: {file.stat().st_size} of {end} bytes")
        return {name: entry["shape"] for name, entry in header.items()}
    except (OSError, ValueError, struct.error, KeyError) as error:
        raise ConfigError(f"cannot read weights {file}: {error}", hint="fetch the file anew", where=key) from error


def _product(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
