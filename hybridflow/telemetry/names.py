"""The table of metric names: what each is called, its unit, how it is reduced, and what it says.

One vocabulary for the terminal, metrics.jsonl, the trackers and the report. Code that logs a name of its own
registers it first (``register_metric``); ``markdown_table`` writes the page of the docs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class MetricName:
    """One entry. ``name`` is ``area/what``; a ``<part>`` in it stands for any word (``time/<phase>_seconds``)."""

    name: str
    unit: str
    reduction: str
    doc: str

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"<\w+>", r"[A-Za-z0-9_.+-]+", self.name))


_SAMPLE, _TOKEN, _UPDATE = "mean over samples", "mean over response tokens", "mean over optimizer steps"

_ENTRIES = (
    # rewards
    MetricName(
        "reward/mean", "reward", _SAMPLE, "score of the responses; failed ones are left out, never counted as 0"
    ),
    MetricName("reward/std", "reward", "over samples", "standard deviation of the scores of the step"),
    MetricName("reward/min", "reward", "min", "lowest score of the step"),
    MetricName("reward/max", "reward", "max", "highest score of the step"),
    MetricName("reward/with_kl_mean", "reward", _SAMPLE, "score of the responses after the KL penalty"),
    MetricName("reward/failures", "samples", "sum", "responses that the reward function gave no score"),
    MetricName("reward/failures_<cause>", "samples", "sum", "by cause: timeout, raised, died, not_finite, ..."),
    MetricName("eval/reward_mean", "reward", _SAMPLE, "score on held-out prompts"),
    MetricName("eval/response_length_mean", "tokens", _SAMPLE, "length of the responses to held-out prompts"),
    MetricName("eval/failures", "samples", "sum", "held-out responses that got no score"),
    # distance from the reference, and between the two engines
    MetricName(
        "kl/actor_reference", "nats per token", _TOKEN, "KL of the policy from the reference, before the update"
    ),
    MetricName("kl/coefficient", "1", "last", "weight of the KL penalty in the reward of this step"),
    MetricName("mismatch/abs_log_prob", "nats", _TOKEN, "|rollout - trainer| log-prob of the same weights"),
    MetricName("mismatch/abs_log_prob_max", "nats", "max", "the largest such difference"),
    MetricName("mismatch/kl", "nats per token", _TOKEN, "KL of the generating engine from the trainer (k3 estimator)"),
    # losses and the policy update
    MetricName("loss/policy", "1", _TOKEN, "clipped policy loss, entropy bonus included"),
    MetricName("loss/value", "1", _TOKEN, "clipped value loss"),
    MetricName("loss/supervised", "nats per token", _TOKEN, "cross-entropy of the supervised warm-up"),
    MetricName("policy/clip_fraction", "fraction", _TOKEN, "tokens whose ratio was clipped"),
    MetricName("policy/dual_clip_fraction", "fraction", _TOKEN, "tokens that the dual clip bounded"),
    MetricName("policy/approx_kl", "nats per token", _TOKEN, "KL of the policy from the one that was sampled from"),
    MetricName("policy/ratio_mean", "1", _TOKEN, "new over old probability"),
    MetricName("policy/ratio_max", "1", "max", "largest ratio of new to old probability"),
    MetricName("policy/ratio_min", "1", "min", "smallest ratio of new to old probability"),
    MetricName("entropy/mean", "nats", _TOKEN, "entropy of the distribution each token was drawn from"),
    MetricName("value/clip_fraction", "fraction", _TOKEN, "tokens whose value was clipped"),
    MetricName("values/mean", "reward", _TOKEN, "the critic's values before the update"),
    MetricName("values/explained_variance", "1", "over response tokens", "1 - Var(returns - values) / Var(returns)"),
    MetricName("advantages/mean", "1", _TOKEN, "advantages before whitening"),
    MetricName("advantages/std", "1", "over response tokens", "standard deviation of the advantages"),
    MetricName("advantages/min", "1", "min", "smallest advantage"),
    MetricName("advantages/max", "1", "max", "largest advantage"),
    MetricName("returns/mean", "reward", _TOKEN, "returns: advantage plus value, before whitening"),
    MetricName("returns/std", "reward", "over response tokens", "standard deviation of the returns"),
    MetricName("grad_norm/actor", "1", _UPDATE, "norm of the actor's whole gradient, before clipping"),
    MetricName("grad_norm/critic", "1", _UPDATE, "norm of the critic's whole gradient, before clipping"),
    MetricName("lr/actor", "1", "last", "learning rate of the actor"),
    MetricName("lr/critic", "1", "last", "learning rate of the critic"),
    # what was generated
    MetricName("prompt/length_mean", "tokens", _SAMPLE, "length of the prompts"),
    MetricName("prompt/length_max", "tokens", "max", "longest prompt"),
    MetricName("response/length_mean", "tokens", _SAMPLE, "length of the responses"),
    MetricName("response/length_max", "tokens", "max", "longest response"),
    MetricName("response/length_min", "tokens", "min", "shortest response"),
    MetricName("response/clipped_fraction", "fraction", _SAMPLE, "responses cut at the length limit"),
    MetricName("batch/samples", "samples", "sum", "samples of the step"),
    MetricName("batch/tokens", "tokens", "sum", "prompt and response tokens of the step"),
    MetricName(
        "policy/version", "updates", "last", "version after the update; the step's samples are of the one before"
    ),
    # cost
    MetricName("time/<phase>_seconds", "seconds", "sum", "wall time of a phase of the step, without phases inside it"),
    MetricName("time/step_seconds", "seconds", "sum", "wall time of the step, evaluation and checkpoint left out"),
    MetricName(
        "memory/<phase>_bytes", "bytes", "max over ranks", "resident memory of a worker process at the end of its calls"
    ),
    MetricName("throughput/tokens_per_second", "tokens/second", "sum", "batch/tokens over time/step_seconds"),
)

TABLE: dict[str, MetricName] = {entry.name: entry for entry in _ENTRIES}


def register_metric(name: str, *, unit: str, reduction: str, doc: str) -> MetricName:
    """Add a name of your own to the table; registering it again with other words is an error."""
    if not re.fullmatch(r"[a-z0-9_]+/[A-Za-z0-9_.<>+-]+", name):
        raise ConfigError(f"{name!r} is no metric name", hint='write "area/what", such as "reward/format_mean"')
    entry = MetricName(name, unit, reduction, doc)
    known = TABLE.setdefault(name, entry)
    if known != entry:
        raise ConfigError(f"metric {name!r} is already registered as {known}", hint="choose another name")
    return entry


def find(name: str) -> MetricName | None:
    """The entry for a name, the exact one before a pattern; None where there is none."""
    return TABLE.get(name) or next((entry for entry in TABLE.values() if entry.pattern.fullmatch(name)), None)


def check_names(names: Iterable[str]) -> None:
    """Raise ConfigError that lists every name that is not in the table, with the nearest known one."""
    unknown = [name for name in names if find(name) is None]
    if unknown:
        near = {name: get_close_matches(name, TABLE, n=1) for name in unknown}
        told = ", ".join(f"{name} (did you mean {near[name][0]}?)" if near[name] else name for name in unknown)
        raise ConfigError(
            f"metric names that nobody registered: {told}",
            hint="hybridflow.telemetry.register_metric(name, unit=..., reduction=..., doc=...)",
        )


def markdown_table() -> str:
    """The table as Markdown, for docs/reference."""
    rows = (f"| `{e.name}` | {e.unit} | {e.reduction} | {e.doc.replace('|', chr(92) + '|')} |" for e in TABLE.values())
    return "\n".join(("| metric | unit | reduction | what it says |", "|---|---|---|---|", *rows, ""))
