"""Reward functions in processes that can be killed: every way to fail, none of which costs another sample its score."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hybridflow.batch.batch import Batch
from hybridflow.config.schema import DataConfig, RewardModelConfig
from hybridflow.errors import ConfigError, WorkerError
from hybridflow.worker import WorkerContext
from jobs import models
from workers.reward import RewardWorker, reward_function_name
from workers.rewards.functions import load_function, score_all, score_one
from workers.rewards.pool import RewardPool

FUNCTIONS = '''
import os, signal, subprocess, sys, time
from pathlib import Path
from workers.rewards.functions import batched

def act(response, answer):
    """Does what the response says."""
    what, _, rest = response.partition(" ")
    if what == "sleep": time.sleep(float(rest))
    if what == "hang": "".join(["a"] * 40) and __import__("re").match(r"(a+)+$", "a" * 40 + "b")  # holds the GIL
    if what == "raise": raise ValueError(f"bad {rest}")
    if what == "exit": sys.exit(3)
    if what == "die": os._exit(7)
    if what == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if what == "nan": return float("nan")
    if what == "inf": return float("inf")
    if what == "none": return None
    if what == "text": return "0.5"
    if what == "dict": return {"score": 1.0}
    if what == "child": Path(rest).write_text(str(subprocess.Popen(["sleep", "60"]).pid)); time.sleep(60)
    if what == "pid": return float(os.getpid())
    return float(answer or 0)

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return (data_source == "gsm8k") + (solution_str == ground_truth) + extra_info["index"]

def everything(**given):
    return float(len(given))

def positional(a, b):
    return 0.0

@batched
def lengths(response, answer):
    return [len(text) for text in response]

@batched
def too_few(response):
    return [0.0] * (len(response) - 1)

@batched
def one(response):
    return 1.0

@batched
def mixed(response):
    return [1, "x", float("nan"), True]

@batched
def hanging(response):
    time.sleep(60)

NOT_A_FUNCTION = 4
'''
MIXTURE = ["ok", "raise 1", "die", "sleep 30", "nan", "ok", "segfault", "text", "ok", "inf", "exit", "none", "dict"]


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "functions.py"
    path.write_text(FUNCTIONS)
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(models.tiny(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def make_pool(functions):
    pools = []

    def make(name="act", **arguments):
        pools.append(RewardPool(name if set(":.") & set(name) else f"{functions}:{name}", **arguments))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def score(pool, responses, answer=0.5):
    return pool.score([""] * len(responses), responses, [json.dumps({"answer": answer})] * len(responses))


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


# -- the pool ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("processes", [1, 3])
def test_every_failure_is_counted_by_cause_and_costs_one_sample(make_pool, processes):
    pool = make_pool(processes=processes, timeout_seconds=0.5)
    outcomes = score(pool, MIXTURE)
    scored = [i for i, what in enumerate(MIXTURE) if what == "ok"]
    assert [i for i, outcome in enumerate(outcomes) if not outcome.failure] == scored
    assert all(outcomes[i].score == 0.5 for i in scored)
    assert all(math.isnan(outcome.score) for outcome in outcomes if outcome.failure), "never scored 0"
    assert Counter(outcome.cause for outcome in outcomes if outcome.failure) == {
        "raised": 2,
        "died": 2,
        "timeout": 1,
        "not finite": 2,
        "not a number": 3,
    }
    assert outcomes[1].failure == "raised: ValueError: bad 1"
    assert outcomes[2].failure == "died: exit code 7" and outcomes[6].failure == "died: SIGSEGV"
    assert outcomes[3].failure == "timeout: more than 0.5 s" and outcomes[10].failure == "raised: SystemExit: 3"
    assert outcomes[12].failure.startswith("not a number: dict {'score'")
    assert [o.score for o in score(pool, ["ok"] * 5)] == [0.5] * 5, "the pool serves on"


def test_the_time_limit_is_each_samples_own(make_pool):
    """Ten samples of 0.2 s, one process, a limit of 0.5 s: time in the queue does not count."""
    outcomes = score(make_pool(timeout_seconds=0.5), ["sleep 0.2"] * 10 + ["sleep 30", "ok"])
    assert [outcome.cause for outcome in outcomes] == [""] * 10 + ["timeout", ""]


def test_a_hanging_regular_expression_is_killed_on_time(make_pool):
    pool = make_pool(processes=2, timeout_seconds=0.4)
    pool.wait_ready()
    start = time.monotonic()
    outcomes = score(pool, ["ok", "hang", *["ok"] * 30])
    assert 0.4 <= time.monotonic() - start < 2.0
    assert Counter(outcome.cause for outcome in outcomes) == {"": 31, "timeout": 1}


def test_processes_stay_and_share_the_work(make_pool):
    pool = make_pool(processes=2)
    pool.wait_ready()
    pids = {outcome.score for outcome in score(pool, ["pid"] * 50)}
    assert pids == {outcome.score for outcome in score(pool, ["pid"] * 50)} and len(pids) == 2


def test_what_a_sample_started_is_killed_with_it(make_pool, tmp_path):
    (outcome,) = score(make_pool(timeout_seconds=0.5), [f"child {tmp_path / 'pid'}"])
    assert outcome.cause == "timeout"
    wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))


def test_a_process_that_dies_between_calls_is_replaced(make_pool):
    pool = make_pool(processes=2)
    pool.wait_ready()
    pids = [int(outcome.score) for outcome in score(pool, ["pid"] * 20)]
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: not is_running(pids[0]))
    assert not any(outcome.failure for outcome in score(pool, ["ok"] * 20))


def test_close_leaves_no_process(make_pool):
    pool = make_pool(processes=2)
    pool.wait_ready()
    pids = {int(outcome.score) for outcome in score(pool, ["pid"] * 20)}
    pool.close()
    assert not any(is_running(pid) for pid in pids)


def test_processes_die_with_their_parent_even_while_they_hang(functions, tmp_path):
    code = (
        "import sys\nfrom workers.rewards.pool import RewardPool\n"
        "pool = RewardPool(sys.argv[1] + ':act', processes=2, timeout_seconds=60)\npool.wait_ready()\n"
        "print(*(int(o.score) for o in pool.score([''] * 9, ['pid'] * 9, ['{\"answer\": 0}'] * 9)), flush=True)\n"
        "pool.score([''] * 2, ['hang'] * 2, ['{\"answer\": 0}'] * 2)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, functions], stdout=subprocess.PIPE, text=True) as parent:
        pids = {int(pid) for pid in parent.stdout.readline().split()}
        assert len(pids) == 2 and all(is_running(pid) for pid in pids)
        time.sleep(0.3)
        parent.kill()
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_256_samples_of_the_sort_task_take_under_10_ms(make_pool):
    """In CPU time of all three processes together, which does not depend on what else runs on the machine."""
    pool = make_pool("tasks:sort", processes=2)
    pool.wait_ready()
    answers = [json.dumps({"task": "sort", "answer": "1 2 3 4"})] * 256
    pids = [os.getpid(), *(child.process.pid for child in pool._children)]
    start = sum(map(cpu_seconds, pids))
    for _ in range(40):
        outcomes = pool.score(["4 3 2 1 ="] * 256, ["1 2 4 3"] * 256, answers)
    seconds = (sum(map(cpu_seconds, pids)) - start) / 40
    assert {outcome.score for outcome in outcomes} == {0.5}
    assert seconds < 0.010, f"{1e3 * seconds:.1f} ms"


def test_no_samples(make_pool):
    assert make_pool().score([], [], []) == []


# -- functions ---------------------------------------------------------------------------------------------------------
def test_batched_functions_get_all_samples_at_once(make_pool):
    pool = make_pool("lengths", processes=2)
    assert [o.score for o in score(pool, ["a" * (i % 7) for i in range(100)])] == [i % 7 for i in range(100)]


@pytest.mark.parametrize(
    ("name", "failures"),
    [
        ("too_few", ["wrong length: 3 scores for 4 samples"] * 4),
        ("one", ["wrong length: a float for 4 samples"] * 4),
        ("mixed", ["", "not a number: str 'x'", "not finite: nan", ""]),
        ("hanging", ["timeout: more than 0.5 s"] * 4),
    ],
)
def test_batched_failures(make_pool, name, failures):
    pool = make_pool(name, timeout_seconds=0.5)
    assert [outcome.failure for outcome in score(pool, ["x"] * 4)] == failures


def test_functions_are_called_by_argument_name(functions):
    row = json.dumps({"answer": "7", "data_source": "gsm8k", "extra_info": {"index": 10}, "other": 1})
    assert score_one(load_function(f"{functions}:verl"), "p", "7", row).score == 12.0
    assert score_one(load_function(f"{functions}:everything"), "p", "7", row).score == 6.0
    missing = score_one(load_function(f"{functions}:verl"), "p", "7", '{"answer": 1}')
    assert missing.cause == "raised" and "'data_source'" in missing.failure
    with pytest.raises(ConfigError, match=r"takes \(a, b\)") as error:
        load_function(f"{functions}:positional")
    assert "prompt, response, answer" in error.value.hint


def test_names_of_functions(functions):
    assert score_one(load_function("tests.unit.test_rewards.grumpy"), "", "1", '{"answer": 2}').score == 2.0
    assert score_one(load_function("tests.unit.test_rewards:grumpy"), "", "1", '{"answer": 2}').score == 2.0
    with pytest.raises(ConfigError, match="does not name an attribute") as error:
        load_function("score")
    assert "path/to/file.py:name" in error.value.hint


def test_numbers_of_other_libraries_are_scores(functions):
    call = load_function(f"{functions}:act")._replace(call=lambda _: np.float32(0.5))
    assert score_one(call, "", "", '{"answer": 1}').score == 0.5
    assert score_one(call._replace(call=lambda _: np.ones(2)), "", "", "{}").cause == "not a number"
    batch = call._replace(call=lambda _: np.array([1.0, 2.0]), batched=True)
    assert [outcome.score for outcome in score_all(batch, ["", ""], ["", ""], ["{}", '{"x": 1}'])] == [1.0, 2.0]


def test_verifiers_are_picked_by_the_rows_task(make_pool):
    pool = make_pool("tasks:sort,reasoning-gym:spell_backward")
    place = {"seed": 5, "size": 3, "index": 1}
    word = load_function("tasks:spell_backward")
    assert word.call({"task": "spell_backward", "response": "", **place}) < 1
    rows = [{"task": "sort", "answer": "1 2"}, {"task": "reasoning-gym:spell_backward", "answer": "", **place}]
    sort, gym = pool.score(["", ""], ["1 2", "wrong"], [json.dumps(row) for row in rows])
    assert sort.score == 1.0 and gym.failure == "" and gym.score < 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_file.py:act", "there is no file 'no_such_file.py'"),
        ("{}:nothing", "has no 'nothing'"),
        ("{}:NOT_A_FUNCTION", "is no function but int"),
        ("no.such.module.score", "cannot import 'no.such.module'"),
        ("{}:positional", "takes"),
        ("tasks:no_such_file.py:Task", "there is no file"),
        ("tests.unit.test_rewards.nothing", "has no 'nothing'"),
    ],
)
def test_functions_that_cannot_be_loaded_are_config_errors(make_pool, functions, name, message):
    with pytest.raises(ConfigError, match=message):
        make_pool(name.replace("{}", functions)).wait_ready()


def test_a_file_that_ends_the_process_at_import_is_said(make_pool, tmp_path):
    for text, message in (("import os; os._exit(5)", "died \\(exit code 5"), ("import time; time.sleep(60)", "in 1 s")):
        (tmp_path / "bad.py").write_text(text)
        with pytest.raises(WorkerError, match=message):
            make_pool(f"{tmp_path / 'bad.py'}:score", start_seconds=1).wait_ready()


# -- the role ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def make_worker(folder):
    workers = []

    def make(data=None, **config):
        workers.append(RewardWorker(WorkerContext(role="reward")))
        return workers[-1], workers[-1].setup(RewardModelConfig(**config), folder, data or DataConfig())

    yield make
    for worker in workers:
        worker.close()


def batch_of(responses, answer):
    ids = [[models.WORDS.index(word) for word in response.split()] + [models.EOS] for response in responses]
    return Batch.of(
        range(10, 10 + len(ids)),
        prompt_text=["3 1 2 ="] * len(ids),
        answer=[json.dumps(answer)] * len(ids),
        response_tokens=ids,
    )


def test_the_role_scores_with_the_tasks_verifier(make_worker):
    worker, summary = make_worker(processes=2)
    assert summary == {"function": "the verifier of task sort", "processes": 2}
    batch, metrics = worker.compute_rewards(batch_of(["1 2 3", "1 3 2", ""], {"task": "sort", "answer": "1 2 3"}))
    assert batch.sample_ids.tolist() == [10, 11, 12]
    assert batch.scalar("reward") == pytest.approx([1, 1 / 3, 0]) and batch.text("reward_failure") == [""] * 3
    assert batch.text("response_text") == ["1 2 3", "1 3 2", ""]
    assert metrics["reward/mean"].value == pytest.approx(4 / 9) and metrics["reward/failures"].value == 0
    empty, metrics = worker.compute_rewards(batch_of([], {}))
    assert len(empty) == 0 and metrics["reward/failures"].value == 0


def grumpy(response: str, answer: float) -> float:
    """A user's function, given by dotted name."""
    if response == "9":
        raise RuntimeError("no nines")
    return float("nan") if response == "8" else answer


def test_the_role_counts_failures_and_leaves_them_out_of_the_mean(make_worker):
    worker, summary = make_worker(function=f"{__file__}:grumpy", max_failure_fraction=0.5)
    assert summary["function"] == f"the reward function {__file__}:grumpy"
    batch, metrics = worker.compute_rewards(batch_of(["1", "9", "8", "2"], {"answer": 0.5}))
    assert np.isnan(batch.scalar("reward")).tolist() == [False, True, True, False]
    assert batch.text("reward_failure") == ["", "raised: RuntimeError: no nines", "not finite: nan", ""]
    assert {name: metric.value for name, metric in metrics.items()} == {
        "reward/mean": 0.5,
        "reward/failures": 2,
        "reward/failures_raised": 1,
        "reward/failures_not_finite": 1,
    }


def test_too_many_failures_stop_the_run(make_worker):
    worker, _ = make_worker(function=f"{__file__}:grumpy", max_failure_fraction=0.5)
    with pytest.raises(WorkerError) as error:
        worker.compute_rewards(batch_of(["9", "9", "8", "2"], {"answer": 1}))
    assert "grumpy gave no score for 3 of 4 samples (2 raised, 1 not finite)" in error.value.message
    assert "RuntimeError: no nines" in error.value.message
    assert "call the function by itself" in error.value.hint and "reward_model.max_failure_fraction" in error.value.hint


def test_which_function_scores():
    name = reward_function_name
    assert name(RewardModelConfig(), DataConfig()) == "tasks:sort"
    assert name(RewardModelConfig(), DataConfig(train="sort", validation="chain_sum")) == "tasks:sort,chain_sum"
    assert name(RewardModelConfig(function="a.py:f"), DataConfig(train="x.jsonl")) == "a.py:f"
    with pytest.raises(ConfigError, match="nothing scores the responses to x.jsonl") as error:
        name(RewardModelConfig(), DataConfig(train="x.jsonl"))
    assert "reward_model.function" in error.value.hint
    with pytest.raises(ConfigError, match="not built yet"):
        name(RewardModelConfig(path="some/folder"), DataConfig())
