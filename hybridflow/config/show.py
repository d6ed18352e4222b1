"""Shows a config to a reader: as YAML with the origin of each value, or a key with its meaning."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from hybridflow.config import schema
from hybridflow.config.draft import Adjustment
from hybridflow.config.ranges import get
from hybridflow.config.schema import Config
from hybridflow.config.validate import leaf_paths, sections
from hybridflow.errors import ConfigError

_COMMENT_COLUMN = 56


def config_yaml(name: str, config: Config, sources: Mapping[str, str], adjustments: Iterable[Adjustment]) -> str:
    """A resolved config as YAML; a comment on each line says where the value came from, and what changed it."""
    notes: dict[str, list[str]] = {}
    for adjustment in adjustments:
        notes.setdefault(adjustment.key, []).append(adjustment.text)
    lines = [f"# config {name}, resolved"]

    def write(text: str, comments: list[str]) -> None:
        lines.append(f"{text:<{_COMMENT_COLUMN}}  # {'; '.join(comments)}" if comments else text)

    def walk(prefix: str, indent: str, block: dict[str, Any]) -> None:
        for key, value in block.items():
            path = f"{prefix}{key}"
            if isinstance(value, dict):
                write(f"{indent}{key}:", notes.get(path, []))
                walk(f"{path}.", f"{indent}  ", value)
            else:
                write(f"{indent}{key}: {_inline(value)}", [sources.get(path, "default"), *notes.get(path, [])])

    walk("", "", dataclasses.asdict(config))
    return "\n".join(lines) + "\n"


def explain(key: str) -> str:
    """A key's meaning, type and default; for a block, one line for each of its keys.

    Raises:
        ConfigError: there is no such key.
    """
    path = tuple(part for part in key.split(".") if part)
    if path in leaf_paths():
        cls = sections()[path[:-1]]
        default = _inline(get(Config(), key))
        kind = cls.__annotations__[path[-1]]
        return f"{key}: {kind} = {default}\n    {_docs(cls)[path[-1]]}"
    if path not in sections():
        known = [".".join(known) for known in (*leaf_paths(), *sections()) if known]
        near = difflib.get_close_matches(key, known, n=1)
        raise ConfigError(
            f"there is no key {key!r}", hint=f"did you mean {near[0]}?" if near else "`hybridflow config` lists all"
        )
    below = [leaf for leaf in leaf_paths() if leaf[: len(path)] == path]
    return "\n".join(explain(".".join(leaf)) for leaf in below)


def _inline(value: Any) -> str:
    """A value on one line, as YAML reads it back."""
    plain = list(value) if isinstance(value, tuple) else value
    text = str(yaml.safe_dump(plain, default_flow_style=True, width=10**6)).strip()
    return text.removesuffix("\n...").removesuffix("...").strip()


@functools.cache
def _docs(cls: type) -> dict[str, str]:
    """The docstring below each field of a section (Python itself does not keep them)."""
    tree = ast.parse(inspect.getsource(schema))
    block = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    docs: dict[str, str] = {}
    for node, following in zip(block.body, block.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(following, ast.Expr):
            docs[node.target.id] = " ".join(str(ast.literal_eval(following.value)).split())
    return docs
