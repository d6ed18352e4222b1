"""Every key of the tutorial: honoured, adjusted with a line of the run card, or refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.config import load_config
from hybridflow.config.problems import InvalidConfigError
from hybridflow.config.ranges import get
from jobs.models import tiny

# key -> (as given, as the program sees it)
HONOURED = {
    "exp_name": ("mine", "mine"),
    "seed": ("7", 7),
    "log_dir": ("elsewhere", "elsewhere"),
    "model.path": ("tiny", "tiny"),
    "model.dtype": ("bfloat16", "bfloat16"),
    "model.enable_gradient_checkpointing": ("true", True),
    "model.lora_rank": ("64", 64),
    "model.lora_alpha": ("128", 128.0),
    "model.target_modules": ("[q_proj,v_proj]", ("q_proj", "v_proj")),
    "mcore_config.tensor_model_parallel_size": ("1", 1),
    "mcore_config.pipeline_model_parallel_size": ("1", 1),
    "algorithm.gamma": ("0.99", 0.99),
    "algorithm.lam": ("0.9", 0.9),
    "algorithm.adv_estimator": ("gae", "gae"),
    "algorithm.kl_penalty": ("low_var_kl", "low_var_kl"),
    "algorithm.kl_ctrl.type": ("adaptive", "adaptive"),
    "algorithm.kl_ctrl.target_kl": ("0.1", 0.1),
    "algorithm.kl_ctrl.horizon": ("5000", 5000),
    "training.total_steps": ("10", 10),
    "training.num_epochs": ("3", 3),
    "training.ppo_mini_batch_size": ("32", 32),
    "training.ppo_micro_batch_size_per_gpu": ("8", 8),
    "training.ppo_max_token_len_per_gpu": ("2048", 2048),
    "training.clip_grad_norm": ("0.5", 0.5),
    "training.log_interval": ("5", 5),
    "rollout.name": ("mcore_vllm", "mcore_vllm"),
    "rollout.dtype": ("float32", "float32"),
    "rollout.tensor_model_parallel_size": ("1", 1),
    "rollout.max_num_batched_tokens": ("4096", 4096),
    "rollout.max_num_seqs": ("64", 64),
    "rollout.enable_chunked_prefill": ("false", False),
    "actor.optim.lr": ("1e-6", 1e-6),
    "actor.optim.weight_decay": ("0.1", 0.1),
    "actor.optim.betas": ("[0.9, 0.95]", (0.9, 0.95)),
    "actor.optim.grad_clip": ("2.0", 2.0),
    "critic.optim.lr": ("1e-5", 1e-5),
    "critic.optim.weight_decay": ("0.1", 0.1),
    "critic.optim.betas": ("[0.8, 0.99]", (0.8, 0.99)),
    "critic.optim.grad_clip": ("2.0", 2.0),
    "checkpoint.save_interval": ("100", 100),
    "checkpoint.keep_last_k": ("3", 3),
    "wandb.project": ("mine", "mine"),
    "wandb.mode": ("offline", "offline"),
}
OTHERS = {  # each has a test of its own below
    *("model.use_flash_attn", "mcore_config.sequence_parallel", "mcore_config.fsdp"),
    *("mcore_config.fsdp_use_orig_params", "training.gradient_accumulation_steps", "device_map.actor"),
    *("device_map.critic", "device_map.reward_model", "device_map.rollout"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    Path("tiny").symlink_to(model)


def loaded(*overrides, devices=1, device_type="cpu"):
    return load_config(["model.path=tiny", *overrides], devices=devices, device_type=device_type)


def line(config, key):
    return " ".join(entry.text for entry in config.adjustments if entry.key == key)


def refusals(*overrides, devices=1, device_type="cpu"):
    with pytest.raises(InvalidConfigError) as error:
        loaded(*overrides, devices=devices, device_type=device_type)
    assert error.value.exit_code == 2
    return {problem.key: problem for problem in error.value.problems}


@pytest.mark.parametrize("key", HONOURED)
def test_honoured(key):
    given, seen = HONOURED[key]
    assert get(loaded(f"{key}={given}").config, key) == seen


def test_the_seven_billion_example_has_every_key():
    shown = Path(__file__).parents[2] / "jobs" / "conf" / "ppo_7b_mcore.yaml"
    config = load_config(
        ["--config-name", "ppo_7b_mcore", "model.path=tiny", "mcore_config.fsdp=false"], devices=2, device_type="cuda"
    )
    given = {key for key, source in config.sources.items() if source.startswith(("jobs/conf/ppo_7b", str(shown)))}
    expected = (set(HONOURED) | OTHERS) - {"model.path", "mcore_config.fsdp"}
    assert expected - given == {key for key in OTHERS if key.startswith("device_map")}
    assert config.config.training.total_steps == 1000
    assert config.config.mcore_config.sequence_parallel is True


def test_the_tutorials_command():
    """The command of the tutorial, with the same overrides, on a machine without GPUs."""
    config = load_config(
        [
            *("--config-name", "ppo_7b_mcore", 'hydra.launcher="basic"', "model.path=tiny", "training.total_steps=10"),
            *("training.ppo_mini_batch_size=32", "mcore_config.tensor_model_parallel_size=1"),
            "rollout.tensor_model_parallel_size=1",
        ],
        devices=1,
        device_type="cpu",
    )
    assert config.config.launcher.kind == "basic"
    assert config.config.training.total_steps == 10
    assert [entry.key for entry in config.adjustments] == [
        "model.use_flash_attn",
        "mcore_config.sequence_parallel",
        "mcore_config.fsdp_use_orig_params",
        "mcore_config.fsdp",
        "reward_model",
        "data.train",
        "training.num_epochs",
        "data.max_prompt_length",
    ]


@pytest.mark.parametrize(
    ("group", "choice"),
    [
        *(("algorithm", "ppo"), ("model", "hf_llama"), ("rollout", "mcore_vllm"), ("actor", "mcore_finetune")),
        *(("critic", "mcore_finetune"), ("reward_model", "mcore_hf")),
    ],
)
def test_defaults_override(group, choice):
    Path("mine.yaml").write_text(f"defaults:\n  - override /{group}: {choice}\nmodel: {{path: tiny}}\n")
    load_config(["--config-name", "mine"])
    Path("mine.yaml").write_text(f"defaults:\n  - override /{group}: {choice}x\nmodel: {{path: tiny}}\n")
    with pytest.raises(InvalidConfigError, match=f"mine.yaml:2.*there is no {group} '{choice}x'") as error:
        load_config(["--config-name", "mine"])
    assert choice in error.value.hint


def test_sequence_parallel():
    assert "TP is 1" in line(loaded("mcore_config.sequence_parallel=true"), "mcore_config.sequence_parallel")
    two = loaded("mcore_config.tensor_model_parallel_size=2", "mcore_config.sequence_parallel=true", devices=2)
    assert two.config.mcore_config.sequence_parallel is True
    assert line(loaded(), "mcore_config.sequence_parallel") == ""  # a default that gives way needs no line


def test_fsdp():
    one = loaded("mcore_config.fsdp=true")
    assert one.config.mcore_config.fsdp is False
    assert "DP is 1" in line(one, "mcore_config.fsdp")
    assert "not built yet" in refusals("mcore_config.fsdp=true", devices=2)["mcore_config.fsdp"].message


def test_fsdp_use_orig_params():
    config = loaded("mcore_config.fsdp_use_orig_params=false")
    assert "always keeps" in line(config, "mcore_config.fsdp_use_orig_params")


def test_use_flash_attn():
    cpu = loaded("model.use_flash_attn=true")
    assert cpu.config.model.use_flash_attn is False
    assert "SDPA" in line(cpu, "model.use_flash_attn")
    assert loaded("model.use_flash_attn=true", device_type="cuda").config.model.use_flash_attn is True


def test_dtype_on_cpu_is_honoured_and_the_rollout_follows():
    config = loaded("model.dtype=bfloat16")
    assert line(config, "model.dtype") == ""
    assert config.config.rollout.dtype == "bfloat16"


def test_lora_on_a_missing_target_names_the_modules_that_exist():
    problem = refusals("model.lora_rank=4", "model.target_modules=[q_proj, c_attn]")["model.target_modules"]
    assert "no c_attn" in problem.message
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in problem.hint


def test_lora_off_leaves_its_keys_without_effect():
    assert "no effect" in line(loaded("model.lora_alpha=128"), "model.lora_alpha")


def test_reward_model():
    assert "verifier" in line(loaded(), "reward_model")
    problem = refusals("reward_model.path=tiny")["reward_model.path"]
    assert "not built yet" in problem.message
    assert "reward_model.function" in problem.hint


def test_reward_function():
    Path("rewards.py").write_text("def score(): ...\n")
    assert line(loaded("reward_model.function=rewards.py:score"), "reward_model") == ""
    assert "no file 'gone.py'" in refusals("reward_model.function=gone.py:f")["reward_model.function"].message
    assert "does not name" in refusals("reward_model.function=rewards.py")["reward_model.function"].message


def test_critic_path():
    tiny("other", num_hidden_layers=1)
    tiny("deaf", num_attention_heads=3, num_key_value_heads=3)
    assert loaded("critic.path=other").config.critic.path == "other"
    assert loaded().config.critic.path is None  # the actor's, warmed up if there is a warm-up
    tp2 = ("mcore_config.tensor_model_parallel_size=2", "critic.path=deaf")
    assert "critic.path" in refusals(*tp2, devices=2)["mcore_config.tensor_model_parallel_size"].message


def test_data():
    assert "built-in task" in line(loaded(), "data.train")
    assert "no file 'gone.parquet'" in refusals("data.train=gone.parquet")["data.train"].message
    assert loaded("data.train=sort").config.data.train == "sort"


def test_rollout_batch_defaults_to_one_mini_batch():
    assert loaded("training.ppo_mini_batch_size=32", "rollout.n=4").config.data.train_batch_size == 8
    small = loaded("training.ppo_mini_batch_size=32", "data.train_batch_size=16")
    assert small.config.training.ppo_mini_batch_size == 16
    assert "16 prompts x 1" in line(small, "training.ppo_mini_batch_size")


def test_mini_batch_needs_a_sequence_for_each_rank():
    assert (
        "fewer than the 4"
        in refusals("training.ppo_mini_batch_size=2", devices=4)["training.ppo_mini_batch_size"].message
    )


def test_gradient_accumulation_steps():
    sizes = ("training.ppo_mini_batch_size=128", "training.ppo_micro_batch_size_per_gpu=32")
    right = loaded(*sizes, "training.gradient_accumulation_steps=4")
    assert line(right, "training.gradient_accumulation_steps") == ""
    assert right.config.training.gradient_accumulation_steps == 4
    wrong = loaded(*sizes, "training.gradient_accumulation_steps=4", devices=2)
    assert wrong.config.training.gradient_accumulation_steps == 2
    assert "4 -> 2" in line(wrong, "training.gradient_accumulation_steps")
    assert "never multiplies" in line(wrong, "training.gradient_accumulation_steps")


def test_total_steps_and_num_epochs():
    both = loaded("training.total_steps=10", "training.num_epochs=2")
    assert "whichever comes first" in line(both, "training.num_epochs")
    neither = loaded()
    assert neither.config.training.num_epochs == 1
    assert "1 pass" in line(neither, "training.num_epochs")


def test_clip_grad_norm_and_grad_clip_are_one_thing():
    assert loaded("training.clip_grad_norm=0.5").config.actor.optim.grad_clip == 0.5
    assert loaded("actor.optim.grad_clip=0.5", "critic.optim.grad_clip=0.5").config.training.clip_grad_norm == 0.5
    assert loaded().config.critic.optim.grad_clip == 1.0
    problems = refusals("training.clip_grad_norm=0.5", "actor.optim.grad_clip=1.0")
    assert "same thing" in problems["actor.optim.grad_clip"].message


def test_lengths():
    """The tiny model has 512 positions."""
    config = loaded().config
    assert (config.data.max_prompt_length, config.rollout.max_response_length) == (256, 256)
    config = loaded("data.max_prompt_length=500").config
    assert config.rollout.max_response_length == 12
    config = loaded("rollout.max_response_length=9").config
    assert config.data.max_prompt_length == 503
    config = loaded("training.ppo_max_token_len_per_gpu=100").config
    assert (config.data.max_prompt_length, config.rollout.max_response_length) == (50, 50)
    assert "512" in refusals("data.max_prompt_length=512")["data.max_prompt_length"].message
    both = refusals("data.max_prompt_length=300", "rollout.max_response_length=300")["rollout.max_response_length"]
    assert "prompts of 300 tokens and responses of 300 tokens" in both.message


def test_max_num_batched_tokens():
    small = refusals("rollout.max_num_batched_tokens=32", "rollout.max_num_seqs=64")
    assert "max_num_seqs" in small["rollout.max_num_batched_tokens"].message
    unchunked = ("rollout.enable_chunked_prefill=false", "rollout.max_num_batched_tokens=500")
    assert "sequence of 512" in refusals(*unchunked)["rollout.max_num_batched_tokens"].message


def test_device_map_on_cpu():
    config = loaded("device_map.actor=cuda:0", "device_map.critic=cuda:1", "device_map.rollout=cuda:2")
    assert "logical device N" in line(config, "device_map")
    assert config.config.device_map.critic == (1,)
    assert config.config.device_map.reference == (0,)
    assert config.config.launcher.devices == 3
    assert "no device" in line(loaded("device_map.reward_model=cuda:0"), "device_map.reward_model")


def test_device_map_is_checked():
    assert (
        "does not exist"
        in refusals("device_map.critic=cuda:5", devices=2, device_type="cuda")["device_map.critic"].message
    )
    half = refusals("device_map.actor=[0,1]", "device_map.critic=1")
    assert "share [1] but not all" in half["device_map.critic"].message
    assert "names no device" in refusals("device_map.actor=gpu-x")["device_map.actor"].message


def test_layout_is_checked():
    """The tiny model has 4 heads, 2 KV heads, 2 layers."""
    tp, pp = "mcore_config.tensor_model_parallel_size", "mcore_config.pipeline_model_parallel_size"
    assert "2 KV heads" in refusals(f"{tp}=4", devices=4)[tp].message
    assert "4 attention heads" in refusals(f"{tp}=3", devices=3)[tp].message
    assert "2 layers" in refusals(f"{pp}=3", devices=3)[pp].message
    assert "3 devices of the actor" in refusals(f"{tp}=2", devices=3)[tp].message
    assert (
        "3 does not divide"
        in refusals("rollout.tensor_model_parallel_size=3", devices=3)["rollout.tensor_model_parallel_size"].message
    )
    assert loaded("rollout.tensor_model_parallel_size=4", devices=4).config.rollout.replicas == 1
    assert "are 2 replicas, not 3" in refusals("rollout.replicas=3", devices=2)["rollout.replicas"].message


def test_names_of_algorithms():
    problems = refusals("algorithm.name=dpo", "algorithm.adv_estimator=grpo", "algorithm.kl_penalty=k9")
    assert "ppo" in problems["algorithm.name"].hint
    assert "gae" in problems["algorithm.adv_estimator"].hint
    assert "low_var_kl" in problems["algorithm.kl_penalty"].hint
    assert "shared_memory" in refusals("resharding.protocol=nccl")["resharding.protocol"].hint


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *(("ddp", "nproc_per_node"), ("ddp", "nnodes"), ("ddp", "node_rank"), ("ddp", "master_port")),
        *(("slurm", "nodes"), ("slurm", "gpus_per_node"), ("slurm", "ntasks_per_node"), ("slurm", "timeout_min")),
    ],
)
def test_launchers_that_are_not_built(kind, key):
    assert set(refusals(f"hydra.launcher={kind}", f"hydra.launcher.{key}=2")) == {"launcher.kind"}
    assert "not built yet" in refusals(f"hydra.launcher={kind}")["launcher.kind"].message
    assert kind in refusals(f"hydra.launcher.{key}=2")[f"launcher.{key}"].message


def test_launcher_devices():
    assert loaded("launcher.devices=4").config.device_map.actor == (0, 1, 2, 3)


@pytest.mark.parametrize("spelling", ["verl.checkpoint", "checkpoint"])
def test_checkpoint_spellings(spelling):
    Path("mine.yaml").write_text(f"model: {{path: tiny}}\n{spelling}:\n  save_interval: 5\n")
    config = load_config(["--config-name", "mine", f"{spelling}.keep_last_k=9"])
    assert (config.config.checkpoint.save_interval, config.config.checkpoint.keep_last_k) == (5, 9)


@pytest.mark.parametrize("spelling", ["verl.wandb", "wandb"])
def test_wandb(spelling):
    Path("mine.yaml").write_text(f"model: {{path: tiny}}\n{spelling}:\n  project: mine\n")
    config = load_config(["--config-name", "mine"])
    assert (config.config.wandb.project, config.config.wandb.mode) == ("mine", "offline")
    assert "for a project is given" in line(config, "wandb.mode")
    assert loaded().config.wandb.mode == "disabled"
