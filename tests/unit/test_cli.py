"""The console script: verbs, one boxed message for each failure, exit codes, and what it does not import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.config.model_rules import ALGORITHMS as KNOWN_ALGORITHMS
from hybridflow.errors import NumericsError, ResourceError, WorkerError
from jobs import cli
from jobs.models import tiny

REPOSITORY = Path(__file__).parents[2]
LOADED = "import sys; print([name for name in ('torch', 'ray', 'vllm', 'megatron') if name in sys.modules])"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_help(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in cli.VERBS)
    assert cli.main([]) == 2


def test_unknown_verb_suggests(capsys):
    assert cli.main(["trian"]) == 2
    assert "did you mean train?" in capsys.readouterr().err


def test_config_verb(capsys):
    assert cli.main(["config", "actor.optim.lr"]) == 0
    assert "Learning rate." in capsys.readouterr().out
    assert cli.main(["config", "actor.optim.lrr"]) == 2
    assert "did you mean actor.optim.lr?" in capsys.readouterr().err


def test_config_errors_come_once_in_a_box(capsys):
    assert cli.main(["train", "modle.path=x", "hydra.launcher=slurm"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("modle") == 1
    assert "not built yet" in shown
    assert "Traceback" not in shown


def test_print_config(capsys):
    tiny("tiny")
    assert cli.main(["train", "--print-config", "model.path=tiny"]) == 0
    assert "# command line" in capsys.readouterr().out


def test_train_dispatches_on_the_algorithm(monkeypatch):
    tiny("tiny")
    seen = []
    monkeypatch.setattr(cli, "ALGORITHMS", {"ppo": "jobs.other:main"})
    monkeypatch.setitem(sys.modules, "jobs.other", type(sys)("jobs.other"))
    sys.modules["jobs.other"].main = lambda argv: seen.append(argv) or 0
    assert cli.main(["train", "model.path=tiny"]) == 0
    assert seen == [["model.path=tiny"]]


def test_every_known_algorithm_has_a_driver():
    assert set(cli.ALGORITHMS) == set(KNOWN_ALGORITHMS)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *((ResourceError("x"), 3), (WorkerError("x"), 4), (NumericsError("x"), 5), (KeyboardInterrupt(), 130)),
        (RuntimeError("x"), 1),
    ],
)
def test_exit_codes(error, code, capsys):
    def run():
        raise error

    assert cli.guarded(run) == code
    assert capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["train", "sed=1"], ["config"], ["train", "--config-name", "nope"]])
def test_light_answers_need_neither_torch_nor_ray(arguments):
    code = f"from jobs import cli; cli.main({arguments!r})\n{LOADED}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
