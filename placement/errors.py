"""The errors a user sees: what went wrong, where, and what to do about it.

They live in the lowest package so that every room can raise them; ``hybridflow.errors`` re-exports them all.
Each class fixes the exit code of the process (see ``exit_code``), so that schedulers can tell causes apart.
"""

from __future__ import annotations

from typing import Any


class HybridFlowError(Exception):
    """Base of every error that is meant for the user.

    Args:
        message: one sentence that names the place and the value that is wrong.
        hint: what to do about it.
        where: file, line, key, role or rank that the message is about.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", where: str = ""):
        super().__init__(message)
        self.message, self.hint, self.where = message, hint, where

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}\n  hint: {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.where, dict(self.__dict__))


def _rebuild(cls: type[HybridFlowError], message: str, hint: str, where: str, state: dict[str, Any]) -> HybridFlowError:
    """Unpickle an error of any subclass, whatever its own constructor takes (errors cross Ray processes)."""
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class ConfigError(HybridFlowError):
    """The config, the data or the model folder is wrong: nothing was started. Exit code 2."""

    exit_code = 2


class ResourceError(HybridFlowError):
    """The cluster lacks what the run asks for, or something outside is in the way. Exit code 3."""

    exit_code = 3


class WorkerError(HybridFlowError):
    """A worker failed or died; names role, rank, node and cause. Exit code 4."""

    exit_code = 4


class NumericsError(HybridFlowError):
    """Training left the realm of finite numbers, or two sides that must agree do not. Exit code 5."""

    exit_code = 5
