"""The run's folder and its checkpoints: one holder, nothing overwritten, nothing half-written counted."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from hybridflow.checkpoint import CheckpointStore
from hybridflow.config.schema import CheckpointConfig, Config, TrainingConfig
from hybridflow.errors import ConfigError, ResourceError
from hybridflow.folder import RunFolder, comparable


def config(tmp_path, total_steps=10, **more):
    return Config(exp_name="run", log_dir=str(tmp_path), training=TrainingConfig(total_steps=total_steps), **more)


def save(folder, step, state):
    aside = folder.store.begin(step)
    (aside / "actor").mkdir()
    (aside / "actor" / "weights.bin").write_bytes(bytes(range(256)) * 8)
    return folder.store.commit(aside, step, state)


def test_a_folder_with_steps_left_is_continued_and_a_finished_one_is_left_alone(tmp_path):
    first = config(tmp_path)
    with RunFolder(first) as folder:
        assert folder.path == tmp_path / "run" and folder.checkpoint is None
        (folder.path / "metrics.jsonl").write_text("{}\n")
        save(folder, 4, {"config": comparable(first), "kl": 1})
    with RunFolder(first) as folder:
        assert folder.path == tmp_path / "run" and folder.checkpoint.step == 4 and folder.checkpoint.state["kl"] == 1
        save(folder, 10, {"config": comparable(first)})
    with RunFolder(first) as folder:
        assert folder.path == tmp_path / "run-2" and folder.checkpoint is None
    with RunFolder(config(tmp_path, total_steps=12)) as folder:
        assert folder.path == tmp_path / "run" and folder.checkpoint.step == 10


def test_a_run_that_never_saved_is_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    assert RunFolder(config(tmp_path)).path == tmp_path / "run-2"
    with pytest.raises(ConfigError, match="already holds a run"):
        RunFolder(config(tmp_path, checkpoint=CheckpointConfig(resume="off")))


def test_a_start_that_failed_uses_up_no_name(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert RunFolder(config(tmp_path)).path == tmp_path / "run"


def test_a_changed_config_does_not_continue_an_old_run(tmp_path):
    first = config(tmp_path)
    with RunFolder(first) as folder:
        (folder.path / "metrics.jsonl").write_text("{}\n")
        save(folder, 4, {"config": comparable(first)})
    changed = dataclasses.replace(first, seed=7)
    with pytest.raises(ConfigError, match="written by another config: seed: 42 -> 7"):
        RunFolder(changed)


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_lives(tmp_path):
    code = (
        "import sys, time; from hybridflow.folder import RunFolder; from hybridflow.config.schema import *\n"
        f"with RunFolder(Config(exp_name='run', log_dir={str(tmp_path)!r})): print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ResourceError, match=rf"another run \(process {other.pid} on .*\) is using this folder"):
            RunFolder(config(tmp_path))
    finally:
        other.kill()
        other.wait()
    with RunFolder(config(tmp_path)) as folder:  # a killed run leaves no lock that holds
        assert folder.path == tmp_path / "run"


def test_only_the_last_k_checkpoints_stay_and_half_written_ones_never_count(tmp_path):
    store = CheckpointStore(tmp_path, keep_last_k=2)
    for step in (1, 2, 3):
        aside = store.begin(step)
        (aside / "x").write_text(str(step))
        store.commit(aside, step, {"n": step})
    half = store.begin(4)
    (half / "x").write_text("4")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writing_step_000004", "step_000002", "step_000003"]
    assert store.latest().step == 3
    store.begin(5)
    assert not half.exists(), "the next save sweeps away what was never committed"
    assert json.loads((tmp_path / "step_000003" / "manifest.json").read_text())["format_version"] == 1


def test_a_damaged_checkpoint_is_named(tmp_path):
    store = CheckpointStore(tmp_path, keep_last_k=2)
    aside = store.begin(1)
    (aside / "weights.bin").write_bytes(b"0" * 100)
    folder = store.commit(aside, 1, {})
    (folder / "weights.bin").write_bytes(b"0" * 99)
    with pytest.raises(ConfigError, match=r"step_000001: 1 file\(s\) are missing or changed .*weights.bin"):
        store.latest()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    blocked = dataclasses.replace(config(tmp_path), log_dir=str(tmp_path / "file"))
    with pytest.raises(ResourceError, match="cannot write the run folder"), RunFolder(blocked):
        pass
