"""The one place where code is loaded by name: engines, CLI verbs and user code.

Keeps heavy packages (torch, megatron, vllm) out of processes that only need to name them.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridflow.errors import ConfigError


def load(name: str) -> Any:
    """Load ``"package.module:attribute"``; a file path may stand for the module (``"my/rewards.py:score"``)."""
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(
            f"{name!r} does not name an attribute", hint='write "package.module:name" or "path/to/file.py:name"'
        )
    module = load_module(module_name)
    if not hasattr(module, attribute):
        public = [entry for entry in vars(module) if not entry.startswith("_")]
        raise ConfigError(f"{module_name!r} has no {attribute!r}", hint=f"it defines: {', '.join(public) or 'nothing'}")
    return getattr(module, attribute)


def load_module(name: str) -> ModuleType:
    """Import a module by dotted name, or a Python file by path (once per process and content of the path)."""
    if not name.endswith(".py"):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"cannot import {name!r}: {error}", hint="check the name and PYTHONPATH") from error
        except (Exception, SystemExit) as error:
            raise _raised(name, error) from error
    path = Path(name).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {name!r}", hint="give a path relative to the current folder")
    key = f"hybridflow_user_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[key] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[key]
            if isinstance(error, KeyboardInterrupt):
                raise
            raise _raised(name, error) from error
    return sys.modules[key]


def _raised(name: str, error: BaseException) -> ConfigError:
    """Code of the user's that fails while it is imported."""
    frames = traceback.extract_tb(error.__traceback__)
    line = f", at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return ConfigError(
        f"{name} raised {type(error).__name__}: {error}{line}",
        hint="import it by itself (python -c 'import ...', python FILE) to see the whole traceback",
    )
