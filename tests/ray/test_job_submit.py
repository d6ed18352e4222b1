"""The demo through Ray's job server, as on KubeRay: two raylets, a head without CPUs, the driver on the head."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster
from ray.job_submission import JobStatus, JobSubmissionClient

from jobs.models import tiny

pytestmark = pytest.mark.ray
HOME = Path(__file__).resolve().parents[2]
SECONDS = 240


@pytest.fixture
def job_server(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": True})
    # A folder of its own, as on a machine of its own: the raylets would delete each other's working_dir.
    cluster.add_node(num_cpus=2, resources={"hf_device": 4.0}, temp_dir=str(tmp_path_factory.mktemp("ray")))
    yield f"http://{cluster.head_node.address_info['webui_url']}"
    cluster.shutdown()


def test_the_demo_runs_as_a_submitted_job(job_server, tmp_path):
    model = tiny(tmp_path / "model")
    client = JobSubmissionClient(job_server)
    job = client.submit_job(
        entrypoint=f"python -m jobs.ppo --config-name demo model.path={model} log_dir={tmp_path}/runs exp_name=job "
        "training.total_steps=2 training.log_interval=1 warmup.steps=2",
        runtime_env={"working_dir": str(HOME), "excludes": ["/tests/", "/docs/"]},
    )
    end = time.monotonic() + SECONDS
    while client.get_job_status(job) not in (JobStatus.SUCCEEDED, JobStatus.FAILED) and time.monotonic() < end:
        time.sleep(0.5)
    logs = client.get_job_logs(job)
    assert client.get_job_status(job) is JobStatus.SUCCEEDED, logs[-4000:]
    assert "step 2/2 | reward" in logs
    assert [line for line in logs.splitlines() if line.startswith("Step ")][-1].startswith("Step 2/2 completed. Avg ")
    assert "\x1b[2K" not in logs, "a job's log must be free of a live panel"
    assert (tmp_path / "runs" / "job" / "report.html").exists()
