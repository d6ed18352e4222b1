"""Layouts are equivalence classes: whatever TP, PP, DP or packing, the engine computes what the HF model computes."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridflow.batch.plan import Planner
from hybridflow.config.schema import OptimConfig
from placement.layout import Layout
from tests.data.models import tiny_model
from tests.numerics import megatron_cases as cases
from tests.numerics.harness import World
from tests.numerics.hugging_face import HuggingFace, distance, random_batch
from tests.numerics.megatron_cases import ADAM, SGD, Setup

pytestmark = pytest.mark.engine

LAYOUTS = {
    "TP1": (Layout(), False),
    "TP2": (Layout(tp=2), False),
    "TP2 SP": (Layout(tp=2), True),
    "PP2": (Layout(pp=2), False),
    "DP2": (Layout(dp=2), False),
    "TP2xPP2 SP": (Layout(tp=2, pp=2), True),
}
BATCH = random_batch()


def _ordered(results: list, count: int) -> np.ndarray:
    """Flat outputs of all DP ranks, put in the order of the batch's rows. Shape: (outputs, tokens)."""
    lengths = BATCH.ragged("response_tokens").lengths
    by_row: list[np.ndarray | None] = [None] * count
    for rows, flat in results:
        if flat is None:
            continue
        parts = np.split(np.atleast_2d(flat), np.cumsum(lengths[rows])[:-1], axis=1)
        for row, part in zip(rows, parts, strict=True):
            by_row[row] = part
    return np.concatenate(by_row, axis=1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_scores(world: World, llama: Path, name: str) -> None:
    layout, sequence_parallel = LAYOUTS[name]
    setup = Setup(llama, optim=None, temperature=0.7, sequence_parallel=sequence_parallel)
    results = world.run(cases.score, layout, setup, BATCH)
    last = [layout.coord(rank).pp == layout.pp - 1 for rank in range(layout.world_size)]
    assert [flat is not None for _, flat in results] == last
    ours = _ordered(results, len(BATCH))
    with torch.no_grad():
        theirs = HuggingFace(llama, temperature=0.7).outputs(BATCH)
    np.testing.assert_allclose(ours[0], theirs["log_probs"], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(ours[1], theirs["entropy"], atol=1e-5, rtol=1e-5)


@cache
def reference(folder: Path, head: str, name: str) -> tuple[dict, float, dict]:
    """Gradients, their norm, and the weights after one step, of the plain model."""
    model, optim = HuggingFace(folder, head), {"sgd": SGD, "adam": ADAM}[name]
    parameters = model.parameters().values()
    if name == "sgd":
        optimizer = torch.optim.SGD(parameters, lr=optim.lr)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=0.0)
    gradients, norm = model.train(BATCH, cases.PROBES[head], optimizer)
    return gradients, norm, {name: parameter.detach().clone() for name, parameter in model.parameters().items()}


STEPS = [(name, head, optim) for name in LAYOUTS for head in ("policy", "value") for optim in (SGD, ADAM)]


@pytest.mark.parametrize(
    ("name", "head", "optim"),
    [step for step in STEPS if step[0] != "TP2xPP2 SP" or step[2] is SGD],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_step(world: World, llama: Path, critic: Path, name: str, head: str, optim: OptimConfig) -> None:
    layout, sequence_parallel = LAYOUTS[name]
    folder = critic if head == "value" else llama
    setup = Setup(folder, head=head, optim=optim, sequence_parallel=sequence_parallel)
    results = world.run(cases.train, layout, setup, BATCH)
    gradients, norm, weights = reference(folder, head, optim.name)
    assert distance(results[0]["gradients"], gradients) < 1e-5
    assert distance(results[0]["weights"], weights) < 1e-5
    for rank, result in enumerate(results):
        assert result["norm"] == pytest.approx(norm, rel=1e-5), f"rank {rank} sees another norm"
        if layout.coord(rank).pp == layout.pp - 1:
            assert result["metrics"]["grad_norm/actor"].value == pytest.approx(norm, rel=1e-5)
        else:
            assert result["metrics"] == {}


def test_no_cut_into_micro_batches_changes_the_gradient(world: World, llama: Path) -> None:
    gradients, _, _ = reference(llama, "policy", "sgd")
    for sequences, seed in ((1, None), (4, 3), (1000, 5)):
        planner = Planner(mini_batch_size=1000, max_tokens=1000, max_sequences=sequences, seed=seed)
        (result,) = world.run(cases.train, Layout(), Setup(llama), BATCH, planner)
        assert distance(result["gradients"], gradients) < 1e-5


@pytest.mark.parametrize(
    ("kind", "tied", "name"),
    [("llama", True, "PP2"), ("llama", True, "TP2xPP2 SP"), ("qwen2", False, "TP2"), ("qwen3", True, "TP2 SP")],
)
def test_a_step_of_other_models(world: World, tmp_path: Path, kind: str, tied: bool, name: str) -> None:
    """Tied embeddings over two stages, biases of q/k/v, norms of q and k."""
    layout, sequence_parallel = LAYOUTS[name]
    folder = tiny_model(tmp_path / "model", kind, tied=tied, vocab_size=97)
    results = world.run(cases.train, layout, Setup(folder, sequence_parallel=sequence_parallel), BATCH)
    gradients, norm, weights = reference(folder, "policy", "sgd")
    assert distance(results[0]["gradients"], gradients) < 1e-5
    assert distance(results[0]["weights"], weights) < 1e-5
    assert results[-1]["norm"] == pytest.approx(norm, rel=1e-5)


def test_bfloat16_trains_close_to_float32(world: World, llama: Path) -> None:
    gradients, norm, _ = reference(llama, "policy", "sgd")
    results = world.run(cases.train, Layout(tp=2), Setup(llama, dtype="bfloat16", sequence_parallel=True), BATCH)
    assert results[0]["weights"]["lm_head.weight"].dtype == torch.bfloat16
    assert distance(results[0]["gradients"], gradients) < 3e-2
    assert results[0]["norm"] == pytest.approx(norm, rel=1e-2)


@pytest.mark.parametrize("name", ["TP1", "TP2 SP", "PP2"])
def test_recomputed_activations_change_nothing(world: World, llama: Path, name: str) -> None:
    layout, sequence_parallel = LAYOUTS[name]
    gradients, _, _ = reference(llama, "policy", "sgd")
    setup = Setup(llama, sequence_parallel=sequence_parallel, recompute=True)
    results = world.run(cases.train, layout, setup, BATCH)
    assert distance(results[0]["gradients"], gradients) < 1e-5
