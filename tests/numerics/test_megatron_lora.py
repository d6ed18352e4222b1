"""LoRA: the same adapters on every layout, and merged weights that compute what the adapters do."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hybridflow.errors import ConfigError
from placement.layout import Layout
from tests.numerics import megatron_cases as cases
from tests.numerics.harness import World
from tests.numerics.hugging_face import HuggingFace, distance, random_batch
from tests.numerics.megatron_cases import Setup

pytestmark = pytest.mark.engine

BATCH = random_batch()
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def flat(adapters: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{kind}": matrix for name, pair in adapters.items() for kind, matrix in zip("AB", pair, strict=True)
    }


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def plain(world: World, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Three updates on one rank."""
    folder = tmp_path_factory.mktemp("lora") / "merged"
    setup = Setup(llama, lora_rank=4, targets=EVERY)
    (result,) = world.run(cases.train_lora, Layout(), setup, BATCH, folder)
    return result | {"folder": folder}


@pytest.mark.parametrize(
    ("layout", "sequence_parallel", "recompute"),
    [
        (Layout(tp=2), False, False),
        (Layout(tp=2), True, False),
        (Layout(pp=2), False, True),
        (Layout(tp=2, dp=2), True, True),
    ],
    ids=["TP2", "TP2 SP", "PP2 recompute", "TP2 DP2 SP recompute"],
)
def test_every_layout_trains_the_same_adapters(
    world: World, llama: Path, plain: dict, tmp_path: Path, layout: Layout, sequence_parallel: bool, recompute: bool
) -> None:
    setup = Setup(llama, lora_rank=4, targets=EVERY, sequence_parallel=sequence_parallel, recompute=recompute)
    results = world.run(cases.train_lora, layout, setup, BATCH, tmp_path / "merged")
    ours, theirs = flat(results[0]["adapters"]), flat(plain["adapters"])
    assert distance(ours, theirs) < 1e-5
    assert results[-1]["norm"].value == pytest.approx(plain["norm"].value, rel=1e-5)
    assert distance(stored(tmp_path / "merged"), stored(plain["folder"])) < 1e-5
    assert all(result["adapters"] == {} for result in results[1:])


def test_only_adapters_are_trained(plain: dict) -> None:
    assert plain["trained"]
    assert all(".lora_A." in name or ".lora_B." in name for name in plain["trained"])
    assert len(plain["adapters"]) == 2 * len(EVERY)
    assert all(a.shape[0] == 4 == b.shape[1] and b.any() for a, b in plain["adapters"].values())


def test_adapters_start_as_the_base_and_can_be_switched_off(plain: dict, llama: Path) -> None:
    with torch.no_grad():
        base = HuggingFace(llama).outputs(BATCH)["log_probs"]
    np.testing.assert_allclose(plain["before"][0], base, atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(plain["before"][0], plain["disabled"][0])
    assert np.abs(plain["after"][0] - plain["before"][0]).max() > 1e-3


def test_merged_weights_are_the_adapters(plain: dict, llama: Path) -> None:
    """W + alpha / rank B A, module by module, as PEFT merges; and the engine computes the same."""
    base, merged = load_file(llama / "model.safetensors"), load_file(plain["folder"] / "model.safetensors")
    assert merged.keys() == base.keys()
    for name in base:
        module = name.removesuffix(".weight")
        expected = base[name]
        if module in plain["adapters"]:
            a, b = plain["adapters"][module]
            expected = expected + 2.0 * b @ a
            assert not torch.equal(merged[name], base[name])
        torch.testing.assert_close(merged[name], expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        theirs = HuggingFace(plain["folder"]).outputs(BATCH)["log_probs"]
    np.testing.assert_allclose(plain["after"][0], theirs, atol=1e-5, rtol=1e-5)


def test_a_part_of_the_fused_layer(world: World, llama: Path, tmp_path: Path) -> None:
    setup = Setup(llama, lora_rank=2, targets=("v_proj", "q_proj"))
    results = world.run(cases.train_lora, Layout(tp=2), setup, BATCH, tmp_path / "merged")
    assert {name.rpartition(".")[2] for name in results[0]["adapters"]} == {"q_proj", "v_proj"}
    base, merged = load_file(llama / "model.safetensors"), load_file(tmp_path / "merged/model.safetensors")
    changed = {name.split(".")[-2] for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {"q_proj", "v_proj"}


def test_unknown_targets_are_refused(world: World, llama: Path) -> None:
    with pytest.raises(ConfigError, match="'query_proj'.*\n.*q_proj, k_proj"):
        world.run(cases.fail_to_build, Layout(), Setup(llama, lora_rank=2, targets=("query_proj", "v_proj")))
