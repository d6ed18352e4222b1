"""The recorder through a whole synthetic run, and the report that it leaves: data, escaping, offline."""

from __future__ import annotations

import io
import json
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest

from hybridflow.batch.batch import Batch, Ragged
from hybridflow.errors import ConfigError, ResourceError, WorkerError
from hybridflow.telemetry.cards import RoleRow, RunCard
from hybridflow.telemetry.figures import MAX_POINTS, curves, phases
from hybridflow.telemetry.metrics import Max, Mean, Sum
from hybridflow.telemetry.recorder import Recorder
from hybridflow.telemetry.report import build_report, read_records
from hybridflow.telemetry.samples import SampleRecorder
from hybridflow.telemetry.sinks import JsonlSink
from jobs import report as report_verb

NASTY = '<b>sort</b> & "quote" </script><script>alert(1)</script> <!-- \u00e9 \u2028'
STEPS = 6


def card(folder, **more):
    return RunCard(
        name="synthetic <run>",
        run_dir=str(folder),
        total_steps=STEPS,
        model="tiny",
        algorithm="ppo",
        layout=[RoleRow(role="actor", devices="0", layout="tp 1")],
        adjustments=["fsdp: no effect with DP 1 & co"],
        **more,
    )


def metrics(step):
    return {
        "reward/mean": Mean(0.1 * step * 8, 8), "reward/std": 0.1, "kl/actor_reference": np.float32(0.01 * step),
        "kl/coefficient": 0.05, "loss/policy": Mean(-0.1, 2), "loss/value": 0.3, "entropy/mean": 1.0,
        "policy/clip_fraction": 0.1, "policy/ratio_max": Max(1.2), "mismatch/abs_log_prob": 1e-7,
        "response/length_mean": 5.0, "response/clipped_fraction": 0.0, "grad_norm/actor": 1.0, "batch/tokens": Sum(64),
    }  # fmt: skip


def record_samples(recorder, step):
    lengths = np.array([2, 3, 1, 2])
    batch = Batch.of(
        np.arange(4) + 4 * step,
        prompt_text=[f"{NASTY} {i}" for i in range(4)],
        response_text=[f"answer {i} of step {step}" for i in range(4)],
        response_tokens=Ragged.from_lengths(np.zeros(8, np.int32), lengths),
        reward=np.array([0.5, 1.0, np.nan, 0.25], np.float32),
        reward_failure=["", "", "timeout", ""],
    )
    recorder.record(step, batch)


def run_to(folder, stop, *, resumed_step=0, stream=None, error=None):
    out = stream or io.StringIO()
    recorder = Recorder(folder, total_steps=STEPS, resumed_step=resumed_step, strict=True, stream=out)
    try:
        return steps_to(recorder, stop, error)
    except WorkerError as failure:
        recorder.fail(failure, checkpoint="ckpt")


def steps_to(recorder, stop, error):
    folder, resumed_step = recorder.run_dir, recorder.resumed_step
    recorder.start(card(folder, resumed_step=resumed_step))
    samples = SampleRecorder(folder / "samples.jsonl", resumed_step=resumed_step)
    if not resumed_step:
        recorder.eval(0, {"eval/reward_mean": Mean(0.8, 8)})
    for step in range(resumed_step + 1, stop + 1):
        recorder.begin_step(step)
        with recorder.phase("generate"):
            recorder.timeline.add_span("rollout", "generate", 100.0 + step, 100.4 + step)
        with recorder.phase("update"):
            if error and step == stop:
                raise error
            for rank in range(2):
                recorder.timeline.add_span("actor", "update", 100.4 + step, 100.9 + step, rank=rank)
        recorder.step(step, metrics(step))
        record_samples(samples, step)
        with recorder.phase("evaluate"):
            pass
        recorder.eval(step, {"eval/reward_mean": 0.1 * step + 0.05})
    samples.close()
    return recorder.finish(checkpoint=f"{folder}/checkpoints/step_6", next_steps=["hybridflow report x"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "synthetic"
    stream = io.StringIO()
    folder.mkdir()
    (folder / "config.resolved.yaml").write_text("exp_name: </pre><i>x\n")
    summary = run_to(folder, STEPS, stream=stream)
    return folder, summary, stream.getvalue()


class Page(HTMLParser):
    """What a browser would see: elements, external references, texts of scripts by id."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.references, self.scripts, self._open = [], [], {}, None
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append(tag)
        self.references += [values[name] for name in ("src", "href") if name in values]
        self._open = (values.get("id") or f"script{len(self.scripts)}") if tag == "script" else None

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open:
            self.scripts[self._open] = self.scripts.get(self._open, "") + data
        else:
            self.text += data


def page_of(folder):
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_the_last_line_of_a_good_run(finished):
    folder, summary, text = finished
    assert text.splitlines()[-1] == "Step 6/6 completed. Avg reward: 0.600"
    assert sum(line.startswith("step ") for line in text.splitlines()) == STEPS
    assert "held-out    0.100 at step 0, 0.650 at step 6, best 0.650 at step 6" in text
    assert f"checkpoint  {folder}/checkpoints/step_6" in text and "adjusted    fsdp" in text
    assert set(summary.phase_seconds) >= {"start", "generate", "update", "evaluate"}
    assert summary.busy_seconds["actor"] == pytest.approx(3.0) and summary.busy_seconds["rollout"] == pytest.approx(2.4)


def test_the_run_folder_describes_itself(finished):
    folder, _, _ = finished
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.resolved.yaml", "environment.json", "metrics.jsonl", "report.html", "samples.jsonl", "summary.json",
        "tensorboard", "timeline.json",
    }  # fmt: skip
    assert json.loads((folder / "environment.json").read_text())["run"]["adjustments"] == [
        "fsdp: no effect with DP 1 & co"
    ]
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"


def test_records_hold_reduced_metrics_times_and_throughput_by_step(finished):
    records = read_records(finished[0])
    assert list(records) == list(range(STEPS + 1)) and records[0] == {"eval/reward_mean": 0.1}
    step = records[2]
    assert step["reward/mean"] == pytest.approx(0.2) and step["policy/ratio_max"] == 1.2
    assert {"time/generate_seconds", "time/update_seconds", "time/step_seconds", "time/evaluate_seconds"} <= set(step)
    assert step["throughput/tokens_per_second"] == pytest.approx(64 / step["time/step_seconds"])


def test_the_report_is_one_offline_file(finished):
    text = (finished[0] / "report.html").read_text(encoding="utf-8")
    page = page_of(finished[0])
    assert page.references == [] and "{{" not in text.partition('<script type="application/json"')[0]
    assert not re.search(r"@import|<link|<iframe|<img", text.partition("<script>")[0])
    assert page.tags.count("script") == 4 and len(page.scripts["script2"]) > 1_000_000


def test_the_report_shows_curves_phases_and_the_gantt(finished):
    charts = {chart["title"]: chart for chart in json.loads(page_of(finished[0]).scripts["charts-data"])}
    assert list(charts) == [
        "Reward", "KL from the reference", "Response length", "Losses", "Policy update", "Gradient norms",
        "Rollout against trainer", "Throughput", "Time by phase", "Step 5, as it ran",
    ]  # fmt: skip
    training, held_out = charts["Reward"]["data"]
    assert training["x"] == [1, 2, 3, 4, 5, 6] and held_out["x"] == [0, 1, 2, 3, 4, 5, 6]
    assert held_out["y"][-1] == pytest.approx(0.65)
    kl, coefficient = charts["KL from the reference"]["data"]
    assert (kl["yaxis"], coefficient["yaxis"], coefficient["y"]) == ("y", "y2", [0.05] * 6)
    assert {trace["name"] for trace in charts["Time by phase"]["data"]} == {"generate", "update", "evaluate"}
    rows = charts["Step 5, as it ran"]["layout"]["yaxis"]["categoryarray"]
    assert set(rows) == {"driver", "rollout 0", "actor 0", "actor 1"}


def test_the_report_shows_best_worst_and_failed_samples_as_they_are(finished):
    page = page_of(finished[0])
    groups = json.loads(page.scripts["samples-data"])
    assert [group["label"] for group in groups] == [f"step {step}" for step in (6, 5, 4, 3, 2, 1)]
    newest = groups[0]
    assert [s["reward"] for s in newest["best"]] == [1.0, 0.5] and [s["reward"] for s in newest["worst"]] == [0.25]
    assert newest["failed"][0]["reward_failure"] == "timeout"
    assert newest["best"][0]["prompt"] == f"{NASTY} 1" and newest["best"][0]["step"] == 6
    assert "alert(1)" not in "".join(page.scripts.get(name, "") for name in ("script2", "script3"))


def test_the_report_escapes_names_config_and_adjustments(finished):
    page = page_of(finished[0])
    for text in ("synthetic <run>", "exp_name: </pre><i>x", "fsdp: no effect with DP 1 & co", "completed", "tiny"):
        assert text in page.text
    assert "i" not in page.tags and "run" not in page.tags


def test_a_failed_run_keeps_its_records_and_says_why(tmp_path, capsys):
    error = WorkerError("out of <memory>", hint="lower the budget", where="actor rank 0")
    run_to(tmp_path, 3, error=error)
    boxed = capsys.readouterr().err
    assert "during: step 3 (update)" in boxed and "hint: lower the budget" in boxed and "Traceback" not in boxed
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["step"], summary["checkpoint"]) == ("failed", 2, "ckpt")
    assert "out of <memory>" in page_of(tmp_path).text
    assert list(read_records(tmp_path)) == [0, 1, 2]


def test_a_resumed_run_continues_every_record(tmp_path):
    run_to(tmp_path, 4)
    stream = io.StringIO()
    summary = run_to(tmp_path, STEPS, resumed_step=3, stream=stream)
    assert "after step 3" in stream.getvalue()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "reward/mean" in line] == [1, 2, 3, 4, 5, 6]
    assert list(summary.evals) == [0, 1, 2, 3, 4, 5, 6]
    steps = [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and steps.count(4) == 4


def test_a_run_with_nothing_left_to_do_still_ends_with_its_line(tmp_path):
    run_to(tmp_path, STEPS)
    stream = io.StringIO()
    recorder = Recorder(tmp_path, total_steps=STEPS, resumed_step=STEPS, stream=stream)
    recorder.finish()
    assert stream.getvalue().splitlines()[-1] == "Step 6/6 completed. Avg reward: 0.600"


def test_an_unregistered_metric_is_an_error_at_the_first_step_and_a_strict_one_later(tmp_path):
    lax = Recorder(tmp_path / "lax", total_steps=9, stream=io.StringIO())
    with pytest.raises(ConfigError, match="nobody registered: mine/x"):
        lax.step(1, {"mine/x": 1.0})
    lax.step(3, {"mine/x": 1.0})
    strict = Recorder(tmp_path / "strict", total_steps=9, strict=True, stream=io.StringIO())
    with pytest.raises(ConfigError):
        strict.step(3, {"mine/x": 1.0})


def test_a_broken_tracker_or_report_does_not_stop_a_run(tmp_path, monkeypatch):
    stream = io.StringIO()
    (tmp_path / "tensorboard").write_text("in the way")
    (tmp_path / "report.html").mkdir()
    recorder = Recorder(tmp_path, total_steps=1, stream=stream)
    recorder.start(card(tmp_path))
    recorder.step(1, metrics(1))
    recorder.finish()
    text = stream.getvalue()
    assert text.count("TensorBoard is off from here on") == 1 and "report.html was not built" in text
    assert text.splitlines()[-1] == "Step 1/6 completed. Avg reward: 0.100".replace("/6", "/1")


def test_a_full_disk_ends_the_run_with_the_folder_in_the_message(tmp_path, capsys):
    recorder = Recorder(tmp_path, total_steps=2, stream=io.StringIO())
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    recorder._record = JsonlSink(tmp_path / "full.jsonl")
    with pytest.raises(ResourceError, match="No space left") as raised:
        recorder.step(1, metrics(1))
    recorder.fail(raised.value)
    assert str(tmp_path) in capsys.readouterr().err


def test_the_verb_rebuilds_the_page_also_of_a_run_that_was_killed(finished, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(finished[0], folder)
    for name in ("report.html", "summary.json", "samples.jsonl", "config.resolved.yaml"):
        (folder / name).unlink()
    (folder / "environment.json").write_text("{half")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "rew')
    assert report_verb.main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}/report.html\n"
    assert "running" in page_of(folder).text


def test_the_verb_says_what_a_run_folder_is(tmp_path, capsys):
    assert report_verb.main([str(tmp_path)]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError):
        build_report(tmp_path)


def test_long_runs_are_thinned_and_keep_their_last_step():
    records = {step: {"reward/mean": 1.0, "time/x_seconds": 1.0} for step in range(1, 10 * MAX_POINTS + 4)}
    (chart,) = curves(records)
    (line,) = chart["data"]
    assert len(line["x"]) <= MAX_POINTS and line["x"][-1] == 10 * MAX_POINTS + 3
    assert len(phases(records)["data"][0]["x"]) <= MAX_POINTS
