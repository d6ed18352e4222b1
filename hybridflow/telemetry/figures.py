"""The charts of the report, as plain Plotly JSON (no Plotly needed to build them; colours are the page's business).

A chart has rows of panels over one x axis, each with its own y axis: two quantities of different scale never share one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.telemetry.timeline import DRIVER

Records = Mapping[int, Mapping[str, float | None]]  # step -> metrics
MAX_POINTS = 2000
GANTT_RANKS = 4  # of each pool
FROM_ZERO = ("coefficient", "cut", "clipped", "norm")  # panels, by the title of their y axis

# title, what it says, then at most two panels: (y axis title, ((metric, legend), ...))
CHARTS: tuple[tuple[str, str, tuple[tuple[str, tuple[tuple[str, str], ...]], ...]], ...] = (
    ("Reward", "mean score of the sampled responses, and of held-out prompts",
     (("reward", (("reward/mean", "training"), ("eval/reward_mean", "held-out"))),)),
    ("KL from the reference", "per token, before the update; below it the weight of the penalty",
     (("nats", (("kl/actor_reference", "KL"),)), ("coefficient", (("kl/coefficient", "coefficient"),)))),
    ("Response length", "mean tokens; below it the share that hit the limit",
     (("tokens", (("response/length_mean", "mean"), ("response/length_max", "max"))),
      ("cut", (("response/clipped_fraction", "cut at the limit"),)))),
    ("Losses", "policy above, value below",
     (("policy", (("loss/policy", "policy"),)), ("value", (("loss/value", "value"),)))),
    ("Policy update", "entropy above, share of clipped tokens below",
     (("nats", (("entropy/mean", "entropy"),)), ("clipped", (("policy/clip_fraction", "clip fraction"),)))),
    ("Gradient norms", "before clipping",
     (("norm", (("grad_norm/actor", "actor"), ("grad_norm/critic", "critic"))),)),
    ("Rollout against trainer", "mean |difference| of the log-probs of the same weights: should stay at rounding",
     (("nats", (("mismatch/abs_log_prob", "mismatch"),)),)),
    ("Throughput", "prompt and response tokens per second of the whole step",
     (("tokens/s", (("throughput/tokens_per_second", "tokens/s"),)),)),
)  # fmt: skip


def curves(records: Records) -> list[dict[str, Any]]:
    """All charts that have data, in the order of ``CHARTS``."""
    charts = []
    for title, text, panels in CHARTS:
        traces = [
            (row, _line(records, name, legend, dots=name.startswith("eval/")))
            for row, (_, names) in enumerate(panels)
            for name, legend in names
        ]
        if traces := [(row, trace) for row, trace in traces if trace["y"]]:
            used = sorted({row for row, _ in traces})
            for row, trace in traces:
                trace["yaxis"] = _axis("y", used.index(row))
            layout = _rows(records, [panels[row][0] for row in used]) | {"showlegend": len(traces) > len(used)}
            if "mismatch" in traces[0][1]["name"]:
                layout["yaxis"] |= {"type": "log"}
            charts.append({"title": title, "text": text, "data": [trace for _, trace in traces], "layout": layout})
    return charts


def phases(records: Records) -> dict[str, Any] | None:
    """Time of each step by phase, stacked; phases in order of their total."""
    totals: dict[str, float] = {}
    for metrics in records.values():
        for name, value in metrics.items():
            if name.startswith("time/") and name != "time/step_seconds" and value is not None:
                totals[name] = totals.get(name, 0.0) + value
    if not totals:
        return None
    timed = [step for step, metrics in records.items() if "time/step_seconds" in metrics]
    steps = _thinned(timed or list(records))
    data = [
        {
            "type": "bar",
            "name": name.removeprefix("time/").removesuffix("_seconds"),
            "x": steps,
            "y": [records[step].get(name) or 0.0 for step in steps],
            "hovertemplate": "%{y:.3f} s",
        }
        for name in sorted(totals, key=lambda name: -totals[name])
    ]
    layout = _rows(records, ["seconds"]) | {"barmode": "stack", "bargap": 0, "showlegend": True}
    return {"title": "Time by phase", "text": "wall time of the driver, step by step", "data": data, "layout": layout}


def gantt(events: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Who works when, in the last whole step of a trace: a row for the driver and for the first ranks of each pool."""
    pools = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    spans = [event for event in events if event.get("ph") == "X" and event["args"].get("step", 0) > 0]
    steps = sorted({event["args"]["step"] for event in spans})
    if not steps:
        return None
    step = steps[-2] if len(steps) > 1 else steps[-1]  # the last one holds the final evaluation and checkpoint
    spans = [event for event in spans if event["args"]["step"] == step and event["tid"] < GANTT_RANKS]
    begin = min(event["ts"] for event in spans)
    rows: dict[str, str] = {}
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for event in sorted(
        spans, key=lambda event: (pools.get(event["pid"]) != DRIVER, event["pid"], event["tid"], event["ts"])
    ):
        by_name.setdefault(event["name"], []).append(event)
        rows[_row(pools, event)] = ""
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [_row(pools, event) for event in group],
            "base": [(event["ts"] - begin) / 1e6 for event in group],
            "x": [event["dur"] / 1e6 for event in group],
            "hovertemplate": f"{name}: %{{x:.3f}} s",
        }
        for name, group in by_name.items()
    ]
    layout = {
        "barmode": "overlay",
        "showlegend": True,
        "hovermode": "closest",
        "height": 120 + 26 * len(rows),
        "xaxis": {"title": {"text": "seconds"}},
        "yaxis": {"categoryorder": "array", "categoryarray": list(rows)[::-1], "automargin": True},
    }
    text = "driver and workers on one axis: bars over one another worked at the same time"
    return {"title": f"Step {step}, as it ran", "text": text, "data": data, "layout": layout}


def _line(records: Records, name: str, legend: str, dots: bool = False) -> dict[str, Any]:
    steps = _thinned([step for step, metrics in records.items() if metrics.get(name) is not None])
    values = [records[step][name] for step in steps]
    mode = "lines+markers" if dots or len(steps) < 3 else "lines"
    return {"type": "scatter", "mode": mode, "name": legend, "x": steps, "y": values, "hovertemplate": "%{y:.4g}"}


def _thinned(steps: list[int]) -> list[int]:
    """At most ``MAX_POINTS``, evenly spaced, the last one among them: a page of a long run stays quick."""
    stride = -(-len(steps) // MAX_POINTS) or 1
    return steps[::-stride][::-1]


def _rows(records: Records, titles: Sequence[str]) -> dict[str, Any]:
    """Axes of one or two panels, one under the other, the first the taller."""
    domains = [[0.0, 1.0]] if len(titles) == 1 else [[0.42, 1.0], [0.0, 0.3]]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "step"}, "anchor": _axis("y", len(titles) - 1)},
        "hovermode": "x unified",
    }
    if len(records) <= 12:
        layout["xaxis"]["dtick"] = 1  # no half steps
    for index, title in enumerate(titles):
        layout[f"yaxis{index + 1 if index else ''}"] = {
            "title": {"text": title},
            "domain": domains[index],
            "nticks": 4 if index else 6,
        }
        if title in FROM_ZERO:
            layout[f"yaxis{index + 1 if index else ''}"]["rangemode"] = "tozero"
    return layout


def _axis(letter: str, index: int) -> str:
    return f"{letter}{index + 1 if index else ''}"


def _row(pools: Mapping[int, str], event: Mapping[str, Any]) -> str:
    pool = pools.get(event["pid"], str(event["pid"]))
    return pool if pool == DRIVER else f"{pool} {event['tid']}"
