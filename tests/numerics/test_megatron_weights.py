"""Hugging Face folders in and out: bitwise, whatever the model and the layout."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hybridflow.errors import ConfigError
from placement.layout import Layout
from tests.data.models import tiny_model
from tests.numerics import megatron_cases as cases
from tests.numerics.harness import World
from tests.numerics.hugging_face import HuggingFace, random_batch
from tests.numerics.megatron_cases import Setup

pytestmark = pytest.mark.engine

BATCH = random_batch(rows=6)
KINDS = ("llama", "qwen2", "qwen3")


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_weights(ours: Path, theirs: Path) -> None:
    left, right = stored(ours), stored(theirs)
    assert left.keys() == right.keys()
    assert [name for name in right if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(world: World, tmp_path: Path, kind: str, tied: bool, layout: Layout) -> None:
    source = tiny_model(tmp_path / "source", kind, tied=tied, vocab_size=97, max_shard_size="60KB")
    assert (source / "model.safetensors.index.json").is_file()
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_text("old weights, not to be copied")
    results = world.run(cases.export_and_score, layout, Setup(source, optim=None), tmp_path / "out", BATCH)
    assert_same_weights(tmp_path / "out", source)
    with torch.no_grad():
        theirs = HuggingFace(tmp_path / "out").outputs(BATCH)
    np.testing.assert_allclose(results[-1][0], theirs["log_probs"], atol=2e-5, rtol=1e-5)
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= files
    assert "pytorch_model.bin" not in files
    assert sorted(tmp_path.iterdir()) == [tmp_path / "out", source]


def test_mistral_and_llama3_rotary_embeddings(world: World, tmp_path: Path) -> None:
    """Long-wave, short-wave and interpolated frequencies all occur at these sizes."""
    rope = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    for kind, options in (
        ("mistral", {}),
        ("llama", {"rope_parameters": rope}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    ):
        source = tiny_model(
            tmp_path / str(len(options) + len(kind) + len(str(options))), kind, vocab_size=97, **options
        )
        ((ours, _),) = world.run(cases.export_and_score, Layout(), Setup(source, optim=None), tmp_path / "out", BATCH)
        with torch.no_grad():
            theirs = HuggingFace(source).outputs(BATCH)
        np.testing.assert_allclose(ours, theirs["log_probs"], atol=2e-5, rtol=1e-5)


def test_bfloat16_round_trip_over_four_ranks(world: World, tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "source", dtype="bfloat16", vocab_size=97)
    world.run(cases.export, Layout(tp=2, dp=2), Setup(source, dtype="bfloat16"), tmp_path / "out")
    assert_same_weights(tmp_path / "out", source)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def test_a_critic_keeps_its_value_head(world: World, critic: Path, llama: Path, tmp_path: Path) -> None:
    setup = Setup(critic, head="value")
    world.run(cases.export, Layout(tp=2, pp=2), setup, tmp_path / "out")
    theirs = stored(critic)
    del theirs["lm_head.weight"]
    ours = stored(tmp_path / "out")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    world.run(cases.export, Layout(), Setup(llama, head="value"), tmp_path / "fresh")
    assert not stored(tmp_path / "fresh")["value_head.weight"].any()


def test_an_export_replaces_the_folder_it_came_from(world: World, tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "source")
    before = stored(source)
    world.run(cases.export, Layout(), Setup(source), source)
    assert all(torch.equal(tensor, before[name]) for name, tensor in stored(source).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loaded_weights_reach_the_optimizer(world: World, llama: Path, tmp_path: Path, dtype: str) -> None:
    """An engine that took other weights is the engine that was built on them, main weights included."""
    other = tiny_model(tmp_path / "other", vocab_size=97, seed=5)
    ((scored, weights),) = world.run(cases.load_another, Layout(), Setup(llama, dtype=dtype), other, BATCH)
    ((same_scored, same_weights),) = world.run(cases.load_another, Layout(), Setup(other, dtype=dtype), other, BATCH)
    np.testing.assert_array_equal(scored[0], same_scored[0])
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)


def test_weights_of_another_model_are_refused(world: World, llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    for key, value, told in (("num_hidden_layers", 3, "model.layers.2."), ("hidden_size", 256, "has shape")):
        folder = tmp_path / key
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        (folder / "model.safetensors").symlink_to(llama / "model.safetensors")
        with pytest.raises(ConfigError, match=told):
            world.run(cases.fail_to_build, Layout(), Setup(folder))
