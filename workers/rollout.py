"""The rollout role: a replica of the generation engine, fed with the actor's weights."""

from __future__ import annotations

from typing import Any

from hybridflow.batch.batch import Batch
from hybridflow.config.schema import ModelConfig, RolloutConfig
from hybridflow.errors import WorkerError
from hybridflow.loading import load
from hybridflow.telemetry.metrics import Metric
from hybridflow.transfer import transfer
from hybridflow.worker import Worker
from workers.resharding.boxes import ShardMap
from workers.resharding.planner import Intake
from workers.resharding.protocol import Channel
from workers.resharding.receive import Receiver


class RolloutWorker(Worker):
    """One rank of one engine replica. Replicas are DP coordinates; the ranks of one are its TP coordinates."""

    group_per_replica = True
    engine: Any = None
    receiver: Receiver | None = None

    @transfer("ONE_TO_ALL")
    def setup(self, model: ModelConfig, rollout: RolloutConfig, seed: int, max_model_len: int) -> None:
        """Start the engine, without weights. ``max_model_len``: longest prompt plus longest response, in tokens."""
        engine = load("workers.vllm.engine:GenerationEngine")
        self.engine = engine(self.context, model, rollout, seed, max_model_len)

    @transfer(
        "3D_ALL_MICRO_DP",
        reads=("prompt_tokens",),
        writes=("response_tokens", "rollout_log_probs", "finish_reason", "policy_version"),
    )
    def generate(self, batch: Batch, version: int, greedy: bool = False) -> tuple[Batch, dict[str, Metric]]:
        """Answer each prompt with policy ``version``, which the engine must hold; ``greedy`` for evaluation."""
        return self.engine.generate(batch, version=version, greedy=greedy)

    @transfer("ONE_TO_ALL")
    def shard_map(self) -> ShardMap:
        """What each rank's parameters hold."""
        return self.engine.shard_map()

    @transfer("ALL_TO_ALL")
    def open_receiver(self, channel: Channel, intake: Intake) -> None:
        """Agree on the protocol and on what this rank copies; before the first ``load_weights``."""
        self.receiver = Receiver(channel, intake)

    @transfer("ONE_TO_ALL")
    def load_weights(self, handles: list[Any], version: int) -> None:
        """Copy published weights into the engine, and stamp the version. ``handles``: of all actor ranks, in order."""
        if self.receiver is None:
            raise WorkerError("weights came before open_receiver", hint="build workers.resharding.link.Resharding")
        self.receiver.receive(handles, self.engine.parameters(), version)
        self.engine.weights_changed(version)

    @transfer("ONE_TO_ALL")
    def load_adapter(self, folders: list[str | None], version: int) -> None:
        """Swap the LoRA adapter; the actor rank that wrote it gives its folder, the others None."""
        self.engine.load_adapter(next(folder for folder in folders if folder is not None), version)

    def sleep(self) -> None:
        """Free the KV cache (on CUDA also the weights' device memory)."""
        if self.engine is not None:  # turns begin before ``setup``
            self.engine.sleep()

    def wake(self) -> None:
        """Make the engine ready to generate again."""
        if self.engine is not None:
            self.engine.wake()

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
        if self.engine is not None:
            self.engine.close()
