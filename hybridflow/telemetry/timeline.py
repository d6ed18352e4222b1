"""Where the time of a run goes: the driver's phases and the workers' spans, as one Chrome trace (Perfetto opens it).

Written as it happens, in Chrome's JSON array format, whose closing bracket may be missing: a killed run leaves a trace
that still opens. Memory stays bounded however long the run is.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

DRIVER = "driver"


class Timeline:
    """Collects spans; all times are seconds since the epoch, so that those of many hosts lie on one axis.

    Args:
        path: the trace to write; None keeps only the sums.
        resumed_step: continue an existing trace after this step; 0 starts afresh.
        max_events: spans written before the file is closed; sums go on. A trace of more opens in no viewer.
    """

    def __init__(self, path: str | Path | None = None, *, resumed_step: int = 0, max_events: int = 200_000):
        self.step = 0
        self.failed_in = ""  # the innermost phase that an exception left
        self._file: TextIO | None = None
        self._separator = "[\n"
        self._events_left = max_events
        self._process_ids: dict[str, int] = {}
        self._threads: set[tuple[int, int]] = set()
        self._inner_seconds: list[float] = []  # for each open phase, what the phases inside it took
        self._of_step: dict[str, float] = defaultdict(float)
        self._totals: dict[str, float] = defaultdict(float)
        self._busy: dict[str, float] = defaultdict(float)
        self._busy_until: dict[str, float] = defaultdict(float)
        if path:
            self._open(Path(path), resumed_step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of the driver. Its seconds are its own: those of a phase inside it are not counted twice."""
        begin, start = time.time(), time.perf_counter()
        self._inner_seconds.append(0.0)
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or name
            raise
        finally:
            seconds = time.perf_counter() - start
            own = seconds - self._inner_seconds.pop()
            if self._inner_seconds:
                self._inner_seconds[-1] += seconds
            self._of_step[name] += own
            self._totals[name] += own
            self._write(DRIVER, 0, name, begin, begin + seconds)

    def add_span(self, pool: str, name: str, start: float, stop: float, *, rank: int = 0) -> None:
        """A call that one rank of a pool worked on, as measured there.

        Spans of a pool are expected in about the order in which they began; the pool's busy time is their union.
        """
        self._busy[pool] += max(0.0, stop - max(start, self._busy_until[pool]))
        self._busy_until[pool] = max(stop, self._busy_until[pool])
        self._write(pool, rank, name, start, stop)

    def add_phase(self, name: str, spans: Iterable[tuple[float, float]]) -> None:
        """A phase whose work went on elsewhere, in ``spans``: its seconds are those in which any of them ran."""
        end = 0.0
        for start, stop in sorted(spans):
            if stop > end:
                seconds = stop - max(start, end)
                self._of_step[name] += seconds
                self._totals[name] += seconds
                self._write(DRIVER, 0, name, max(start, end), stop)
                end = stop

    def take_step(self) -> dict[str, float]:
        """Seconds by phase since the last call, and forget them; the totals stay."""
        taken, self._of_step = dict(self._of_step), defaultdict(float)
        self._put("", flush=True)
        return taken

    def totals(self) -> dict[str, float]:
        """Seconds by phase of the whole run (of this process), longest first."""
        return dict(sorted(self._totals.items(), key=lambda item: -item[1]))

    def busy_seconds(self) -> dict[str, float]:
        """For each pool, the seconds in which at least one of its ranks worked."""
        return dict(self._busy)

    def close(self) -> None:
        """Close the trace properly. Sums may still be read, and later spans still count in them."""
        self._put("\n]\n" if self._separator == ",\n" else "[]\n", flush=True)
        self._file = None

    def _open(self, path: Path, resumed_step: int) -> None:
        events = read_trace(path) if resumed_step and path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        for event in events:
            if event["name"] == "process_name":
                self._process_ids[event["args"]["name"]] = event["pid"]
            if event.get("args", {}).get("step", 0) <= resumed_step:
                self._event(**event)

    def _write(self, pool: str, rank: int, name: str, start: float, stop: float) -> None:
        if self._file is None:
            return
        process = self._process_ids.get(pool)
        if process is None:
            process = self._process_ids[pool] = len(self._process_ids)
            self._event(name="process_name", ph="M", pid=process, tid=0, args={"name": pool})
        if (process, rank) not in self._threads:
            self._threads.add((process, rank))
            self._event(name="thread_name", ph="M", pid=process, tid=rank, args={"name": f"rank {rank}"})
        micros = {"ts": round(start * 1e6), "dur": round((stop - start) * 1e6)}
        self._event(name=name, cat=pool, ph="X", pid=process, tid=rank, **micros, args={"step": self.step})
        if self._events_left <= 0:
            self._event(name="trace is full", ph="i", s="g", pid=process, tid=rank, ts=round(stop * 1e6))
            self.close()

    def _event(self, **event: Any) -> None:
        self._events_left -= 1
        self._put(self._separator + json.dumps(event))
        self._separator = ",\n"

    def _put(self, text: str, flush: bool = False) -> None:
        try:
            if self._file:
                self._file.write(text)
                if flush:
                    self._file.flush()
        except OSError:  # a trace is not worth a run; metrics.jsonl on the same disk raises the error that names it
            self._file = None


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """The events of a trace, also of one whose run is still going or was killed in the middle of a line."""
    text = Path(path).read_text(encoding="utf-8").strip().removesuffix("]").rstrip()
    lines = [line.rstrip(",") for line in text.removeprefix("[").strip().split("\n") if line.strip()]
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:  # only the last line of a killed run
            break
    return events
