"""The examples of CONTRIBUTING.md run as they stand there."""

import re
from pathlib import Path

import numpy as np
import pytest

from hybridflow.algorithms.advantages import ADVANTAGE_ESTIMATORS, compute
from hybridflow.batch.batch import Batch
from hybridflow.config.schema import AlgorithmConfig
from hybridflow.transfer import PROTOCOLS, get_protocol
from placement.layout import Layout
from workers.resharding import protocol

TEXT = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
ESTIMATOR, TRANSFER, RESHARDING = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(autouse=True)
def clean_registries():
    """Whatever an example registers is gone afterwards."""
    registries = (ADVANTAGE_ESTIMATORS._entries, PROTOCOLS, protocol._PROTOCOLS)
    before = [dict(registry) for registry in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


def test_advantage_estimator():
    exec(ESTIMATOR, {})
    tokens = [[1], [2, 2], [3], [4, 4, 4], [5]]
    batch = Batch.of(
        range(5),
        group_id=[7, 9, 7, 9, 7],  # groups by id: rows of one prompt need not be neighbours
        response_tokens=tokens,
        log_probs=[[0.0] * len(row) for row in tokens],
        reward=np.array([1, 0, 4, 2, 1], np.float32),
    )
    result, _ = compute(batch, AlgorithmConfig(adv_estimator="leave_one_out", whiten_advantages=False), kl_coef=0.0)
    first_tokens = [float(result.ragged("advantages")[row][0]) for row in range(5)]
    assert first_tokens == [1 - 2.5, 0 - 2, 4 - 1, 2 - 0, 1 - 2.5]


def test_transfer_protocol():
    scope: dict = {}
    exec(TRANSFER, scope)
    assert get_protocol("LAST_STAGE").collected(Layout(tp=2, pp=2)) == [2, 3]
    assert scope["MyWorker"].gradient_norm.transfer.protocol == "LAST_STAGE"


def test_resharding_protocol():
    exec(RESHARDING, {})
    assert protocol.choose_resharding("mine", one_host=True) == "mine"
