"""The config while it is being resolved: rules read it, change it with a reason, or object to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hybridflow.config.model_folder import ModelInfo
from hybridflow.config.problems import Problem, problem_of
from hybridflow.config.ranges import get, replaced
from hybridflow.config.schema import Config
from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class Adjustment:
    """One change (or remark) that the run card shows: ``text`` says what became of ``key``, and why."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


@dataclass
class Draft:
    """A config, the facts that it is checked against, and what came of it.

    Args:
        devices: devices of the run; device_type: "cpu" or "cuda". None: known only once the cluster is in reach, and
            what depends on them waits until then.
        model, critic_model: facts of the two model folders, None where unknown.
        given: keys that the user set; None: taken to be all. A default that gives way needs no line.
        memory_gb: memory of one GPU, None where unknown.
    """

    config: Config
    devices: int | None
    device_type: str | None
    model: ModelInfo | None = None
    critic_model: ModelInfo | None = None
    given: frozenset[str] | None = None
    memory_gb: float | None = None
    adjustments: list[Adjustment] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    decided: set[str] = field(default_factory=set)

    def is_given(self, key: str) -> bool:
        return self.given is None or key in self.given

    def decide(self, key: str, value: Any) -> None:
        """Fill in a value that was left open; needs no line."""
        if get(self.config, key) != value:
            self.config = replaced(self.config, key, value)
            self.decided.add(key)

    def adjust(self, key: str, value: Any, reason: str) -> None:
        """Change a value that stood there; a line says so, unless it was only a default."""
        before = get(self.config, key)
        if before != value:
            self.decide(key, value)
            if self.is_given(key):
                self.note(key, f"{_text(before)} -> {_text(value)}: {reason}")

    def note(self, key: str, text: str) -> None:
        """A line for the run card without a change."""
        self.adjustments.append(Adjustment(key, text))

    def refuse(self, key: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(key, message, hint))

    def refuse_as(self, key: str, error: ConfigError) -> None:
        """Object with the words of a check elsewhere."""
        self.problems.append(problem_of(error, key))


def _text(value: Any) -> str:
    """As the user would write it in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
