"""The check of an installation: each row, and what it says where something is wrong."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow import backends
from jobs import doctor


def test_backends_of_this_installation():
    assert backends.get_available_backends() == ["mcore", "vllm"]


def without(monkeypatch, *names, extra=()):
    version = importlib.metadata.version

    def look_up(name):
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0" if name in extra else version(name)

    monkeypatch.setattr(importlib.metadata, "version", look_up)


def test_a_missing_backend(monkeypatch, capsys):
    without(monkeypatch, "megatron-core")
    monkeypatch.setattr(doctor, "QUICK", {"backends": doctor.backends})
    assert backends.get_available_backends() == ["vllm"]
    assert doctor.main(["--quick"]) == 3
    shown = capsys.readouterr().out
    assert "missing: mcore" in shown
    assert "pip install megatron-core" in shown
    assert "1 of the checks failed" in shown


@pytest.mark.parametrize("wrong", ["megatron-lm", "megatron-deepspeed"])
def test_the_wrong_package_is_named(monkeypatch, capsys, wrong):
    without(monkeypatch, extra=(wrong,))
    monkeypatch.setattr(doctor, "QUICK", {"backends": doctor.backends})
    assert doctor.main(["--quick"]) == 3
    shown = capsys.readouterr().out
    assert wrong in shown
    assert "cannot import name 'get_args'" in shown
    assert "pip uninstall" in shown


def test_an_absent_module_is_not_available(monkeypatch):
    monkeypatch.setattr(backends, "BACKENDS", (backends.Backend("x", "no_such.module", ("pip",), ""),))
    assert backends.get_available_backends() == []


def test_whatever_a_broken_installation_raises_is_a_finding(monkeypatch, capsys):
    def broken():
        raise OSError("libfoo.so is missing")

    monkeypatch.setattr(doctor, "QUICK", {"parallel layers": broken})
    assert doctor.main(["--quick"]) == 3
    assert "OSError: libfoo.so is missing" in capsys.readouterr().out


def test_quick_passes_here():
    """In a process of its own: it imports torch and Megatron, and joins a process group."""
    command = [sys.executable, "-m", "jobs.cli", "doctor", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300)
    shown = done.stdout.splitlines()
    assert (done.returncode, shown[-1]) == (0, "All checks passed."), done.stdout + done.stderr
    assert [line.split("  ")[0] for line in shown[:-1]] == ["ok"] * 5
    assert "'mcore'" in shown[2]
