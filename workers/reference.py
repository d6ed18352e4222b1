"""The reference role: the frozen policy that the KL penalty is measured against."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hybridflow.batch.batch import Batch, Ragged
from hybridflow.config.schema import McoreConfig, ModelConfig
from hybridflow.loading import load
from hybridflow.transfer import transfer
from hybridflow.worker import Worker


class ReferenceWorker(Worker):
    """One rank of the reference. With LoRA, in the actor's process, it is the actor's engine without its adapters."""

    engine: Any = None

    @transfer("ONE_TO_ALL")
    def setup(self, model_path: str, model: ModelConfig, mcore: McoreConfig, temperature: float) -> None:
        """Build a frozen engine with the weights of ``model_path``, or share the actor's (which is set up before)."""
        self._settings = (model, mcore, temperature)
        self.load_weights(model_path)

    @transfer("ONE_TO_ALL")
    def load_weights(self, folder: str) -> None:
        """Take other weights."""
        model, mcore, temperature = self._settings
        if self._shares_actor(folder):
            self.engine = None
        elif self.engine is not None:
            self.engine.load(folder)
        else:
            self.engine = load("workers.megatron.engine:MegatronEngine")(
                self.context,
                head="policy",
                model=dataclasses.replace(model, path=folder),
                mcore=mcore,
                optim=None,
                temperature=temperature,
            )

    def _shares_actor(self, folder: str) -> bool:
        actor = getattr(self.context.peers.get("actor"), "engine", None)
        return actor is not None and actor.lora is not None and actor.folder == Path(folder)

    @transfer("3D_PROTO", reads=("prompt_tokens", "response_tokens"), writes=("reference_log_probs",))
    def compute_log_probs(self, batch: Batch) -> Batch | None:
        """Log-prob of each response token under the reference."""
        engine = self.engine or self.context.peers["actor"].engine  # type: ignore[attr-defined]
        scored = engine.log_probs(batch, adapters=False)
        if scored is None:
            return None
        log_probs = Ragged(scored[0], batch.ragged("response_tokens").offsets)
        return Batch.of(batch.sample_ids, reference_log_probs=log_probs)
