"""From a command line to an exit code: load the config, run the algorithm, end in a success line or one boxed error."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ray

from hybridflow.config import LoadedConfig, load_config
from hybridflow.config.schema import Config
from hybridflow.data.sources import check_source
from hybridflow.errors import HybridFlowError
from hybridflow.run import Placed, Run
from hybridflow.telemetry.console import print_failure
from jobs.pools import WORKERS, device_count, plan_of
from placement.device import DeviceKind
from workers.resharding.segments import sweep

Train = Callable[[Run], None]


def run_job(train: Train, argv: Sequence[str]) -> int:
    """Run ``train`` as the command line says. Problems of the config and of the data's form are said before
    Ray is started.

    Returns:
        0, or the exit code of what went wrong: 2 config and data, 3 resources, 4 a worker, 5 numerics, 130 interrupted.
    """
    try:
        loaded = load_config(argv)
        _check_sources(loaded.config)
    except HybridFlowError as error:
        print_failure(error)
        return error.exit_code
    if loaded.print_config:
        print(loaded.print_config, end="")
        return 0
    options = {"written": loaded.written, "verbose": loaded.verbose}
    run = Run(loaded.config, WORKERS, lambda kind: _place(loaded, kind), **options)
    try:
        with run:
            train(run)
            run.succeed()
        return 0
    except BaseException as error:  # noqa: BLE001 - the end of the line: told in a box, and in the exit code
        return run.fail(error)
    finally:
        sweep()  # shared weights of a worker that was killed; on other hosts their next start does it


def _check_sources(config: Config) -> None:
    """Open every source of data that the run will read, and no more: what is wrong with its form is said at once."""
    check_source(config.data.train, config.data)
    others = {
        "data.validation": config.data.validation,
        "warmup.data": config.warmup.data if config.warmup.steps else None,
    }
    for key, source in others.items():
        if source:
            check_source(source, config.data, key)


def _place(loaded: LoadedConfig, kind: DeviceKind) -> Placed:
    """The config and the plan for the cluster that the driver has reached."""
    loaded = loaded.on(device_count(loaded.config, kind, ray.cluster_resources()), kind.name)
    config = loaded.config
    devices = device_count(config, kind, ray.cluster_resources())
    card = {
        "config": loaded.source,
        "model": f"{config.model.path} ({config.model.dtype})",
        "algorithm": f"{config.algorithm.name}, advantages by {config.algorithm.adv_estimator}",
        "data": ", ".join([config.data.train] if isinstance(config.data.train, str) else config.data.train or ()),
        "adjustments": [str(adjustment) for adjustment in loaded.adjustments],
    }
    return Placed(config, plan_of(config, kind, devices), card, loaded.resolved_yaml)
