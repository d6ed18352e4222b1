"""Telemetry without a run: names, timeline, sinks, samples, cards and the two consoles."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from hybridflow.batch.batch import Batch, Ragged
from hybridflow.errors import ConfigError, ResourceError, WorkerError
from hybridflow.telemetry import check_names, environment, markdown_table, names, register_metric
from hybridflow.telemetry.cards import RoleRow, RunCard, Summary, box, duration, failure_lines, si, step_line
from hybridflow.telemetry.console import Console, LiveConsole, make_console, print_failure
from hybridflow.telemetry.recorder import Recorder
from hybridflow.telemetry.samples import Sample, SampleRecorder, extremes, read_samples
from hybridflow.telemetry.sinks import BestEffort, JsonlSink, TensorBoardSink, WandbSink, read_jsonl
from hybridflow.telemetry.timeline import Timeline, read_trace


# -- names -------------------------------------------------------------------------------------------------------------
def test_every_name_has_area_unit_reduction_and_text():
    for name, entry in names.TABLE.items():
        assert name.count("/") == 1 and all((entry.unit, entry.reduction, entry.doc)), name


def test_known_names_and_patterns_pass_and_unknown_ones_are_all_listed():
    check_names(["reward/mean", "time/generate_seconds", "memory/actor.update_bytes", "reward/failures_timeout"])
    with pytest.raises(ConfigError, match=r"reward/meen \(did you mean reward/mean\?\), bogus/x") as raised:
        check_names(["reward/meen", "kl/coefficient", "bogus/x"])
    assert "register_metric" in raised.value.hint


def test_a_registered_name_is_known_and_cannot_change_its_meaning(monkeypatch):
    monkeypatch.setattr(names, "TABLE", dict(names.TABLE))
    entry = register_metric("mine/score", unit="1", reduction="mean", doc="a | b")
    check_names(["mine/score"])
    assert register_metric("mine/score", unit="1", reduction="mean", doc="a | b") == entry
    with pytest.raises(ConfigError, match="already registered"):
        register_metric("mine/score", unit="2", reduction="mean", doc="a | b")
    with pytest.raises(ConfigError, match="is no metric name"):
        register_metric("no area", unit="1", reduction="mean", doc="x")
    assert "| `mine/score` | 1 | mean | a \\| b |" in markdown_table()


def test_the_table_as_markdown_has_a_row_for_each_name():
    lines = markdown_table().splitlines()
    assert len(lines) == 2 + len(names.TABLE) and lines[2].startswith("| `reward/mean` | reward |")


# -- timeline ----------------------------------------------------------------------------------------------------------
def test_a_phase_inside_another_is_counted_once():
    timeline = Timeline()
    with timeline.phase("outer"):
        time.sleep(0.02)
        with timeline.phase("inner"):
            time.sleep(0.05)
    taken = timeline.take_step()
    assert 0.05 <= taken["inner"] < 0.09 and 0.02 <= taken["outer"] < 0.045
    assert timeline.take_step() == {} and list(timeline.totals()) == ["inner", "outer"]


def test_busy_time_is_the_union_of_the_spans_of_a_pool():
    timeline = Timeline()
    for rank, (start, stop) in enumerate([(0.0, 2.0), (0.5, 1.0), (1.0, 3.0), (5.0, 6.0)]):
        timeline.add_span("actor", "update", start, stop, rank=rank)
    assert timeline.busy_seconds() == {"actor": 4.0}
    timeline.add_phase("score", [(2.0, 3.0), (0.0, 1.0), (0.5, 1.5)])
    assert timeline.take_step() == {"score": 2.5}


def test_the_trace_is_json_with_named_processes_and_survives_a_kill(tmp_path):
    path = tmp_path / "timeline.json"
    timeline = Timeline(path)
    timeline.step = 3
    timeline.add_span("rollout", "generate", 10.0, 10.5, rank=1)
    with pytest.raises(RuntimeError), timeline.phase("outer"), timeline.phase("update"):
        raise RuntimeError
    assert timeline.failed_in == "update"
    timeline.take_step()
    half = path.read_text() + ',\n{"name": "hal'
    timeline.close()
    events = json.loads(path.read_text())
    spans = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in spans] == ["generate", "update", "outer"]
    assert spans[0] | {"ts": 10_000_000, "dur": 500_000, "tid": 1, "args": {"step": 3}} == spans[0]
    assert {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"} == {"rollout": 0, "driver": 1}
    path.write_text(half)
    assert read_trace(path) == events


def test_a_resumed_trace_continues_with_the_same_processes_and_without_later_steps(tmp_path):
    path = tmp_path / "timeline.json"
    first = Timeline(path)
    for first.step in (1, 2, 3):
        first.add_span("actor", "update", first.step, first.step + 0.5)
    first.close()
    second = Timeline(path, resumed_step=2)
    second.step = 3
    second.add_span("critic", "update", 7.0, 8.0)
    second.add_span("actor", "update", 8.0, 9.0)
    second.close()
    spans = [(e["pid"], e["args"]["step"]) for e in json.loads(path.read_text()) if e["ph"] == "X"]
    assert spans == [(0, 1), (0, 2), (1, 3), (0, 3)]
    Timeline(path).close()
    assert json.loads(path.read_text()) == []


def test_a_long_trace_is_cut_with_a_mark_and_sums_go_on(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json", max_events=10)
    for index in range(100):
        timeline.add_span("actor", "update", index, index + 1.0)
    timeline.close()
    events = json.loads((tmp_path / "timeline.json").read_text())
    assert len(events) == 11 and events[-1]["name"] == "trace is full"
    assert timeline.busy_seconds() == {"actor": 100.0}


# -- sinks -------------------------------------------------------------------------------------------------------------
def test_each_line_is_on_disk_at_once_and_nan_is_null(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.log(1, {"reward/mean": 0.1 + 0.2, "loss/policy": math.nan, "loss/value": math.inf})
    assert "NaN" not in path.read_text() and path.read_text().endswith("}\n")
    (record,) = read_jsonl(path)
    assert record["reward/mean"] == 0.1 + 0.2 and record["loss/policy"] is None and record["loss/value"] is None
    sink.close()


def test_resume_drops_later_steps_and_the_half_line_of_a_killed_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "x/y": step}) + "\n" for step in (0, 1, 2, 3)) + '{"step": 4, "x')
    sink = JsonlSink(path, resumed_step=2)
    sink.log(3, {"x/y": 30.0})
    assert [(record["step"], record["x/y"]) for record in read_jsonl(path)] == [(0, 0), (1, 1), (2, 2), (3, 30.0)]
    JsonlSink(path).close()
    assert path.read_text() == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with pytest.raises(ResourceError, match="No space left") as raised:
        sink.log(1, {"reward/mean": 1.0})
    assert str(tmp_path) in raised.value.message and raised.value.hint


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot write metrics.jsonl"):
        JsonlSink(tmp_path / "file" / "metrics.jsonl")


def test_tensorboard_holds_the_same_numbers_without_importing_torch(tmp_path):
    sink = TensorBoardSink(tmp_path, resumed_step=4)
    sink.log(5, {"reward/mean": 0.5, "kl/actor_reference": 0.25})
    sink.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["reward/mean", "kl/actor_reference"]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(5, 0.5)]


def test_wandb_online_without_a_key_goes_on_offline_and_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    warnings = []
    sink = WandbSink(project="p", mode="online", name="n", folder=tmp_path, config={"a": 1}, warn=warnings.append)
    sink.log(1, {"reward/mean": 0.5})
    assert sink.id
    sink.close()
    assert len(warnings) == 1 and "logging offline" in warnings[0]
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_a_failing_tracker_is_said_once_and_left_alone():
    class Broken:
        def log(self, step, metrics):
            raise RuntimeError("quota\nand a long trace")

        def close(self):
            raise AssertionError("a dead tracker is not closed")

    warnings = []
    tracker = BestEffort("W&B", Broken, warnings.append)
    for step in range(3):
        tracker.log(step, {})
    tracker.close()
    assert warnings == ["W&B is off from here on (RuntimeError: quota); training goes on"]
    BestEffort("TensorBoard", lambda: 1 / 0, warnings.append).log(1, {})
    assert len(warnings) == 2 and "TensorBoard" in warnings[1]


# -- samples -----------------------------------------------------------------------------------------------------------
def batch_of(rewards, prompts=None):
    count = len(rewards)
    lengths = np.full(count, 2)
    return Batch.of(
        np.arange(count),
        group_id=np.arange(count),
        prompt_text=prompts or [f"p{i}" for i in range(count)],
        prompt_tokens=Ragged.from_lengths(np.zeros(3 * count, np.int32), np.full(count, 3)),
        response_text=[f"r{i} \u2028</script>" for i in range(count)],
        response_tokens=Ragged.from_lengths(np.zeros(2 * count, np.int32), lengths),
        finish_reason=["stop"] * count,
        policy_version=np.full(count, 6),
        reward=np.asarray(rewards, np.float32),
        reward_failure=["timeout" if math.isnan(reward) else "" for reward in rewards],
        advantages=Ragged.from_lengths(np.arange(2 * count, dtype=np.float32), lengths),
    )


def test_samples_come_back_as_they_were(tmp_path):
    recorder = SampleRecorder(tmp_path / "samples.jsonl")
    recorder.record(7, batch_of([0.5, math.nan]))
    recorder.close()
    first, second = read_samples(tmp_path / "samples.jsonl")
    assert first == Sample(
        step=7, sample_id=0, group_id=0, prompt="p0", response="r0 \u2028</script>", reward=0.5, advantage_mean=0.5,
        prompt_length=3, response_length=2, finish_reason="stop", policy_version=6,
    )  # fmt: skip
    assert second.reward is None and second.reward_failure == "timeout"
    SampleRecorder(tmp_path / "samples.jsonl", resumed_step=6).close()
    assert read_samples(tmp_path / "samples.jsonl") == []


def test_a_bound_keeps_the_best_the_worst_and_some_failures(tmp_path):
    recorder = SampleRecorder(tmp_path / "samples.jsonl", per_step=4)
    recorder.record(1, batch_of([0.1, 0.9, math.nan, 0.5, 0.6, 0.0, math.nan, 0.4]))
    rewards = [sample.reward for sample in read_samples(tmp_path / "samples.jsonl")]
    assert rewards == pytest.approx([0.9, 0.0, None])


def test_best_and_worst_share_no_sample_and_say_nothing_twice():
    def sample(index, reward, prompt="p"):
        return Sample(step=1, sample_id=index, prompt=f"{prompt}{index}", response="r", reward=reward)

    samples = [sample(0, 0.5), sample(1, 1.0), sample(2, None), sample(3, 0.0)]
    best, worst = extremes(samples, 2)
    assert [s.sample_id for s in best] == [1, 0] and [s.sample_id for s in worst] == [3]
    assert extremes([samples[0]] * 5, 3) == ([samples[0]], [])
    assert extremes([], 3) == ([], [])


# -- cards -------------------------------------------------------------------------------------------------------------
METRICS = {
    "reward/mean": 0.4123, "reward/std": 0.18, "kl/actor_reference": 0.0031, "loss/policy": -0.01234,
    "response/length_mean": 812.0, "response/clipped_fraction": 0.031, "time/generate_seconds": 41.2,
    "time/score_seconds": 8.7, "time/update_seconds": 20.0, "time/reshard_seconds": 1.9, "time/step_seconds": 71.8,
    "throughput/tokens_per_second": 12_400.0,
}  # fmt: skip


def test_the_step_line():
    assert step_line(12, 500, METRICS, 18_720.0) == (
        "step  12/500 | reward  0.412 | spread 0.18 | kl  0.0031 | loss  -0.0123 | len  812 (cut  3%) | "
        "gen 41.20s train 28.70s sync  1.90s | 12.4k tok/s | eta 5h12m"
    )
    assert step_line(1, 10, {"reward/mean": math.nan}) == "step  1/10 | reward    nan"
    assert "unscored 3" in step_line(1, 10, {"reward/failures": 3.0})


def test_lines_of_one_run_are_aligned():
    lines = [step_line(step, 500, METRICS | {"loss/policy": loss}) for step, loss in ((1, 0.5), (77, -0.25), (500, 10))]
    assert len({line.index("| len") for line in lines}) == 1


def test_durations_and_thousands():
    assert [duration(x) for x in (0.418, 12.34, 59.96, 185, 18_720, math.nan)] == [
        "0.42s", "12.3s", "1m00s", "3m05s", "5h12m", "?",
    ]  # fmt: skip
    assert [si(x) for x in (7, 950, 12_400, 1_300_000)] == ["7", "950", "12.4k", "1.3M"]


def test_the_success_line_is_word_for_word():
    summary = Summary(status="completed", step=10, total_steps=10, seconds=1.0, reward_mean=0.2344)
    assert summary.success_line == "Step 10/10 completed. Avg reward: 0.234"


def test_the_failure_box_says_what_where_when_and_what_to_do():
    error = WorkerError("out of memory", hint="lower x=" + "y" * 120, where="actor rank 0")
    title, lines = failure_lines(error, step=3, phase="update", log="/logs")
    assert (title, lines[:3]) == ("WorkerError", ["out of memory", "where: actor rank 0", "during: step 3 (update)"])
    text = box(title, lines)
    assert len({len(line) for line in text.splitlines()}) == 1 and "y" * 120 in text and text.isascii()
    _, (message,) = failure_lines(WorkerError("\n".join(map(str, range(99)))))
    assert message.splitlines()[-2:] == ["11", "... 87 more lines"]
    assert failure_lines(KeyboardInterrupt("SIGTERM"))[1][0] == "interrupted by SIGTERM"


# -- consoles ----------------------------------------------------------------------------------------------------------
CARD = RunCard(
    name="demo",
    run_dir="runs/demo",
    total_steps=3,
    layout=[RoleRow(role="actor", devices="0-3", layout="tp 2 dp 2"), RoleRow(role="rollout", devices="4")],
    adjustments=["sequence_parallel: off [TP is 1]", "fsdp: no effect"],
)


def play(console):
    console.card(CARD)
    console.note("starting [1 of 5]")
    console.eval(0, {"eval/reward_mean": 0.25})
    for step in (1, 2, 3):
        console.step(step, METRICS)
    console.warn("W&B [offline]")
    console.summary(
        Summary(status="completed", step=3, total_steps=3, seconds=2.0, reward_mean=0.4, next_steps=["do x"])
    )


def test_off_a_tty_there_is_one_plain_line_a_step():
    stream = io.StringIO()
    console = make_console(3, stream=stream)
    assert type(console) is Console
    play(console)
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()
    assert [line.split(" |")[0] for line in lines if line.startswith("step ")] == ["step 1/3", "step 2/3", "step 3/3"]
    assert [line for line in lines if "adjusted" in line] == [
        "  adjusted    sequence_parallel: off [TP is 1]",
        "  adjusted    fsdp: no effect",
    ]
    assert "  layout      role     devices  layout" in lines and "              actor    0-3      tp 2 dp 2" in lines
    assert lines[-2].split() == ["next", "do", "x"] and lines[-1] == "Step 3/3 completed. Avg reward: 0.400"


def test_a_look_at_samples_shows_the_best_and_the_worst_of_the_step(tmp_path):
    stream = io.StringIO()
    recorder = Recorder(tmp_path / "run", total_steps=2, log_interval=2, stream=stream)
    samples = SampleRecorder(tmp_path / "run" / "samples.jsonl")
    for step in (1, 2):
        samples.record(step, batch_of([0.1, 0.9, 0.5, 0.3, 0.7]))
        recorder.step(step, {"reward/mean": 0.5})
    lines = stream.getvalue().splitlines()
    assert [line.split("/")[0] for line in lines if line.startswith("step")] == ["step 1", "step 2"]
    shown = [float(line.split()[0]) for line in lines if line.startswith("    ") and line.split()[0] != "reward"]
    assert shown == pytest.approx([0.9, 0.7, 0.3, 0.1])


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def test_on_a_tty_there_is_a_panel_and_the_last_line_stays_plain(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    console = make_console(3, stream=stream)
    assert type(console) is LiveConsole
    play(console)
    console.close()
    text = stream.getvalue()
    assert "\x1b[" in text and "sequence_parallel: off [TP is 1]" in text and "W&B [offline]" in text
    assert "starting [1 of 5]" in text
    assert text.endswith("\nStep 3/3 completed. Avg reward: 0.400\n")
    monkeypatch.setenv("TERM", "dumb")
    assert type(make_console(3, stream=Terminal())) is Console


def test_only_an_error_that_is_none_of_ours_shows_its_traceback():
    ours, theirs = io.StringIO(), io.StringIO()
    print_failure(ConfigError("bad key", hint="use good"), stream=ours)
    try:
        raise ValueError("odd")
    except ValueError as error:
        print_failure(error, stream=theirs)
    assert "Traceback" not in ours.getvalue() and "hint: use good" in ours.getvalue()
    assert theirs.getvalue().index("Traceback") < theirs.getvalue().index("+- ValueError")


# -- environment and imports -------------------------------------------------------------------------------------------
def test_the_environment_names_versions_source_host_and_command():
    described = environment.describe()
    assert described["packages"]["ray"] and described["host"]["cpus"] >= 1 and described["command"]
    assert set(described["git"]) == {"sha", "dirty"} and json.dumps(described)
    assert environment.git_state(environment.Path("/")) == {"sha": None, "dirty": None}


def test_telemetry_imports_nothing_heavy():
    code = (
        "import sys, hybridflow.telemetry, hybridflow.telemetry.recorder, jobs.report\n"
        "heavy = {'torch', 'ray', 'rich', 'plotly', 'tensorboard', 'wandb', 'megatron', 'vllm', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
