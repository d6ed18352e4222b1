"""The table of columns: what each is called, what it holds, over which tokens it runs, and who writes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Over(Enum):
    """What a column has one value for."""

    SAMPLE = "sample"
    PROMPT = "prompt token"
    RESPONSE = "response token"
    TEXT = "sample (text)"


@dataclass(frozen=True)
class Column:
    """One column. ``dtype`` is a NumPy name, or "string" for text."""

    name: str
    over: Over
    dtype: str
    writer: str
    doc: str


_TABLE = (
    Column("sample_id", Over.SAMPLE, "int64", "data", "group_id * n + k: unique in the run"),
    Column("group_id", Over.SAMPLE, "int64", "data", "epoch * len(dataset) + index: samples of one prompt share it"),
    Column("prompt_tokens", Over.PROMPT, "int32", "data", "token ids of the prompt, chat template applied"),
    Column("prompt_text", Over.TEXT, "string", "data", "the prompt as text"),
    Column("answer", Over.TEXT, "string", "data", "what the reward function needs, as JSON"),
    Column("response_tokens", Over.RESPONSE, "int32", "rollout", "generated ids, the end token included if emitted"),
    Column("rollout_log_probs", Over.RESPONSE, "float32", "rollout", "log-probs under the generating weights"),
    Column("finish_reason", Over.TEXT, "string", "rollout", '"stop" or "length"'),
    Column("policy_version", Over.SAMPLE, "int64", "rollout", "weight updates that the generating weights had seen"),
    Column("log_probs", Over.RESPONSE, "float32", "actor", "log-probs under the trainer's weights before the update"),
    Column("entropy", Over.RESPONSE, "float32", "actor", "entropy of the distribution each token was drawn from, nats"),
    Column("reference_log_probs", Over.RESPONSE, "float32", "reference", "log-probs under the frozen first policy"),
    Column("values", Over.RESPONSE, "float32", "critic", "values[t]: the critic's value of the state before token t"),
    Column("reward", Over.SAMPLE, "float32", "reward", "score of the whole response; NaN where it failed"),
    Column(
        "reward_failure",
        Over.TEXT,
        "string",
        "reward",
        "why there is no score: '', 'timeout', 'raised: ...', 'not finite: nan', ...",
    ),
    Column("response_text", Over.TEXT, "string", "reward", "the decoded response"),
    Column("advantages", Over.RESPONSE, "float32", "data", "advantage of each token, whitened if so configured"),
    Column("returns", Over.RESPONSE, "float32", "data", "advantage + value, before whitening"),
)

COLUMNS: dict[str, Column] = {column.name: column for column in _TABLE}


def register_column(column: Column) -> Column:
    """Add a column of your own algorithm. A second, different column of the same name is an error."""
    known = COLUMNS.setdefault(column.name, column)
    if known != column:
        raise ValueError(f"column {column.name!r} is already registered as {known}")
    return column
