"""A whole PPO step of the system equals plain single-process PyTorch, in fp32, for every layout of two ranks."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from hybridflow.algorithms import advantages
from hybridflow.batch.batch import Batch, Ragged
from hybridflow.batch.plan import Planner
from hybridflow.config.schema import AlgorithmConfig, KLControlConfig, OptimConfig
from hybridflow.telemetry.metrics import merge
from placement.layout import Layout
from tests.data.models import tiny_model
from tests.numerics.hugging_face import distance, random_batch
from tests.numerics.megatron_cases import Setup
from tests.numerics.plain_ppo import ppo_step
from tests.numerics.ppo_cases import scores, update

LAYOUTS = [Layout(), Layout(tp=2), Layout(pp=2), Layout(dp=2)]
OPTIMIZERS = {
    "sgd": OptimConfig(name="sgd", lr=0.05, weight_decay=0.0, grad_clip=1.0),
    "adam, eps 1e-3": OptimConfig(lr=1e-3, weight_decay=0.01, betas=(0.9, 0.95), eps=1e-3, grad_clip=1.0),
    "adam": OptimConfig(lr=1e-4, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8, grad_clip=1.0),
}
KL_COEF = 0.1
CONFIG = AlgorithmConfig(
    gamma=0.98, lam=0.9, clip_ratio=0.1, dual_clip=1.5, value_clip=0.1, entropy_coef=0.01, ppo_epochs=2,
    kl_ctrl=KLControlConfig(type="fixed", kl_coef=KL_COEF),
)  # fmt: skip
PLANNER = Planner(mini_batch_size=5, max_tokens=60, max_sequences=3, seed=3)
REWARDS = np.random.default_rng(5).standard_normal(10).astype(np.float32)
BATCH = random_batch(rows=10, vocabulary=97, seed=4)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "reference", vocab_size=97, seed=9)


@pytest.fixture(scope="module")
def plain(llama, reference):
    lengths = BATCH.ragged("prompt_tokens").lengths, BATCH.ragged("response_tokens").lengths
    rows = PLANNER.plan(*lengths, 1).rows[0]
    mini_batches = [rows[:5], rows[5:]]

    @functools.cache
    def step(optimizer: str):
        return ppo_step(llama, reference, BATCH, REWARDS, mini_batches, CONFIG, OPTIMIZERS[optimizer], KL_COEF)

    return step


@pytest.fixture(scope="module")
def scored(world, llama, reference):
    """The batch with all columns of the step, computed by the engines of a layout."""

    @functools.cache
    def make(layout: Layout) -> Batch:
        policy, frozen = Setup(llama), Setup(reference)
        ranks = [r for r in world.run(scores, layout, policy, frozen, BATCH, PLANNER) if r is not None]
        offsets = BATCH.ragged("response_tokens").offsets
        columns = {name: np.full(offsets[-1], np.nan, np.float32) for name in ("log_probs", "reference", "values")}
        for rows, *flat in ranks:
            tokens = np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in rows])
            for name, values in zip(columns, flat, strict=True):
                columns[name][tokens] = values
        ragged = {name: Ragged(values, offsets) for name, values in columns.items()}
        batch = BATCH.select(np.arange(len(BATCH)), ["prompt_tokens", "response_tokens"]).with_columns(
            reward=REWARDS,
            log_probs=ragged["log_probs"],
            reference_log_probs=ragged["reference"],
            values=ragged["values"],
        )
        return batch.join(advantages.compute(batch, CONFIG, KL_COEF)[0])

    return make


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_scores_and_advantages(scored, plain, layout):
    batch, expected = scored(layout), plain("sgd")
    for name in ("log_probs", "reference_log_probs", "values", "advantages", "returns"):
        ours, theirs = batch.ragged(name).values, getattr(expected, name)
        assert np.linalg.norm(ours - theirs) <= 1e-5 * max(np.linalg.norm(theirs), 1.0), name
    assert np.linalg.norm(batch.ragged("advantages").values) > 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("head", ["policy", "value"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_losses_gradients_and_updated_weights(world, llama, scored, plain, layout, head, optimizer):
    expected = plain(optimizer)
    setup = dataclasses.replace(Setup(llama), head=head, optim=OPTIMIZERS[optimizer])
    ranks = world.run(update, layout, setup, scored(layout), PLANNER, CONFIG)
    loss = merge(part for rank in ranks for part in rank["first"] if part)[f"loss/{head}"].value
    assert abs(loss - expected.losses[head]) <= 1e-5 * max(1.0, abs(expected.losses[head]))
    assert distance(ranks[0]["gradients"], expected.gradients[head]) <= 1e-5
    before = _initial(llama, head)
    moved = sum((expected.weights[head][n] - before[n]).double().square().sum() for n in before).sqrt()
    off = sum((expected.weights[head][n] - ranks[0]["weights"][n]).double().square().sum() for n in before).sqrt()
    norm = sum(t.double().square().sum() for t in expected.weights[head].values()).sqrt()
    if optimizer == "adam":  # its first step turns rounding into sign noise where a gradient is near zero
        assert off <= 1e-2 * moved
    else:
        assert off <= 1e-5 * norm and off <= 1e-3 * moved


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_first_mini_batch_has_ratio_one_exactly(world, llama, scored, layout):
    """Trap 10: the same cuts and kernels before and during the update, so not one bit differs."""
    ranks = world.run(update, layout, Setup(llama), scored(layout), PLANNER, CONFIG)
    first = merge(part for rank in ranks for part in rank["first"] if part)
    assert first["policy/ratio_max"].value == first["policy/ratio_min"].value == 1.0
    assert first["policy/clip_fraction"].value == 0.0 and first["policy/approx_kl"].value == 0.0


def _initial(folder, head):
    from tests.numerics.hugging_face import HuggingFace

    return {name: tensor.detach().clone() for name, tensor in HuggingFace(folder, head=head).parameters().items()}
