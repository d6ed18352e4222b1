"""From a command line to a checked, resolved config: what every program of ``jobs/`` begins with."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridflow.config.compose import Composed, compose
from hybridflow.config.draft import Adjustment, Draft
from hybridflow.config.model_folder import ModelInfo, read_model_folder
from hybridflow.config.problems import InvalidConfigError, Problem, problem_of
from hybridflow.config.resolution import resolve_draft
from hybridflow.config.schema import Config
from hybridflow.config.show import config_yaml
from hybridflow.config.validate import leaf_paths, located, validate
from hybridflow.errors import ConfigError
from hybridflow.loading import load_module
from placement.device import local_gpus

USAGE = """\
keys are given as block.key=value, without + or --; a block of the config tree is chosen as group=choice.

  hybridflow train --config-name ppo_7b_mcore model.path=my/model training.total_steps=10
  hybridflow train --config-dir my/configs --config-name mine actor.optim.lr=1e-6 --print-config

configs are looked for in the current folder, then in --config-dir, then in the package.
every key, with its meaning and default: hybridflow config; one of them: hybridflow config actor.optim.lr
"""


@dataclass(frozen=True)
class LoadedConfig:
    """A config that is ready to run.

    Args:
        config: resolved; written: as it was before resolving, for ``on``.
        adjustments: what resolving changed, for the run card.
        sources: where each key's value came from: ``file:line``, ``command line``, ``default`` or ``decided``.
        given: keys that the user set, in the file or on the command line.
        name: of the config ("defaults" if none was asked for).
        verbose: the option of this name; print_config: ``resolved_yaml`` if the option was given, else "".
        code: digest of each registered file or module.
        model, critic_model: facts of the model folders; memory_gb: of a GPU of this machine, None without one.
        places: ``file:line`` or ``command line`` of each key and block that was given.
    """

    config: Config
    written: Config
    adjustments: tuple[Adjustment, ...]
    sources: dict[str, str]
    given: frozenset[str] = frozenset()
    name: str = "defaults"
    verbose: bool = False
    print_config: str = ""
    code: dict[str, str] = dataclasses.field(default_factory=dict)
    model: ModelInfo | None = None
    critic_model: ModelInfo | None = None
    memory_gb: float | None = None
    places: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def source(self) -> str:
        """Name and digest of the config, for the run card."""
        return f"{self.name} ({config_digest(self.config)})"

    @property
    def resolved_yaml(self) -> str:
        """The resolved config; each line says where its value came from."""
        return config_yaml(self.name, self.config, self.sources, self.adjustments)

    def on(self, devices: int, device_type: str) -> LoadedConfig:
        """The same, resolved for the machines that the run is on: a driver calls it once it has reached its cluster.

        Raises:
            InvalidConfigError: the config does not fit these machines.
        """
        draft = Draft(self.written, devices, device_type, self.model, self.critic_model, self.given, self.memory_gb)
        resolve_draft(draft)
        if draft.problems:
            raise InvalidConfigError(located(draft.problems, self.places))
        sources = _sources(draft, self.places)
        return dataclasses.replace(self, config=draft.config, adjustments=tuple(draft.adjustments), sources=sources)


def parser(prog: str) -> argparse.ArgumentParser:
    """The options that every program with a config takes."""
    result = argparse.ArgumentParser(prog=prog, epilog=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--config-name", metavar="NAME", help="the config file, without .yaml")
    result.add_argument("--config-dir", metavar="DIR", action="append", default=[], help="folder to look for it in")
    result.add_argument("--print-config", action="store_true", help="print the resolved config and stop")
    result.add_argument("--verbose", action="store_true", help="say more while running")
    result.add_argument("overrides", nargs="*", metavar="block.key=value", help="values that win over the file's")
    return result


def load_config(
    argv: Sequence[str], *, devices: int | None = None, device_type: str | None = None, prog: str = "hybridflow train"
) -> LoadedConfig:
    """Compose, check and resolve the config that ``argv`` asks for. Needs neither torch nor ray.

    Args:
        devices, device_type: of the run. None: those of this machine (its GPUs, else one logical CPU device); with a
            Ray cluster named by RAY_ADDRESS they stay unknown, and what depends on them waits for ``LoadedConfig.on``.

    Raises:
        InvalidConfigError: everything that is wrong, in one error.
    """
    options = parser(prog).parse_intermixed_args(list(argv))
    composed = compose(options.config_name, options.config_dir, options.overrides)
    code, problems = _register(composed)
    config, wrong = validate(composed)
    problems += wrong
    gpus = local_gpus()
    if not os.environ.get("RAY_ADDRESS"):
        devices, device_type = devices or gpus or 1, device_type or ("cuda" if gpus else "cpu")
    model, critic = _models(config, problems)
    given = frozenset(".".join(path) for path in composed.given & composed.values.keys())
    places = {".".join(path): place for path, place in composed.where.items()}
    draft = resolve_draft(Draft(config, devices, device_type, model, critic, given, _memory_gb(gpus)))
    broken = {problem.key for problem in problems}
    problems += [problem for problem in draft.problems if problem.key not in broken]
    if problems:
        raise InvalidConfigError(located(problems, places))
    loaded = LoadedConfig(
        config=draft.config,
        written=config,
        adjustments=tuple(draft.adjustments),
        sources=_sources(draft, places),
        given=given,
        name=Path(options.config_name).stem if options.config_name else "defaults",
        verbose=options.verbose,
        code=code,
        model=model,
        critic_model=critic,
        memory_gb=draft.memory_gb,
        places=places,
    )
    return dataclasses.replace(loaded, print_config=loaded.resolved_yaml) if options.print_config else loaded


def config_digest(config: Config) -> str:
    """A short name for all values of a config."""
    content = json.dumps(dataclasses.asdict(config), sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def code_digest(name: str) -> str:
    """Digest of the source that ``register`` names: the file itself, or the module's file."""
    module = load_module(name)
    source = Path(module.__file__).read_bytes() if module.__file__ else name.encode()
    return hashlib.blake2b(source, digest_size=8).hexdigest()


def _register(composed: Composed) -> tuple[dict[str, str], list[Problem]]:
    """Import the user's code before anything is checked, so that what it registers is known."""
    value = composed.values.get(("register",)) or []
    names = map(str, value if isinstance(value, list) else [value])
    code, problems = {}, []
    for name in names:
        try:
            code[name] = code_digest(name)
        except ConfigError as error:
            problems.append(problem_of(error, "register"))
    return code, problems


def _models(config: Config, problems: list[Problem]) -> tuple[ModelInfo | None, ModelInfo | None]:
    found: dict[str, ModelInfo] = {}
    for key, path in (
        ("model.path", config.model.path),
        ("critic.path", config.critic.path),
        ("reference.path", config.reference.path),
    ):
        if path is not None and path not in found:
            try:
                found[path] = read_model_folder(path, key)
            except ConfigError as error:
                problems.append(problem_of(error, key))
    critic = config.critic.path
    return found.get(config.model.path or ""), found.get(critic) if critic and critic != config.model.path else None


def _memory_gb(gpus: int) -> float | None:
    if not gpus:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        return int(answer.split()[0]) / 1024
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None  # advice only: without it there is none


def _sources(draft: Draft, places: dict[str, str]) -> dict[str, str]:
    """Where the value of each key came from."""
    keys = [".".join(path) for path in leaf_paths()]
    return {key: places.get(key) or ("decided" if key in draft.decided else "default") for key in keys}
