"""The tutorial's command, word for word but for the model's folder, to its success line on this machine."""

from __future__ import annotations

import pytest

from jobs.models import tiny
from tests.ray.runs import SUCCESS, segments, train

pytestmark = [pytest.mark.ray, pytest.mark.engine]


def test_the_tutorials_command_runs_to_its_success_line(tmp_path):
    model = tiny(tmp_path / "model")
    before = segments()
    done = train(
        tmp_path / "ppo_7b_mcore",
        "--config-name", "ppo_7b_mcore", 'hydra.launcher=basic', f"model.path={model}",
        "training.total_steps=10", "training.ppo_mini_batch_size=32",
        "mcore_config.tensor_model_parallel_size=1", "rollout.tensor_model_parallel_size=1", "--verbose",
    )  # fmt: skip
    assert done.code == 0, done.stderr[-4000:]
    text = "\n".join(done.lines)
    assert SUCCESS.fullmatch(done.lines[-1]) and done.lines[-1].startswith("Step 10/10 completed. Avg reward: ")
    assert "HybridEngine initialized with TP=1, SP=False" in done.lines
    for adjusted in (
        "sequence_parallel",
        "fsdp",
        "fsdp_use_orig_params",
        "use_flash_attn",
        "reward_model",
        "data.train",
    ):
        assert f"{adjusted}: " in text, f"no line says what became of {adjusted}"
    # bfloat16 on both sides: the engines differ by rounding of their own kernels, not more
    assert all(step["mismatch/abs_log_prob"] < 0.05 for number, step in done.metrics().items() if 0 < number <= 10)
    assert done.metrics()[1]["loss/policy"] != done.metrics()[10]["loss/policy"]
    assert segments() == before
