"""Reward functions: how they are found, what they are given, and what counts as a score.

A reward function scores one response. It is called by argument name with whichever of these it takes:

    prompt      the prompt as text, chat template included
    response    the decoded response, special tokens left out
    answer      the data's answer, as it stands there (``data.answer_key``, or ``reward_model.ground_truth``)
    ...         any other column of the row: ``data_source``, ``extra_info``, ...; all of them with ``**extra``

so that ``def score(response, answer): return float(answer in response)`` will do, and functions written for verl
(``data_source, solution_str, ground_truth, extra_info``) work as they are. It returns a finite number. One decorated
with ``batched`` is called once for all samples, with a list for each argument, and returns as many numbers.

In the config: ``reward_model.function: path/to/file.py:name`` or ``package.module:name``.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from hybridflow.data.tasks import load_task
from hybridflow.errors import ConfigError
from hybridflow.loading import load

Function = TypeVar("Function", bound=Callable[..., Any])
TASKS_PREFIX = "tasks:"
_OTHER_NAMES = {"solution_str": "response", "ground_truth": "answer"}  # verl's
_NAN = float("nan")


class Outcome(NamedTuple):
    """A score; or NaN and why there is none, as ``cause`` or ``cause: message``."""

    score: float
    failure: str = ""

    @property
    def cause(self) -> str:
        return self.failure.split(":")[0]

    @property
    def failed(self) -> bool:
        return bool(self.failure) and self is not NOT_TRIED


NOT_TRIED = Outcome(_NAN, "not tried")  # so many others had failed that the pool gave up


class RewardFunction(NamedTuple):
    """A reward function that takes its arguments out of a dict. ``batched``: the dict holds lists."""

    call: Callable[[dict[str, Any]], Any]
    batched: bool


def batched(function: Function) -> Function:
    """Mark a reward function that scores all samples in one call."""
    function.batched = True  # type: ignore[attr-defined]
    return function


def load_function(name: str) -> RewardFunction:
    """The reward function of a name: ``file.py:name``, ``package.module:name``, or ``tasks:sort,chain_sum``.

    ``tasks:...`` is the verifiers of these tasks; the row's ``task`` says which one scores it.

    Raises:
        ConfigError: it cannot be loaded, or is no function, or takes nothing that a reward function is given.
    """
    if name.startswith(TASKS_PREFIX):
        verifiers = {task: _by_name(load_task(task).reward) for task in name.removeprefix(TASKS_PREFIX).split(",")}
        return RewardFunction(lambda arguments: verifiers[arguments["task"]](arguments), batched=False)
    module, dot, attribute = name.rpartition(".")
    function = load(f"{module}:{attribute}" if dot and ":" not in name else name)
    if not callable(function):
        raise ConfigError(f"{name} is no function but {type(function).__name__}", where="reward_model.function")
    return RewardFunction(_by_name(function), getattr(function, "batched", False))


def score_one(function: RewardFunction, prompt: str, response: str, answer: str) -> Outcome:
    """Score one sample. ``answer``: JSON of the row's answer and extra columns. Never raises."""
    try:
        return _checked(function.call({**json.loads(answer), "prompt": prompt, "response": response}))
    except BaseException as error:  # noqa: BLE001 - sys.exit() in a reward function is a failure like any other
        return _raised(error)


def score_all(
    function: RewardFunction, prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]
) -> list[Outcome]:
    """Score all samples in one call of a batched function. Never raises."""
    rows = [json.loads(answer) for answer in answers]
    arguments = {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
    try:
        result = function.call({**arguments, "prompt": list(prompts), "response": list(responses)})
        scores = list(result) if hasattr(result, "__iter__") else None
    except BaseException as error:  # noqa: BLE001
        return [_raised(error)] * len(rows)
    if scores is None or len(scores) != len(rows):
        given = f"{len(scores)} scores" if scores is not None else f"a {type(result).__name__}"
        return [Outcome(_NAN, f"wrong length: {given} for {len(rows)} samples")] * len(rows)
    return [_checked(score) for score in scores]


def _checked(value: Any) -> Outcome:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return Outcome(_NAN, f"not a number: {type(value).__name__} {value!r:.80}")
    try:
        score = float(value)
    except (TypeError, ValueError) as error:  # an array of several
        return Outcome(_NAN, f"not a number: {type(value).__name__}, {error}")
    return Outcome(score) if math.isfinite(score) else Outcome(_NAN, f"not finite: {score}")


def _raised(error: BaseException) -> Outcome:
    return Outcome(_NAN, f"raised: {type(error).__name__}: {error}"[:500])


def _by_name(function: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    """``function`` called with those entries of a dict that it has parameters for."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        wanted = {p.name: _OTHER_NAMES[p.name] for p in parameters if p.name in _OTHER_NAMES}
        return lambda arguments: function(**arguments, **{name: arguments[key] for name, key in wanted.items()})
    wanted = {p.name: _OTHER_NAMES.get(p.name, p.name) for p in parameters}
    if not set(wanted.values()) & {"prompt", "response", "answer"}:
        raise ConfigError(
            f"reward function {getattr(function, '__name__', function)} takes ({', '.join(wanted)}), called by name",
            hint="name its parameters prompt, response, answer (any of them), or after columns of the data",
            where="reward_model.function",
        )
    return lambda arguments: function(**{name: arguments[key] for name, key in wanted.items() if key in arguments})
