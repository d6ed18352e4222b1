"""The supervised warm-up: a few steps of plain cross-entropy on demonstrations, by the actor's own engine.

The policy that comes out is where reinforcement learning starts, and is its reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybridflow.batch.plan import Planner
from hybridflow.config.schema import WarmupConfig
from hybridflow.pool import Call, Pool
from hybridflow.run import Run

_RAMP_STEPS = 20
_LAST_SHARE = 0.1


def learning_rate(warmup: WarmupConfig, step: int) -> float:
    """Linear ramp over 20 steps, then linear decay to a tenth; ``step`` counts from 1."""
    ramp = min(1.0, step / _RAMP_STEPS)
    return warmup.lr * ramp * max(_LAST_SHARE, 1.0 - (step - 1) / warmup.steps)


@dataclass(frozen=True)
class Warmup:
    """A warm-up on its way: ``written`` is the call that writes the warmed policy to ``warmed_folder``."""

    first: Call
    last: Call
    written: Call

    def describe(self) -> str:
        """The loss at the first and at the last step; waits."""
        before, after = (call.metrics()["loss/supervised"].value for call in (self.first, self.last))
        return f"warm-up: cross-entropy {before:.3f} -> {after:.3f} nats per token"


def warm_up(run: Run, actor: Pool, data: Pool) -> Warmup:
    """Train the actor on demonstrations. Submits everything, and waits for nothing but the batches' lengths."""
    warmup, training = run.config.warmup, run.config.training
    planner = Planner(
        mini_batch_size=warmup.batch_size,
        max_tokens=training.ppo_max_token_len_per_gpu,
        max_sequences=warmup.batch_size,
    )
    updates: list[Call] = []
    with run.phase("warmup"):
        for step in range(1, warmup.steps + 1):
            batch = data.warmup_batch(step).with_plan(planner)
            updates.append(actor.update_supervised(batch, lr=learning_rate(warmup, step)))
        return Warmup(updates[0], updates[-1], actor.export(str(warmed_folder(run))))


def warmed_folder(run: Run) -> Path:
    """Where the warmed policy lies; a resumed run finds its reference there."""
    return run.path / "warm_model"
