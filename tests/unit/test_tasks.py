"""Tasks: the built-in one, reasoning-gym, and a user's own."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from hybridflow.data.tasks import ReasoningGymTask, SortTask, load_task
from hybridflow.errors import ConfigError


def test_sort_prompts_are_a_pure_function_of_the_seed():
    task = SortTask()
    rows = task.prompts(500, 3, "train")
    assert rows == task.prompts(500, 3, "train") != task.prompts(500, 4, "train")
    for row in rows:
        *digits, separator = row.prompt.split(" ")
        assert separator == "=" and 4 <= len(digits) <= 7
        assert row.answer.split(" ") == sorted(digits)
    assert set(Counter(len(row.prompt.split()) - 1 for row in rows)) == {4, 5, 6, 7}


def test_sort_demonstrations_hold_the_digits_in_random_order():
    task = SortTask()
    rows = task.demonstrations(400, 0)
    assert all(Counter(row.response.split()) == Counter(row.prompt.split()[:-1]) for row in rows)
    mean = sum(task.reward(row.response, " ".join(sorted(row.prompt.split()[:-1]))) for row in rows) / len(rows)
    assert 0.15 < mean < 0.45, "demonstrations teach the form, not the sorting"


@pytest.mark.parametrize(
    ("response", "reward"),
    [("1 3 4 7", 1.0), ("1 3 7 4", 0.5), ("1 3 4", 0.75), ("1 3 4 7 7", 0.8), ("", 0.0), ("a = 4 <pad>", 0.25)],
)
def test_sort_reward_is_the_share_of_right_places(response, reward):
    assert SortTask().reward(response, "1 3 4 7") == reward


@pytest.mark.parametrize("name", ["chain_sum", "reasoning-gym:spell_backward", "reasoning-gym:shortest_path"])
def test_reasoning_gym_scores_its_own_answers(name):
    task = load_task(name)
    rows = task.prompts(5, 2**40 + 1, "train")
    assert rows == task.prompts(5, 2**40 + 1, "train")
    for row in rows:
        assert row.question and isinstance(row.prompt, str)
        assert task.reward(row.answer, **row.extra) == 1.0
        assert task.reward(f"I think so.\n<answer>{row.answer}</answer> Yes.", **row.extra) == 1.0
        assert task.reward("no idea", **row.extra) < 0.5
    assert all(row.response == row.answer for row in task.demonstrations(5, 0))


def test_a_user_writes_a_task_in_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from hybridflow.data.tasks import Row, Task\n"
        "class Echo(Task):\n"
        "    size = 7\n"
        "    def prompts(self, count, seed, split):\n"
        "        return [Row(f'{split} {i}', answer=str(i)) for i in range(count)]\n"
        "    def reward(self, response, answer):\n"
        "        return float(response == answer)\n"
        "NOT_A_TASK = 3\n"
    )
    task = load_task(f"{file}:Echo")
    assert task.size == 7 and task.prompts(2, 0, "train")[1].prompt == "train 1"
    with pytest.raises(ConfigError, match="has no demonstrations") as error:
        task.demonstrations(1, 0)
    assert "warmup.steps=0" in error.value.hint
    with pytest.raises(ConfigError, match="is no task but int"):
        load_task(f"{file}:NOT_A_TASK")
    with pytest.raises(ConfigError, match="has no 'Ecko'"):
        load_task(f"{file}:Ecko")


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("sotr", "neither a .parquet or .jsonl file nor a task", "did you mean sort"),
        ("chain_summ", "neither", "chain_sum"),
        ("reasoning-gym:chain_som", "no dataset 'chain_som'", "chain_sum"),
        ("no/such/file.py:Task", "there is no file", "relative"),
    ],
)
def test_unknown_names_are_answered_with_near_ones(name, message, hint):
    with pytest.raises(ConfigError, match=message) as error:
        load_task(name)
    assert hint in error.value.hint


def test_reasoning_gym_absent_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match="cannot be imported") as error:
        ReasoningGymTask("chain_sum")
    assert "pip install reasoning-gym" in error.value.hint


def test_settings_of_a_reasoning_gym_dataset_stand_behind_a_question_mark():
    task = load_task("reasoning-gym:chain_sum?min_terms=2&max_terms=2&max_digits=1")
    rows = task.prompts(20, 3, "train")
    assert all(len([word for word in row.prompt.split() if word.isdigit()]) == 2 for row in rows)
    assert all(task.reward(response=row.answer, **row.extra) == 1.0 for row in rows)
    with pytest.raises(ConfigError, match="cannot make 'chain_sum'.*max_term"):
        load_task("chain_sum?max_term=2").prompts(1, 0, "train")
