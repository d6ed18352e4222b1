"""The run's folder: found free, or with a checkpoint to go on from; held by one process at a time."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridflow.checkpoint import Checkpoint, CheckpointStore
from hybridflow.config.schema import Config
from hybridflow.errors import ConfigError, ResourceError

# What may differ between a checkpoint and the run that goes on from it.
_FREE_TO_CHANGE = ("exp_name", "log_dir", "training", "checkpoint", "wandb", "tensorboard", "launcher", "device_map")


class RunFolder:
    """``<log_dir>/<exp_name>``, locked. Use as a context manager.

    With ``checkpoint.resume: auto`` a folder whose run has a checkpoint and steps left is continued (``checkpoint`` is
    set); one whose run ended, or never saved, stays as it is and the next free name (``-2``, ``-3``, ...) is taken.
    With ``off`` a folder that holds a run is an error.

    Args:
        config: of the run.
        identity: what must equal the checkpoint's (``comparable`` of the config as the user wrote it: what resolving
            makes of it may depend on the machine); None takes it from ``config``.

    Raises:
        ResourceError: another run is using the folder, or it cannot be written.
        ConfigError: the checkpoint is of a different config, or damaged.
    """

    def __init__(self, config: Config, identity: Mapping[str, Any] | None = None):
        self.config = config
        self.identity = comparable(config) if identity is None else identity
        first = Path(config.log_dir).expanduser().resolve() / config.exp_name
        self.path, self.checkpoint = self._choose(first)
        self.store = CheckpointStore(self.path / "checkpoints", config.checkpoint.keep_last_k)
        self._lock: Any = None

    def __enter__(self) -> RunFolder:
        self._lock = _lock(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        self.store.sweep()
        (self.path / "run.lock").unlink(missing_ok=True)  # while it is held: nobody can have locked this file since
        self._lock.close()

    def _choose(self, first: Path) -> tuple[Path, Checkpoint | None]:
        number, path = 1, first
        while _holds_a_run(path):
            _check_unlocked(path)
            if self.config.checkpoint.resume == "off":
                raise ConfigError(
                    "the folder already holds a run",
                    hint="choose another exp_name, or checkpoint.resume=auto to continue it",
                    where=str(path),
                )
            checkpoint = CheckpointStore(path / "checkpoints", 1).latest()
            total = self.config.training.total_steps
            if checkpoint and (total is None or checkpoint.step < total):
                self._check_same(checkpoint)
                return path, checkpoint
            number += 1
            path = first.with_name(f"{first.name}-{number}")
        _check_unlocked(path)
        return path, None

    def _check_same(self, checkpoint: Checkpoint) -> None:
        saved, mine = checkpoint.state["config"], self.identity
        changed = [f"{k}: {saved.get(k)!r} -> {mine.get(k)!r}" for k in mine if saved.get(k) != mine[k]]
        if changed:
            raise ConfigError(
                f"the checkpoint of step {checkpoint.step} was written by another config: {'; '.join(changed[:5])}",
                hint="choose another exp_name for the changed run, or put these keys back",
                where=str(checkpoint.folder),
            )


def _holds_a_run(path: Path) -> bool:
    """Whether something was recorded there (a start that failed leaves an empty file)."""
    metrics = path / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def comparable(config: Config) -> dict[str, Any]:
    """The keys that must not change when a run is resumed, flat: ``{"actor.optim.lr": 1e-6, ...}``."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, entry in value.items():
                walk(f"{prefix}.{key}" if prefix else key, entry)
        else:
            flat[prefix] = list(value) if isinstance(value, tuple) else value

    walk("", {k: v for k, v in asdict(config).items() if k not in _FREE_TO_CHANGE})
    flat["training.ppo_mini_batch_size"] = config.training.ppo_mini_batch_size
    return flat


def _lock(path: Path) -> Any:
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = (path / "run.lock").open("a+")
    except OSError as error:
        raise ResourceError(
            f"cannot write the run folder: {error.strerror}", hint="choose another log_dir", where=str(path)
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _in_use(path) from error
    if not _is_at(path / "run.lock", file):  # its holder ended between our open and our lock, and took it away
        file.close()
        return _lock(path)
    file.truncate(0)
    file.write(f"{os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def _is_at(path: Path, file: Any) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _check_unlocked(path: Path) -> None:
    if (path / "run.lock").exists():
        _lock(path).close()


def _in_use(path: Path) -> ResourceError:
    holder = (path / "run.lock").read_text() or "unknown"
    return ResourceError(
        f"another run (process {holder}) is using this folder",
        hint="wait for it, stop it, or choose another exp_name",
        where=str(path),
    )
