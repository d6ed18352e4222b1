"""How a config is put together: files, groups, overrides, lines, types, and all problems in one error."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hybridflow.config import code_digest, config_digest, explain, load_config
from hybridflow.config.model_folder import read_model_folder
from hybridflow.config.problems import InvalidConfigError
from hybridflow.config.resolution import resolve
from hybridflow.config.schema import Config
from hybridflow.config.training_rules import batched_tokens
from hybridflow.config.validate import leaf_paths
from hybridflow.config.yaml_lines import read_value, read_yaml
from hybridflow.errors import ConfigError
from jobs.models import tiny

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    Path("tiny").symlink_to(model)
    return tmp_path


def write(text, name="mine.yaml"):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)


def load(*arguments):
    return load_config(["model.path=tiny", *arguments], devices=1, device_type="cpu")


def problems(*arguments):
    with pytest.raises(InvalidConfigError) as error:
        load(*arguments)
    return error.value.problems


# -- YAML ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-6", 1e-6), ("1_000", 1000), ("off", "off"), ("2024-01-01", "2024-01-01"), ("1:30", "1:30")),
        *(("true", True), ("null", None), ("", None), ("'1'", "1"), ("[1e-6, a]", [1e-6, "a"]), ("cuda:0", "cuda:0")),
        *(("a.py:f", "a.py:f"), ("%x", "%x"), ("{a: 1}", {"a": 1})),
    ],
)
def test_values(text, value):
    assert read_value(text) == value


def test_lines_and_dotted_keys():
    table = read_yaml("a: 1\nactor.optim:\n  lr: 1e-6\nb: {c: 2}\n", "f.yaml")
    assert table.values == {("a",): 1, ("actor", "optim", "lr"): 1e-6, ("b", "c"): 2}
    assert table.where[("actor", "optim", "lr")] == "f.yaml:3"


def test_merge_keys_fill_what_is_not_given():
    table = read_yaml("base: &b {k: 1, l: 2}\nother:\n  <<: *b\n  k: 3\n", "f.yaml")
    assert table.values[("other", "k")] == 3
    assert table.values[("other", "l")] == 2
    assert table.problems == []


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        ("training: {total_steps: 1}\nseed: 1\ntraining: {log_interval: 2}\n", "training", "1 and 3"),
        ("seed: 1\nseed: 1\n", "seed", "1 and 2"),
        ("checkpoint:\n  keep_last_k: 1\nverl.checkpoint:\n  save_interval: 2\n", "checkpoint", "1 and 3"),
        ("verl:\n  wandb: {project: a}\nwandb: {mode: offline}\n", "wandb", "2 and 3"),
        ("hydra: {launcher: basic}\nlauncher: {devices: 1}\n", "launcher", "1 and 2"),
        ("actor.optim: {lr: 1}\nactor:\n  optim: {lr: 2}\n", "actor.optim", "1 and 3"),
    ],
)
def test_given_twice(text, key, lines):
    write(text)
    found = [problem for problem in problems("--config-name", "mine") if "given twice" in problem.message]
    assert [problem.key for problem in found][:1] == [key]
    assert f"lines {lines}" in found[0].message


def test_broken_yaml_names_the_line():
    write("seed: 1\nmodel: {path: [\n")
    (problem,) = problems("--config-name", "mine")
    assert problem.where.startswith("mine.yaml:")


# -- composition -----------------------------------------------------------------------------------------------------


def test_overrides_beat_the_file_and_the_file_beats_the_groups():
    write("defaults:\n  - override /algorithm: ppo\nalgorithm: {gamma: 0.9, lam: 0.8}\n")
    config = load("--config-name", "mine", "algorithm.lam=0.7")
    assert (config.config.algorithm.gamma, config.config.algorithm.lam) == (0.9, 0.7)
    assert config.sources["algorithm.gamma"] == "mine.yaml:3"
    assert config.sources["algorithm.lam"] == "command line"
    assert config.sources["algorithm.kl_penalty"] == "jobs/conf/algorithm/ppo.yaml:6"
    assert config.sources["algorithm.clip_ratio"] == "default"
    assert config.sources["data.train_batch_size"] == "decided"


def test_search_order_is_current_folder_then_config_dir_then_package():
    write("exp_name: package beaten\n", "here/ppo_7b_mcore.yaml")
    assert load("--config-dir", "here", "--config-name", "ppo_7b_mcore").config.exp_name == "package beaten"
    write("exp_name: all beaten\n", "ppo_7b_mcore.yaml")
    assert load("--config-dir", "here", "--config-name", "ppo_7b_mcore").config.exp_name == "all beaten"


def test_a_name_with_a_folder_or_suffix():
    write("exp_name: deep\n", "some/where/mine.yaml")
    assert load("--config-name", "some/where/mine.yaml").config.exp_name == "deep"


def test_groups_of_the_users_own():
    write("gamma: 0.5\n", "algorithm/mine.yaml")
    assert load("algorithm=mine").config.algorithm.gamma == 0.5
    write("defaults:\n  - override /algorithm: mine\n")
    assert load("--config-name", "mine").config.algorithm.gamma == 0.5
    assert load("--config-name", "mine", "algorithm=ppo").config.algorithm.gamma == 1.0  # the command line wins


def test_a_config_on_top_of_another():
    write("exp_name: base\nseed: 1\n", "base.yaml")
    write("defaults:\n  - base\n  - override /algorithm: ppo\nexp_name: top\n")
    config = load("--config-name", "mine").config
    assert (config.exp_name, config.seed) == ("top", 1)


def test_a_group_without_the_word_override():
    write("defaults:\n  - algorithm: ppo\n  - _self_\nseed: 3\n")
    assert load("--config-name", "mine").config.seed == 3


def test_interpolation():
    write("exp_name: run\nlog_dir: out/${exp_name}/${model.dtype}\n")
    assert load("--config-name", "mine").config.log_dir == "out/run/bfloat16"
    (problem,) = problems("--config-name", "mine", "log_dir=${nope}")
    assert problem.key == "log_dir"


def test_hydra_launcher_everywhere():
    write("defaults:\n  - override hydra/launcher: basic\n")
    assert load("--config-name", "mine").config.launcher.kind == "basic"
    assert load("hydra.launcher=basic", "hydra.launcher.devices=2").config.launcher.devices == 2
    assert load("hydra/launcher=basic").config.launcher.kind == "basic"


def test_hydras_plus_is_the_same_as_none():
    assert load("+algorithm.gamma=0.5", "++algorithm.lam=0.5").config.algorithm.gamma == 0.5


# -- problems --------------------------------------------------------------------------------------------------------


def test_all_problems_together_with_file_line_and_suggestion():
    write(
        "training:\n  total_step: 10\n  ppo_mini_batch_size: many\nlr: 1\ntranining: {a: 1, b: 2}\n"
        "algorithm: {gamma: 2}\nactor: 3\ndevice_map: {critic: {gpus: 8}}\n"
    )
    found = {
        problem.key: problem for problem in problems("--config-name", "mine", "hydra.run.dir=x", "seed=true", "rubbish")
    }
    assert {key: problem.where for key, problem in found.items()} == {
        "": "command line",
        "training.total_step": "mine.yaml:2",
        "training.ppo_mini_batch_size": "mine.yaml:3",
        "lr": "mine.yaml:4",
        "tranining": "mine.yaml:5",
        "algorithm.gamma": "mine.yaml:6",
        "actor": "mine.yaml:7",
        "device_map.critic": "mine.yaml:8",
        "hydra": "command line",
        "seed": "command line",
    }
    assert "did you mean training.total_steps?" in found["training.total_step"].hint
    assert "actor.optim.lr" in found["lr"].hint
    assert "did you mean training?" in found["tranining"].hint
    assert "'many'" in found["training.ppo_mini_batch_size"].message
    assert "True" in found["seed"].message
    assert "optim" in found["actor"].hint


def test_one_problem_reads_as_one():
    with pytest.raises(InvalidConfigError, match=r"^command line: training.total_steps: must be at least 1, but is 0"):
        load("training.total_steps=0")


def test_the_error_survives_pickling():
    with pytest.raises(InvalidConfigError) as error:
        load("sed=1")
    copy = pickle.loads(pickle.dumps(error.value))
    assert (str(copy), copy.problems) == (str(error.value), error.value.problems)


def test_missing_things():
    with pytest.raises(InvalidConfigError, match="did you mean ppo_7b_mcore"):
        load("--config-name", "ppo_7b_mcor")
    with pytest.raises(InvalidConfigError, match="no folder"):
        load("--config-dir", "gone")
    with pytest.raises(InvalidConfigError, match="model.path: no model is given"):
        load_config([])
    with pytest.raises(InvalidConfigError, match="did you mean algorithm"):
        write("defaults:\n  - override /algoritm: ppo\n")
        load("--config-name", "mine")
    with pytest.raises(InvalidConfigError, match="did you mean ppo"):
        load("algorithm=pppo")
    with pytest.raises(InvalidConfigError, match=r"training.total_steps: has no value yet"):
        load("training.total_steps=???")


def test_types():
    config = load("exp_name=7", "training.total_steps=1e1", "model.lora_alpha=3", "mcore_config.sequence_parallel=on")
    assert config.config.exp_name == "7"
    assert config.config.training.total_steps == 10
    wrong = {problem.key for problem in problems("model.dtype=fp8", "actor.optim.betas=[1]", "data.train=[[1]]")}
    assert wrong == {"model.dtype", "actor.optim.betas", "data.train"}


# -- the model folder ------------------------------------------------------------------------------------------------


def test_model_facts(model):
    info = read_model_folder(str(model))
    assert (info.heads, info.kv_heads, info.layers, info.positions) == (4, 2, 2, 512)
    assert info.linear_modules == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    assert 300_000 < info.parameters < 350_000


@pytest.mark.parametrize(
    ("remove", "named"),
    [("config.json", "config.json"), ("tokenizer.json", "a tokenizer"), ("model.safetensors", "weights")],
)
def test_half_a_model_folder_names_what_is_missing(remove, named):
    (tiny("half") / remove).unlink()
    with pytest.raises(InvalidConfigError, match=f"lacks {named}"):
        load("model.path=half")


def test_missing_shards_are_named():
    half = tiny("half")
    (half / "model.safetensors").rename(half / "model-00001-of-00003.safetensors")
    shards = ", ".join(f'"w{n}": "model-0000{n}-of-00003.safetensors"' for n in (1, 2, 3))
    (half / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{shards}}}}}')
    with pytest.raises(ConfigError, match="lacks model-00002-of-00003.safetensors, model-00003-of-00003.safetensors"):
        read_model_folder("half")


def test_damaged_weights():
    file = tiny("half") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cut off"):
        read_model_folder("half")


def test_not_a_folder():
    with pytest.raises(ConfigError) as error:
        read_model_folder("meta/some-7b")
    assert "download it first" in error.value.hint
    with pytest.raises(ConfigError, match="type 'gpt2'"):
        read_model_folder(str(tiny("other", model_type="gpt2")))


# -- the rest --------------------------------------------------------------------------------------------------------


def test_registered_code_is_imported_before_the_check_and_hashed():
    write(
        "from hybridflow.algorithms.advantages import ADVANTAGE_ESTIMATORS\n"
        "ADVANTAGE_ESTIMATORS.register('of_a_test')(lambda *_: None)\n",
        "mine.py",
    )
    config = load("register=[mine.py]", "algorithm.adv_estimator=of_a_test")
    assert config.code == {"mine.py": code_digest("mine.py")}
    (problem,) = problems("register=[gone.py]")
    assert problem.key == "register"


def test_a_cluster_that_is_not_yet_in_reach(monkeypatch):
    """On a head without GPUs nothing is assumed of the cluster; the driver resolves again once it knows."""
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    monkeypatch.setattr("hybridflow.config.loader.local_gpus", lambda: 0)
    config = load_config(["model.path=tiny", "mcore_config.tensor_model_parallel_size=2"])
    assert config.config.device_map.actor is None
    there = config.on(4, "cuda")
    assert there.config.device_map.actor == (0, 1, 2, 3)
    assert there.config.model.use_flash_attn is True
    with pytest.raises(InvalidConfigError, match="3 devices of the actor"):
        config.on(3, "cuda")


def test_resolve_says_every_change_when_it_does_not_know_what_was_given(model):
    config, adjustments = resolve(load().written, 1, "cpu", read_model_folder(str(model)))
    assert config.mcore_config.sequence_parallel is False
    assert "mcore_config.sequence_parallel" in {entry.key for entry in adjustments}


def test_printed_config_reads_back_to_the_same():
    config = load("--print-config", "actor.optim.lr=1e-6", "device_map.actor=cuda:0")
    assert config.print_config == config.resolved_yaml
    assert yaml.safe_load(config.print_config)["actor"]["optim"]["lr"] == 1e-6
    assert "# command line" in config.print_config
    write(config.print_config, "again.yaml")
    again = load_config(["--config-name", "again"], devices=1, device_type="cpu")
    assert again.config == config.config
    assert config_digest(again.config) == config_digest(config.config)


def test_every_key_is_explained():
    text = explain("")
    assert all(".".join(path) in text for path in leaf_paths())
    assert explain("actor.optim.lr") == "actor.optim.lr: float = 1.0e-06\n    Learning rate."
    with pytest.raises(ConfigError, match="no key"):
        explain("actor.lr")


def test_advice_on_batched_tokens(model):
    assert batched_tokens(80, 2) == 28672
    info = read_model_folder(str(model))
    _, adjustments = resolve(load().written, 1, "cuda", info, memory_gb=80)
    assert "28672" in next(entry.text for entry in adjustments if entry.key == "rollout.max_num_batched_tokens")


def test_the_schema_needs_only_the_standard_library():
    code = (
        "import sys; before = set(sys.modules); import hybridflow.config.schema\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names) - {'hybridflow', 'placement'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout.strip() == "[]"
    assert pickle.loads(pickle.dumps(Config())) == Config()
