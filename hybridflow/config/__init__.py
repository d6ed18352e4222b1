"""The config of a run: its schema, how it is composed from files and overrides, checked and resolved.

``schema`` needs the standard library alone, so that workers can hold a config; what reads and checks one (Hydra,
pydantic) is loaded when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridflow.loading import load

if TYPE_CHECKING:
    from hybridflow.config.loader import LoadedConfig as LoadedConfig
    from hybridflow.config.loader import code_digest as code_digest
    from hybridflow.config.loader import config_digest as config_digest
    from hybridflow.config.loader import load_config as load_config
    from hybridflow.config.resolution import resolve as resolve
    from hybridflow.config.show import explain as explain

_HOMES = {
    "LoadedConfig": "loader",
    "code_digest": "loader",
    "config_digest": "loader",
    "load_config": "loader",
    "resolve": "resolution",
    "explain": "show",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load(f"{__name__}.{_HOMES[name]}:{name}")
