"""Bad input as users give it: each case ends in one message that names place, value and cure; nothing is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.config.loader import load_config
from hybridflow.config.ranges import _LIMITS
from hybridflow.data.dataset import load_prompts
from hybridflow.data.sources import check_source
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import ConfigError
from hybridflow.loading import check_defines, load, load_module
from jobs import cli
from jobs.models import tiny
from placement.device import parse_devices
from workers.rewards.functions import NOT_TRIED
from workers.rewards.pool import RewardPool

HOME = Path(__file__).parents[2]
DEMO = ("--config-name", "demo", "model.path=tiny")
NUMBERS = [f"{block}.{name}" for _, blocks in _LIMITS.values() for block, names in blocks.items() for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cwd")
    tiny(path / "tiny")
    return path


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config([*DEMO, *overrides])
    return [str(problem) for problem in caught.value.problems]


# -- config: one mistake, one message ----------------------------------------------------------------------------------
def test_a_number_out_of_range_is_the_only_problem():
    """Its default stands in, so that no later rule divides by it, or complains about what follows from it."""
    lists = [key for key in NUMBERS if key.endswith("betas")]
    for key in set(NUMBERS) - set(lists):
        (problem,) = problems(f"{key}=-1")
        assert problem.startswith(f"command line: {key}: must be "), problem
    for key in lists:
        assert len(problems(f"{key}=[0.9,2]")) == 1


@pytest.mark.parametrize(
    "key", ["mcore_config.tensor_model_parallel_size", "rollout.tensor_model_parallel_size", "rollout.n"]
)
def test_zero_divides_nothing(key):
    assert problems(f"{key}=0") == [f"command line: {key}: must be at least 1, but is 0"]


@pytest.mark.parametrize("value", ["-1", "[]", "cuda:3-1", "[0,0]", "banana", "cuda:9", "[0,1]"])
def test_a_wrong_device_is_said_once(value):
    (problem,) = problems(f"device_map.actor={value}")
    assert "device_map" in problem and "hint" in problem


@pytest.mark.parametrize("value", [-1, "-1", [], "", [0, -2]])
def test_devices_that_are_none(value):
    with pytest.raises(ConfigError, match="names no device"):
        parse_devices(value, "device_map.actor")


def test_a_single_text_is_a_list_of_one():
    Path("registered.py").write_text("VALUE = 1\n")
    assert load_config([*DEMO, "register=registered.py"]).config.register == ("registered.py",)


def test_what_a_list_should_be_is_said_in_the_users_words():
    assert problems("actor.optim.betas=0.9") == ["command line: actor.optim.betas: must be a valid list, but is 0.9"]


def test_all_problems_together():
    found = problems("training.total_stepz=3", "actor.optim.lr=abc", "rollout.n=0", "reward_model.function=no.py:f")
    assert len(found) == 4 and "did you mean training.total_steps?" in found[0]


# -- code of the user's ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ValueError('boom')", "raised ValueError: boom, at broken.py:1"),
        ("import sys; sys.exit(3)", "raised SystemExit: 3"),
        ("def (:", "raised SyntaxError"),
    ],
)
def test_registered_code_that_fails(source, said, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(source)
    (problem,) = problems(f"register={tmp_path / 'broken.py'}")
    assert said in problem and "loading.py" not in problem
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="raised"):
        load_module("broken")


def test_ctrl_c_during_an_import_stays_one(tmp_path):
    (tmp_path / "slow.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_module(str(tmp_path / "slow.py"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rewards.py:scor", "did you mean rewards.py:score?"),
        ("rewards.py:nothing_like_it", "it defines: "),
        ("reward.py:score", "there is no file 'reward.py'"),
        ("syntax.py:score", "syntax.py:2 is not valid Python"),
    ],
)
def test_a_reward_function_that_is_not_there_is_found_before_anything_starts(name, said):
    Path("rewards.py").write_text("import os.path as p\ndef score(response): return 0.0\nother = score\n")
    Path("syntax.py").write_text("a = 1\ndef (:\n")
    (problem,) = problems(f"reward_model.function={name}")
    assert said in problem and "reward_model.function" in problem


def test_names_that_only_running_would_tell_pass(tmp_path):
    (tmp_path / "star.py").write_text("from os.path import *\n")
    check_defines(f"{tmp_path / 'star.py'}:join")
    assert load(f"{tmp_path / 'star.py'}:join")


# -- data --------------------------------------------------------------------------------------------------------------
def load_data(*overrides: str):
    """What a run does with its data, without a run."""
    overrides = ("warmup.steps=0", "reward_model.function=rewards.py:score", *overrides)
    Path("rewards.py").write_text("def score(response): return 0.0\n")
    data = load_config([*DEMO, *overrides]).config.data
    check_source(data.train, data)
    check_source(data.validation, data, "data.validation")
    return load_prompts(data, load_tokenizer("tiny"), 0)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "column.jsonl",
            '{"question": "1 2 ="}',
            "column.jsonl:1: there is no column 'prompt'.*\n.*data.prompt_key=que",
        ),
        ("later.jsonl", '{"prompt": "1 2 ="}\n{"promt": "2 ="}', "later.jsonl:2: .*\n.*data.prompt_key=promt"),
        ("cut.jsonl", '{"prompt": "1 2 ="}\n{"prompt": ', "cut.jsonl:2: cannot be read"),
        ("list.jsonl", "[1, 2]", "list.jsonl:1: .*a JSON object is needed"),
        ("none.jsonl", "", "none.jsonl: the file has no rows"),
        ("blank.jsonl", "\n\n", "blank.jsonl: the file has no rows"),
        ("empty.jsonl", '{"prompt": ""}\n{"prompt": null}', "no usable prompt .*: 2 empty, 0 longer"),
        ("long.jsonl", json.dumps({"prompt": "1 " * 40}), 'no usable prompt .*1 longer than 16 tokens\n.*"truncate"'),
        ("number.jsonl", '{"prompt": 5}', "number.jsonl:1: column 'prompt' holds int 5"),
        ("mapping.jsonl", '{"prompt": {"a": 1}}', "column 'prompt' holds dict"),
        ("chat.jsonl", '{"prompt": [{"content": "x"}]}', "column 'prompt' holds list .*\n.*role and content"),
        ("data.json", "{}", r"data.train: .*must end in .parquet or .jsonl"),
        ("text.parquet", "no parquet", "text.parquet: cannot be read"),
    ],
)
def test_files_that_hold_no_prompts(name, content, said, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=said):
        load_data(f"data.train={tmp_path / name}")


def test_parquet_without_prompts(tmp_path):
    for name, table, said in (
        ("column", {"question": ["1 2 ="]}, "column.parquet row 1: there is no column 'prompt'"),
        ("none", {"prompt": pa.array([], pa.string())}, "none.parquet: the file has no rows"),
        ("bytes", {"prompt": [b"1 2 ="]}, "holds bytes"),
    ):
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
        with pytest.raises(ConfigError, match=said):
            load_data(f"data.train={tmp_path / name}.parquet")


def test_a_folder_for_a_file(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="is a folder\n.*train.jsonl"):
        load_data(f"data.train={tmp_path}/")


@pytest.mark.parametrize("name", ["no.jsonl", "no.csv", "none.jsonl"])
def test_the_key_that_named_the_file_is_said(name):
    Path("none.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"data\.validation: |none\.jsonl: "):
        load_data(f"data.validation={name}")


def test_usable_rows_are_used_and_the_others_counted(tmp_path):
    rows = ["1 2 =", "", None, "1 " * 40, "2 1 ="]
    text = "\n".join(json.dumps({"prompt": row, "answer": "1"}) for row in rows)
    (tmp_path / "mixed.jsonl").write_text("\ufeff" + text, encoding="utf-8")
    train, _ = load_data(f"data.train={tmp_path / 'mixed.jsonl'}")
    assert (len(train), train.empty, train.overlong, train.truncated) == (2, 2, 1, 0)
    train, _ = load_data(f"data.train={tmp_path / 'mixed.jsonl'}", "data.overlong=truncate")
    assert (len(train), train.empty, train.overlong, train.truncated) == (3, 2, 0, 1)


TASKS = """
from hybridflow.data.tasks import Row, Task
class Raises(Task):
    def prompts(self, count, seed, split): raise ValueError("my bug")
class Unfinished(Task): pass
class None_(Task):
    def prompts(self, count, seed, split): return []
class Tuples(Task):
    def prompts(self, count, seed, split): return [("1 =", "1")] * count
class Same(Task):
    def prompts(self, count, seed, split): return [Row("1 =", "1")] * count
class Wants(Task):
    def __init__(self, more): pass
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Raises", "task .*:Raises raised ValueError: my bug, at tasks_of_mine.py:4"),
        ("Unfinished", "Unfinished must define prompts"),
        ("None_", "no usable prompt in .*: it has none at all"),
        ("Tuples", "made a tuple, not a Row"),
        ("Same", "all 8192 training prompts are among the 1 held-out ones"),
        ("Wants", "data.train: task .*:Wants raised TypeError"),
        ("Rases", "has no 'Rases'"),
    ],
)
def test_tasks_that_do_not_work(name, said, tmp_path):
    (tmp_path / "tasks_of_mine.py").write_text(TASKS)
    with pytest.raises(ConfigError, match=said):
        load_data(f"data.train={tmp_path / 'tasks_of_mine.py'}:{name}")


# -- rewards -----------------------------------------------------------------------------------------------------------
def test_a_function_that_always_hangs_is_given_up(tmp_path):
    """Not one time limit after the other: the verdict stands as soon as too many have failed; the pool serves on."""
    source = "import time\ndef score(response):\n    while response == 'hang': time.sleep(1)\n    return 1.0\n"
    (tmp_path / "hangs.py").write_text(source)
    pool = RewardPool(f"{tmp_path / 'hangs.py'}:score", timeout_seconds=0.3)
    outcomes = pool.score(["p"] * 50, ["ok", *["hang"] * 49], ["{}"] * 50, max_failures=1)
    after = pool.score(["p"] * 3, ["ok"] * 3, ["{}"] * 3, max_failures=0)
    pool.close()
    assert [outcome.cause for outcome in outcomes[:3]] == ["", "timeout", "timeout"]
    assert all(outcome is NOT_TRIED for outcome in outcomes[3:])
    assert [outcome.score for outcome in after] == [1.0] * 3


# -- the command line --------------------------------------------------------------------------------------------------
def test_a_reader_that_has_seen_enough_is_no_error():
    """``hybridflow config | head -1``: no traceback, no box, and the exit code of every tool that lost its reader."""
    program = [sys.executable, "-c", "import time, jobs.cli, sys; time.sleep(0.3); sys.exit(jobs.cli.main(['config']))"]
    run = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=HOME)
    run.stdout.close()
    assert run.stderr.read() == b""
    assert run.wait(30) == 141


def test_a_closed_standard_output_is_no_error():
    program = f"{sys.executable} -c \"import sys, jobs.cli; sys.exit(jobs.cli.main(['--help']))\" >&-"
    assert subprocess.run(program, shell=True, cwd=HOME, capture_output=True).returncode == 0


def test_no_mistake_shows_a_traceback(capsys, monkeypatch):
    for arguments in (["trian"], ["report", "nothing"], ["config", "actr"], ["train", "--config-name", "dmo"]):
        assert cli.main(arguments) == 2
        shown = capsys.readouterr().err
        assert "Traceback" not in shown and shown.count("+-") == 2, shown
