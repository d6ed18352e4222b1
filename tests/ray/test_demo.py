"""The demo, whole: it learns, the driver stays light, the export is right; and resumed as a submitted job it goes on
bit for bit, on a cluster of two raylets whose head has no CPUs."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jobs.models import tiny
from tests.ray.runs import HOME, SUCCESS, Finished, read_metrics, segments, train

pytestmark = [pytest.mark.ray, pytest.mark.engine]
SAVED, LAST = 78, 80


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def demo(model, tmp_path_factory) -> Finished:
    before = segments()
    folder = tmp_path_factory.mktemp("runs") / "demo"
    done = train(folder, "--config-name", "demo", f"model.path={model}", f"checkpoint.save_interval={SAVED}")
    assert done.code == 0, done.stderr[-4000:]
    assert segments() == before, "the run left shared memory behind"
    return done


def test_it_learns_from_the_reward(demo):
    metrics = demo.metrics()
    first, last = metrics[0]["eval/reward_mean"], metrics[LAST]["eval/reward_mean"]
    assert last >= first + 0.5 and last > 0.88, (first, last)


def test_the_success_line_is_the_last_one(demo):
    assert SUCCESS.fullmatch(demo.lines[-1]) and demo.lines[-1].startswith(f"Step {LAST}/{LAST} ")


def test_every_step_says_how_far_the_two_engines_are_apart(demo):
    metrics = demo.metrics()
    assert all(metrics[step]["mismatch/abs_log_prob"] < 1e-4 for step in range(1, LAST + 1))
    assert all(metrics[step]["policy/version"] == step for step in range(1, LAST + 1))


def test_the_driver_holds_neither_engine(demo):
    assert not {"vllm", "megatron", "torch", "transformers"} & demo.packages
    assert "ray" in demo.packages


def test_five_worker_processes_at_most(demo):
    plan = json.loads((demo.folder / "plan.json").read_text())
    assert plan["processes"] <= 5
    assert {row["role"] for row in plan["roles"]} == {"actor", "critic", "reference", "rollout", "reward", "data"}


def test_the_run_folder_is_complete(demo):
    names = {path.name for path in demo.folder.iterdir()}
    wanted = {
        "config.resolved.yaml",
        "environment.json",
        "plan.json",
        "metrics.jsonl",
        "samples.jsonl",
        "timeline.json",
    }
    assert wanted | {"report.html", "tensorboard", "checkpoints", "model"} <= names
    assert not list(demo.folder.rglob(".writing*")) and not (demo.folder / "run.lock").exists()
    page = (demo.folder / "report.html").read_text()
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="?http', page), "the page needs the network"
    samples = [json.loads(line) for line in (demo.folder / "samples.jsonl").read_text().splitlines()]
    held_out = [s for s in samples if s["held_out"]]
    assert held_out and not {s["prompt"] for s in held_out} & {s["prompt"] for s in samples if not s["held_out"]}


def test_the_exported_policy_answers_like_the_trained_one(demo):
    """Loaded by transformers, it sorts: greedy answers on held-out prompts score as the run's evaluation did."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = AutoModelForCausalLM.from_pretrained(demo.folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo.folder / "model")
    samples = [json.loads(line) for line in (demo.folder / "samples.jsonl").read_text().splitlines()]
    prompts = [s["prompt"] for s in samples if s["held_out"] and s["step"] == LAST]
    right = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        answer = policy.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]
        gold = sorted(prompt.replace("=", "").split())
        words = tokenizer.decode(answer, skip_special_tokens=True).split()
        right.append(sum(a == b for a, b in zip(words, gold, strict=False)) / max(len(words), len(gold)))
    assert len(prompts) >= 16 and np.mean(right) > 0.85


@pytest.fixture(scope="module")
def job_server(tmp_path_factory):
    from ray.cluster_utils import Cluster

    old = {name: os.environ.get(name) for name in ("RAY_worker_niceness", "PATH")}
    os.environ |= {"RAY_worker_niceness": "0", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": True})
    # A folder of its own, as on a machine of its own: the raylets would delete each other's working_dir.
    cluster.add_node(num_cpus=2, resources={"hf_device": 4.0}, temp_dir=str(tmp_path_factory.mktemp("ray")))
    yield f"http://{cluster.head_node.address_info['webui_url']}"
    cluster.shutdown()
    for name, value in old.items():
        os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def submit(client, **job) -> str:
    """Submit, once the head's agent is up (the server answers before it is)."""
    for _ in range(60):
        try:
            return client.submit_job(**job)
        except RuntimeError as error:
            if "No available agent" not in str(error):
                raise
            time.sleep(1.0)
    raise TimeoutError("no agent came up in a minute")


def test_resumed_as_a_submitted_job_it_goes_on_bit_for_bit(demo, model, job_server, tmp_path):
    """The job starts from the checkpoint of step 78 and gives the losses of the run that never stopped."""
    from ray.job_submission import JobStatus, JobSubmissionClient

    folder = tmp_path / "runs" / "resumed"
    shutil.copytree(demo.folder, folder, ignore=shutil.ignore_patterns(f"step_{LAST:06d}", "tensorboard", "model"))
    client = JobSubmissionClient(job_server)
    job = submit(
        client,
        entrypoint=f"python -m jobs.ppo --config-name demo model.path={model} log_dir={folder.parent} "
        f"exp_name=resumed training.log_interval=1 checkpoint.save_interval={SAVED}",
        runtime_env={"working_dir": str(HOME), "excludes": ["/tests/", "/docs/", "/runs/"]},
    )
    ended = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)
    end = time.monotonic() + 240
    while client.get_job_status(job) not in ended and time.monotonic() < end:
        time.sleep(0.5)
    logs = client.get_job_logs(job)
    assert client.get_job_status(job) is JobStatus.SUCCEEDED, logs[-4000:]
    assert f"after step {SAVED}" in logs and "\x1b[2K" not in logs
    assert any(line.startswith(f"Step {LAST}/{LAST} completed. Avg reward: ") for line in logs.splitlines())
    once, twice = demo.metrics(), read_metrics(folder)
    compared = ("loss/policy", "loss/value", "kl/actor_reference", "reward/mean", "grad_norm/actor", "grad_norm/critic")
    for step in range(SAVED + 1, LAST + 1):
        assert {name: once[step][name] for name in compared} == {name: twice[step][name] for name in compared}
    assert once[LAST]["eval/reward_mean"] == twice[LAST]["eval/reward_mean"]
