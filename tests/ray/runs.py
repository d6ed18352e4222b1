"""Runs of the real program in processes of their own, and what they leave behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import IO

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
    return Running(folder, *arguments, cwd=cwd).finish(seconds)


class Running:
    """A run that has been started. All its processes carry a mark in their environment, by which they are found."""

    def __init__(self, folder: Path, *arguments: str, cwd: Path | None = None, **environment: str):
        self.folder, self._mark, self._segments = folder, f"run-{uuid.uuid4().hex}", segments()
        command = [sys.executable, "-c", _DRIVER, "train", *arguments]
        command += [f"log_dir={folder.parent}", f"exp_name={folder.name}"]
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment = {**inherited, "PYTHONPATH": str(HOME), "HYBRIDFLOW_TEST": self._mark, **environment}
        self._files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115 - open as long as the run
        where = {"cwd": cwd or folder.parent, "env": environment}
        self.process = subprocess.Popen(command, stdout=self._files[0], stderr=self._files[1], **where)

    def wait_for(self, line: str, seconds: float = 120) -> None:
        """Wait until standard output has a line with this regular expression in it."""
        end = time.monotonic() + seconds
        while not re.search(line, _content(self._files[0])):
            alive = self.process.poll() is None and time.monotonic() < end
            assert alive, f"no {line}: {_content(self._files[1])[-3000:]}"
            time.sleep(0.1)

    def finish(self, seconds: float = 120) -> Finished:
        """Wait for its end, which must come within ``seconds``."""
        try:
            self.process.wait(seconds)
        finally:
            for pid in [self.process.pid, *self.processes()] if self.process.poll() is None else ():
                os.kill(pid, signal.SIGKILL)
        lines = [line for line in _content(self._files[0]).splitlines() if "pid=" not in line]
        return Finished(self.process.returncode, lines, _content(self._files[1]), self.folder)

    def processes(self) -> dict[int, str]:
        """Every living process that the run has started, and what it is called."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (path / "environ").read_bytes():
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:  # it ended, or is a zombie
                continue
        return found

    def left_behind(self, seconds: float = 60) -> list[str]:
        """What is still there after ``seconds``: processes, shared memory, the folder's lock."""
        end = time.monotonic() + seconds
        while self.processes() and time.monotonic() < end:
            time.sleep(0.2)
        lock = [name for name in ("run.lock",) if (self.folder / name).exists()]
        return [*self.processes().values(), *sorted(segments() - self._segments), *lock]


def _content(file: IO[str]) -> str:
    """All of a file that another process may be writing (it shares our position, which therefore stays)."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


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
