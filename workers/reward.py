"""The reward role: the task's verifier or the user's function scores responses, in processes that can be killed."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import numpy as np

from hybridflow.batch.batch import Batch
from hybridflow.config.schema import DataConfig, RewardModelConfig
from hybridflow.data.sources import is_file, names_of
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.errors import ConfigError, WorkerError
from hybridflow.telemetry.metrics import Mean, Metric, Sum
from hybridflow.transfer import transfer
from hybridflow.worker import Worker
from workers.rewards.functions import NOT_TRIED, TASKS_PREFIX, Outcome
from workers.rewards.pool import RewardPool

_CURES = {
    "timeout": "raise reward_model.timeout_seconds, or make the function faster",
    "raised": "call the function by itself with this sample (samples.jsonl of an earlier step shows its arguments)",
    "died": "the function ended its process: look for os._exit, native crashes, and memory (SIGKILL)",
    "not finite": "return a finite number for every response, also for an empty one",
    "not a number": "return a float",
    "wrong length": "a batched function returns one number for each sample, in order",
}


class RewardWorker(Worker):
    """Scores responses on CPU. Ranks share the samples; no process group, no torch."""

    needs_process_group: ClassVar[bool] = False
    _pool: RewardPool | None = None
    _tokenizer: Tokenizer
    _config: RewardModelConfig

    @transfer("ONE_TO_ALL")
    def setup(self, reward_model: RewardModelConfig, model_path: str, data: DataConfig) -> dict[str, Any]:
        """Start the processes and load the function in each.

        Args:
            reward_model: reads function, timeout_seconds, max_failure_fraction, processes.
            model_path: Hugging Face folder of the tokenizer.
            data: says which task's verifier scores, where ``reward_model.function`` is not given.

        Returns:
            ``function`` (what scores, in words) and ``processes``.

        Raises:
            ConfigError: no reward function, or one that cannot be loaded.
        """
        self._config = reward_model
        self._pool = RewardPool(
            reward_function_name(reward_model, data),
            processes=reward_model.processes,
            timeout_seconds=reward_model.timeout_seconds,
        )
        self._tokenizer = load_tokenizer(model_path)
        self._pool.wait_ready()
        return {"function": self._described, "processes": reward_model.processes}

    @transfer(
        "DP_PROTO",
        reads=("prompt_text", "answer", "response_tokens"),
        writes=("reward", "reward_failure", "response_text"),
    )
    def compute_rewards(self, batch: Batch) -> tuple[Batch, dict[str, Metric]]:
        """Score every response. ``reward`` is NaN where ``reward_failure`` says why.

        Metrics: ``reward/mean`` over the scored ones, ``reward/failures``, and ``reward/failures_<cause>``.

        Raises:
            WorkerError: more than ``reward_model.max_failure_fraction`` of the samples failed.
        """
        assert self._pool, "setup comes first"
        responses = self._tokenizer.decode(batch.ragged("response_tokens"))
        texts = (batch.text("prompt_text"), responses, batch.text("answer"))
        outcomes = self._pool.score(*texts, max_failures=int(self._config.max_failure_fraction * len(responses)))
        failures = Counter(outcome.cause for outcome in outcomes if outcome.failed)
        self._require_few_failures(outcomes, failures)
        scores = np.fromiter((outcome.score for outcome in outcomes), np.float32, len(outcomes))
        metrics: dict[str, Metric] = {
            "reward/mean": Mean(float(np.nansum(scores, dtype=np.float64)), len(scores) - failures.total()),
            "reward/failures": Sum(failures.total()),
        }
        for cause, count in failures.items():
            metrics[f"reward/failures_{cause.replace(' ', '_')}"] = Sum(count)
        scored = Batch.of(
            batch.sample_ids,
            reward=scores,
            reward_failure=[outcome.failure for outcome in outcomes],
            response_text=responses,
        )
        return scored, metrics

    def close(self) -> None:
        if self._pool:
            self._pool.close()

    @property
    def _described(self) -> str:
        name = self._pool.function if self._pool else ""
        tasks = name.removeprefix(TASKS_PREFIX)
        return f"the verifier of task {tasks}" if tasks != name else f"the reward function {name}"

    def _require_few_failures(self, outcomes: list[Outcome], failures: Counter[str]) -> None:
        if failures.total() <= self._config.max_failure_fraction * len(outcomes):
            return
        cause = failures.most_common(1)[0][0]
        example, _ = Counter(o.failure for o in outcomes if o.cause == cause).most_common(1)[0]
        left_out = {NOT_TRIED.cause: n} if (n := sum(o is NOT_TRIED for o in outcomes)) else {}
        counts = ", ".join(f"{count} {cause}" for cause, count in [*failures.most_common(), *left_out.items()])
        raise WorkerError(
            f"{self._described} gave no score for {failures.total()} of {len(outcomes)} samples ({counts}); "
            f"most often: {example}",
            hint=f"{_CURES[cause]}; or allow more than {self._config.max_failure_fraction:g} of the samples to fail: "
            "reward_model.max_failure_fraction",
        )


def reward_function_name(reward_model: RewardModelConfig, data: DataConfig) -> str:
    """What scores: ``reward_model.function``, else the verifiers of the tasks in ``data``.

    Raises:
        ConfigError: neither is there; or a scoring model is asked for.
    """
    if reward_model.function:
        return reward_model.function
    if reward_model.path:
        raise ConfigError(
            "reward models are not built yet",
            hint="use reward_model.function, or a task's verifier (no reward_model.path)",
            where="reward_model.path",
        )
    names = dict.fromkeys((*names_of(data.train), *names_of(data.validation or data.train)))
    if files := [name for name in names if is_file(name)]:
        raise ConfigError(
            f"nothing scores the responses to {files[0]}: a file brings no verifier",
            hint="set reward_model.function to path/to/file.py:name; it is called with prompt, response, answer",
            where="reward_model.function",
        )
    return TASKS_PREFIX + ",".join(names)
