"""Chat templates: a list of messages becomes the text that a chat model expects."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.data.tasks import Message
from hybridflow.errors import ConfigError


class ChatTemplate:
    """The chat template of a model folder, rendered by ``transformers`` (imported at the first use)."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._tokenizer: Any = None

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a conversation, up to and including the mark that opens the assistant's turn.

        Raises:
            ConfigError: the template refuses the messages (an unknown role, two user turns in a row).
        """
        if self._tokenizer is None:
            # The fast tokenizer's class, not AutoTokenizer: that one imports torch.
            fast = importlib.import_module("transformers").PreTrainedTokenizerFast
            self._tokenizer = fast.from_pretrained(self.folder)
        try:
            return self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:
            raise ConfigError(
                f"the chat template of {str(self.folder)!r} refuses {messages!r:.200}: {error}",
                hint='messages are a list of {"role": "system" | "user" | "assistant", "content": "text"}',
                where="data.train",
            ) from error
