"""Tasks: prompts made by code, together with the verifier that scores the answers.

A task is named in the config (``data.train: sort``): the built-in ``sort``; any dataset of reasoning-gym, as
``reasoning-gym:chain_sum`` or plainly ``chain_sum``, with settings behind a question mark
(``chain_sum?max_terms=2&max_digits=1``); or a subclass of ``Task`` of your own, as ``my_task.py:MyTask``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from random import Random
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple
from urllib.parse import parse_qsl

import yaml

from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.loading import load, user_error

Message = Mapping[str, Any]


class Row(NamedTuple):
    """One prompt.

    ``prompt`` is a text, or a list of chat messages (``{"role": ..., "content": ...}``); ``question`` says that a text
    is to be put as the user's message to models that have a chat template. ``extra`` holds what a reward function may
    ask for by name beside ``prompt``, ``response`` and ``answer``; it must be JSON. ``response``: what a supervised
    warm-up teaches (demonstrations only).
    """

    prompt: str | list[Message] | None
    answer: Any = None
    extra: Mapping[str, Any] = MappingProxyType({})
    response: str | None = None
    question: bool = False


class Task:
    """Base of all tasks. Rows are a pure function of the arguments: each run makes the same ones anew.

    ``size`` is the number of prompts of the training split.
    """

    size: ClassVar[int] = 8192

    def prompts(self, count: int, seed: int, split: str) -> list[Row]:
        """``count`` rows of a split ("train" or "validation"); ``seed`` differs from split to split already."""
        raise NotImplementedError(f"{type(self).__name__} must define prompts(count, seed, split)")

    def demonstrations(self, count: int, seed: int) -> list[Row]:
        """``count`` rows with a ``response``, for the supervised warm-up."""
        raise ConfigError(
            f"task {type(self).__name__} has no demonstrations",
            hint="turn the warm-up off (warmup.steps=0), or name a JSONL of prompt and response in warmup.data",
            where="warmup.data",
        )

    def reward(self, prompt: str, response: str, answer: Any, **extra: Any) -> float:
        """The score of a response, from 0 to 1. Takes any of these arguments, by name (see ``workers/rewards``)."""
        raise NotImplementedError(f"{type(self).__name__} must define reward(prompt, response, answer)")


class SortTask(Task):
    """Sort 4 to 7 digits: ``7 3 1 4 =`` is answered by ``1 3 4 7``.

    The reward is the share of places that are right: matches over the longer of response and answer. Demonstrations
    answer with the digits in random order: they teach the form, and leave the sorting to the reward.
    """

    def prompts(self, count: int, seed: int, split: str) -> list[Row]:
        random = Random(seed)
        drawn = (random.choices("0123456789", k=random.randint(4, 7)) for _ in range(count))
        return [Row(" ".join(digits) + " =", answer=" ".join(sorted(digits))) for digits in drawn]

    def demonstrations(self, count: int, seed: int) -> list[Row]:
        random, rows = Random(seed), []
        for _ in range(count):
            digits = random.choices("0123456789", k=random.randint(4, 7))
            rows.append(Row(" ".join(digits) + " =", response=" ".join(random.sample(digits, len(digits)))))
        return rows

    def reward(self, response: str, answer: str) -> float:  # type: ignore[override]
        given, right = response.split(), answer.split()
        return sum(a == b for a, b in zip(given, right, strict=False)) / max(len(given), len(right))


class ReasoningGymTask(Task):
    """A dataset of reasoning-gym, scored by its own ``score_answer``.

    What stands between ``<answer>`` tags is scored, the whole response where there are none. A row carries the place
    of its entry (seed, size, index), from which the verifier makes the entry again: entries need not survive JSON.
    """

    size: ClassVar[int] = 2048

    def __init__(self, name: str):
        name, _, settings = name.partition("?")
        self.name = name
        self.settings = {key: yaml.safe_load(value) for key, value in parse_qsl(settings, keep_blank_values=True)}
        self.gym = _reasoning_gym()
        known = sorted(self.gym.factory.DATASETS)
        if name not in known:
            near = get_close_matches(name, known, n=3)
            raise ConfigError(
                f"reasoning-gym has no dataset {name!r}",
                hint=f"did you mean {', '.join(near)}?" if near else f"it has: {', '.join(known)}",
            )

    def prompts(self, count: int, seed: int, split: str) -> list[Row]:
        place = {"seed": seed % 2**31, "size": count}
        entries = self._dataset(**place)
        rows = (entries[index] for index in range(count))
        return [
            Row(entry["question"], _plain(entry["answer"]), {**place, "index": index}, question=True)
            for index, entry in enumerate(rows)
        ]

    def demonstrations(self, count: int, seed: int) -> list[Row]:
        rows = self.prompts(count, seed, "warmup")
        return [row._replace(response=row.answer) for row in rows if row.answer is not None]

    def reward(self, response: str, seed: int, size: int, index: int) -> float:  # type: ignore[override]
        entries = self._dataset(seed, size)
        tagged = self.gym.utils.extract_answer(response)
        return float(entries.score_answer(response.strip() if tagged is None else tagged, entries[index]))

    @lru_cache(maxsize=4)  # noqa: B019 - tasks live as long as their process
    def _dataset(self, seed: int, size: int) -> Any:
        try:
            return self.gym.create_dataset(self.name, seed=seed, size=size, **self.settings)
        except Exception as error:
            raise ConfigError(
                f"reasoning-gym cannot make {self.name!r}: {type(error).__name__}: {error}",
                hint="check the settings behind `?`, choose another dataset, or wrap it in a task of your own",
            ) from error


@lru_cache(maxsize=16)
def load_task(name: str) -> Task:
    """The task of a name.

    Raises:
        ConfigError: nothing of that name; says what is near.
    """
    if name == "sort":
        return SortTask()
    if name.startswith("reasoning-gym:"):
        return ReasoningGymTask(name.removeprefix("reasoning-gym:"))
    if ":" in name:
        task = load(name)
        if isinstance(task, type):
            task = asked(name, task)
        if not isinstance(task, Task):
            raise ConfigError(f"{name} is no task but {type(task).__name__}", hint="derive it from hybridflow's Task")
        return task
    known = ["sort"]
    if importlib.util.find_spec("reasoning_gym"):
        known += _reasoning_gym().factory.DATASETS
        if name.partition("?")[0] in known[1:]:
            return ReasoningGymTask(name)
    near = get_close_matches(name, known, n=3)
    raise ConfigError(
        f"{name!r} is neither a .parquet or .jsonl file nor a task",
        hint=(f"did you mean {', '.join(near)}? " if near else "")
        + "tasks are sort, reasoning-gym:NAME, or your own as my_task.py:MyTask",
    )


def asked(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a task's code, which may be the user's: what it raises becomes one error with the task's name.

    Raises:
        ConfigError: the code raised.
    """
    try:
        return function(*arguments)
    except HybridFlowError:
        raise
    except Exception as error:
        raise user_error(f"task {name}", error) from error


def _reasoning_gym() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            f"reasoning-gym cannot be imported: {error}", hint="pip install reasoning-gym, or use another task"
        ) from error


def _plain(answer: Any) -> str | None:
    return None if answer is None else str(answer)
