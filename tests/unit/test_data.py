"""Prompts from files and tasks: what is read, dropped and counted, in which order, and what the data role hands out."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.batch.batch import Batch, Ragged
from hybridflow.config.schema import AlgorithmConfig, DataConfig, WarmupConfig
from hybridflow.data.dataset import load_demonstrations, load_prompts
from hybridflow.data.sampler import Sampler
from hybridflow.data.sources import check_source, is_file, read_rows
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError
from hybridflow.telemetry.samples import read_samples
from hybridflow.worker import WorkerContext
from jobs import models
from workers.data import VALIDATION_IDS, DataWorker


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer(folder)


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(count, **extra):
    return [{"prompt": f"{i // 10} {i % 10} =", "answer": str(i), **extra} for i in range(count)]


def config(train=None, **changes):
    return DataConfig(train=train, **{"train_batch_size": 4, "validation_size": 0, **changes})


# -- files -------------------------------------------------------------------------------------------------------------
def test_rows_as_verl_writes_them(tmp_path, tokenizer):
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{i} + 1"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(3)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    train, _ = load_prompts(config(str(tmp_path / "train.parquet")), tokenizer, 0)
    assert train.texts == ["0 + 1 =", "1 + 1 =", "2 + 1 ="], "through the folder's chat template"
    answer = json.loads(train.answers[1])
    assert answer["answer"] == "2" and answer["data_source"] == "openai/gsm8k"
    assert answer["extra_info"] == {"index": 1, "split": "train"}
    from_jsonl, _ = load_prompts(config(jsonl(tmp_path / "train.jsonl", rows)), tokenizer, 0)
    assert from_jsonl.texts == train.texts and from_jsonl.answers == train.answers


def test_plain_prompts_are_tokenised_as_they_are(tmp_path, tokenizer):
    train, _ = load_prompts(config(jsonl(tmp_path / "a.jsonl", [{"q": "7 3 1 4 =", "solution": 9}]), prompt_key="q",
                                   answer_key="solution"), tokenizer, 0)  # fmt: skip
    assert train.tokens[0].tolist() == [10, 6, 4, 7, 2]
    assert json.loads(train.answers[0]) == {"answer": 9}


def test_many_sources_make_one_dataset(tmp_path):
    one, two = jsonl(tmp_path / "a.jsonl", numbered(3)), jsonl(tmp_path / "b.jsonl", numbered(4))
    rows = read_rows((one, two, "sort"), config(), seed=0, split="train", count=5)
    assert len(rows) == 12
    assert [row.extra.get("task") for row in rows[6:9]] == [None, "sort", "sort"]


def test_empty_and_overlong_rows_are_dropped_and_counted(tmp_path, tokenizer):
    rows = [*numbered(3), {"prompt": ""}, {"prompt": None}, {"prompt": "  \n"}, {"prompt": []}, {"prompt": "1 " * 9}]
    source = jsonl(tmp_path / "a.jsonl", rows)
    train, _ = load_prompts(config(source, max_prompt_length=4), tokenizer, 0)
    assert (len(train), train.empty, train.overlong, train.truncated) == (3, 4, 1, 0)
    cut, _ = load_prompts(config(source, max_prompt_length=2, overlong="truncate"), tokenizer, 0)
    assert (len(cut), cut.empty, cut.overlong, cut.truncated) == (4, 4, 0, 4)
    assert cut.tokens[1].tolist() == [4, models.SEP], "the end of a prompt is kept"
    assert len(load_prompts(config(source), tokenizer, 0)[0]) == 4, "no limit given"


@pytest.mark.parametrize(
    ("rows", "changes", "message", "hint"),
    [
        ([{"question": "1", "answer": "1"}], {}, "no column 'prompt'.*question, answer", "data.prompt_key=question"),
        ([{"promt": "1"}], {}, "no column 'prompt'.*promt", "data.prompt_key=promt"),
        ([{"zzz": "1"}], {}, "no column 'prompt'.*zzz", "name the prompts' column"),
        ([{"prompt": ""}, {"prompt": None}], {}, "no usable prompt.*2 empty", "data.prompt_key"),
        ([{"prompt": "1 2 3"}], {"max_prompt_length": 2}, "no usable prompt.*1 longer than 2", "overlong"),
        ([], {}, "no usable prompt", "data.prompt_key"),
    ],
)
def test_files_without_prompts_are_refused(tmp_path, tokenizer, rows, changes, message, hint):
    with pytest.raises(ConfigError, match=message) as error:
        load_prompts(config(jsonl(tmp_path / "a.jsonl", rows), **changes), tokenizer, 0)
    assert hint in error.value.hint and error.value.where


def test_a_column_that_only_later_rows_lack_is_found(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [{"prompt": "1"}, {"text": "2"}])
    check_source(source, config())
    with pytest.raises(ConfigError, match="no column 'prompt'") as error:
        read_rows(source, config(), seed=0, split="train")
    assert error.value.where.endswith("a.jsonl:2")


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1"}\n{"prompt": \n')
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    (tmp_path / "bad.parquet").write_text("PAR1 this is none")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    for name, message in {
        "bad.jsonl": "bad.jsonl:2: cannot be read",
        "list.jsonl": "list.jsonl:1: .*JSON object",
        "bad.parquet": "bad.parquet: cannot be read",
        "latin.jsonl": "latin.jsonl: cannot be read",
        "bed.jsonl": "there is no file(.|\n)*did you mean .*bad.jsonl",
        "prompts.csv": "must end in .parquet or .jsonl",
    }.items():
        with pytest.raises(ConfigError, match=message):
            read_rows(str(tmp_path / name), config(), seed=0, split="train")


def test_check_source_is_quick_and_needs_only_the_first_row(tmp_path):
    good = jsonl(tmp_path / "a.jsonl", numbered(2))
    check_source((good, "sort"), config())
    check_source(None, config())
    for source, message in ((good.replace("a.", "b."), "no file"), ("sotr", "neither"), ("x/y.txt", "must end in")):
        with pytest.raises(ConfigError, match=message):
            check_source(source, config())
    with pytest.raises(ConfigError, match="no column 'text'"):
        check_source(good, config(prompt_key="text"))
    names = {"sort": False, "mine.py:Task": False, "a.jsonl": True, "dir/a.parquet": True, "reasoning-gym:x": False}
    assert {name: is_file(name) for name in names} == names


def test_chat_messages_need_a_template(tmp_path, folder):
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("tokenizer.json", "config.json"):
        (plain / name).write_bytes((folder / name).read_bytes())
    source = jsonl(tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": "1"}]}])
    with pytest.raises(ConfigError, match="no chat template"):
        load_prompts(config(source), Tokenizer(plain), 0)
    train, _ = load_prompts(config("reasoning-gym:spell_backward"), Tokenizer(plain), 0)
    assert train.texts[0].startswith("Spell this word backward"), "a task's questions do without one"
    chat, _ = load_prompts(config("reasoning-gym:spell_backward"), Tokenizer(folder), 0)
    assert chat.texts[0] == f"{train.texts[0]} ="


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no model folder"):
        Tokenizer(tmp_path / "none")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="no tokenizer can be loaded") as error:
        Tokenizer(tmp_path)
    assert "the folder has: tokenizer.json" in error.value.hint


def test_special_tokens_are_left_out_of_text(tokenizer):
    tokens = Ragged.of([[4, 2, models.EOS], [], [models.PAD, 63, models.EOS]], "int32")
    assert tokenizer.decode(tokens) == ["1 =", "", f"<pad> {models.WORDS[63]}"]
    assert tokenizer.end_ids == (models.EOS,)


# -- splits ------------------------------------------------------------------------------------------------------------
def test_held_out_prompts_of_a_task_are_in_no_other_split(tokenizer):
    data = config(validation_size=256)
    train, held_out = load_prompts(data, tokenizer, 0)
    warmup = load_demonstrations(data, WarmupConfig(steps=50, batch_size=128), tokenizer, 0, held_out=held_out)
    unseen = set(held_out.texts)
    assert len(held_out) == len(unseen) == 256
    assert not unseen & set(train.texts) and not unseen & set(warmup.texts)
    assert train.held_out == 8192 - len(train) and warmup.held_out == 6400 - len(warmup)
    assert load_prompts(data, tokenizer, 1)[1].texts != held_out.texts


def test_held_out_prompts_of_a_file(tmp_path, tokenizer):
    source = jsonl(tmp_path / "a.jsonl", numbered(60) + numbered(60))
    train, held_out = load_prompts(config(source, validation_size=4), tokenizer, 0)
    assert len(held_out) == 4 and len(train) == 112 and train.held_out == 8, "both copies of a prompt go"
    assert not set(train.texts) & set(held_out.texts)
    assert len(load_prompts(config(source, validation_size=100), tokenizer, 0)[1]) == 6, "a tenth at most"


def test_validation_from_its_own_file(tmp_path, tokenizer):
    train_file, validation_file = jsonl(tmp_path / "a.jsonl", numbered(20)), jsonl(tmp_path / "b.jsonl", numbered(30))
    train, held_out = load_prompts(config(train_file, validation=validation_file, validation_size=7), tokenizer, 0)
    assert len(train) == 20 and held_out.texts == [f"2 {i} =" for i in range(7)] and held_out.held_out == 20
    with pytest.raises(ConfigError, match="all 20 validation prompts are among the training prompts"):
        load_prompts(config(train_file, validation=train_file, validation_size=7), tokenizer, 0)


def test_demonstrations_from_a_file(tmp_path, tokenizer):
    source = jsonl(tmp_path / "a.jsonl", [*numbered(3, response="1 2"), {"prompt": "5 ="}])
    found = load_demonstrations(
        config(source), WarmupConfig(steps=1), tokenizer, 0, held_out=load_prompts(config(), tokenizer, 0)[1]
    )
    assert len(found) == 3 and found.responses[0].tolist() == [4, 5, models.EOS]
    plain = jsonl(tmp_path / "b.jsonl", numbered(3))
    with pytest.raises(ConfigError, match="no column 'response'") as error:
        load_demonstrations(config(), WarmupConfig(steps=1, data=plain), tokenizer, 0, held_out=found)
    assert "warmup.steps=0" in error.value.hint


# -- order -------------------------------------------------------------------------------------------------------------
def test_order_is_a_pure_function_of_seed_epoch_and_index():
    sampler = Sampler(10, 4, seed=3)
    epochs = [np.concatenate([sampler.step(step)[1] for step in range(1, 6)])[start : start + 10] for start in (0, 10)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(10))
    assert not np.array_equal(*epochs), "each epoch has an order of its own"
    again = Sampler(10, 4, seed=3)
    assert all(np.array_equal(again.step(step)[1], sampler.step(step)[1]) for step in (5, 1, 3))
    assert not np.array_equal(Sampler(10, 10, seed=4).step(1)[1], epochs[0])


def test_order_does_not_depend_on_the_batch_size():
    orders = [np.concatenate([Sampler(7, size, 0).step(s)[1] for s in range(1, 1 + 42 // size)]) for size in (1, 3, 21)]
    assert np.array_equal(orders[0], orders[1]) and np.array_equal(orders[0], orders[2])


def test_a_partial_step_runs_on_into_the_next_epoch():
    sampler = Sampler(10, 4, seed=0)
    groups, rows = sampler.step(3)
    assert groups.tolist() == [8, 9, 10, 11]
    assert len(set(np.concatenate([sampler.step(1)[1], sampler.step(2)[1], rows[:2]]))) == 10
    assert (sampler.steps(1), sampler.steps(2), Sampler(3, 100, 0).steps(1)) == (3, 5, 1)
    assert len(Sampler(3, 100, 0).step(2)[1]) == 100, "a step may span many epochs"
    with pytest.raises(ValueError, match="counted from 1"):
        sampler.step(0)


# -- the role ----------------------------------------------------------------------------------------------------------
def worker(folder, data, run_dir="", **setup):
    made = DataWorker(WorkerContext(role="data", run_dir=str(run_dir)))
    return made, made.setup(data, str(folder), **setup)


def test_the_data_role_counts_what_it_found(tmp_path, folder):
    source = jsonl(tmp_path / "a.jsonl", [*numbered(40), {"prompt": ""}, {"prompt": "1 " * 50}])
    _, counts = worker(folder, config(source, validation_size=2, max_prompt_length=20), seed=1)
    assert counts == {
        "prompts": 38,
        "steps_per_epoch": 10,
        "validation": 2,
        "demonstrations": 0,
        "empty": 1,
        "overlong": 1,
        "truncated": 0,
        "held_out": 2,
        "longest_prompt": 3,
    }


def test_samples_of_a_step(folder):
    data, _ = worker(folder, config(train_batch_size=3), n=2, seed=5)
    first, second = data.prompts(1), data.prompts(2)
    assert first.sample_ids.tolist() == [0, 1, 2, 3, 4, 5] and second.sample_ids.tolist() == [6, 7, 8, 9, 10, 11]
    assert first.scalar("group_id").tolist() == [0, 0, 1, 1, 2, 2]
    texts = first.text("prompt_text")
    assert texts[0] == texts[1] != texts[2]
    assert first.ragged("prompt_tokens")[0].tolist() == [models.WORDS.index(word) for word in texts[0].split()]
    again, _ = worker(folder, config(train_batch_size=3), n=2, seed=5)
    assert again.prompts(2).table.equals(second.table)


def test_validation_and_warmup_batches(folder):
    warmup = WarmupConfig(steps=3, batch_size=16)
    data, counts = worker(folder, config(validation_size=32), warmup=warmup, n=4)
    held_out = data.validation_prompts()
    assert len(held_out) == counts["validation"] == 32 and held_out.sample_ids[0] == VALIDATION_IDS
    batch = data.warmup_batch(3)
    assert batch.columns == ["sample_id", "prompt_tokens", "response_tokens"] and len(batch) == 16
    prompts, responses = batch.ragged("prompt_tokens"), batch.ragged("response_tokens")
    for row in range(16):
        assert prompts[row][-1] == models.SEP and responses[row][-1] == models.EOS
        assert sorted(prompts[row][:-1]) == sorted(responses[row][:-1])
    none, _ = worker(folder, config())
    assert len(none.validation_prompts()) == 0
    with pytest.raises(ValueError, match="without warmup"):
        none.warmup_batch(1)


def scored_batch(reward, lengths=(3, 2, 4)):
    rng = np.random.default_rng(0)
    columns = {
        name: Ragged.from_lengths(rng.normal(size=sum(lengths)).astype(np.float32), np.array(lengths))
        for name in ("log_probs", "reference_log_probs", "values", "rollout_log_probs")
    }
    tokens = Ragged.from_lengths(np.ones(sum(lengths), np.int32), np.array(lengths))
    return Batch.of([4, 7, 9], response_tokens=tokens, reward=np.array(reward, np.float32), **columns)


def test_failed_samples_teach_nothing(folder):
    data, _ = worker(folder, config(), algorithm=AlgorithmConfig())
    batch = scored_batch([1.0, float("nan"), 0.5])
    result, metrics = data.compute_advantages(batch, kl_coef=0.1)
    alone, _ = data.compute_advantages(batch.select(np.array([0, 2])), kl_coef=0.1)
    assert result.sample_ids.tolist() == [4, 7, 9] and metrics["reward/mean"].value == 0.75
    for name in ("advantages", "returns"):
        column = result.ragged(name)
        assert np.array_equal(np.concatenate([column[0], column[2]]), alone.ragged(name).values)
    assert not result.ragged("advantages")[1].any()
    assert np.array_equal(result.ragged("returns")[1], batch.ragged("values")[1])
    none, _ = data.compute_advantages(scored_batch([float("nan")] * 3), kl_coef=0.1)
    assert not none.ragged("advantages").values.any()
    whole, _ = data.compute_advantages(scored_batch([1.0, 0.0, 0.5]), kl_coef=0.1)
    assert whole.ragged("advantages")[1].any()


def test_samples_are_recorded(tmp_path, folder):
    data, _ = worker(folder, config(validation_size=4), tmp_path, n=2)
    for held_out, batch in ((False, data.prompts(1)), (True, data.validation_prompts())):
        count = len(batch)
        batch = batch.with_columns(
            response_tokens=[[4, 1]] * count,
            response_text=["1"] * count,
            reward=np.linspace(0, 1, count, dtype=np.float32),
            reward_failure=[""] * count,
            finish_reason=["stop"] * count,
            policy_version=[0] * count,
        )
        if held_out:
            data.record_validation(batch, 0)
        else:
            data.record(batch.with_columns(advantages=Ragged.of([[1.0, 2.0]] * count, "float32")), 1)
    data.close()
    samples = read_samples(tmp_path / "samples.jsonl")
    assert [sample.held_out for sample in samples] == [False] * 8 + [True] * 4
    assert samples[0].reward == 0.0 and samples[0].advantage_mean == 1.5 and samples[0].answer


def test_the_role_imports_neither_torch_nor_transformers(folder):
    code = (
        "import sys\nfrom tests.unit.test_data import config, worker\n"
        "worker(sys.argv[1], config(validation_size=8))[0].prompts(1)\n"
        "print(sorted({'torch', 'transformers', 'ray', 'vllm', 'megatron', 'reasoning_gym'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
