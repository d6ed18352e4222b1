"""One Ray on this machine for all the Ray tests of a session: starting one costs seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",
        num_cpus=2,
        resources={"hf_device": 8.0},
        include_dashboard=False,
        object_store_memory=256 * 2**20,
        logging_level="ERROR",
        namespace="hybridflow-tests",
    )
    yield
    ray.shutdown()
