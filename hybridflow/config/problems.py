"""What is wrong with a config: collected first, told together in one error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Args:
        key: the config key that it is about, dotted ("" if none).
        message: what is wrong, with the value.
        hint: what to do about it.
        where: ``file:line`` or "command line" where the value was given.
    """

    key: str
    message: str
    hint: str = ""
    where: str = ""

    def __str__(self) -> str:
        text = ": ".join(part for part in (self.where, self.key, self.message) if part)
        return f"{text}\n    hint: {self.hint}" if self.hint else text


class InvalidConfigError(ConfigError):
    """Everything that is wrong with a config, in one error; ``problems`` lists it. Exit code 2."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(dict.fromkeys(problems))
        if len(self.problems) == 1:
            only = self.problems[0]
            message = f"{only.key}: {only.message}" if only.key else only.message
            super().__init__(message, hint=only.hint, where=only.where)
        else:
            listed = "\n".join(f"  - {problem}" for problem in self.problems)
            super().__init__(f"{len(self.problems)} problems in the config\n{listed}")


def problem_of(error: ConfigError, key: str) -> Problem:
    """The problem that a check elsewhere has raised, as one about ``key``."""
    return Problem(key, error.message, error.hint)
