import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.data.models import tiny_model
from tests.numerics.harness import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Four ranks for all tests of the session; they start with the first case."""
    made = World()
    yield made
    made.close()


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untied Llama in fp32, whose vocabulary of 97 TP 2 must pad."""
    return tiny_model(tmp_path_factory.mktemp("models") / "llama", vocab_size=97)


@pytest.fixture(scope="session")
def critic(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same trunk with a value head that is not zero (a zero one would send no gradient into the trunk)."""
    folder = tmp_path_factory.mktemp("models") / "critic"
    shutil.copytree(llama, folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    tensors["value_head.weight"] = torch.randn(tensors["lm_head.weight"][:1].shape, generator=generator) * 0.1
    tensors["value_head.bias"] = torch.full((1,), 0.3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
