"""A small role for the resharding tests: how far the log-probs of trainer and rollout lie apart."""

from __future__ import annotations

import numpy as np

from hybridflow.batch.batch import Batch
from hybridflow.transfer import transfer
from hybridflow.worker import Worker


class Mismatch(Worker):
    needs_process_group = False

    @transfer("ONE_TO_ALL", reads=("log_probs", "rollout_log_probs", "policy_version"))
    def compare(self, batch: Batch) -> tuple[float, list[int]]:
        """Largest absolute difference, and the policy versions that generated."""
        difference = batch.ragged("log_probs").values - batch.ragged("rollout_log_probs").values
        return float(np.abs(difference).max()), sorted(set(batch.scalar("policy_version").tolist()))
