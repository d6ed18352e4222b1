"""The one thing a job talks to about what happens: terminal, metrics, trackers, timeline, and the report at the end."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from hybridflow.errors import HybridFlowError
from hybridflow.telemetry.cards import RunCard, Summary
from hybridflow.telemetry.console import make_console
from hybridflow.telemetry.environment import describe
from hybridflow.telemetry.metrics import Metric
from hybridflow.telemetry.names import check_names
from hybridflow.telemetry.report import build_report
from hybridflow.telemetry.samples import extremes, latest_samples
from hybridflow.telemetry.sinks import (
    BestEffort,
    JsonlSink,
    TensorBoardSink,
    WandbSink,
    first_line,
    read_jsonl,
    unwritable,
)
from hybridflow.telemetry.timeline import Timeline

NAME_CHECK_STEPS = 2
SHOWN_SAMPLES = 2  # best, and as many worst


class Recorder:
    """Telemetry of one run, in the driver.

    ::

        recorder = Recorder(run_dir, total_steps=80, resumed_step=0, log_interval=1)
        recorder.start(card, tensorboard=True, wandb_project="demo", wandb_mode="offline", config=resolved)
        recorder.eval(0, {"eval/reward_mean": 0.24})
        for step in range(1, 81):
            recorder.begin_step(step)
            with recorder.phase("generate"):
                ...
            recorder.step(step, metrics)      # floats or Mean/Sum/Max/Min
        recorder.finish(checkpoint=path, next_steps=["hybridflow report runs/demo"])

    Around it, ``except BaseException as error: recorder.fail(error); raise SystemExit(code)``.

    Args:
        run_dir: the run's folder, made if missing.
        resumed_step: records of later steps are dropped and the rest is continued; 0 starts afresh.
        log_interval: steps between looks at a few samples on the terminal.
        strict: also check metric names after the first steps (tests do).

    Raises:
        ResourceError: the run folder cannot be written (metrics.jsonl must hold; all else is best effort).
        ConfigError: a metric name that nobody registered.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        total_steps: int,
        resumed_step: int = 0,
        log_interval: int = 1,
        strict: bool = False,
        stream: TextIO | None = None,
    ):
        self.run_dir = Path(run_dir)
        self.total_steps, self.resumed_step, self._strict = total_steps, resumed_step, strict
        self._record = JsonlSink(self.run_dir / "metrics.jsonl", resumed_step)
        self._trackers: list[BestEffort] = []
        self.console = make_console(total_steps, stream=stream)
        self._log_interval = max(1, log_interval)
        self.timeline = Timeline(self.run_dir / "timeline.json", resumed_step=resumed_step)
        self._begin = time.perf_counter()
        self._step_begin: float | None = None
        self._start_seconds = 0.0
        self._last_step, self._reward_mean = resumed_step, math.nan
        self._evals: dict[int, float] = {}
        self._recorded = False
        self._recall()

    def start(
        self,
        card: RunCard,
        *,
        config: Mapping[str, Any] | None = None,
        tensorboard: bool = True,
        wandb_project: str = "",
        wandb_mode: str = "disabled",
        wandb_id: str = "",
    ) -> None:
        """Show the run card, write environment.json and open the trackers."""
        environment = {**describe(), "run": asdict(card)}
        self._write_json("environment.json", environment)
        self.console.card(card)
        if tensorboard:
            self._track("TensorBoard", lambda: TensorBoardSink(self.run_dir / "tensorboard", self.resumed_step))
        if wandb_mode != "disabled":
            self._track(
                "W&B",
                lambda: WandbSink(
                    project=wandb_project,
                    mode=wandb_mode,
                    name=card.name,
                    folder=self.run_dir,
                    config=config or {},
                    warn=self.warn,
                    resume_id=wandb_id,
                ),
            )

    def set_total_steps(self, total_steps: int) -> None:
        """The number of steps, once it is known (an epoch's length may be known only when the data is read)."""
        self.total_steps = self.console.total_steps = total_steps

    @property
    def wandb_id(self) -> str:
        """W&B's id of this run, to be kept in the checkpoint; empty without W&B."""
        return next((tracker.sink.id for tracker in self._trackers if isinstance(tracker.sink, WandbSink)), "")

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a phase; it becomes ``time/<name>_seconds`` of the step and a span of the timeline."""
        return self.timeline.phase(name)

    def note(self, text: str) -> None:
        self.console.note(text)

    def warn(self, text: str) -> None:
        self.console.warn(text)

    def begin_step(self, step: int) -> None:
        """Start the clock of a step. What came before it belongs to the previous step (start-up: to none)."""
        self._log_leftovers()
        if self.timeline.step == 0:
            self._start_seconds = max(0.0, time.perf_counter() - self._begin - sum(self.timeline.totals().values()))
        self.timeline.step = step
        self._step_begin = time.perf_counter()

    def step(self, step: int, metrics: Mapping[str, float | Metric]) -> dict[str, float]:
        """Record a step; returns its metrics as numbers, times and throughput added."""
        phases = self.timeline.take_step()
        begun = self._step_begin
        self._step_begin = None
        seconds = time.perf_counter() - begun if begun is not None else sum(phases.values())
        numbers = _numbers(metrics) | {f"time/{name}_seconds": value for name, value in phases.items()}
        numbers["time/step_seconds"] = seconds
        if "batch/tokens" in numbers and seconds > 0:
            numbers["throughput/tokens_per_second"] = numbers["batch/tokens"] / seconds
        self.log(step, numbers)
        self._last_step, self._reward_mean = step, numbers.get("reward/mean", math.nan)
        self.console.step(step, numbers)
        if step % self._log_interval == 0:
            found = latest_samples(self.run_dir / "samples.jsonl", step)
            self.console.samples(*extremes(found, SHOWN_SAMPLES))
        return numbers

    def eval(self, step: int, metrics: Mapping[str, float | Metric]) -> None:
        """Record an evaluation on held-out prompts (names ``eval/...``)."""
        numbers = _numbers(metrics)
        self.log(step, numbers)
        if "eval/reward_mean" in numbers:
            self._evals[step] = numbers["eval/reward_mean"]
        self.console.eval(step, numbers)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record numbers of a step without a line on the terminal (the warm-up's, as step 0)."""
        # Names are fixed by the program, so the first steps show them all; a rare one must not end a long run.
        if self._strict or step - self.resumed_step <= NAME_CHECK_STEPS:
            check_names(numbers)
        self._record.log(step, numbers)
        self._recorded = True
        for tracker in self._trackers:
            tracker.log(step, numbers)

    def finish(self, *, checkpoint: str = "", next_steps: Sequence[str] = ()) -> Summary:
        """End of a good run: close all files, build the report, print the summary and the success line."""
        summary = self._end("completed", checkpoint=checkpoint, next_steps=tuple(next_steps))
        self.console.summary(summary)
        return summary

    def fail(self, error: BaseException, *, checkpoint: str = "", log: str = "") -> None:
        """End of a bad run: the same, with one boxed cause on stderr in place of the summary."""
        self.console.close()
        try:
            self._end("failed", checkpoint=checkpoint, error=str(error) or type(error).__name__)
        except (OSError, HybridFlowError) as second:  # such as a full disk, which may be the very cause
            self.warn(f"the run folder is incomplete ({first_line(second)})")
        self.console.failure(
            error, step=self.timeline.step, phase=self.timeline.failed_in, log=log or str(self.run_dir / "summary.json")
        )

    def _end(self, status: str, **more: Any) -> Summary:
        self._log_leftovers()
        self._record.close()
        for tracker in self._trackers:
            tracker.close()
        self.timeline.close()
        phases = self.timeline.totals()
        if self._start_seconds:
            phases["start"] = phases.get("start", 0.0) + self._start_seconds
        summary = Summary(
            status=status,
            step=self._last_step,
            total_steps=self.total_steps,
            seconds=time.perf_counter() - self._begin,
            reward_mean=self._reward_mean,
            evals=self._evals,
            phase_seconds=dict(sorted(phases.items(), key=lambda item: -item[1])),
            busy_seconds=self.timeline.busy_seconds(),
            report=str(self.run_dir / "report.html") if self._recorded else "",
            **more,
        )
        self._write_json("summary.json", asdict(summary))
        try:
            if self._recorded:
                build_report(self.run_dir)
        except Exception as error:  # noqa: BLE001 - a page about a run is not worth the run
            self.warn(f"report.html was not built ({first_line(error)})")
        return summary

    def _log_leftovers(self) -> None:
        """Phases that ran after their step was recorded (evaluation, checkpoint) still belong to it."""
        phases = self.timeline.take_step()
        if phases and self._last_step > self.resumed_step:
            self.log(self._last_step, {f"time/{name}_seconds": value for name, value in phases.items()})

    def _track(self, name: str, make: Any) -> None:
        self._trackers.append(BestEffort(name, make, self.warn))

    def _recall(self) -> None:
        """What an earlier process of this run reached: a resumed run may have nothing left to do."""
        for record in read_jsonl(self.run_dir / "metrics.jsonl"):
            self._recorded = True
            if (reward := record.get("reward/mean")) is not None:
                self._reward_mean = reward
            if (reward := record.get("eval/reward_mean")) is not None:
                self._evals[record["step"]] = reward

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        path = self.run_dir / name
        try:
            path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
        except OSError as error:
            raise unwritable(path, error) from error


def _numbers(metrics: Mapping[str, float | Metric]) -> dict[str, float]:
    return {name: m.value if isinstance(m, Metric) else float(m) for name, m in metrics.items()}
