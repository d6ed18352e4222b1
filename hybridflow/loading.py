"""The one place where code is loaded by name: engines, CLI verbs and user code.

Keeps heavy packages (torch, megatron, vllm) out of processes that only need to name them.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridflow.errors import ConfigError

_OURS = (str(Path(__file__).resolve().parent), "<frozen")  # frames that tell the user nothing


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
            raise user_error(name, error) from error
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
            raise user_error(name, error) from error
    return sys.modules[key]


def check_defines(name: str) -> None:
    """Check ``"path/to/file.py:name"`` without running the file: it is there, it is Python, and it binds the name.

    Raises:
        ConfigError: one of these does not hold.
    """
    file, _, attribute = name.partition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"there is no file {file!r}", hint="give a path from the current folder")
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = f"{file}:{error.lineno}" if isinstance(error, SyntaxError) else file
        raise ConfigError(f"{line} is not valid Python: {getattr(error, 'msg', error)}") from error
    bound = {found for node in ast.walk(tree) for found in _bound_by(node)}
    if not {attribute, "*", "__getattr__"} & bound:  # with a star import only running it would tell
        near = get_close_matches(attribute, bound, n=1)
        hint = f"did you mean {file}:{near[0]}?" if near else f"it defines: {', '.join(sorted(bound)) or 'nothing'}"
        raise ConfigError(f"{file!r} has no {attribute!r}", hint=hint)


def _bound_by(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.alias(name=name, asname=other):
            yield (other or name).partition(".")[0]


def user_error(name: str, error: BaseException) -> ConfigError:
    """What to say when code that ``name`` brought in has raised: the error, and the line that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]
    line = f", at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return ConfigError(
        f"{name} raised {type(error).__name__}: {error}{line}",
        hint="run that code by itself to see the whole traceback",
    )
