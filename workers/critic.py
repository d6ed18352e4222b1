"""The critic role: the value of each state of a response."""

from __future__ import annotations

from hybridflow.batch.batch import Batch, Ragged
from hybridflow.config.schema import AlgorithmConfig, McoreConfig, ModelConfig, OptimConfig
from hybridflow.loading import load
from hybridflow.telemetry.metrics import Metric
from hybridflow.transfer import transfer
from workers.trained import TrainedWorker


class CriticWorker(TrainedWorker):
    """One rank of the value model: the policy's trunk with one output per token, on a Megatron engine."""

    head = "value"

    @transfer("ONE_TO_ALL")
    def setup(
        self,
        model_path: str,
        model: ModelConfig,
        mcore: McoreConfig,
        optim: OptimConfig,
        algorithm: AlgorithmConfig,
        seed: int,
    ) -> None:
        """Build the engine on the trunk of ``model_path``; its value head starts at zero unless the folder has one."""
        self.build(model_path, model, mcore, optim, algorithm, seed=seed)

    @transfer("ONE_TO_ALL")
    def load_weights(self, folder: str) -> None:
        """Take other weights, before training."""
        self.engine.load(folder)

    @transfer("3D_PROTO", reads=("prompt_tokens", "response_tokens"), writes=("values",))
    def compute_values(self, batch: Batch) -> Batch | None:
        """The value of the state before each response token."""
        values = self.engine.values(batch)
        if values is None:
            return None
        return Batch.of(batch.sample_ids, values=Ragged(values, batch.ragged("response_tokens").offsets))

    @transfer("3D_PROTO", reads=("prompt_tokens", "response_tokens", "values", "returns"))
    def update(self, batch: Batch) -> dict[str, Metric]:
        """Train on a step's samples: an optimizer step per mini-batch, ``ppo_epochs`` times over."""
        return self.train(batch, load("hybridflow.algorithms.losses:value_loss"))
