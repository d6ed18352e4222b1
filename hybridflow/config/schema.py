"""Every key of the config, its type, default and meaning: the one schema that the whole program codes against.

Plain frozen dataclasses of the standard library, so that workers unpickle them without pydantic or Hydra. ``None``
means "decided by ``resolve``" wherever a docstring says so; after ``resolve`` such fields hold the decided value.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Literal, TypeVar, dataclass_transform

DType = Literal["bfloat16", "float32"]
DeviceSet = int | str | tuple[int | str, ...] | None
_Class = TypeVar("_Class")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def section(cls: type[_Class]) -> type[_Class]:
    """A block of the config: a frozen keyword-only dataclass whose unknown keys are errors when pydantic reads it."""
    cls.__pydantic_config__ = {  # type: ignore[attr-defined]
        "extra": "forbid",
        "coerce_numbers_to_str": True,
        "allow_inf_nan": False,
    }
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


@section
class ModelConfig:
    """``model``: the policy, as a local Hugging Face folder, and how it is held."""

    path: str | None = None
    """Folder with config.json, tokenizer and safetensors. Required."""
    dtype: DType = "bfloat16"
    """Type of the weights in training and (unless ``rollout.dtype`` says otherwise) generation."""
    use_flash_attn: bool = True
    """Use flash attention where it exists; on CPU the SDPA of PyTorch takes its place (said in the run card)."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more compute."""
    lora_rank: int = 0
    """Rank of the LoRA adapters; 0 trains all weights."""
    lora_alpha: float = 16.0
    """LoRA scale: the adapter's output is multiplied by ``lora_alpha / lora_rank``."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Names of the linear layers that get an adapter, as the Hugging Face model calls them."""


@section
class McoreConfig:
    """``mcore_config``: how Megatron-Core cuts actor, critic and reference over devices."""

    tensor_model_parallel_size: int = 1
    """TP: devices that share each matrix. Must divide attention heads and KV heads."""
    pipeline_model_parallel_size: int = 1
    """PP: stages of consecutive layers. Must divide the number of layers."""
    sequence_parallel: bool = True
    """Cut activations along the sequence between the matrices of TP; without effect at TP 1 (said)."""
    fsdp: bool = False
    """Cut weights over data-parallel ranks (PyTorch FSDP2). Without effect at DP 1 (said)."""
    fsdp_use_orig_params: bool | None = None
    """Accepted for old configs: FSDP2 always keeps the original parameters (said)."""


@section
class KLControlConfig:
    """``algorithm.kl_ctrl``: the weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "adaptive"
    """``adaptive`` steers the measured KL towards ``target_kl`` (Ziegler et al. 2019); ``fixed`` never changes."""
    kl_coef: float = 0.001
    """Weight at the first step."""
    target_kl: float = 0.05
    """KL per response token (nats) that the adaptive controller aims at."""
    horizon: int = 10000
    """Sequences over which the adaptive controller corrects an error."""


@section
class AlgorithmConfig:
    """``algorithm``: PPO, its advantage estimator and its losses."""

    name: str = "ppo"
    """Which driver runs: ``ppo``."""
    gamma: float = 1.0
    """Discount per token, 0 to 1."""
    lam: float = 0.95
    """GAE's lambda, 0 to 1."""
    adv_estimator: str = "gae"
    """Advantage estimator: ``gae``."""
    kl_penalty: str = "kl"
    """Estimate of the KL per token: ``kl``/``k1``, ``abs``, ``mse``/``k2``, ``low_var_kl``/``k3``."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    """Controller of the KL penalty's weight."""
    clip_ratio: float = 0.2
    """PPO's epsilon: the ratio is clipped to 1 - epsilon below."""
    clip_ratio_high: float | None = None
    """Epsilon above 1 (DAPO's clip-higher); None: the same as ``clip_ratio``."""
    dual_clip: float | None = 3.0
    """Lower bound of the loss for negative advantages, in units of the advantage (Ye et al. 2020); None: off."""
    value_clip: float | None = 0.2
    """Clip of the value's change from its old value; None: off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the policy's loss."""
    ppo_epochs: int = 1
    """Passes over one rollout."""
    whiten_advantages: bool = True
    """Shift and scale the advantages of a step to mean 0 and deviation 1 over all response tokens."""


@section
class TrainingConfig:
    """``training``: how long, and in which portions."""

    total_steps: int | None = None
    """Steps (one rollout plus its updates) at most; None: as many as ``num_epochs`` gives."""
    num_epochs: int | None = None
    """Passes over the training prompts at most; None: as many as ``total_steps`` needs. Neither given: 1 pass."""
    ppo_mini_batch_size: int = 128
    """Sequences of one optimizer step, over all data-parallel ranks (verl counts prompts)."""
    ppo_micro_batch_size_per_gpu: int = 32
    """Sequences of one forward/backward on a device, at most."""
    ppo_max_token_len_per_gpu: int = 4096
    """Tokens of one forward/backward on a device, at most; a micro-batch closes at whichever cap comes first."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches of a mini-batch on a device. Follows from the three above and DP; a differing value is said."""
    clip_grad_norm: float | None = None
    """Norm to which gradients are clipped, for actor and critic; None: their ``optim.grad_clip``, else 1.0."""
    log_interval: int = 10
    """Steps between looks at the best and worst samples on the terminal; each step has its line anyway."""
    eval_interval: int = 0
    """Steps between evaluations on the validation prompts; 0: only before and after the run."""


@section
class RolloutConfig:
    """``rollout``: the generation engine."""

    name: Literal["mcore_vllm"] = "mcore_vllm"
    """Engine pair: Megatron-Core trains, vLLM generates."""
    dtype: DType | None = None
    """Type of the engine's weights; None: ``model.dtype``."""
    tensor_model_parallel_size: int = 1
    """TP of one engine replica."""
    replicas: int | None = None
    """Engine replicas; None: as many as fill the rollout's devices."""
    max_num_batched_tokens: int = 8192
    """Tokens that the engine processes in one pass, at most."""
    max_num_seqs: int = 256
    """Sequences that the engine holds at once, at most."""
    enable_chunked_prefill: bool = True
    """Process long prompts in pieces beside running sequences."""
    n: int = 1
    """Responses per prompt."""
    temperature: float = 1.0
    """Sampling temperature, above 0; log-probs of the trainer use the same."""
    max_response_length: int | None = None
    """Tokens of a response, at most; None: 256, or what positions and token budget leave beside the prompt."""
    kv_cache_bytes: int | None = None
    """Bytes of one replica rank's KV cache; None: the engine's plan decides."""
    lora: Literal["adapter", "merged"] = "adapter"
    """How LoRA reaches the engine: as an adapter beside the base weights, or merged into them."""


@section
class OptimConfig:
    """``*.optim``: one role's optimizer."""

    name: Literal["adam", "sgd"] = "adam"
    """``adam`` is AdamW (decoupled weight decay); ``sgd`` is plain."""
    lr: float = 1e-6
    """Learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's moments."""
    eps: float = 1e-8
    """Adam's epsilon."""
    grad_clip: float | None = None
    """Norm to which gradients are clipped; None: ``training.clip_grad_norm``, else 1.0. 0 turns clipping off."""


@section
class ActorConfig:
    """``actor``: the policy that is trained."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """Its optimizer."""


@section
class CriticConfig:
    """``critic``: the value model."""

    path: str | None = None
    """Hugging Face folder of its trunk; None: ``model.path``. The value head is its own, else zero."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Its optimizer."""


@section
class ReferenceConfig:
    """``reference``: the frozen policy that the KL penalty is measured against."""

    path: str | None = None
    """Hugging Face folder; None: ``model.path`` (after the warm-up, if there is one)."""


@section
class RewardModelConfig:
    """``reward_model``: what scores a response."""

    name: Literal["mcore_hf"] = "mcore_hf"
    """Kind of reward; without ``path`` it is the task's verifier (said)."""
    path: str | None = None
    """Folder of a scoring model. Not built yet: use ``function`` or a task's verifier."""
    function: str | None = None
    """``path/to/file.py:name`` or ``package.module:name`` of a reward function; None: the task's verifier."""
    timeout_seconds: float = 10.0
    """Time for one sample; a slower one is stopped and counted as failed."""
    max_failure_fraction: float = 0.1
    """Share of a step's samples that may fail before the run ends with an error."""
    processes: int = 1
    """Processes that run the reward function, per reward worker."""


@section
class DeviceMapConfig:
    """``device_map``: a device or set of devices per role: ``0``, ``cuda:0``, ``cuda:0-3``, ``[0, 1]``; None: all."""

    actor: DeviceSet = None
    """Devices of the actor; None: all."""
    critic: DeviceSet = None
    """Devices of the critic; None: the actor's."""
    reference: DeviceSet = None
    """Devices of the reference; None: the actor's."""
    reward_model: DeviceSet = None
    """Devices of the reward worker; None: no device (a reward function needs none)."""
    rollout: DeviceSet = None
    """Devices of the generation engines; None: the actor's."""


@section
class DataConfig:
    """``data``: the prompts."""

    train: str | tuple[str, ...] | None = None
    """Parquet or JSONL file(s), or a task's name; None: the built-in task (said)."""
    validation: str | tuple[str, ...] | None = None
    """The same for held-out prompts; None: ``validation_size`` prompts held out from ``train``."""
    train_batch_size: int | None = None
    """Prompts per step; None: so many that ``x rollout.n`` gives ``training.ppo_mini_batch_size`` sequences."""
    validation_size: int = 128
    """Held-out prompts of an evaluation; 0: none."""
    prompt_key: str = "prompt"
    """Column of the prompt: a text or a list of chat messages."""
    answer_key: str = "answer"
    """Column handed to the reward function."""
    max_prompt_length: int | None = None
    """Tokens of a prompt, at most; None: 1024, or what the model's positions and the token budget leave for it."""
    overlong: Literal["drop", "truncate"] = "drop"
    """What happens to longer prompts at load (counted in the run card)."""


@section
class ReshardingConfig:
    """``resharding``: how the actor's weights reach the generation engine."""

    protocol: str = "auto"
    """``auto`` picks by placement; or a registered name: ``shared_memory``, ``object_store``, ``checkpoint``."""


@section
class CheckpointConfig:
    """``checkpoint`` (``verl.checkpoint`` is an accepted spelling)."""

    save_interval: int = 0
    """Steps between checkpoints; 0: only at the end of the run."""
    keep_last_k: int = 3
    """Checkpoints kept."""
    resume: Literal["auto", "off"] = "auto"
    """``auto`` continues from the run folder's last checkpoint; ``off`` refuses a folder that holds a run."""


@section
class WandbConfig:
    """``wandb`` (``verl.wandb`` is an accepted spelling)."""

    project: str | None = None
    """Project of the run; None: ``hybridflow``."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """``offline`` writes below the run folder and needs no login; None: offline with a project, else disabled."""


@section
class LauncherConfig:
    """``launcher`` (``hydra.launcher`` is an accepted spelling): which machines the run uses."""

    kind: Literal["basic", "ddp", "slurm"] = "basic"
    """``basic`` is this machine or the Ray cluster in reach; ``ddp`` and ``slurm`` are not built yet."""
    devices: int | None = None
    """Devices of the run; None: all of this machine (on CPU one)."""
    wait_seconds: float = 60.0
    """How long a cluster that lacks devices is waited for."""
    threads: int = 1
    """CPU threads of each worker process. One is best while several processes work at once on few cores."""
    dashboard: bool = False
    """Start Ray's dashboard with a Ray that this run starts itself."""
    nproc_per_node: int | None = None
    """``ddp``: processes of a node."""
    nnodes: int | None = None
    """``ddp``: nodes."""
    node_rank: int | None = None
    """``ddp``: this node's number."""
    master_addr: str | None = None
    """``ddp``: address of node 0."""
    master_port: int | None = None
    """``ddp``: port on node 0."""
    nodes: int | None = None
    """``slurm``: nodes."""
    gpus_per_node: int | None = None
    """``slurm``: GPUs of a node."""
    ntasks_per_node: int | None = None
    """``slurm``: tasks of a node."""
    timeout_min: int | None = None
    """``slurm``: minutes until the job is ended."""


@section
class WarmupConfig:
    """``warmup``: supervised training of the actor before the first PPO step."""

    steps: int = 0
    """Optimizer steps; 0: no warm-up."""
    batch_size: int = 64
    """Sequences of one step."""
    lr: float = 1e-3
    """Learning rate."""
    data: str | None = None
    """JSONL of prompt and response, or a task's name; None: the training task's own examples."""


@section
class Config:
    """The whole config of a run."""

    exp_name: str = "hybridflow"
    """Name of the run; its folder is ``<log_dir>/<exp_name>``."""
    seed: int = 42
    """Seed of everything that is random; each use derives its own."""
    log_dir: str = "runs"
    """Folder of all runs."""
    register: tuple[str, ...] = ()
    """User code to import in the driver and in every process: ``file.py`` or a module's name."""
    fuse: bool = True
    """Let Megatron roles with the same devices and layout share processes."""
    tensorboard: bool = True
    """Write TensorBoard events below the run folder."""
    model: ModelConfig = field(default_factory=ModelConfig)
    mcore_config: McoreConfig = field(default_factory=McoreConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    device_map: DeviceMapConfig = field(default_factory=DeviceMapConfig)
    data: DataConfig = field(default_factory=DataConfig)
    resharding: ReshardingConfig = field(default_factory=ReshardingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
