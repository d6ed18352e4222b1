"""Checkpoints of a run: written aside, committed by a rename with a manifest, pruned to the last k.

``checkpoints/step_000100/`` holds ``actor/`` and ``critic/`` (Megatron distributed checkpoints), ``driver.json`` (what
the driver must know to go on) and ``manifest.json``. What was never committed counts for nothing, and is swept away
when the run ends, or at the next save. The folder must be visible to all nodes of the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError, ResourceError

FORMAT_VERSION = 1
_HASHED_BYTES = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint. ``state`` is what the driver saved."""

    folder: Path
    step: int
    state: dict[str, Any]


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: where they lie; made at the first save.
        keep_last_k: how many stay.
    """

    def __init__(self, folder: Path, keep_last_k: int):
        self.folder, self.keep_last_k = folder, keep_last_k

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of ``step`` into. It counts for nothing until ``commit``."""
        self.sweep()
        aside = self.folder / f".writing_step_{step:06d}"
        try:
            aside.mkdir(parents=True)
        except OSError as error:
            raise _no_room(self.folder, error) from error
        return aside

    def sweep(self) -> None:
        """Remove what was begun and never committed."""
        for leftover in self.folder.glob(".writing_step_*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def commit(self, aside: Path, step: int, state: Mapping[str, Any]) -> Path:
        """Make the checkpoint count: state and manifest first, then one rename; then drop the oldest."""
        final = self.folder / f"step_{step:06d}"
        try:
            _write_json(aside / "driver.json", dict(state))
            manifest = {"format_version": FORMAT_VERSION, "step": step, "files": _digests(aside)}
            _write_json(aside / "manifest.json", manifest)
            shutil.rmtree(final, ignore_errors=True)
            os.rename(aside, final)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise _no_room(self.folder, error) from error
        for old in self._committed()[: -self.keep_last_k or None]:
            if old != final:
                shutil.rmtree(old)
        return final

    def latest(self) -> Checkpoint | None:
        """The newest committed checkpoint, checked against its manifest; None if there is none.

        Raises:
            ConfigError: the newest one is damaged (a file missing, of another size or content) or of another format.
        """
        committed = self._committed()
        if not committed:
            return None
        folder = committed[-1]
        manifest = _read_manifest(folder)
        if manifest["format_version"] != FORMAT_VERSION:
            raise ConfigError(
                f"checkpoint format {manifest['format_version']} is not the one this version reads ({FORMAT_VERSION})",
                hint="use the version that wrote it, or another exp_name",
                where=str(folder),
            )
        found = _digests(folder)
        damaged = [name for name, digest in manifest["files"].items() if found.get(name) != digest]
        if damaged:
            raise ConfigError(
                f"{len(damaged)} file(s) are missing or changed since the checkpoint was written: {damaged[:3]}",
                hint="delete this checkpoint's folder to continue from the one before it",
                where=str(folder),
            )
        return Checkpoint(folder, manifest["step"], json.loads((folder / "driver.json").read_text()))

    def _committed(self) -> list[Path]:
        found = (manifest.parent for manifest in self.folder.glob("step_*/manifest.json"))
        return sorted(found, key=lambda folder: int(folder.name.removeprefix("step_")))


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "manifest.json").read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"manifest.json cannot be read: {error}",
            hint="delete this checkpoint's folder to continue from the one before it",
            where=str(folder),
        ) from error


def _write_json(path: Path, value: Any) -> None:
    with path.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _digests(folder: Path) -> dict[str, list[Any]]:
    """Size and a digest of the first and last MiB of each file: cheap on terabytes, and finds what cut writes leave."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.name == "manifest.json":
            continue
        size = path.stat().st_size
        with path.open("rb") as file:
            content = hashlib.blake2b(file.read(_HASHED_BYTES), digest_size=16)
            if size > _HASHED_BYTES:
                file.seek(max(_HASHED_BYTES, size - _HASHED_BYTES))
                content.update(file.read())
        digests[str(path.relative_to(folder))] = [size, content.hexdigest()]
    return digests


def _no_room(folder: Path, error: OSError) -> ResourceError:
    return ResourceError(
        f"cannot write a checkpoint: {error.strerror or error}",
        hint="make room, lower checkpoint.keep_last_k, or set log_dir to another disk; earlier checkpoints are whole",
        where=str(folder),
    )
