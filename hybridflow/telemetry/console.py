"""The terminal: a live panel on a tty; elsewhere (pipes, ``ray job submit``) one plain, flushed line a step."""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from hybridflow.errors import HybridFlowError
from hybridflow.telemetry.cards import (
    Facts,
    RunCard,
    Summary,
    box,
    duration,
    eval_line,
    failure_lines,
    grouped_seconds,
    sample_lines,
    si,
    step_line,
)
from hybridflow.telemetry.samples import Sample

if TYPE_CHECKING:
    from rich.panel import Panel

SPARKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"

# The live panel: columns of (label, metric, format).
PANEL = (
    (("reward", "reward/mean", ".3f"), ("spread", "reward/std", ".2f"), ("unscored", "reward/failures", ".0f")),
    (("kl", "kl/actor_reference", ".4f"), ("entropy", "entropy/mean", ".3f"), ("clip", "policy/clip_fraction", ".1%")),
    (("policy loss", "loss/policy", ".4f"), ("value loss", "loss/value", ".4f")),
    (("length", "response/length_mean", ".0f"), ("cut", "response/clipped_fraction", ".0%")),
)


class Console:
    """Plain text, made for logs: every line is complete, flushed and free of control codes."""

    def __init__(self, total_steps: int, *, stream: TextIO | None = None):
        self.total_steps = total_steps
        self.stream = stream or sys.stdout
        self._step_ends: deque[tuple[int, float]] = deque(maxlen=20)

    def card(self, card: RunCard) -> None:
        self._facts(f"HybridFlow run {card.name}", card.facts())

    def note(self, text: str) -> None:
        """Progress outside the steps, such as start-up."""
        self._print(text)

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line a step."""
        self._step_ends.append((step, time.monotonic()))
        self._print(step_line(step, self.total_steps, metrics, self.eta_seconds()))

    def samples(self, best: Sequence[Sample], worst: Sequence[Sample]) -> None:
        """What the policy says: the step's best and worst samples."""
        for line in sample_lines(best, worst):
            self._print(line)

    def eval(self, step: int, metrics: Mapping[str, float]) -> None:
        self._print(eval_line(step, self.total_steps, metrics))

    def summary(self, summary: Summary) -> None:
        self.close()
        self._facts("HybridFlow summary", summary.facts())
        self._print(summary.success_line)

    def failure(self, error: BaseException, *, step: int = 0, phase: str = "", log: str = "") -> None:
        self.close()
        print_failure(error, step=step, phase=phase, log=log)

    def close(self) -> None:
        """Give the terminal back; safe to call twice."""

    def eta_seconds(self) -> float:
        """Wall time to the last step, from the last 20; what lies between steps (evaluation) counts."""
        if len(self._step_ends) < 2:
            return math.nan
        (first, begin), (last, end) = self._step_ends[0], self._step_ends[-1]
        return (end - begin) / max(1, last - first) * (self.total_steps - last)

    def _facts(self, title: str, facts: Facts) -> None:
        width = max(len(label) for label, _ in facts)
        self._print(title)
        previous = ""
        for label, text in facts:  # the label of a table is said once; an adjustment keeps its own, for grep
            shown = "" if label == previous and label in ("layout", "time") else label
            self._print(f"  {shown:<{width}}  {text}")
            previous = label

    def _print(self, line: str) -> None:
        try:
            print(line, file=self.stream, flush=True)
        except OSError:  # the reader went away (`| head`, a closed terminal): the run goes on, unseen
            self.stream = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
            os.dup2(self.stream.fileno(), sys.stdout.fileno())  # what is still buffered has nowhere to go


class LiveConsole(Console):
    """A panel that stays at the bottom of a terminal while other output scrolls by above it."""

    def __init__(self, total_steps: int, *, stream: TextIO | None = None):
        super().__init__(total_steps, stream=stream)
        from rich.console import Console as RichConsole
        from rich.live import Live

        self._rich = RichConsole(file=self.stream, highlight=False)
        self._title, self._note = "HybridFlow", "starting"
        self._begin = time.monotonic()
        self._step = 0
        self._metrics: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=60)
        self._evals: dict[int, float] = {}
        self._live = Live(get_renderable=self._panel, console=self._rich, refresh_per_second=4, transient=True)

    def card(self, card: RunCard) -> None:
        self._title = f"HybridFlow run {card.name}"
        super().card(card)
        self._live.start()

    def note(self, text: str) -> None:
        self._note = text
        self._live.refresh()

    def warn(self, text: str) -> None:
        self._rich.print(f"warning: {text}", style="yellow", markup=False)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step_ends.append((step, time.monotonic()))
        self._step, self._metrics, self._note = step, dict(metrics), ""
        self._rewards.append(metrics.get("reward/mean", math.nan))

    def samples(self, best: Sequence[Sample], worst: Sequence[Sample]) -> None:
        for line in sample_lines(best, worst):
            self._rich.print(_plain(line, "dim"))

    def eval(self, step: int, metrics: Mapping[str, float]) -> None:
        self._evals[step] = metrics.get("eval/reward_mean", math.nan)

    def close(self) -> None:
        self._live.stop()

    def _facts(self, title: str, facts: Facts) -> None:
        from rich.panel import Panel
        from rich.table import Table

        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        previous = ""
        for label, text in facts:  # a label that repeats is said once
            grid.add_row("" if label == previous else label, _plain(text, "yellow" if label == "adjusted" else ""))
            previous = label
        self._rich.print(Panel(grid, title=title, title_align="left", border_style="cyan", expand=False))

    def _panel(self) -> Panel:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        bar = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, 1, None):
            bar.add_column(ratio=ratio)
        elapsed, eta = duration(time.monotonic() - self._begin), self.eta_seconds()
        told = f"{elapsed}, eta {duration(eta)}" if math.isfinite(eta) else elapsed
        bar.add_row(f"step {self._step}/{self.total_steps}", ProgressBar(self.total_steps, self._step), told)
        columns = Table.grid(padding=(0, 3))
        columns.add_row(*(_column(rows) for rows in self._columns() if rows))
        spark = _plain(self._spark(), "cyan")
        body = [bar, columns] if self._metrics else [bar]
        body += [part for part in (spark, _plain(self._note, "dim")) if part.plain]
        return Panel(Group(*body), title=self._title, title_align="left", border_style="cyan")

    def _columns(self) -> list[list[tuple[str, str]]]:
        """Metrics by area, as label and text; what was not measured is left out."""
        known = self._metrics
        columns = [
            [(label, format(known[name], spec)) for label, name, spec in rows if name in known] for rows in PANEL
        ]
        if self._evals:
            last, best = list(self._evals.values())[-1], max(self._evals.values())
            columns[0].append(("held-out", f"{last:.3f} (best {best:.3f})"))
        speed = [(group, f"{seconds:.2f}s") for group, seconds in grouped_seconds(known).items()]
        if "throughput/tokens_per_second" in known:
            speed.append(("tokens/s", si(known["throughput/tokens_per_second"])))
        return [*columns, speed]

    def _spark(self) -> str:
        """The rewards of the last steps as small bars, where the terminal has the characters."""
        values = [value for value in self._rewards if math.isfinite(value)]
        if len(values) < 2 or not self._rich.encoding.startswith("utf"):
            return ""
        low, high = min(values), max(values)
        heights = (int((value - low) / (high - low or 1.0) * (len(SPARKS) - 1)) for value in values)
        return f"reward {low:.3f} {''.join(SPARKS[height] for height in heights)} {high:.3f}"


def make_console(total_steps: int, *, stream: TextIO | None = None) -> Console:
    """The console for this terminal: live where it is a tty that can move its cursor."""
    out = stream or sys.stdout
    live = out.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    return (LiveConsole if live else Console)(total_steps, stream=out)


def print_failure(
    error: BaseException, *, step: int = 0, phase: str = "", log: str = "", stream: TextIO | None = None
) -> None:
    """One boxed cause on stderr; before it the traceback, where the error is none of ours (ours say what to do)."""
    out = stream or sys.stderr
    if not isinstance(error, HybridFlowError | KeyboardInterrupt):
        traceback.print_exception(error, file=out)
    title, lines = failure_lines(error, step=step, phase=phase, log=log)
    if not out.isatty():
        print(box(title, lines), file=out, flush=True)
        return
    from rich.console import Console as RichConsole
    from rich.panel import Panel

    RichConsole(file=out, highlight=False).print(
        Panel(_plain("\n".join(lines)), title=title, title_align="left", border_style="red")
    )


def _column(rows: list[tuple[str, str]]) -> Any:
    from rich.table import Table

    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim")
    table.add_column(justify="right", style="bold")
    for label, text in rows:
        table.add_row(label, text)
    return table


def _plain(text: str, style: str = "") -> Any:
    """Text that is shown as it is: square brackets in it are no markup."""
    from rich.text import Text

    return Text(text, style=style)
