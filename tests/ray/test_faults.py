"""Real runs that are struck: each ends in one message with the right exit code, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from jobs.models import tiny
from tests.ray.runs import SUCCESS, Finished, Running, segments, train
from workers.resharding.segments import sweep

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.engine]
SMALL = ("data.train_batch_size=32", "training.ppo_mini_batch_size=16", "training.log_interval=1", "warmup.steps=0")
ENDLESS = (*SMALL, "training.total_steps=5000", "data.validation_size=0")
REWARDS = """
def some(prompt, response):
    kind = sum(map(ord, prompt)) % 16
    if kind == 0:
        raise KeyError("missing")
    return float("inf") if kind == 1 else 0.5

def none(response):
    raise ValueError("my own bug")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return f"model.path={tiny(tmp_path_factory.mktemp('models') / 'tiny')}"


@pytest.fixture(scope="module")
def rewards(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture
def started(model, tmp_path):
    """Starts runs; kills what a failed test leaves."""
    runs: list[Running] = []

    def start(*arguments: str, **more) -> Running:
        runs.append(Running(tmp_path / "run", "--config-name", "demo", model, *arguments, **more))
        return runs[-1]

    yield start
    for run in runs:
        for pid in run.processes():
            os.kill(pid, signal.SIGKILL)


def box(done: Finished) -> str:
    """The one message of a failed run, its lines joined."""
    lines = [line for line in done.stderr.splitlines() if "pid=" not in line]
    boxes = sum(line.startswith("+-") for line in lines) // 2
    assert boxes == 1 and "Traceback" not in "\n".join(lines), done.stderr[-4000:]
    return " ".join(line.strip("| ") for line in lines if line.startswith("| "))


def test_a_killed_worker_ends_the_run(started):
    run = started(*ENDLESS)
    run.wait_for("step +2/")
    worker = next(pid for pid, name in run.processes().items() if re.match("ray::(WorkerProcess|actor|rollout)", name))
    os.kill(worker, signal.SIGKILL)
    done = run.finish(40)
    assert done.code == 4
    assert re.search(r"process died during \w+: .* where: \w+ rank 0 \(dp=0 tp=0 pp=0\) on \w+", box(done)), box(done)
    assert not run.left_behind()


def test_a_signal_saves_and_the_same_command_resumes(started):
    run = started(*ENDLESS)
    run.wait_for("step +2/")
    second = started(*ENDLESS).finish(40)
    assert second.code == 3 and f"(process {run.process.pid} on " in box(second)
    run.process.send_signal(signal.SIGTERM)
    done = run.finish(40)
    assert done.code == 130
    step = int(re.search(r"stopped after step (\d+); the checkpoint is", box(done))[1])
    assert not run.left_behind()

    again = started(*ENDLESS)
    again.wait_for(f"step +{step + 1}/")
    again.process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    again.process.send_signal(signal.SIGINT)
    done = again.finish(40)
    assert done.code == 130, done.stderr[-3000:]
    assert not again.left_behind()


def test_a_signal_in_the_last_step_loses_nothing(started):
    """There is nothing left to go on with: the run ends well, and its model is there."""
    run = started(*SMALL, "training.total_steps=2", "data.validation_size=4096")
    run.wait_for("step +2/2")  # the evaluation that follows takes a second or two
    run.process.send_signal(signal.SIGTERM)
    done = run.finish(60)
    assert done.code == 0 and SUCCESS.fullmatch(done.lines[-1]), done.stderr[-3000:]
    assert any(line.startswith("SIGTERM: finishing this step") for line in done.lines)
    assert (done.folder / "model" / "config.json").exists()
    assert not run.left_behind()


def test_a_killed_driver_takes_its_workers_along(started):
    run = started(*ENDLESS)
    run.wait_for("step +2/")
    run.process.kill()
    run.finish()
    workers = [name for name in run.left_behind() if name.startswith(("ray::Worker", "python"))]
    assert not workers
    sweep()
    pids = {name.split("-")[1] for name in segments()}
    assert all(Path("/proc", pid).exists() for pid in pids), "the next start sweeps what nobody owns any more"


def test_a_reward_function_that_always_fails(model, rewards, tmp_path):
    done = train(tmp_path / "run", "--config-name", "demo", model, *SMALL, f"reward_model.function={rewards}:none")
    assert done.code == 4
    told = box(done)
    assert "gave no score for" in told and "raised: ValueError: my own bug" in told and "reward_model.max_fail" in told


def test_a_few_failures_and_an_unreachable_tracker_end_nothing(model, rewards, tmp_path):
    arguments = (f"reward_model.function={rewards}:some", "reward_model.max_failure_fraction=0.5", "wandb.mode=online")
    run = Running(
        tmp_path / "run", "--config-name", "demo", model, *SMALL, "training.total_steps=2", *arguments,
        WANDB_API_KEY="", HOME=str(tmp_path), WANDB_BASE_URL="http://127.0.0.1:9",
    )  # fmt: skip
    done = run.finish(180)
    assert done.code == 0, done.stderr[-3000:]
    assert SUCCESS.fullmatch(done.lines[-1])
    metrics = done.metrics()
    failures = [metrics[step]["reward/failures"] for step in (1, 2)]
    causes = [metrics[s].get(f"reward/failures_{c}", 0) for s in (1, 2) for c in ("raised", "not_finite")]
    assert sum(failures) > 0 and sum(failures) == sum(causes)
    assert all(metrics[step]["reward/mean"] == 0.5 for step in (1, 2)), "a failure is never scored 0"
    assert not run.left_behind()


def test_numbers_that_are_not_finite(model, tmp_path):
    arguments = ("training.total_steps=4", "actor.optim.lr=1e30")
    done = train(tmp_path / "run", "--config-name", "demo", model, *SMALL, *arguments)
    assert done.code == 5, done.stderr[-3000:]
    assert re.search(r"mini-batch \d+", box(done)), box(done)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk(started, tmp_path):
    disk = tmp_path / "run"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no right to mount")
    try:
        run = started(*ENDLESS)
        run.wait_for("step +2/")
        with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        done = run.finish(60)
        assert done.code == 3
        assert "No space left on device" in box(done) and str(disk) in box(done)
        assert not [name for name in run.left_behind() if name != "run.lock"]
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_more_devices_than_the_cluster_has(started, tmp_path):
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "resources": {"hf_device": 1.0}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        run = started("launcher.wait_seconds=3", RAY_ADDRESS=cluster.address)
        done = run.finish(60)
        assert done.code == 3
        told = r"asks for .*4 hf_device, the cluster lacks 3 hf_device .*nodes: .*has 2 CPU, 1 hf_device"
        assert re.search(told, box(done)), box(done)
        assert not run.left_behind()
    finally:
        cluster.shutdown()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
