"""The console script ``hybridflow``: finds the verb, and ends every failure in one boxed message and its exit code.

Verbs are loaded by name, so that ``--help`` and errors of the config need neither torch nor ray.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.loading import load
from hybridflow.telemetry.console import print_failure

INTERRUPTED = 130


@dataclass(frozen=True)
class Verb:
    """``target``: "module:function", called with the remaining arguments; returns an exit code (or nothing)."""

    target: str
    help: str


VERBS = {
    "train": Verb("jobs.cli:train", "train a model as a config says"),
    "doctor": Verb("jobs.doctor:main", "check versions, devices and the engines of this installation"),
    "config": Verb("jobs.cli:config", "explain the keys of the config"),
    "report": Verb("jobs.report:main", "build the page of a run from its folder again"),
}
ALGORITHMS = {"ppo": "jobs.ppo:main"}

USAGE = """\
usage: hybridflow VERB [options]

{verbs}

  hybridflow train --config-name ppo_7b_mcore model.path=my/model training.total_steps=10
  hybridflow train --help          options of a verb
  hybridflow config actor.optim    what keys mean, their types and defaults

exit codes: 0 done, 2 config or data, 3 resources, 4 a worker failed, 5 numerics, 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0 if arguments else 2
    return guarded(lambda: _dispatch(arguments[0], arguments[1:]))


def guarded(run: Callable[[], int | None]) -> int:
    """Call ``run``; an error is printed once, in a box, and becomes an exit code."""
    try:
        code = run() or 0
        print(end="", flush=True)
        return code
    except BrokenPipeError:  # the reader has seen enough (`hybridflow config | head`): end as all tools do, silently
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has nowhere to go
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as error:
        print_failure(error)
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the end of the line: told, never swallowed
        print_failure(error)
        return error.exit_code if isinstance(error, HybridFlowError) else 1


def usage() -> str:
    """The text of ``hybridflow --help``."""
    return USAGE.format(verbs="\n".join(f"  {name:<8} {verb.help}" for name, verb in VERBS.items()))


def train(argv: Sequence[str]) -> int | None:
    """``hybridflow train``: check the config, then run the driver of its algorithm."""
    loaded = load("hybridflow.config.loader:load_config")(argv)
    if loaded.print_config:
        print(loaded.print_config, end="")
        return 0
    return load(ALGORITHMS[loaded.config.algorithm.name])(list(argv))  # type: ignore[no-any-return]


def config(argv: Sequence[str]) -> int:
    """``hybridflow config [--explain] [KEY ...]``: meaning, type and default of keys; without one, of all."""
    keys = [argument for argument in argv if argument not in ("--explain", "-h", "--help")]
    if unknown := [key for key in keys if key.startswith("-")]:
        raise ConfigError(f"there is no option {unknown[0]}", hint="hybridflow config actor.optim.lr explains one key")
    explain = load("hybridflow.config.show:explain")
    print("\n".join(explain(key) for key in keys or [""]))
    return 0


def _dispatch(name: str, arguments: list[str]) -> int | None:
    if name not in VERBS:
        near = difflib.get_close_matches(name, VERBS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"there is no verb {name!r}", hint=f"{hint}verbs: {', '.join(VERBS)}; see hybridflow --help")
    return load(VERBS[name].target)(arguments)  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main())
