"""Updates: what one step means, what is reported, what is refused, and what a checkpoint brings back."""

import dataclasses
from pathlib import Path

import pytest
import torch

from hybridflow.batch.plan import Planner
from hybridflow.errors import ConfigError
from placement.layout import Layout
from tests.data.models import tiny_model
from tests.numerics import megatron_cases as cases
from tests.numerics.harness import World
from tests.numerics.hugging_face import HuggingFace, distance, random_batch
from tests.numerics.megatron_cases import ADAM, SGD, Setup

pytestmark = pytest.mark.engine

BATCH = random_batch()
TWO_STEPS = Planner(mini_batch_size=5, max_tokens=40, max_sequences=2, seed=3)


@pytest.mark.parametrize(
    ("layout", "setup"),
    [
        (Layout(), {}),
        (Layout(tp=2), {"sequence_parallel": True, "recompute": True}),
        (Layout(pp=2), {"dtype": "bfloat16"}),
    ],
    ids=["TP1", "TP2 SP recompute", "PP2 bf16"],
)
def test_the_first_ratio_is_exactly_1(world: World, llama: Path, layout: Layout, setup: dict) -> None:
    same = world.run(cases.first_ratio, layout, Setup(llama, **setup), BATCH, TWO_STEPS)[-1]
    assert len(same) > 1
    assert all(same)


def test_steps_and_metrics(world: World, llama: Path) -> None:
    ((metrics, calls),) = world.run(cases.several_steps, Layout(), Setup(llama), BATCH, TWO_STEPS)
    tokens = len(BATCH.ragged("response_tokens").values)
    assert sum(calls) == 2 * tokens
    assert metrics["loss/policy"].count == 2 * tokens
    assert metrics["loss/policy"].value == 1.0
    assert metrics["lr/actor"].value == 0.25
    assert metrics["grad_norm/actor"].count == 4
    assert metrics.keys() == {"loss/policy", "lr/actor", "grad_norm/actor"}


def test_a_rank_without_rows_takes_part(world: World, llama: Path) -> None:
    lonely = BATCH.select([0])
    gradients, _ = HuggingFace(llama).train(lonely, cases.policy_probe)
    results = world.run(cases.train, Layout(pp=2, dp=2), Setup(llama), lonely)
    assert distance(results[0]["gradients"], gradients) < 1e-5


def test_a_gradient_that_is_not_finite_stops_before_the_step(world: World, llama: Path) -> None:
    for layout in (Layout(), Layout(tp=2)):
        for told in world.run(cases.not_finite, layout, Setup(llama), BATCH, TWO_STEPS):
            assert "mini-batch 2 of 2, epoch 1 of 1" in told
            assert "nan" in told


def test_padding_of_the_vocabulary_has_no_probability(world: World) -> None:
    """Five words over four ranks: the last rank holds padding only."""
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(6, 8, generator=generator) * 4, torch.tensor([0, 1, 2, 3, 4, 4])
    real = logits[:, :5].clone().requires_grad_()
    every = (real / 0.5).log_softmax(-1)
    log_probs, entropy = every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
    (log_probs.sum() + 2.0 * entropy.sum()).backward()
    results = world.run(cases.vocabulary_shares, Layout(tp=4), logits, targets, 5)
    for ours, other, _ in results:
        torch.testing.assert_close(ours, log_probs.detach())
        torch.testing.assert_close(other, entropy.detach())
    gradient = torch.cat([share for _, _, share in results], dim=-1)
    torch.testing.assert_close(gradient[:, :5], real.grad)
    assert not gradient[:, 5:].any()


def test_roles_of_one_process_share_one_layout(world: World, llama: Path) -> None:
    with pytest.raises(ConfigError, match="already runs with tp 2"):
        world.run(cases.two_roles, Layout(tp=2), Setup(llama), Layout(pp=2))


@pytest.mark.parametrize(
    ("layout", "setup", "steps"),
    [
        (Layout(), {"optim": ADAM}, 2),
        (Layout(), {"optim": ADAM}, 0),
        (Layout(), {"optim": SGD, "head": "value"}, 1),
        (Layout(tp=2, dp=2), {"optim": ADAM, "dtype": "bfloat16", "sequence_parallel": True}, 1),
        (Layout(tp=2, pp=2), {"optim": ADAM, "sequence_parallel": True, "lora_rank": 4}, 2),
        (Layout(pp=2), {"optim": ADAM, "tied": True}, 2),
    ],
    ids=["adam", "before the first step", "sgd, value head", "TP2 DP2 bf16", "TP2 PP2 LoRA", "PP2 tied"],
)
def test_a_restored_run_goes_on_bit_for_bit(
    world: World, llama: Path, critic: Path, tmp_path: Path, layout: Layout, setup: dict, steps: int
) -> None:
    folder = critic if setup.get("head") == "value" else llama
    if setup.pop("tied", False):
        folder = tiny_model(tmp_path / "tied", tied=True)
    made = Setup(folder, **setup)
    went_on = world.run(cases.save_and_go_on, layout, made, BATCH, tmp_path / "checkpoint", steps)
    other = dataclasses.replace(made, folder=folder)
    restored = world.run(cases.restore_and_go_on, layout, other, BATCH, tmp_path / "checkpoint")
    for (ours, _), (theirs, _) in zip(restored, went_on, strict=True):
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_a_checkpoint_of_another_layout(world: World, llama: Path, tmp_path: Path) -> None:
    setup = Setup(llama, optim=ADAM)
    went_on = world.run(cases.save_and_go_on, Layout(tp=2), setup, BATCH, tmp_path / "checkpoint", 2)
    restored = world.run(cases.restore_and_go_on, Layout(pp=2), setup, BATCH, tmp_path / "checkpoint")
    assert distance(restored[0][1], went_on[0][1]) < 1e-5
