"""From the flat table of given values to a ``Config``: unknown keys, interpolations, types and ranges.

Nothing stops at the first problem: a value that is wrong is left out (its default stands in), so that the checks that
come after can still speak about everything else.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from hybridflow.config.compose import Composed
from hybridflow.config.problems import Problem
from hybridflow.config.ranges import get, out_of_range, replaced
from hybridflow.config.schema import Config
from hybridflow.config.yaml_lines import Path


@functools.cache
def sections() -> dict[Path, type]:
    """Every block of the schema by its path; the root is ``()``."""
    found: dict[Path, type] = {(): Config}

    def visit(path: Path, cls: type) -> None:
        for name, kind in typing.get_type_hints(cls).items():
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                found[(*path, name)] = kind
                visit((*path, name), kind)

    visit((), Config)
    return found


@functools.cache
def leaf_paths() -> tuple[Path, ...]:
    """Every key of the schema that takes a value."""
    blocks = sections()
    return tuple(
        (*path, entry.name)
        for path, cls in blocks.items()
        for entry in dataclasses.fields(cls)
        if (*path, entry.name) not in blocks
    )


@functools.cache
def _lists_of_text() -> frozenset[Path]:
    """Keys that hold a list of texts: one text alone is a list of one."""
    hints = {block: typing.get_type_hints(cls) for block, cls in sections().items()}
    return frozenset(path for path in leaf_paths() if hints[path[:-1]][path[-1]] == tuple[str, ...])


def validate(composed: Composed) -> tuple[Config, list[Problem]]:
    """The config that the given values make, and what is wrong with them (each with the place it was given)."""
    problems = list(composed.problems)
    problems += _drop_unknown(composed)
    problems += _interpolate(composed)
    config, wrong = _typed(composed)
    outside = out_of_range(config)  # a value of the wrong type has become its default, which is in range
    for problem in outside:
        config = replaced(config, problem.key, get(Config(), problem.key))
    return config, problems + wrong + outside


def located(problems: Iterable[Problem], places: Mapping[str, str]) -> list[Problem]:
    """The problems, each with the place where its key was given (if it was)."""
    return [dataclasses.replace(entry, where=entry.where or places.get(entry.key, "")) for entry in problems]


def _drop_unknown(composed: Composed) -> list[Problem]:
    blocks, keys = sections(), set(leaf_paths())
    problems: dict[Path, Problem] = {}
    for path in list(composed.values):
        if path in keys and composed.values[path] != "???":
            continue
        value = composed.values.pop(path)
        if path in blocks and value is None:  # a block without keys
            continue
        stem = path
        while len(stem) > 1 and stem[:-1] not in blocks:  # the outermost part that is unknown
            stem = stem[:-1]
        place = composed.where.get(stem, composed.where[path])
        key = ".".join(stem)
        if path in keys:
            if path != ("model", "path"):  # its absence has its own message
                problems[stem] = Problem(key, "has no value yet (???)", f"give one: {key}=<value>", place)
        elif stem in keys:
            problems[stem] = Problem(key, "takes a value, not a block", f"write {key}: <value>", place)
        elif stem in blocks:
            names = ", ".join(entry.name for entry in dataclasses.fields(blocks[stem]))
            problems[stem] = Problem(key, f"is a block, not a value ({value!r})", f"its keys: {names}", place)
        else:
            problems[stem] = Problem(key, "unknown key", _suggest(stem), place)
    return list(problems.values())


def _suggest(path: Path) -> str:
    """The nearest known key: a neighbour with a similar name, else the same name elsewhere, else a similar path."""
    if path[0] == "hydra":
        return "only hydra.launcher is read: HybridFlow keeps Hydra's other settings to itself"
    every = [".".join(known) for known in (*leaf_paths(), *sections()) if known]
    parent, name = path[:-1], path[-1]
    neighbours = {entry.name: ".".join((*parent, entry.name)) for entry in dataclasses.fields(sections()[parent])}
    if near := difflib.get_close_matches(name, neighbours, n=1, cutoff=0.7):
        return f"did you mean {neighbours[near[0]]}?"
    elsewhere = [key for key in every if key.rpartition(".")[2] == name]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere[:3])}?"
    if near := difflib.get_close_matches(".".join(path), every, n=1, cutoff=0.6):
        return f"did you mean {near[0]}?"
    return f"known here: {', '.join(neighbours)}"


def _interpolate(composed: Composed) -> list[Problem]:
    """Resolve ``${other.key}``; the schema's defaults can be referred to as well."""
    wanted = [path for path, value in composed.values.items() if "${" in str(value)]
    if not wanted:
        return []
    tree = OmegaConf.create(dataclasses.asdict(Config()))
    OmegaConf.set_struct(tree, False)
    for path, value in composed.values.items():
        OmegaConf.update(tree, ".".join(path), value, merge=False)
    problems = []
    for path in wanted:
        key = ".".join(path)
        try:
            value = OmegaConf.select(tree, key, throw_on_missing=True)
            composed.values[path] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (OmegaConfBaseException, ValueError) as error:
            composed.values.pop(path)
            text = str(error).splitlines()[0]
            problems.append(Problem(key, text, "write ${block.key}", composed.where[path]))
    return problems


@functools.cache
def _adapter() -> TypeAdapter[Config]:
    return TypeAdapter(Config)


def _typed(composed: Composed) -> tuple[Config, list[Problem]]:
    """Build the dataclasses; a value of the wrong type becomes a problem and falls back to its default."""
    adapter = _adapter()
    lists = _lists_of_text()
    values = {path: [v] if path in lists and isinstance(v, str) else v for path, v in composed.values.items()}
    try:
        return adapter.validate_python(_nested(values)), []
    except ValidationError as error:
        keys = set(leaf_paths())
        wishes: dict[Path, list[str]] = {}
        for detail in error.errors(include_url=False):
            parts = tuple(map(str, detail["loc"]))
            path = next(parts[:length] for length in range(len(parts), 0, -1) if parts[:length] in keys)
            wish = detail["msg"].replace("Input should be ", "").replace("Input ", "").replace("tuple", "list")
            wishes.setdefault(path, []).append(wish.partition(", unable")[0])
    problems = [
        Problem(".".join(path), f"must be {' or '.join(wish)}, but is {values.pop(path)!r}", "", composed.where[path])
        for path, wish in wishes.items()
    ]
    return adapter.validate_python(_nested(values)), problems


def _nested(values: dict[Path, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = _without_bools(value)
    return tree


def _without_bools(value: Any) -> Any:
    """Booleans as text, which pydantic takes for a boolean, but (unlike ``True``) not for the number 1."""
    if isinstance(value, list):
        return [_without_bools(item) for item in value]
    return str(value).lower() if isinstance(value, bool) else value
