"""Whole runs that take longer: other seeds, the control, other layouts and replicas, LoRA, a real model."""

from __future__ import annotations

import math

import pytest

from jobs.models import smollm, tiny
from tests.ray.runs import SUCCESS, Finished, train

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.engine]

# A reward function that knows the right scores, and gives them to the wrong samples.
PERMUTED = """
import random
from hybridflow.data.tasks import SortTask
from workers.rewards.functions import batched

@batched
def permuted(prompt, response, answer):
    scores = [SortTask().reward(*row) for row in zip(response, answer)]
    random.Random(len(scores)).shuffle(scores)
    return scores
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("models") / "tiny")


def demo(folder, model, *arguments) -> Finished:
    done = train(folder, "--config-name", "demo", f"model.path={model}", *arguments)
    assert done.code == 0, done.stderr[-4000:]
    assert SUCCESS.fullmatch(done.lines[-1])
    return done


@pytest.mark.parametrize("seed", [1, 2])
def test_the_demo_learns_with_other_seeds(model, tmp_path, seed):
    metrics = demo(tmp_path / "run", model, f"seed={seed}").metrics()
    first, last = metrics[0]["eval/reward_mean"], metrics[80]["eval/reward_mean"]
    assert last >= first + 0.5 and last > 0.88, (first, last)


def test_with_permuted_rewards_nothing_is_learned(model, tmp_path):
    """The control: the same run, each response scored by another one's merit."""
    (tmp_path / "permuted.py").write_text(PERMUTED)
    done = demo(
        tmp_path / "run", model, f"reward_model.function={tmp_path}/permuted.py:permuted", "training.total_steps=40"
    )
    metrics = done.metrics()
    assert abs(metrics[40]["eval/reward_mean"] - metrics[0]["eval/reward_mean"]) < 0.1
    assert metrics[40]["loss/policy"] != metrics[1]["loss/policy"], "the policy did move"


SHORT = ("training.total_steps=3", "warmup.steps=10", "data.train_batch_size=64", "training.ppo_mini_batch_size=32")
ONE_SET = ("device_map.actor=null", "device_map.critic=null", "device_map.reference=null", "device_map.rollout=null")
LAYOUTS = {
    "TP 2, engine TP 2, colocated": (
        *ONE_SET, "launcher.devices=2",
        "mcore_config.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size=2",
    ),
    "PP 2, two replicas, colocated": (*ONE_SET, "launcher.devices=2", "mcore_config.pipeline_model_parallel_size=2"),
    "DP 2, engine TP 2 apart": (
        "device_map.actor=cuda:0-1", "device_map.critic=cuda:0-1", "device_map.reference=cuda:0-1",
        "device_map.rollout=cuda:2-3", "rollout.tensor_model_parallel_size=2",
    ),
    "TP 2 by object store, two replicas apart": (
        "device_map.actor=cuda:0-1", "device_map.critic=cuda:0-1", "device_map.reference=cuda:0-1",
        "device_map.rollout=cuda:2-3", "mcore_config.tensor_model_parallel_size=2", "resharding.protocol=object_store",
    ),
    "not fused, checkpoint protocol": (*ONE_SET, "launcher.devices=1", "fuse=false", "resharding.protocol=checkpoint"),
}  # fmt: skip


@pytest.fixture(scope="module")
def apart(model, tmp_path_factory):
    """Each role on a device of its own: what the layouts below must equal."""
    return demo(tmp_path_factory.mktemp("runs") / "apart", model, *SHORT).metrics()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_no_number(model, tmp_path, apart, layout):
    metrics = demo(tmp_path / "run", model, *SHORT, *LAYOUTS[layout]).metrics()
    for step in range(1, 4):
        assert metrics[step]["mismatch/abs_log_prob"] < 1e-4
        for name in ("reward/mean", "kl/actor_reference", "loss/policy", "loss/value", "response/length_mean"):
            assert math.isclose(metrics[step][name], apart[step][name], rel_tol=1e-3, abs_tol=1e-4), (step, name)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("way", ["adapter", "merged"])
def test_lora_reaches_the_engine(model, tmp_path, way, tp):
    arguments = (*SHORT, *ONE_SET, f"launcher.devices={tp}", f"mcore_config.tensor_model_parallel_size={tp}")
    arguments += (
        "model.lora_rank=8",
        "model.lora_alpha=16",
        f"rollout.lora={way}",
        "actor.optim.lr=1e-2",
        "warmup.steps=0",
    )
    metrics = demo(tmp_path / "run", model, *arguments).metrics()
    assert all(metrics[step]["mismatch/abs_log_prob"] < 1e-4 for step in range(1, 4))
    assert metrics[3]["kl/actor_reference"] != 0.0, "the adapters moved, and the engine with them"


def test_the_reference_is_the_folder_it_is_given(model, tmp_path):
    """With LoRA it may share the actor's engine, but not once the warm-up has moved the actor to other weights."""
    arguments = (*SHORT, *ONE_SET, "launcher.devices=1", "model.lora_rank=8", "training.total_steps=1")
    metrics = demo(tmp_path / "run", model, *arguments, f"reference.path={model}").metrics()
    shared = demo(tmp_path / "shared", model, *arguments).metrics()
    assert abs(shared[1]["kl/actor_reference"]) < 1e-6, "the reference is the warmed policy: no distance yet"
    assert metrics[1]["kl/actor_reference"] > 1e-3, "the reference is the policy before the warm-up"


def test_a_real_model_on_a_reasoning_task(tmp_path):
    done = train(
        tmp_path / "run", "--config-name", "demo_smollm", f"model.path={smollm(tmp_path / 'smollm')}", seconds=900
    )
    assert done.code == 0, done.stderr[-4000:]
    assert SUCCESS.fullmatch(done.lines[-1])
    metrics = done.metrics()
    assert all(metrics[step]["mismatch/abs_log_prob"] < 0.05 for step in range(1, 4))
    assert metrics[1]["reward/mean"] > 0.0, "it solves some of the sums from the start"
