"""Where metrics go: metrics.jsonl (the record, which must hold) and trackers (best effort: never the end of a run)."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from hybridflow.errors import ResourceError

WANDB_START_SECONDS = 30.0
WANDB_FINISH_SECONDS = 60.0


class Sink(Protocol):
    """Takes the metrics of a step. A step may come more than once (evaluation and training of one step)."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlFile:
    """An append-only file of one JSON object a line, each line on disk when ``append`` returns.

    Args:
        path: the file; its folder is made.
        resumed_step: continue after this step: lines of later steps, and a half line, are dropped. 0 starts afresh.

    Raises:
        ResourceError: the disk is full or the folder cannot be written; names the folder.
    """

    def __init__(self, path: str | Path, resumed_step: int = 0):
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_file():
                self._keep_until(resumed_step)
            self._file = self.path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def append(self, record: Mapping[str, Any]) -> None:
        try:
            self._file.write(_line(record))
        except OSError as error:
            raise unwritable(self.path, error) from error

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise unwritable(self.path, error) from error

    def _keep_until(self, step: int) -> None:
        kept = [record for record in read_jsonl(self.path) if step and record["step"] <= step]
        aside = self.path.with_suffix(".tmp")
        aside.write_text("".join(map(_line, kept)), encoding="utf-8")
        os.replace(aside, self.path)


def unwritable(path: Path, error: OSError) -> ResourceError:
    """What to say when a file of the run folder cannot be written (a full disk, most often)."""
    return ResourceError(
        f"cannot write {path.name} in {path.parent}: {error.strerror or error}",
        hint="make room there, or choose another folder with log_dir=...; the run resumes from its last checkpoint",
        where=str(path.parent),
    )


def _line(record: Mapping[str, Any]) -> str:
    """A line that stays readable in any language; line breaks that only some readers know are escaped."""
    text = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False)
    return text.translate({0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null, which every reader takes for a missing value."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return value


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines of a JSONL file; the half line that a killed run may leave at its end is left out."""
    records = []
    with Path(path).open(encoding="utf-8") as lines:
        for line in lines:
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return records


class JsonlSink:
    """metrics.jsonl: ``{"step": 3, "time": <seconds since the epoch>, "reward/mean": 0.41, ...}``."""

    def __init__(self, path: str | Path, resumed_step: int = 0):
        self._file = JsonlFile(path, resumed_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.append({"step": step, "time": round(time.time(), 3), **metrics})

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """TensorBoard event files, through TensorBoard's own writer: no torch and no TensorFlow needed."""

    def __init__(self, folder: str | Path, resumed_step: int = 0):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder), flush_secs=10)
        if resumed_step:  # TensorBoard hides what an earlier process wrote after this step
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resumed_step + 1, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases, online or offline (offline needs neither login nor network; ``wandb sync`` sends it later).

    Online that cannot start (no key, no network) goes on offline and says so through ``warn``.
    """

    def __init__(
        self,
        *,
        project: str,
        mode: str,
        name: str,
        folder: str | Path,
        config: Mapping[str, Any],
        warn: Callable[[str], None],
        resume_id: str = "",
    ):
        import wandb

        Path(folder).mkdir(parents=True, exist_ok=True)
        # login_timeout: without a key wandb would ask for one on the terminal, and wait for ever.
        settings = wandb.Settings(console="off", silent=True, init_timeout=WANDB_START_SECONDS, login_timeout=1)
        what: dict[str, Any] = {
            "project": project or "hybridflow",
            "name": name,
            "dir": str(folder),
            "config": dict(config),
            "settings": settings,
            "id": resume_id or None,
            "resume": "allow" if resume_id else None,
        }
        try:
            self._run = wandb.init(mode=mode, **what)  # type: ignore[arg-type]
        except Exception as error:  # wandb raises several kinds, of which none may end a run
            if mode == "offline":
                raise
            warn(f"W&B is not reachable ({first_line(error)}): logging offline, `wandb sync {folder}/wandb/*` sends it")
            self._run = wandb.init(mode="offline", **what)

    @property
    def id(self) -> str:
        """The tracker's id of this run, to be kept in the checkpoint and given back as ``resume_id``."""
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        # finish() waits for the upload, without a bound when the network is gone.
        waiter = threading.Thread(target=self._run.finish, daemon=True)
        waiter.start()
        waiter.join(WANDB_FINISH_SECONDS)
        if waiter.is_alive():
            raise TimeoutError(f"the upload did not end in {WANDB_FINISH_SECONDS:.0f} s; `wandb sync` sends the rest")


class BestEffort:
    """A tracker that cannot stop a run: the first failure is said once, then the tracker is left alone."""

    def __init__(self, name: str, make: Callable[[], Sink], warn: Callable[[str], None]):
        self._name, self._warn = name, warn
        self.sink: Sink | None = None
        self._try(lambda: setattr(self, "sink", make()))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if sink := self.sink:
            self._try(lambda: sink.log(step, metrics))

    def close(self) -> None:
        if sink := self.sink:
            self._try(sink.close)

    def _try(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, training goes on
            self.sink = None
            self._warn(f"{self._name} is off from here on ({first_line(error)}); training goes on")


def first_line(error: BaseException) -> str:
    """An error in one line: its class and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")
