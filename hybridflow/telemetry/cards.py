"""What the terminal and the report say about a run, as plain text: run card, step line, summary, failure box.

Pure functions of what they are given; ``console.py`` decides how it looks on which terminal.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybridflow.errors import HybridFlowError
from hybridflow.telemetry.samples import Sample

Facts = list[tuple[str, str]]
BOX_WIDTH = 100
SAMPLE_WIDTH = 70
BOX_LINES = 12  # of the message: Ray's own can have a hundred

# The step line says where time went in three words; a phase that is not named here belongs to training.
# Evaluation and checkpoints lie between steps, and are not shown.
PHASE_GROUPS = {"prompts": "gen", "generate": "gen", "reshard": "sync", "evaluate": "", "checkpoint": "", "step": ""}


@dataclass(frozen=True, kw_only=True)
class RoleRow:
    """One role in the layout table, such as ``RoleRow(role="actor", process="actor+critic", devices="0-3",
    layout="tp 2 pp 1 dp 2", engine="megatron")``."""

    role: str
    process: str = ""
    devices: str = ""
    layout: str = ""
    engine: str = ""


@dataclass(frozen=True, kw_only=True)
class RunCard:
    """What a run is, said before it starts. ``adjustments`` are the changes made to the user's config, a line each."""

    name: str
    run_dir: str
    total_steps: int
    config: str = ""
    model: str = ""
    algorithm: str = ""
    data: str = ""
    resumed_step: int = 0
    layout: Sequence[RoleRow] = ()
    placement: Sequence[str] = ()
    adjustments: Sequence[str] = ()
    dashboard: str = ""
    attach: str = ""
    stop: str = ""

    def facts(self) -> Facts:
        """Label and text of each line; what is empty is left out."""
        resumed = f"after step {self.resumed_step}" if self.resumed_step else ""
        single = [
            ("config", self.config), ("model", self.model), ("algorithm", self.algorithm), ("data", self.data),
            ("steps", str(self.total_steps)), ("resumes", resumed), ("run folder", self.run_dir),
            ("dashboard", self.dashboard), ("attach", self.attach), ("stop", self.stop),
        ]  # fmt: skip
        return [
            *((label, text) for label, text in single if text),
            *(("layout", line) for line in self.layout_table()),
            *(("placement", line) for line in self.placement),
            *(("adjusted", line) for line in self.adjustments),
        ]

    def layout_table(self) -> list[str]:
        if not self.layout:
            return []
        names = ("role", "process", "devices", "layout", "engine")
        return align([names, *(tuple(getattr(row, name) for name in names) for row in self.layout)])


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How a run ended. ``evals`` maps step to mean reward on held-out prompts; seconds are wall time."""

    status: str
    step: int
    total_steps: int
    seconds: float
    reward_mean: float = math.nan
    evals: Mapping[int, float] = field(default_factory=dict)
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    busy_seconds: Mapping[str, float] = field(default_factory=dict)
    checkpoint: str = ""
    report: str = ""
    next_steps: Sequence[str] = ()
    error: str = ""

    @property
    def success_line(self) -> str:
        """The last line of a good run, word for word as the tutorial has it."""
        return f"Step {self.step}/{self.total_steps} completed. Avg reward: {self.reward_mean:.3f}"

    def facts(self) -> Facts:
        facts = [("finished", f"{self.step} steps in {duration(self.seconds)}")]
        facts += [("time", line) for line in self._phase_table()]
        if self.busy_seconds:
            shares = ", ".join(
                f"{pool} {_share(busy, self.seconds).strip()}" for pool, busy in self.busy_seconds.items()
            )
            facts.append(("busy", shares))
        if self.evals:
            best = max(self.evals, key=lambda step: (self.evals[step], -step))
            first, last = min(self.evals), max(self.evals)
            told = f"{self.evals[first]:.3f} at step {first}, {self.evals[last]:.3f} at step {last}"
            facts.append(("held-out", f"{told}, best {self.evals[best]:.3f} at step {best}"))
        facts += [(label, text) for label, text in (("checkpoint", self.checkpoint), ("report", self.report)) if text]
        return facts + [("next", command) for command in self.next_steps]

    def _phase_table(self) -> list[str]:
        known = sum(self.phase_seconds.values())
        rows = [*self.phase_seconds.items()]
        if self.seconds - known > 0.005 * self.seconds:
            rows.append(("other", self.seconds - known))
        return align([(name, duration(value), _share(value, self.seconds)) for name, value in rows])


_STEP_LINE = (
    ("reward {:6.3f}", "reward/mean"),
    ("spread {:.2f}", "reward/std"),
    ("kl {:7.4f}", "kl/actor_reference"),
    ("loss {:8.4f}", "loss/policy"),
    ("value {:7.4f}", "loss/value"),
    ("len {:4.0f} (cut {:3.0%})", "response/length_mean", "response/clipped_fraction"),
)


def step_line(step: int, total_steps: int, metrics: Mapping[str, float], eta_seconds: float = math.nan) -> str:
    """One step in one line: fixed order, fixed widths, and only what was measured."""
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    for template, *names in _STEP_LINE:
        if all(name in metrics for name in names):
            parts.append(template.format(*(metrics[name] for name in names)))
    if failures := metrics.get("reward/failures"):
        parts.append(f"unscored {failures:.0f}")
    if times := grouped_seconds(metrics):
        parts.append(" ".join(f"{group} {seconds:5.2f}s" for group, seconds in times.items()))
    if "throughput/tokens_per_second" in metrics:
        parts.append(f"{si(metrics['throughput/tokens_per_second']):>5} tok/s")
    if math.isfinite(eta_seconds):
        parts.append(f"eta {duration(eta_seconds)}")
    return " | ".join(parts)


def sample_lines(best: Sequence[Sample], worst: Sequence[Sample]) -> list[str]:
    """A few samples, the best first: reward, prompt and response, each on one line and cut where it is long."""
    rows = [(f"{s.reward:6.3f}", _one_line(s.prompt), "->", _one_line(s.response)) for s in (*best, *worst[::-1])]
    return [f"    {line}" for line in align([("reward", "prompt", "", "response"), *rows])] if rows else []


def _one_line(text: str) -> str:
    return textwrap.shorten(text, SAMPLE_WIDTH, placeholder=" ...") or "(empty)"


def eval_line(step: int, total_steps: int, metrics: Mapping[str, float]) -> str:
    shown = {"eval/reward_mean": "reward {:6.3f}", "eval/response_length_mean": "len {:4.0f}"}
    parts = [template.format(metrics[name]) for name, template in shown.items() if name in metrics]
    return " | ".join([f"eval {step:>{len(str(total_steps))}}/{total_steps}", *parts])


def failure_lines(error: BaseException, *, step: int = 0, phase: str = "", log: str = "") -> tuple[str, list[str]]:
    """Title and lines of the failure box: what, where, when, and what to do."""
    if isinstance(error, HybridFlowError):
        title, message, hint, where = type(error).__name__, error.message, error.hint, error.where
    elif isinstance(error, KeyboardInterrupt):
        text = str(error)  # a signal's name, or a sentence
        title, message, where = "Stopped", text if " " in text else f"interrupted by {text or 'Ctrl-C'}", ""
        hint = "the same command goes on from the last checkpoint, or starts afresh where there is none"
    else:
        title, message, hint, where = type(error).__name__, str(error) or "no message", "the traceback is above", ""
    told = message.splitlines()
    if len(told) > BOX_LINES:
        message = "\n".join([*told[:BOX_LINES], f"... {len(told) - BOX_LINES} more lines"])
    during = " ".join(part for part in (f"step {step}" if step else "", f"({phase})" if phase else "") if part)
    lines = [("", message), ("where", where), ("during", during), ("log", log), ("hint", hint)]
    return title, [f"{label}: {text}" if label else text for label, text in lines if text]


def box(title: str, lines: Sequence[str], width: int = BOX_WIDTH) -> str:
    """Lines in a box of ASCII, for logs and pipes. Words longer than the box (paths) are never cut."""
    inner = width - 4
    wrapped = [
        piece
        for line in lines
        for part in line.splitlines()
        for piece in textwrap.wrap(part, inner, break_long_words=False, break_on_hyphens=False) or [""]
    ]
    inner = max([inner, *map(len, wrapped)])
    body = [f"| {piece:<{inner}} |" for piece in wrapped]
    return "\n".join([f"+- {title} ".ljust(inner + 3, "-") + "+", *body, "+" + "-" * (inner + 2) + "+"])


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width, two blanks apart; columns that are empty but for the heading are left out."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:]) or len(rows) == 1]
    padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


def grouped_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a step's phases, summed to gen, train and sync (``PHASE_GROUPS``)."""
    groups: dict[str, float] = {}
    for name, seconds in metrics.items():
        phase = name.removeprefix("time/").removesuffix("_seconds")
        if name == f"time/{phase}_seconds":
            group = PHASE_GROUPS.get(phase, "train")
            groups[group] = groups.get(group, 0.0) + seconds
    return {group: groups[group] for group in ("gen", "train", "sync") if group in groups}


def duration(seconds: float) -> str:
    """0.42s, 12.3s, 3m05s, 5h12m."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 59.95:
        return f"{seconds:.1f}s" if seconds >= 9.995 else f"{seconds:.2f}s"
    minutes = round(seconds) // 60
    return f"{minutes}m{round(seconds) % 60:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def si(value: float) -> str:
    """Three digits and a letter: 950, 12.4k, 1.30M."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:4.0%}" if whole else ""
