"""Weights between real pools: a Megatron actor of TP 2 with LoRA, and two vLLM replicas that take adapters.

Every layout into every layout is compared bitwise in ``tests/contract/test_vllm.py``; here the way through the pools.
"""

from __future__ import annotations

import pytest

from hybridflow.batch.plan import Planner
from hybridflow.config.schema import (
    AlgorithmConfig,
    McoreConfig,
    ModelConfig,
    OptimConfig,
    ReshardingConfig,
    RolloutConfig,
)
from hybridflow.errors import NumericsError
from hybridflow.start import Pools
from placement.device import CPU
from placement.layout import Layout
from placement.plan import RoleDemand, make_plan
from tests.data.models import tiny_model
from workers.resharding.link import Resharding

pytestmark = [pytest.mark.ray, pytest.mark.engine]
ROLES = {
    "source": "tests.ray.roles:Source",
    "mismatch": "tests.ray.mismatch_role:Mismatch",
    "actor": "workers.actor:ActorWorker",
    "rollout": "workers.rollout:RolloutWorker",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def pools(ray_session, folder):
    demands = [
        RoleDemand("source", "cpu"),
        RoleDemand("mismatch", "cpu"),
        RoleDemand("actor", "megatron", Layout(tp=2), (0, 1)),
        RoleDemand("rollout", "vllm", Layout(dp=2), (2, 3)),
    ]
    made = Pools(make_plan(demands, CPU), ROLES, run_dir=str(folder))
    path = str(tiny_model(folder / "model", "qwen3"))
    model = ModelConfig(path=path, dtype="float32", lora_rank=4, lora_alpha=8)
    mcore = McoreConfig(tensor_model_parallel_size=2)
    calls = [
        made["rollout"].setup(model, RolloutConfig(max_response_length=8, max_num_seqs=32), seed=0, max_model_len=32),
        made["actor"].setup(path, model, mcore, OptimConfig(lr=0.05), AlgorithmConfig(), 1.0, 0),
    ]
    for call in calls:
        call.result()
    yield made
    made.close()


def step(pools, link: Resharding, version: int) -> tuple[float, object]:
    """Send, generate, score; the largest difference of rollout and trainer log-probs, and the generated batch."""
    link.send(version)
    batch = pools["source"].prompts(16)
    batch = batch.join(pools["rollout"].generate(batch, version=version)).with_plan(Planner(16, 4096, 16))
    batch = batch.join(pools["actor"].compute_log_probs(batch))
    difference, versions = pools["mismatch"].compare(batch).result()[0]
    assert versions == [version]
    return difference, batch


def link_of(pools, folder, protocol: str, *, adapter: bool) -> Resharding:
    config = ReshardingConfig(protocol=protocol)
    return Resharding(pools["actor"], pools["rollout"], config, dtype="float32", run_dir=str(folder), adapter=adapter)


@pytest.mark.parametrize("protocol", ["auto", "object_store", "checkpoint"])
def test_merged_weights_by_each_protocol_after_each_update(pools, folder, protocol):
    link = link_of(pools, folder, protocol, adapter=False)
    assert link.protocol == ("shared_memory" if protocol == "auto" else protocol)
    for version in (0, 1):
        difference, batch = step(pools, link, version)
        assert difference < 1e-4
        pools["actor"].update_supervised(batch, lr=0.05).result()
    assert step(pools, link, 2)[0] < 1e-4
    prompts = pools["source"].prompts(16)
    with pytest.raises(NumericsError, match="holds policy version 2, the step expects 3"):
        pools["rollout"].generate(prompts, version=3).call.result()


def test_adapters_after_the_base(pools, folder):
    link = link_of(pools, folder, "auto", adapter=True)
    for version in (3, 4, 5):
        difference, batch = step(pools, link, version)
        assert difference < 1e-4
        pools["actor"].update_supervised(batch, lr=0.05).result()
    base = link._published
    link.send(6).result()
    assert link._published is base, "the base weights travel once"
