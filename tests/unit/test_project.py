"""The project's own files agree with each other: packages, pins, and the tools' lists."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CPU = ("requirements/cpu.txt", "requirements/cpu-nodeps.txt")
GPU = ("requirements/gpu.txt",)


def pins(lines: list[str]) -> dict[str, str]:
    """Canonical package name -> version, of lines like ``ray[default]==2.60.0``."""
    found = {}
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[[\w,]+\])?==([\w.+]+)", line.strip())
        assert match, f"{line!r} is not pinned"
        found[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return found


def lock(names: tuple[str, ...]) -> dict[str, str]:
    lines = [line for name in names for line in (ROOT / name).read_text(encoding="utf-8").splitlines()]
    return pins([line for line in lines if line and not line.startswith("#")])


def test_every_package_is_listed():
    roots = ("placement", "hybridflow", "workers", "jobs")
    there = {
        ".".join(file.parent.relative_to(ROOT).parts) for root in roots for file in (ROOT / root).rglob("__init__.py")
    }
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(there)


def test_data_files_of_packages_are_shipped():
    """Whatever lies in a package and is no Python file matches a pattern of ``package-data``."""
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    shipped = {file for package, globs in patterns.items() for glob in globs for file in (ROOT / package).glob(glob)}
    there = {
        file
        for root in ("placement", "hybridflow", "workers", "jobs")
        for file in (ROOT / root).rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc")
    }
    assert not sorted(str(file.relative_to(ROOT)) for file in there - shipped)


@pytest.mark.parametrize("extra,locks", [("base", CPU), ("cpu", CPU), ("dev", CPU), ("base", GPU), ("gpu", GPU)])
def test_pins_agree_with_the_lock(extra, locks):
    project = PROJECT["project"]
    wanted = pins(project["dependencies"] if extra == "base" else project["optional-dependencies"][extra])
    locked = lock(locks)
    assert {name: locked.get(name) for name in wanted} == wanted


def test_the_lock_has_no_media_wheels():
    """They cannot load beside the CPU torch, and transformers imports them where they exist."""
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(lock(CPU))


def test_an_old_python_is_refused_with_a_hint(tmp_path):
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.1"\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "install.sh"), str(tmp_path / "venv")],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(old)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr and "Python 3.9.1" in done.stderr and "hint:" in done.stderr
    assert not (tmp_path / "venv").exists()
