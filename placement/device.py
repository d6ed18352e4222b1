"""The only file that knows CUDA from CPU: what a device is called, which Ray resource stands for it, how ranks talk.

On machines without a GPU a *logical device* stands in: a unit of the custom Ray resource ``hf_device`` (8 a node unless
the launcher says otherwise). Every program then runs unchanged, ``cuda:0`` naming logical device 0.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement.errors import ConfigError

LOGICAL_DEVICES_PER_NODE = 8
_FORMS = "write cuda:0, cuda:0-3 or a list of ids"


@dataclass(frozen=True)
class DeviceKind:
    """``name``: torch's device type; ``resource``: Ray's name for one device; ``backend``: of process groups;
    ``cpus``: what one worker process reserves (tiny on CPU, where logical devices share few cores)."""

    name: str
    resource: str
    backend: str
    cpus: float

    @property
    def in_process(self) -> str:
        """What a process calls its device: Ray shows it no other one (CUDA_VISIBLE_DEVICES)."""
        return "cuda:0" if self.name == "cuda" else self.name


CUDA = DeviceKind("cuda", "GPU", "nccl", 1.0)
CPU = DeviceKind("cpu", "hf_device", "gloo", 0.1)


def local_gpus() -> int:
    """GPUs of this machine that this process may use, counted without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(glob.glob("/dev/nvidia[0-9]*"))
    if visible is None:
        return present
    return min(present, len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")]))


def kind_of(resources: Mapping[str, float]) -> DeviceKind:
    """The kind of device of a cluster with these Ray resources: CUDA as soon as one GPU is there."""
    return CUDA if resources.get("GPU", 0) >= 1 else CPU


def parse_devices(value: int | str | Sequence[int | str], where: str) -> tuple[int, ...]:
    """Device ids from ``0``, ``"cuda:0"``, ``"cuda:0-3"``, ``"0,1"`` or a list of these; sorted, without repeats.

    Raises:
        ConfigError: an entry that is none of these, no entry at all, or a device named twice.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        ids = list(_parse_entry(str(value), where))
    elif isinstance(value, str):
        ids = [device for entry in value.split(",") for device in _parse_entry(entry.strip(), where)]
    elif isinstance(value, Sequence):
        ids = [device for entry in value for device in parse_devices(entry, where)]
    else:
        ids = []
    if not ids:
        raise ConfigError(f"{value!r} names no device", hint=_FORMS, where=where)
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{value!r} names a device twice", hint="name each device once", where=where)
    return tuple(sorted(ids))


def _parse_entry(entry: str, where: str) -> range:
    match = re.fullmatch(r"(?:(?:cuda|cpu|gpu):)?(\d+)(?:-(\d+))?", entry)
    if not match:
        raise ConfigError(f"{entry!r} names no device", hint=_FORMS, where=where)
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if last < first:
        raise ConfigError(f"{entry!r} counts downwards", hint=f"write {last}-{first}", where=where)
    return range(first, last + 1)
