from collections.abc import Iterator
from pathlib import Path

import pytest

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
