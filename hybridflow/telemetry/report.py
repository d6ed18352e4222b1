"""report.html: one file that opens anywhere, without a network, and shows what a run did.

Reads only the run folder, so it can be built while a run goes on, after a crash, or a year later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.telemetry.cards import duration, si
from hybridflow.telemetry.figures import Records, curves, gantt, phases
from hybridflow.telemetry.samples import Sample, extremes, read_samples
from hybridflow.telemetry.sinks import read_jsonl, unwritable
from hybridflow.telemetry.timeline import read_trace

TEMPLATE = Path(__file__).with_name("report_page.html")
SAMPLE_STEPS, SAMPLES_EACH = 12, 4


def build_report(run_dir: str | Path) -> Path:
    """Write ``report.html`` into a run folder, from whatever is there; returns its path.

    Raises:
        ConfigError: the folder is not one of a run (no metrics.jsonl, or an empty one).
        ResourceError: the page cannot be written.
    """
    folder = Path(run_dir)
    records = read_records(folder)
    environment, summary = _json(folder / "environment.json"), _json(folder / "summary.json")
    card = environment.pop("run", {})
    trace = folder / "timeline.json"
    charts = [*curves(records), phases(records), gantt(read_trace(trace) if trace.is_file() else [])]
    samples = read_samples(folder / "samples.jsonl") if (folder / "samples.jsonl").is_file() else []
    config = folder / "config.resolved.yaml"
    parts = {
        "title": escape(str(card.get("name") or folder.resolve().name)),
        "status": escape(str(summary.get("status", "running"))),
        "subtitle": escape(_subtitle(card, records)),
        "tiles": _tiles(records, summary),
        "error": f'<pre class="error">{escape(summary["error"])}</pre>' if summary.get("error") else "",
        "adjustments": _list("Adjusted", card.get("adjustments", ())),
        "facts": _facts(card, environment, summary),
        "config": escape(config.read_text(encoding="utf-8")) if config.is_file() else "",
        "charts": _embed([chart for chart in charts if chart]),
        "samples": _embed(_choose(samples)),
        "plotly": _plotly(),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], TEMPLATE.read_text(encoding="utf-8"))
    path = folder / "report.html"
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def read_records(folder: Path) -> Records:
    """metrics.jsonl by step, in order; the lines of one step are merged, the last word counts."""
    path = folder / "metrics.jsonl"
    lines = read_jsonl(path) if path.is_file() else []
    if not lines:
        raise ConfigError(
            f"{folder} holds no metrics.jsonl with records",
            hint="give a run's folder, such as runs/demo",
            where=str(path),
        )
    merged: dict[int, dict[str, float | None]] = {}
    for line in lines:
        metrics = merged.setdefault(line["step"], {})
        metrics.update({name: value for name, value in line.items() if "/" in name})
    return dict(sorted(merged.items()))


def _choose(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Best, worst and failed ones of some steps, evenly spaced over the run, the newest first."""
    by_step: dict[tuple[int, bool], list[Sample]] = {}
    for sample in samples:
        by_step.setdefault((sample.step, sample.held_out), []).append(sample)
    picked = {key for held_out in (True, False) for key in _spread(sorted(k for k in by_step if k[1] is held_out))}
    chosen = []
    for step, held_out in sorted(picked, reverse=True):
        group = by_step[step, held_out]
        best, worst = extremes(group, SAMPLES_EACH)
        failed = [sample for sample in group if sample.reward is None][:SAMPLES_EACH]
        lists = {"best": best, "worst": worst, "failed": failed}
        label = f"step {step}{', held-out' if held_out else ''}"
        chosen.append({"label": label} | {name: [asdict(sample) for sample in lists[name]] for name in lists})
    return chosen


def _spread(keys: list[tuple[int, bool]]) -> list[tuple[int, bool]]:
    """At most ``SAMPLE_STEPS`` of them, evenly spaced, the first and the last among them."""
    count = min(SAMPLE_STEPS, len(keys))
    return [keys[round(i * (len(keys) - 1) / max(1, count - 1))] for i in range(count)]


def _tiles(records: Records, summary: Mapping[str, Any]) -> str:
    """The figures that one looks for first."""
    tiles = []

    def change(label: str, name: str, spec: str) -> None:
        values = _column(records, name)
        if values:
            first, last = format(values[0], spec), format(values[-1], spec)
            tiles.append((label, last, f"from {first}" if len(values) > 1 else ""))

    change("Reward", "reward/mean", ".3f")
    change("Held-out reward", "eval/reward_mean", ".3f")
    change("KL from reference", "kl/actor_reference", ".4f")
    change("Response length", "response/length_mean", ".0f")
    if speeds := _column(records, "throughput/tokens_per_second"):
        tiles.append(("Tokens per second", si(sorted(speeds)[len(speeds) // 2]), "median"))
    if step_times := _column(records, "time/step_seconds"):
        each = f"{duration(sum(step_times) / len(step_times))} a step"
        tiles.append(("Wall time", duration(summary.get("seconds") or sum(step_times)), each))
    html = (f"<div class=tile><h3>{a}</h3><b>{escape(b)}</b><span>{escape(c)}</span></div>" for a, b, c in tiles)
    return "\n".join(html)


def _facts(card: Mapping[str, Any], environment: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    git, host = environment.get("git") or {}, environment.get("host") or {}
    sha = f"{git['sha'][:12]}{' (with local changes)' if git.get('dirty') else ''}" if git.get("sha") else ""
    machine = ", ".join(f"{host[key]}{unit}" for key, unit in (("name", ""), ("cpus", " CPUs")) if host.get(key))
    devices = ", ".join(device.get("name", "") for device in environment.get("devices") or ())
    rows = [
        ("model", card.get("model")), ("algorithm", card.get("algorithm")), ("data", card.get("data")),
        ("config", card.get("config")), ("run folder", card.get("run_dir")), ("command", environment.get("command")),
        ("started", environment.get("started")), ("source", sha), ("machine", machine), ("devices", devices),
        ("checkpoint", summary.get("checkpoint")),
        *(("placement", line) for line in card.get("placement", ())),
    ]  # fmt: skip
    table = "".join(f"<tr><th>{escape(label)}<td>{escape(str(text))}" for label, text in rows if text)
    layout = _table(card.get("layout", ()))
    packages = environment.get("packages") or {}
    versions = " ".join(f"<span>{escape(name)} {escape(version)}</span>" for name, version in packages.items())
    return f"<table class=facts>{table}</table>{layout}<p class=versions>{versions}</p>"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}" for name in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(str(value))}" for value in row.values()) for row in rows)
    return f"<div class=scroll><table class=layout><thead><tr>{head}<tbody>{body}</table></div>"


def _list(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}" for line in lines)
    return f"<section><h2>{title}</h2><ul class=adjusted>{items}</ul></section>" if lines else ""


def _subtitle(card: Mapping[str, Any], records: Records) -> str:
    done = max(records)
    steps = f"{done} of {card['total_steps']} steps" if card.get("total_steps") else f"{done} steps"
    return ", ".join(part for part in (card.get("algorithm"), card.get("model"), steps) if part)


def _column(records: Records, name: str) -> list[float]:
    return [value for metrics in records.values() if (value := metrics.get(name)) is not None]


def _embed(value: Any) -> str:
    """JSON inside a script element: no text of a sample can end the element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).replace("</script", "<\\/script")


def _json(path: Path) -> dict[str, Any]:
    """A file of the run folder; what a killed run left half is as good as absent."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
