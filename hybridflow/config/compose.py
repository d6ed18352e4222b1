"""Puts a config together: the defaults of every group, then the user's file, then the overrides of the command line.

Hydra decides which files take part, and in which order: its defaults list, its search path, its group choices. The
values are read and merged here, so that each keeps the file and line that it came from. A file that begins with
``override /group: choice`` has no base of its own, and Hydra alone refuses it: our root lists every group's default,
then the user's file as ``@_global_``, then ``_self_``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from hybridflow.config import yaml_lines
from hybridflow.config.problems import InvalidConfigError, Problem
from hybridflow.config.yaml_lines import YamlTable, canonical, leaves, read_value, read_yaml

PACKAGE_CONFIGS = Path(__file__).resolve().parents[2] / "jobs" / "conf"
GROUPS = {
    "algorithm": "ppo",
    "model": "hf_llama",
    "rollout": "mcore_vllm",
    "actor": "mcore_finetune",
    "critic": "mcore_finetune",
    "reward_model": "mcore_hf",
}
COMMAND_LINE = "command line"
_ROOT, _USER = "hybridflow_root", "hybridflow_user"


@dataclass
class Composed:
    """What the user gave in all, flat. ``given``: paths that the user's own file or the command line set."""

    values: dict[yaml_lines.Path, Any] = field(default_factory=dict)
    where: dict[yaml_lines.Path, str] = field(default_factory=dict)
    given: set[yaml_lines.Path] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)

    def put(self, path: yaml_lines.Path, value: Any, where: str, *, given: bool) -> None:
        self.values[path], self.where[path] = value, where
        if given:
            self.given.add(path)


def compose(config_name: str | None, config_dirs: Sequence[str], overrides: Sequence[str]) -> Composed:
    """Compose the config ``config_name`` (None: the defaults alone) with ``overrides`` (``a.b=value``).

    The search goes through the current folder, then ``config_dirs``, then the package.

    Raises:
        InvalidConfigError: a file or group choice is missing, so that nothing can be composed.
    """
    folders = [Path.cwd(), *(Path(folder).expanduser().resolve() for folder in config_dirs), PACKAGE_CONFIGS]
    for folder in folders:
        if not folder.is_dir():
            raise InvalidConfigError([Problem("", f"there is no folder {folder}", "check --config-dir")])
    user_file, table = None, YamlTable()
    if config_name is not None:
        user_file, folders = _find_user_file(config_name, folders)
        table = _read(user_file)
    composed = Composed(problems=table.problems)
    choices, assignments = _split_overrides(overrides, folders, composed)
    defaults = _user_defaults(table, folders, composed)
    for result in _hydra_layers(defaults, choices, folders):
        if result.config_path == _USER:
            _merge(composed, table, (), given=True)
        elif file := _find(str(result.config_path), folders):
            layer = _read(file)
            composed.problems += layer.problems
            prefix = tuple((result.package or "").split(".")) if result.package else ()
            _merge(composed, layer, prefix, given=not prefix)
    for key, text in assignments:
        for path, value in leaves(tuple(key.split(".")), read_value(text)):
            composed.put(path, value, COMMAND_LINE, given=True)
    return composed


def groups_in(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Every config group on the search path, with its choices."""
    found: dict[str, set[str]] = {group: set() for group in GROUPS}
    for folder in folders:
        for group in found:
            found[group] |= {file.stem for file in (folder / group).glob("*.yaml")}
    return {group: sorted(choices) for group, choices in found.items()}


def display_name(file: Path) -> str:
    """How messages call a file: relative to the current folder, or to the program, where that is shorter."""
    for base in (Path.cwd(), PACKAGE_CONFIGS.parents[1]):
        if file.is_relative_to(base):
            return str(file.relative_to(base))
    return str(file)


def _read(file: Path) -> YamlTable:
    try:
        return read_yaml(file.read_text(encoding="utf-8"), display_name(file))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError([Problem("", f"cannot read it: {error}", where=display_name(file))]) from error


def _find(name: str, folders: Iterable[Path]) -> Path | None:
    return next((file for folder in folders if (file := folder / f"{name}.yaml").is_file()), None)


def _find_user_file(name: str, folders: list[Path]) -> tuple[Path, list[Path]]:
    """The user's file, and the search path with its own folder in front if the name has one."""
    stem = re.sub(r"\.ya?ml$", "", name)
    if file := _find(stem, folders):
        return file, folders if "/" not in stem else [file.parent, *folders]
    known = sorted({file.stem for folder in folders for file in folder.glob("[!.]*.yaml")})
    near = difflib.get_close_matches(stem, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    looked = ", ".join(display_name(folder) for folder in folders)
    raise InvalidConfigError(
        [Problem("", f"there is no config {stem!r} in {looked}", f"{hint}known: {', '.join(known)}; see --config-dir")]
    )


def _split_overrides(
    overrides: Sequence[str], folders: Sequence[Path], composed: Composed
) -> tuple[list[str], list[tuple[str, str]]]:
    """Separate ``group=choice`` (for Hydra) from ``a.b=value`` (for us)."""
    groups = groups_in(folders)
    choices, assignments = [], []
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip().lstrip("+").replace("/", ".")
        if not equals or not key or key.startswith(("~", "-")):
            hint = "to set a key write a.b=value; to have its default again, leave it out"
            composed.problems.append(Problem("", f"{text!r} is not an override", hint, COMMAND_LINE))
        elif key in groups:
            choice = str(read_value(value))
            if _known_choice(key, choice, groups, COMMAND_LINE, composed):
                choices.append(f"{key}={choice}")
        else:
            assignments.append((key, value))
    return choices, assignments


def _user_defaults(table: YamlTable, folders: Sequence[Path], composed: Composed) -> list[Any]:
    """The defaults list of the user's file, as Hydra takes it after our root; wrong choices become problems.

    ``algorithm: ppo`` without ``override`` would name the group a second time: the two are read alike.
    """
    groups = groups_in(folders)
    where = table.where.pop(("defaults",), "")
    entries = table.values.pop(("defaults",), None) or []
    if not isinstance(entries, list):
        composed.problems.append(Problem("defaults", "must be a list", "write `- override /group: choice`", where))
        return []
    plain, replacing = [], []
    for index, entry in enumerate(entries):
        line = table.where.pop(("defaults", str(index)), where)
        key, choice = next(iter(entry.items())) if isinstance(entry, dict) and entry else ("", None)
        group = re.sub(r"^(override\s+)?/?", "", key)
        if group == "hydra/launcher":
            table.values[("launcher", "kind")], table.where[("launcher", "kind")] = choice, line
        elif group in groups:
            if _known_choice(group, str(choice), groups, line, composed):
                replacing.append({f"override /{group}": choice})
        elif key.startswith("override"):
            near = difflib.get_close_matches(group, groups, n=1)
            hint = f"did you mean {near[0]}?" if near else f"groups: {', '.join(groups)}"
            composed.problems.append(Problem("defaults", f"there is no config group {group!r}", hint, line))
        else:
            plain.append(entry)
    return [*plain, *replacing]


def _known_choice(group: str, choice: str, groups: dict[str, list[str]], where: str, composed: Composed) -> bool:
    if choice in groups[group]:
        return True
    near = difflib.get_close_matches(choice, groups[group], n=1)
    hint = (f"did you mean {near[0]}? " if near else "") + f"there are: {', '.join(groups[group])}"
    composed.problems.append(Problem(group, f"there is no {group} {choice!r}", hint, where))
    return False


def _hydra_layers(defaults: list[Any], choices: list[str], folders: Sequence[Path]) -> Iterator[ResultDefault]:
    """The files that take part, weakest first, as Hydra's defaults list orders them."""
    store = ConfigStore.instance()
    root = [*({group: choice} for group, choice in GROUPS.items()), f"{_USER}@_global_", "_self_"]
    search = [f"file://{folder}" for folder in folders[1:]]
    store.store(name=_ROOT, node={"defaults": root, "hydra": {"searchpath": search}})
    store.store(name=_USER, node={"defaults": defaults or ["_self_"]})
    try:
        with initialize_config_dir(config_dir=str(folders[0]), version_base="1.3"):
            listed = (
                GlobalHydra.instance()
                .config_loader()
                .compute_defaults_list(
                    config_name=_ROOT,
                    overrides=choices,
                    run_mode=RunMode.RUN,
                )
            )
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        text = str(error).replace(f"In '{_USER}': ", "").replace(_USER, "your config")
        raise InvalidConfigError([Problem("defaults", f"Hydra cannot compose it: {text.strip()}")]) from error
    seen_user = False
    for result in listed.defaults:
        if result.config_path == _USER:
            if seen_user:
                continue
            seen_user = True
        if not str(result.config_path).startswith("hydra/"):
            yield result


def _merge(composed: Composed, layer: YamlTable, prefix: yaml_lines.Path, *, given: bool) -> None:
    """Lay a file over what is there: later values win, lists are replaced whole."""
    for path, line in layer.where.items():
        composed.where[canonical((*prefix, *path))] = line
    for path, value in layer.values.items():
        if path[0] != "defaults":
            composed.put(canonical((*prefix, *path)), value, layer.where[path], given=given)
