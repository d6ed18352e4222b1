"""Reads YAML into a flat table of ``path -> value``, keeping the line of each key, and noticing keys given twice.

A dotted key is a path (``actor.optim:`` means the block ``optim`` in ``actor``), and old spellings of a block are
replaced here, so that giving a block under both names counts as giving it twice. Scalars follow YAML 1.2 where 1.1
surprises: ``1e-6`` is a number, ``off`` and ``2024-01-01`` are texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from hybridflow.config.problems import Problem

Path = tuple[str, ...]

ALIASES: dict[Path, Path] = {
    ("verl", "checkpoint"): ("checkpoint",),
    ("verl", "wandb"): ("wandb",),
    ("hydra", "launcher"): ("launcher",),
}


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """SafeLoader with the scalars of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own attribute, filled below


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9][0-9_]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?)", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), [c.strip("\0") for c in _first]
    )


@dataclass
class YamlTable:
    """``values``: each given leaf; ``where``: ``file:line`` of each given leaf, block and list item."""

    values: dict[Path, Any] = field(default_factory=dict)
    where: dict[Path, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_yaml(text: str, name: str) -> YamlTable:
    """Read one file's text; ``name`` is what messages call it. Broken YAML becomes a problem with its line."""
    table = YamlTable()
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is not None and not isinstance(root, yaml.MappingNode):
            table.problems.append(Problem("", "holds no keys", "write `key: value` lines", name))
        elif root is not None:
            _walk(loader, root, (), name, table)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"{name}:{mark.line + 1}" if mark else name
        table.problems.append(Problem("", f"not valid YAML: {getattr(error, 'problem', error)}", where=line))
    finally:
        loader.dispose()
    return table


def read_value(text: str) -> Any:
    """The value of an override as YAML reads it; text that is no YAML is itself."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return None if node is None else loader.construct_object(node, deep=True)
    except yaml.YAMLError:
        return text
    finally:
        loader.dispose()


def canonical(path: Path) -> Path:
    """``path`` in today's spelling."""
    for old, new in ALIASES.items():
        if path[: len(old)] == old:
            return new + path[len(old) :]
    return path


def leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """The leaves below ``path``, in canonical spelling; a launcher given as a plain name is its kind."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves((*path, *str(key).split(".")), inner)
    else:
        path = canonical(path)
        yield (("launcher", "kind") if path == ("launcher",) and value is not None else path), value


def _walk(loader: _Loader, node: yaml.MappingNode, prefix: Path, name: str, table: YamlTable) -> None:
    merged: list[yaml.MappingNode] = []
    for key_node, value_node in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            continue
        written = (*prefix, *str(loader.construct_object(key_node)).split("."))
        path, line = canonical(written), f"{name}:{key_node.start_mark.line + 1}"
        if path in table.where:
            first = table.where[path].rpartition(":")[2]
            spelled = f" (written {'.'.join(written)})" if written != path else ""
            table.problems.append(
                Problem(
                    ".".join(path),
                    f"given twice in one file: lines {first} and {line.rpartition(':')[2]}{spelled}",
                    "keep one of them, with all its keys",
                    line,
                )
            )
        table.where.setdefault(path, line)
        _take(loader, value_node, written, line, name, table)
    for source in merged:  # a merged block only fills what is not given beside it
        inner = YamlTable()
        _walk(loader, source, prefix, name, inner)
        table.values = {**inner.values, **table.values}
        table.where = {**inner.where, **table.where}


def _take(loader: _Loader, node: yaml.Node, written: Path, line: str, name: str, table: YamlTable) -> None:
    if isinstance(node, yaml.MappingNode):
        _walk(loader, node, written, name, table)
        return
    for path, value in leaves(written, loader.construct_object(node, deep=True)):
        table.values[path] = value
        table.where[path] = line
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            table.where[*canonical(written), str(index)] = f"{name}:{item.start_mark.line + 1}"
