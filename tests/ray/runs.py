"""Runs of the real program in processes of their own, and what they leave behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
SUCCESS = re.compile(r"Step (\d+)/\1 completed\. Avg reward: \d\.\d{3}")
# What a user types, and afterwards the packages that the driver has come to hold.
_DRIVER = (
    "import sys; from jobs.cli import main; code = main(sys.argv[1:]);"
    " print('PACKAGES', *sorted({n.split('.')[0] for n in sys.modules}), file=sys.stderr); sys.exit(code)"
)


@dataclass(frozen=True)
class Finished:
    """A run that has ended. ``lines``: its standard output without what workers logged."""

    code: int
    lines: list[str]
    stderr: str
    folder: Path

    @property
    def packages(self) -> set[str]:
        return set(next(line for line in self.stderr.splitlines() if line.startswith("PACKAGES")).split()[1:])

    def metrics(self) -> dict[int, dict[str, float]]:
        return read_metrics(self.folder)


def train(folder: Path, *arguments: str, seconds: float = 300, cwd: Path | None = None) -> Finished:
    """``hybridflow train`` with these arguments, writing to ``folder``."""
    command = [sys.executable, "-c", _DRIVER, "train", *arguments]
    command += [f"log_dir={folder.parent}", f"exp_name={folder.name}"]
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, cwd=cwd or folder.parent, env=environment
    )
    lines = [line for line in done.stdout.splitlines() if "pid=" not in line]
    return Finished(done.returncode, lines, done.stderr, folder)


def read_metrics(folder: Path) -> dict[int, dict[str, float]]:
    """All that was recorded for each step, merged."""
    steps: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        steps.setdefault(record["step"], {}).update(record)
    return steps


def segments() -> set[str]:
    """Shared-memory files of ours on this machine."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("hybridflow", "hf_", "hf-"))}
