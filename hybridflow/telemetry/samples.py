"""samples.jsonl: what the policy was asked, what it answered and what that earned, a line per sample.

The recorder lives next to the data (text never enters the driver); the report and people with ``jq`` read the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch.batch import Batch
from hybridflow.telemetry.sinks import JsonlFile, read_jsonl

_TAIL_BYTES = 512 * 1024


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt with one response. Lengths are in tokens; ``reward`` is None where the reward function failed."""

    step: int
    sample_id: int
    group_id: int = -1
    prompt: str = ""
    response: str = ""
    answer: str = ""
    reward: float | None = None
    reward_failure: str = ""
    advantage_mean: float | None = None
    prompt_length: int = 0
    response_length: int = 0
    finish_reason: str = ""
    policy_version: int = -1
    held_out: bool = False

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Sample:
        """From a line of the file; entries that a newer version may have added are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in record.items() if name in known})


class SampleRecorder:
    """Writes samples.jsonl.

    Args:
        path: the file. ``resumed_step`` drops the lines of later steps (0 starts afresh).
        per_step: at most so many samples of a step: the best and the worst, half each, and of those without a score
            up to a quarter. None writes all.
    """

    def __init__(self, path: str | Path, *, resumed_step: int = 0, per_step: int | None = None):
        self._file = JsonlFile(path, resumed_step)
        self._per_step = per_step

    def record(self, step: int, batch: Batch, *, held_out: bool = False) -> None:
        """Write the samples of a step; needs ``prompt_text`` and ``response_text``, takes more where there is more."""
        samples = samples_of(step, batch, held_out=held_out)
        if self._per_step is not None and len(samples) > self._per_step:
            failed = [sample for sample in samples if sample.reward is None][: self._per_step // 4]
            best, worst = extremes(samples, (self._per_step - len(failed)) // 2)
            samples = best + worst[::-1] + failed
        for sample in samples:
            self._file.append(asdict(sample))

    def close(self) -> None:
        self._file.close()


def samples_of(step: int, batch: Batch, *, held_out: bool = False) -> list[Sample]:
    """The rows of a batch as samples, in its order."""
    texts = {name: batch.text(name) for name in ("answer", "reward_failure", "finish_reason") if name in batch}
    numbers = {name: batch.scalar(name).tolist() for name in ("group_id", "reward", "policy_version") if name in batch}
    columns: dict[str, list[Any]] = {
        "sample_id": batch.sample_ids.tolist(),
        "prompt": batch.text("prompt_text"),
        "response": batch.text("response_text"),
        **texts,
        **numbers,
    }
    for name in ("prompt", "response"):
        if f"{name}_tokens" in batch:
            columns[f"{name}_length"] = batch.ragged(f"{name}_tokens").lengths.tolist()
    if "advantages" in batch:
        advantages = batch.ragged("advantages")
        columns["response_length"] = advantages.lengths.tolist()
        columns["advantage_mean"] = (advantages.sums() / np.maximum(advantages.lengths, 1)).tolist()
    if "reward" in columns:
        columns["reward"] = [None if math.isnan(value) else value for value in columns["reward"]]
    rows = zip(*columns.values(), strict=True)
    return [Sample(step=step, held_out=held_out, **dict(zip(columns, row, strict=True))) for row in rows]


def extremes(samples: Iterable[Sample], count: int) -> tuple[list[Sample], list[Sample]]:
    """The ``count`` best, best first, and the ``count`` worst, worst first; no sample is in both.

    Samples without a reward are in neither. Equal prompts with equal responses are taken once. Ties go by sample id.
    """
    scored = {(s.prompt, s.response): s for s in samples if s.reward is not None}
    ranked = sorted(scored.values(), key=lambda sample: (-(sample.reward or 0.0), sample.sample_id))
    best = ranked[: min(count, (len(ranked) + 1) // 2)]
    worst = ranked[len(best) :][-count:] if count else []
    return best, worst[::-1]


def latest_samples(path: str | Path, step: int) -> list[Sample]:
    """The training samples of a step, from the end of the file (however long it is); [] where there are none."""
    path = Path(path)
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    # Lines are whole at the end (line-buffered); the first one may be half.
    records = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return [Sample.of(record) for record in records if record["step"] == step and not record["held_out"]]


def read_samples(path: str | Path) -> list[Sample]:
    return [Sample.of(record) for record in read_jsonl(path)]
