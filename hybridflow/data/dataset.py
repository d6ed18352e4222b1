"""Tokenised prompts: the training split, the held-out split, and the demonstrations of the warm-up.

Everything that can be wrong with a prompt is found, and counted, at load: empty ones and over-long ones never reach a
step. Held-out prompts appear in neither the training prompts nor the demonstrations (compared as text).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridflow.batch.batch import Batch, Ragged
from hybridflow.config.schema import DataConfig, WarmupConfig
from hybridflow.data.sources import is_file, names_of, read_demonstrations, read_rows
from hybridflow.data.tasks import Row
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError
from hybridflow.seeds import derive_seed

MAX_DEMONSTRATIONS = 16384  # that a task is asked for; a longer warm-up sees them again


@dataclass(frozen=True)
class PromptSet:
    """N usable prompts. ``answers``: JSON for the reward function (see ``workers/rewards/functions.py``).

    ``responses``: token ids that the warm-up teaches, the end token included (None outside demonstrations).
    Counts: ``empty`` and ``overlong`` rows were dropped, ``truncated`` ones were cut, ``held_out`` ones went or belong
    to the validation split.
    """

    tokens: Ragged
    texts: list[str]
    answers: list[str]
    responses: Ragged | None = None
    empty: int = 0
    overlong: int = 0
    truncated: int = 0
    held_out: int = 0

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, rows: np.ndarray | Sequence[int], *, held_out: int = 0) -> PromptSet:
        rows = np.asarray(rows, dtype=np.int64)
        return PromptSet(
            self.tokens.select(rows),
            [self.texts[row] for row in rows],
            [self.answers[row] for row in rows],
            None if self.responses is None else self.responses.select(rows),
            self.empty,
            self.overlong,
            self.truncated,
            held_out,
        )

    def without(self, texts: Collection[str]) -> PromptSet:
        """Without the prompts that are among ``texts``; their number becomes ``held_out``."""
        keep = [row for row, text in enumerate(self.texts) if text not in texts]
        return self if len(keep) == len(self) else self.select(keep, held_out=len(self) - len(keep))

    def batch(self, sample_ids: np.ndarray, group_ids: np.ndarray, rows: np.ndarray) -> Batch:
        """The given rows as samples."""
        return Batch.of(
            sample_ids,
            group_id=group_ids,
            prompt_tokens=self.tokens.select(rows),
            prompt_text=[self.texts[row] for row in rows],
            answer=[self.answers[row] for row in rows],
        )


def load_prompts(data: DataConfig, tokenizer: Tokenizer, seed: int) -> tuple[PromptSet, PromptSet]:
    """(training prompts, held-out prompts).

    Held-out prompts come from ``data.validation``, at most ``validation_size`` of them. Without it a task makes more
    prompts, and of files every tenth different prompt is held out, at most ``validation_size`` in all.

    Raises:
        ConfigError: a source cannot be read, has no prompt column or no usable prompt, or the training prompts hold all
            of ``data.validation``.
    """
    train = _encode(read_rows(data.train, data, seed=seed, split="train"), data, tokenizer)
    _require_any(train, data)
    if not data.validation_size:
        return train, train.select([])
    if data.validation:
        return train, _validation(data.validation, data, tokenizer, seed, without=train.texts)
    tasks = tuple(name for name in names_of(data.train) if not is_file(name))
    if tasks:
        held_out = _validation(tasks, data, tokenizer, seed)
    else:
        unique = _first_of_each(train.texts)
        order = np.random.default_rng(derive_seed(seed, "held out")).permutation(len(unique))
        held_out = train.select(unique[order[: min(data.validation_size, len(unique) // 10)]])
    left = train.without(set(held_out.texts))
    if not len(left):
        raise ConfigError(
            f"all {len(train)} training prompts are among the {len(held_out)} held-out ones, so none is left",
            hint="lower data.validation_size (0: no evaluation), or bring more different prompts",
            where="data.train",
        )
    return left, held_out


def load_demonstrations(
    data: DataConfig, warmup: WarmupConfig, tokenizer: Tokenizer, seed: int, *, held_out: PromptSet
) -> PromptSet:
    """The warm-up's prompts with responses, none of them held out.

    Raises:
        ConfigError: the source has no demonstrations, or the model folder names no end token.
    """
    if not tokenizer.end_ids:
        raise ConfigError(
            f"{str(tokenizer.folder)!r} names no end token, so a warm-up cannot teach when to stop",
            hint='add "eos_token_id" to its generation_config.json',
            where="model.path",
        )
    source = warmup.data or data.train
    count = min(warmup.steps * warmup.batch_size, MAX_DEMONSTRATIONS)
    rows = read_demonstrations(source, data, seed=seed, count=count)
    demonstrations = _encode(rows, data, tokenizer, responses=True).without(set(held_out.texts))
    if not len(demonstrations):
        raise ConfigError(
            f"no usable demonstration in {', '.join(names_of(source))}",
            hint="see data.max_prompt_length",
            where="warmup",
        )
    return demonstrations


def _validation(
    source: str | tuple[str, ...], data: DataConfig, tokenizer: Tokenizer, seed: int, without: Collection[str] = ()
) -> PromptSet:
    rows = read_rows(source, data, seed=seed, split="validation", count=data.validation_size)
    found = _encode(rows, data, tokenizer)
    fresh = found.select(_first_of_each(found.texts)).without(set(without))
    if len(found) and not len(fresh):
        raise ConfigError(
            f"all {len(found)} validation prompts are among the training prompts too, so none is held out",
            hint="name another file, or leave data.validation out: a tenth of data.train is held out then",
            where="data.validation",
        )
    return fresh.select(np.arange(min(data.validation_size, len(fresh))), held_out=fresh.held_out)


def _encode(rows: list[Row], data: DataConfig, tokenizer: Tokenizer, *, responses: bool = False) -> PromptSet:
    """Tokenise; drop what is empty; drop or cut what is too long. Cut prompts keep their end."""
    usable = [row for row in rows if _is_given(row.prompt)]
    chats = {i: messages for i, row in enumerate(usable) if (messages := _messages(row, tokenizer)) is not None}
    texts = [_render(chats[i], tokenizer) if i in chats else str(row.prompt) for i, row in enumerate(usable)]
    tokens: list[list[int]] = [[]] * len(usable)
    for special in (True, False):  # a chat template writes the special tokens itself
        places = [i for i in range(len(usable)) if (i not in chats) is special]
        for i, ids in zip(places, tokenizer.encode([texts[i] for i in places], special=special), strict=True):
            tokens[i] = ids
    limit = data.max_prompt_length or sys.maxsize
    long = [i for i, ids in enumerate(tokens) if len(ids) > limit]
    cut = data.overlong == "truncate"
    tokens = [ids[-limit:] for ids in tokens]
    dropped = set() if cut else set(long)
    keep = [i for i, ids in enumerate(tokens) if ids and i not in dropped]
    return PromptSet(
        Ragged.of([tokens[i] for i in keep], "int32"),
        [texts[i] for i in keep],
        [_answer_json(usable[i]) for i in keep],
        _encode_responses([usable[i] for i in keep], tokenizer) if responses else None,
        empty=len(rows) - len(dropped) - len(keep),
        overlong=len(dropped),
        truncated=len(long) if cut else 0,
    )


def _is_given(prompt: Any) -> bool:
    return bool(prompt.strip()) if isinstance(prompt, str) else bool(prompt)


def _messages(row: Row, tokenizer: Tokenizer) -> list[Any] | None:
    if isinstance(row.prompt, list):
        return row.prompt
    return [{"role": "user", "content": row.prompt}] if row.question and tokenizer.chat else None


def _render(messages: list[Any], tokenizer: Tokenizer) -> str:
    if tokenizer.chat is None:
        raise ConfigError(
            f"the prompts are chat messages, and {str(tokenizer.folder)!r} has no chat template",
            hint="use a chat model's folder (with chat_template.jinja), or write the prompts as plain text",
            where="data.train",
        )
    return tokenizer.chat.render(messages)


def _encode_responses(rows: list[Row], tokenizer: Tokenizer) -> Ragged:
    taught = tokenizer.encode([str(row.response) for row in rows], special=False)
    return Ragged.of([[*ids, tokenizer.end_ids[0]] for ids in taught], "int32")


def _answer_json(row: Row) -> str:
    return json.dumps({**row.extra, "answer": row.answer}, ensure_ascii=False, default=str)


def _first_of_each(texts: list[str]) -> np.ndarray:
    """Rows of the first occurrence of each text, in order."""
    first: dict[str, int] = {}
    for row, text in enumerate(texts):
        first.setdefault(text, row)
    return np.fromiter(first.values(), np.int64, len(first))


def _require_any(prompts: PromptSet, data: DataConfig) -> None:
    if len(prompts):
        return
    counts = f"{prompts.empty} empty, {prompts.overlong} longer than {data.max_prompt_length} tokens"
    raise ConfigError(
        f"no usable prompt in {', '.join(names_of(data.train))}: "
        f"{counts if prompts.empty or prompts.overlong else 'it has none at all'}",
        hint='raise data.max_prompt_length, or set data.overlong="truncate"'
        if prompts.overlong
        else f"look at column {data.prompt_key!r} of the file (data.prompt_key)",
        where="data.train",
    )
