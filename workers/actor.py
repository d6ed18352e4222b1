"""The actor role: the policy that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridflow.batch.batch import Batch, Ragged
from hybridflow.config.schema import AlgorithmConfig, McoreConfig, ModelConfig, OptimConfig
from hybridflow.errors import WorkerError
from hybridflow.loading import load
from hybridflow.telemetry.metrics import Metric
from hybridflow.transfer import transfer
from workers.resharding.boxes import ShardMap
from workers.resharding.planner import Share
from workers.resharding.protocol import Channel
from workers.resharding.publish import Publisher
from workers.trained import TrainedWorker


class ActorWorker(TrainedWorker):
    """One rank of the policy, on a Megatron engine."""

    head = "policy"
    publisher: Publisher | None = None

    @transfer("ONE_TO_ALL")
    def setup(
        self,
        model_path: str,
        model: ModelConfig,
        mcore: McoreConfig,
        optim: OptimConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        seed: int,
    ) -> None:
        """Build the engine with the weights of ``model_path``; called again, it replaces engine and optimizer."""
        self.build(model_path, model, mcore, optim, algorithm, temperature=temperature, seed=seed)

    @transfer("3D_PROTO", reads=("prompt_tokens", "response_tokens"), writes=("log_probs", "entropy"))
    def compute_log_probs(self, batch: Batch) -> Batch | None:
        """Log-prob and entropy of each response token, before the update."""
        scored = self.engine.log_probs(batch)
        if scored is None:
            return None
        offsets = batch.ragged("response_tokens").offsets
        log_probs, entropy = (Ragged(values, offsets) for values in scored)
        return Batch.of(batch.sample_ids, log_probs=log_probs, entropy=entropy)

    @transfer("3D_PROTO", reads=("prompt_tokens", "response_tokens", "log_probs", "advantages"))
    def update(self, batch: Batch) -> dict[str, Metric]:
        """Train on a step's samples: an optimizer step per mini-batch, ``ppo_epochs`` times over."""
        return self.train(batch, load("hybridflow.algorithms.losses:POLICY_LOSSES")[self.algorithm.name])

    @transfer("3D_PROTO", reads=("prompt_tokens", "response_tokens"))
    def update_supervised(self, batch: Batch, lr: float) -> dict[str, Metric]:
        """Imitate the responses (the warm-up): one optimizer step per mini-batch, with this learning rate."""
        return self.engine.update(batch, load("hybridflow.algorithms.losses:supervised_loss"), lr=lr)

    # -- weights to the rollout ----------------------------------------------------------------------------------------
    @transfer("ONE_TO_ALL")
    def shard_map(self) -> ShardMap:
        """What each rank's parameters hold."""
        return self.engine.shard_map()

    @transfer("ALL_TO_ALL")
    def open_publisher(self, channel: Channel, share: Share) -> None:
        """Agree on the protocol and on what this rank publishes; before the first ``publish_weights``."""
        if self.publisher is not None:
            self.publisher.close()
        self.publisher = Publisher(channel, share)

    @transfer("ONE_TO_ALL")
    def publish_weights(self, version: int, merged: bool = True) -> Any:
        """Make the weights of policy ``version`` available to the rollout; returns each rank's handle.

        Args:
            merged: with LoRA, add the adapters to the weights; False gives the base (adapters travel on their own).
        """
        if self.publisher is None:
            raise WorkerError("weights went before open_publisher", hint="build workers.resharding.link.Resharding")
        parameters = self.engine.merged() if merged else self.engine.parameters()
        return self.publisher.publish(parameters, version)

    @transfer("ONE_TO_ALL")
    def publish_adapter(self, version: int) -> str | None:
        """Write the LoRA adapter of policy ``version`` as a PEFT folder; its path on rank 0, None elsewhere."""
        adapters = self.engine.adapters()
        if self.context.rank != 0:
            return None
        folder = Path(self.context.run_dir or ".") / "adapter"
        lora, write = self.engine.lora, load("workers.resharding.adapter:write_adapter")
        return write(folder, adapters, rank=lora.rank, alpha=lora.alpha, base=str(self.engine.folder))

    def close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
