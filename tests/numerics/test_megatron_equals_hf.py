"""Layouts are equivalence classes: whatever TP, PP, DP or packing, the engine computes what the HF model computes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hybridflow.batch.plan import Planner
from placement.layout import Layout
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


@pytest.fixture(scope="module")
def reference(llama: Path) -> dict:
    """Gradients and norm, and weights after one step, of the plain model: by head and optimizer."""
    found = {}
    for head in ("policy", "value"):
        for optim in (SGD, ADAM):
            model = HuggingFace(llama, head)
            parameters = model.parameters().values()
            if optim is SGD:
                optimizer = torch.optim.SGD(parameters, lr=optim.lr)
            else:
                optimizer = torch.optim.AdamW(
                    parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=0.0
                )
            gradients, norm = model.train(BATCH, cases.PROBES[head], optimizer)
            weights = {name: parameter.detach().clone() for name, parameter in model.parameters().items()}
            found[head, optim.name] = (gradients, norm, weights)
    return found


@pytest.mark.parametrize("optim", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("head", ["policy", "value"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step(world: World, llama: Path, reference: dict, name: str, head: str, optim) -> None:
    layout, sequence_parallel = LAYOUTS[name]
    if optim is ADAM and name == "TP2xPP2 SP":
        pytest.skip("covered with sgd")
    setup = Setup(llama, head=head, optim=optim, sequence_parallel=sequence_parallel)
    results = world.run(cases.train, layout, setup, BATCH)
    gradients, norm, weights = reference[head, optim.name]
    assert distance(results[0]["gradients"], gradients) < 1e-5
    assert distance(results[0]["weights"], weights) < 1e-5
    for rank, result in enumerate(results):
        assert result["norm"] == pytest.approx(norm, rel=1e-5), f"rank {rank} sees another norm"
        if layout.coord(rank).pp == layout.pp - 1:
            assert result["metrics"]["grad_norm/actor"].value == pytest.approx(norm, rel=1e-5)
        else:
            assert result["metrics"] == {}


def test_no_cut_into_micro_batches_changes_the_gradient(world: World, llama: Path, reference: dict) -> None:
    gradients, _, _ = reference["policy", "sgd"]
    for sequences, seed in ((1, None), (4, 3), (1000, 5)):
        planner = Planner(mini_batch_size=1000, max_tokens=1000, max_sequences=sequences, seed=seed)
        (result,) = world.run(cases.train, Layout(), Setup(llama), BATCH, planner)
        assert distance(result["gradients"], gradients) < 1e-5
