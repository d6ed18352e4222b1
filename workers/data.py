"""The data role: prompts, demonstrations, advantages and the record of samples, so that no token enters the driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hybridflow.algorithms import advantages
from hybridflow.batch.batch import Batch, Ragged
from hybridflow.config.schema import AlgorithmConfig, DataConfig, WarmupConfig
from hybridflow.data.dataset import PromptSet, load_demonstrations, load_prompts
from hybridflow.data.sampler import Sampler
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.seeds import derive_seed
from hybridflow.telemetry.metrics import Metric
from hybridflow.telemetry.samples import SampleRecorder
from hybridflow.transfer import transfer
from hybridflow.worker import Worker

VALIDATION_IDS = 1 << 48  # ids of held-out samples start here: far from those of any run
RECORDED_PER_STEP = 32
_PROMPT_COLUMNS = ("group_id", "prompt_tokens", "prompt_text", "answer")
_SAMPLE_COLUMNS = (*_PROMPT_COLUMNS, "response_tokens", "response_text", "finish_reason", "policy_version")
_SCORES = ("reward", "reward_failure")


class DataWorker(Worker):
    """Owns the prompts of a run. One rank; no process group, no torch."""

    needs_process_group: ClassVar[bool] = False
    _train: PromptSet
    _held_out: PromptSet
    _sampler: Sampler
    _demonstrations: PromptSet | None = None
    _demonstration_order: Sampler
    _recorder: SampleRecorder | None = None
    _algorithm: AlgorithmConfig
    _n: int

    @transfer("ONE_TO_ALL")
    def setup(
        self,
        data: DataConfig,
        model_path: str,
        *,
        n: int = 1,
        seed: int = 0,
        algorithm: AlgorithmConfig | None = None,
        warmup: WarmupConfig | None = None,
        resumed_step: int = 0,
    ) -> dict[str, Any]:
        """Load, tokenise and split the prompts.

        Args:
            data: where prompts come from; ``train_batch_size`` must be decided.
            model_path: Hugging Face folder of the tokenizer.
            n: responses per prompt.
            seed: of the run.
            algorithm: for ``compute_advantages``.
            warmup: demonstrations are loaded if its ``steps`` is above 0.
            resumed_step: lines of later steps leave samples.jsonl; 0 starts the file afresh.

        Returns:
            Counts: ``prompts`` (the dataset's length), ``steps_per_epoch``, ``validation``, ``demonstrations``,
            ``empty``, ``overlong`` (dropped), ``truncated``, ``held_out`` (training rows left out because they are
            held out), ``longest_prompt`` (tokens).

        Raises:
            ConfigError: see ``hybridflow.data.dataset``.
        """
        if not data.train_batch_size:
            raise ValueError("data.train_batch_size must be decided before the data worker is set up")
        self._n, self._algorithm = n, algorithm or AlgorithmConfig()
        tokenizer = load_tokenizer(model_path)
        self._train, self._held_out = load_prompts(data, tokenizer, seed)
        self._sampler = Sampler(len(self._train), data.train_batch_size, derive_seed(seed, "data"))
        if warmup and warmup.steps:
            self._demonstrations = load_demonstrations(data, warmup, tokenizer, seed, held_out=self._held_out)
            self._demonstration_order = Sampler(
                len(self._demonstrations), warmup.batch_size, derive_seed(seed, "warmup")
            )
        if self.context.run_dir:
            path = Path(self.context.run_dir) / "samples.jsonl"
            self._recorder = SampleRecorder(path, resumed_step=resumed_step, per_step=RECORDED_PER_STEP)
        return {
            "prompts": len(self._train),
            "steps_per_epoch": self._sampler.steps(1),
            "validation": len(self._held_out),
            "demonstrations": len(self._demonstrations) if self._demonstrations else 0,
            "empty": self._train.empty,
            "overlong": self._train.overlong,
            "truncated": self._train.truncated,
            "held_out": self._train.held_out,
            "longest_prompt": max(int(s.tokens.lengths.max(initial=0)) for s in (self._train, self._held_out)),
        }

    @transfer("ONE_TO_ALL", writes=_PROMPT_COLUMNS)
    def prompts(self, step: int) -> Batch:
        """The samples of a step, counted from 1: ``train_batch_size * n`` rows, the ``n`` of a prompt together."""
        group_ids, rows = self._sampler.step(step)
        sample_ids = np.add.outer(group_ids * self._n, np.arange(self._n)).ravel()
        return self._train.batch(sample_ids, np.repeat(group_ids, self._n), np.repeat(rows, self._n))

    @transfer("ONE_TO_ALL", writes=_PROMPT_COLUMNS)
    def validation_prompts(self) -> Batch:
        """All held-out prompts, once each; no rows where there are none."""
        rows = np.arange(len(self._held_out))
        return self._held_out.batch(VALIDATION_IDS + rows, VALIDATION_IDS + rows, rows)

    @transfer("ONE_TO_ALL", writes=("prompt_tokens", "response_tokens"))
    def warmup_batch(self, step: int) -> Batch:
        """Demonstrations of a warm-up step, counted from 1: ``warmup.batch_size`` rows. Ids count over the warm-up."""
        demonstrations = self._demonstrations
        if demonstrations is None or demonstrations.responses is None:
            raise ValueError("there are no demonstrations: setup was called without warmup")
        ids, rows = self._demonstration_order.step(step)
        return Batch.of(
            ids,
            prompt_tokens=demonstrations.tokens.select(rows),
            response_tokens=demonstrations.responses.select(rows),
        )

    @transfer(
        "ONE_TO_ALL",
        reads=("response_tokens", "reward", "log_probs", "reference_log_probs", "values", "rollout_log_probs"),
        writes=("advantages", "returns"),
    )
    def compute_advantages(self, batch: Batch, kl_coef: float) -> tuple[Batch, dict[str, Metric]]:
        """Advantages and returns of a whole step (``hybridflow.algorithms.advantages``).

        Samples without a score take no part in whitening and teach nothing: their advantages are 0 and their returns
        are their values. Their tokens still count in the mini-batch's token count.
        """
        scored = np.flatnonzero(~np.isnan(batch.scalar("reward")))
        if len(scored) == len(batch):
            return advantages.compute(batch, self._algorithm, kl_coef)
        found, metrics = advantages.compute(batch.select(scored), self._algorithm, kl_coef)
        values = batch.ragged("values")
        token_is_scored = np.isin(values.row_of, scored)
        filled = {"advantages": np.zeros_like(values.values), "returns": values.values.copy()}
        for name, column in filled.items():
            column[token_is_scored] = found.ragged(name).values
        ragged = {name: Ragged(column, values.offsets) for name, column in filled.items()}
        return Batch.of(batch.sample_ids, **ragged), metrics

    @transfer("ONE_TO_ALL", reads=(*_SAMPLE_COLUMNS, *_SCORES, "advantages"))
    def record(self, batch: Batch, step: int) -> None:
        """Append the step's best and worst samples to samples.jsonl."""
        if self._recorder:
            self._recorder.record(step, batch)

    @transfer("ONE_TO_ALL", reads=(*_SAMPLE_COLUMNS, *_SCORES))
    def record_validation(self, batch: Batch, step: int) -> None:
        """Append the best and worst held-out samples to samples.jsonl; ``step``: steps that the policy has seen."""
        if self._recorder:
            self._recorder.record(step, batch, held_out=True)

    def close(self) -> None:
        if self._recorder:
            self._recorder.close()
