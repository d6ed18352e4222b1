"""Actor, critic and reference as a pool calls them, several in one process."""

import json
from pathlib import Path

import numpy as np
import pytest

from placement.layout import Layout
from tests.data.models import tiny_model
from tests.numerics import megatron_cases as cases
from tests.numerics.harness import World
from tests.numerics.hugging_face import random_batch

pytestmark = pytest.mark.engine

BATCH = random_batch()


@pytest.mark.parametrize(
    ("layout", "lora_rank"),
    [(Layout(tp=2), 0), (Layout(tp=2), 4), (Layout(pp=2), 4)],
    ids=["TP2", "LoRA TP2", "LoRA PP2"],
)
def test_roles_of_one_process(world: World, tmp_path: Path, layout: Layout, lora_rank: int) -> None:
    one = tiny_model(tmp_path / "one", vocab_size=97)
    other = tiny_model(tmp_path / "other", vocab_size=97, seed=4)
    results = world.run(cases.roles_together, layout, one, other, lora_rank, BATCH)
    last = results[-1]
    losses = [metrics["loss/supervised"].value for metrics in last["warmed"]]
    assert losses == sorted(losses, reverse=True)
    assert last["warmed"][0]["lr/actor"].value == 0.05
    assert all(result["shared"] == (lora_rank > 0) for result in results)
    actor, reference, critic = last["scored"]
    np.testing.assert_array_equal(actor.ragged("log_probs").values, reference.ragged("reference_log_probs").values)
    np.testing.assert_array_equal(actor.sample_ids, BATCH.sample_ids)
    assert not critic.ragged("values").values.any()
    policy, value = last["updates"]
    assert policy["policy/ratio_max"].value == policy["policy/ratio_min"].value == 1.0
    assert policy["lr/actor"].value == cases.ADAM.lr
    assert {"grad_norm/critic", "lr/critic", "loss/value"} <= value.keys()
    moved, still = last["after"]
    np.testing.assert_array_equal(
        still.ragged("reference_log_probs").values, reference.ragged("reference_log_probs").values
    )
    assert np.abs(moved.ragged("log_probs").values - actor.ragged("log_probs").values).max() > 1e-5
    if layout.pp > 1:
        assert results[0]["scored"] == [None, None, None]
        assert results[0]["updates"] == [{}, {}]
    if lora_rank:
        folder = Path(results[0]["adapter"])
        assert [result["adapter"] for result in results[1:]] == [None]
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == lora_rank
    assert (tmp_path / "warmed/config.json").is_file()
