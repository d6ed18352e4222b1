"""What actor and critic share: a Megatron engine that is trained, written out, saved and restored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from hybridflow.batch.batch import Batch
from hybridflow.config.schema import AlgorithmConfig, McoreConfig, ModelConfig, OptimConfig
from hybridflow.loading import load
from hybridflow.telemetry.metrics import Metric
from hybridflow.transfer import transfer
from hybridflow.worker import Worker


class TrainedWorker(Worker):
    """One rank of a model that is trained. A role says which ``head`` it has, and by which loss it is trained."""

    head: ClassVar[str]
    engine: Any = None
    algorithm: AlgorithmConfig

    def build(
        self,
        model_path: str,
        model: ModelConfig,
        mcore: McoreConfig,
        optim: OptimConfig,
        algorithm: AlgorithmConfig,
        **more: Any,
    ) -> None:
        """Build the engine with the weights of ``model_path``; called again, it replaces engine and optimizer."""
        self.engine = None  # its memory is free before the next one is built
        self.algorithm = algorithm
        engine = load("workers.megatron.engine:MegatronEngine")
        model = dataclasses.replace(model, path=model_path)
        self.engine = engine(self.context, head=self.head, model=model, mcore=mcore, optim=optim, **more)

    def train(self, batch: Batch, loss: Callable[..., Any]) -> dict[str, Metric]:
        """An optimizer step per mini-batch, ``ppo_epochs`` times over."""
        return self.engine.update(
            batch, lambda outputs, columns: loss(outputs, columns, self.algorithm), self.algorithm.ppo_epochs
        )

    @transfer("ONE_TO_ALL")
    def export(self, folder: str) -> None:
        """Write a Hugging Face folder (with LoRA: merged; with a value head: its tensors beside the trunk's)."""
        self.engine.export(folder)

    @transfer("ONE_TO_ALL")
    def save(self, folder: str) -> None:
        """Write weights, optimizer and random state as a Megatron checkpoint."""
        self.engine.save(folder)

    @transfer("ONE_TO_ALL")
    def restore(self, folder: str) -> None:
        """Read what ``save`` wrote."""
        self.engine.restore(folder)
