"""From a command line to an exit code: load the config, run the algorithm, end in a success line or one boxed error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray

from hybridflow.config import LoadedConfig, load_config
from hybridflow.errors import HybridFlowError
from hybridflow.run import Run
from hybridflow.telemetry.console import print_failure
from jobs.pools import WORKERS, device_count, plan_of
from placement.device import DeviceKind
from placement.plan import PlacementPlan

Train = Callable[[Run], None]
INTERRUPTED = 130


def run_job(train: Train, argv: Sequence[str]) -> int:
    """Run ``train`` as the command line says. Every problem of the config is said before Ray is started.

    Returns:
        0, or the exit code of what went wrong: 2 config and data, 3 resources, 4 a worker, 5 numerics, 130 interrupted.
    """
    try:
        loaded = load_config(argv)
    except HybridFlowError as error:
        print_failure(error)
        return error.exit_code
    if loaded.print_config:
        print(loaded.print_config, end="")
        return 0
    run = Run(loaded.config, WORKERS, lambda kind: _place(loaded, kind), _card(loaded))
    try:
        with run:
            train(run)
            run.succeed()
        return 0
    except BaseException as error:
        return run.fail(error)


def _place(loaded: LoadedConfig, kind: DeviceKind) -> PlacementPlan:
    devices = device_count(loaded.config, kind, ray.cluster_resources())
    return plan_of(loaded.config, kind, devices)


def _card(loaded: LoadedConfig) -> dict[str, Any]:
    config = loaded.config
    return {
        "config": loaded.source,
        "model": f"{config.model.path} ({config.model.dtype})",
        "algorithm": f"{config.algorithm.name} ({config.algorithm.adv_estimator})",
        "data": str(config.data.train),
        "adjustments": [str(adjustment) for adjustment in loaded.adjustments],
        "resolved": loaded.resolved_yaml,
    }
