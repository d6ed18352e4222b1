"""Text to ids and back, from a Hugging Face folder, without importing more than is needed.

The Rust library ``tokenizers`` reads ``tokenizer.json`` in milliseconds. ``transformers`` (seconds) is imported only
for chat templates, and for folders that have no ``tokenizer.json``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from hybridflow.batch.batch import Ragged
from hybridflow.data.chat import ChatTemplate
from hybridflow.errors import ConfigError


class Tokenizer:
    """The tokenizer of a model folder.

    Args:
        folder: Hugging Face folder. Reads tokenizer.json, tokenizer_config.json, generation_config.json, config.json.

    Raises:
        ConfigError: no such folder, no tokenizer in it, or a broken one.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ConfigError(
                f"there is no model folder {str(folder)!r}",
                hint="give a local Hugging Face folder; python -m jobs.models tiny DIR makes a small one",
                where="model.path",
            )
        self._backend = _load_backend(self.folder)
        self._backend.no_truncation()  # some folders ship with both; cut and padded prompts would go unnoticed
        self._backend.no_padding()

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a response, the usual one first. Empty where the folder names none."""
        for name in ("generation_config.json", "config.json"):
            ids = self._read(name).get("eos_token_id")
            if ids is not None:
                return tuple(ids) if isinstance(ids, list) else (ids,)
        token = self._read("tokenizer_config.json").get("eos_token")
        token = token["content"] if isinstance(token, dict) else token
        found = self._backend.token_to_id(token) if token else None
        return () if found is None else (found,)

    @cached_property
    def chat(self) -> ChatTemplate | None:
        """The folder's chat template; None where it has none."""
        has_one = any(self.folder.glob("chat_template.*")) or self._read("tokenizer_config.json").get("chat_template")
        return ChatTemplate(self.folder) if has_one else None

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """Ids of each text; ``special``: with what the tokenizer adds at the ends (such as BOS)."""
        return [one.ids for one in self._backend.encode_batch_fast(list(texts), add_special_tokens=special)]

    def decode(self, tokens: Ragged) -> list[str]:
        """Text of each row, special tokens left out."""
        rows = np.split(tokens.values, tokens.offsets[1:-1]) if len(tokens) else []
        return self._backend.decode_batch([row.tolist() for row in rows], skip_special_tokens=True)

    def _read(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


@lru_cache(maxsize=4)
def load_tokenizer(folder: str) -> Tokenizer:
    """The tokenizer of a folder; roles that share a process share it."""
    return Tokenizer(folder)


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    try:
        if path.is_file():
            return tokenizers.Tokenizer.from_file(str(path))
        slow = importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder)
        return slow.backend_tokenizer
    except Exception as error:
        present = ", ".join(sorted(entry.name for entry in folder.iterdir())) or "nothing"
        raise ConfigError(
            f"no tokenizer can be loaded from {str(folder)!r}: {str(error).splitlines()[0]}",
            hint=f"copy the model's tokenizer.json and tokenizer_config.json there; the folder has: {present}",
            where="model.path",
        ) from error
