"""Rules about machines: launcher, device map, and how the models are cut over devices."""

from __future__ import annotations

from hybridflow.config.draft import Draft
from hybridflow.config.model_folder import ModelInfo
from hybridflow.config.ranges import get
from hybridflow.errors import ConfigError
from placement.device import parse_devices

TRAINED = ("actor", "critic", "reference")
ON_DEVICES = (*TRAINED, "rollout")
_OF_LAUNCHER = {
    "ddp": ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port"),
    "slurm": ("nodes", "gpus_per_node", "ntasks_per_node", "timeout_min"),
}


def launcher(draft: Draft) -> None:
    kind = draft.config.launcher.kind
    if kind != "basic":
        draft.refuse(
            "launcher.kind",
            f"the launcher {kind!r} is not built yet",
            "use hydra.launcher=basic: on one machine as it is, on several with RAY_ADDRESS of a running Ray cluster",
        )
    for owner, names in _OF_LAUNCHER.items():
        for name in names:
            if kind == "basic" and getattr(draft.config.launcher, name) is not None:
                message = f"belongs to the launcher {owner!r}, which is not built yet"
                draft.refuse(f"launcher.{name}", message, "remove it")


def device_map(draft: Draft) -> None:
    """Give each role its devices; sets must be equal or disjoint, and exist."""
    objections = len(draft.problems)
    named = {role: devices for role in ON_DEVICES if (devices := _parsed(draft, role))}
    last = max((device for devices in named.values() for device in devices), default=0)
    if draft.config.launcher.devices is not None:
        draft.devices = draft.config.launcher.devices
    elif draft.devices is None:
        return
    elif draft.device_type == "cpu":  # logical devices cost nothing: as many as are named
        draft.devices = max(draft.devices, last + 1)
    draft.decide("launcher.devices", draft.devices)
    for role, devices in named.items():
        if devices[-1] >= draft.devices:
            draft.refuse(
                f"device_map.{role}",
                f"device {devices[-1]} does not exist: the run has {draft.devices} (0 to {draft.devices - 1})",
                f"name other devices, or set launcher.devices={devices[-1] + 1}",
            )
    _say_logical(draft, named)
    actor = named.get("actor", tuple(range(draft.devices)))
    for role in ON_DEVICES:
        draft.decide(f"device_map.{role}", named.get(role, actor))
    if len(draft.problems) == objections:  # else the default stands in for a set that was meant otherwise
        _check_overlap(draft, list(named))
    if _parsed(draft, "reward_model"):
        draft.adjust("device_map.reward_model", None, "a reward function runs on CPU and needs no device")


def layouts(draft: Draft) -> None:
    """Cut each role's devices into model copies; what is left over is data parallelism."""
    tp, pp = _sizes(draft)
    if tp == 1:
        draft.adjust("mcore_config.sequence_parallel", False, "TP is 1, there is nothing to cut along the sequence")
    if draft.devices is None:
        return
    dp: dict[tuple[int, ...], int] = {}
    for role in TRAINED:
        devices = get(draft.config, f"device_map.{role}")
        dp.setdefault(devices, len(devices) // (tp * pp))
        if len(devices) % (tp * pp) and dp[devices] >= 0:
            draft.refuse(
                f"device_map.{role}" if draft.config.device_map.actor != devices else _size_key(tp),
                f"{_count(devices)} of the {role} cannot be cut into model copies of TP {tp} x PP {pp} = {tp * pp}",
                f"launcher.devices and device_map must give a multiple of {tp * pp}, or choose smaller sizes",
            )
            dp[devices] = -1  # said once for all roles on these devices
    _rollout_layout(draft)
    _fsdp(draft, max(dp.values()))


def model_fits(draft: Draft) -> None:
    """TP divides heads, KV heads and the MLP; PP divides the layers; vLLM's TP divides or replicates KV heads."""
    tp, pp = _sizes(draft)
    for key, model in (("model.path", draft.model), ("critic.path", draft.critic_model)):
        if model:
            _check_training(draft, model, tp, pp, "" if key == "model.path" else f" of {key}")
    model, rollout_tp = draft.model, draft.config.rollout.tensor_model_parallel_size
    if model and (model.heads % rollout_tp or (model.kv_heads % rollout_tp and rollout_tp % model.kv_heads)):
        draft.refuse(
            "rollout.tensor_model_parallel_size",
            f"{rollout_tp} does not divide the model's {model.heads} attention heads and {model.kv_heads} KV heads",
            f"possible: {', '.join(str(n) for n in range(1, model.heads + 1) if model.heads % n == 0)}",
        )


def actor_dp(draft: Draft) -> int | None:
    """Data-parallel size of the actor (1 where the layout is wrong anyway); None where devices are not known yet."""
    if draft.devices is None:
        return None
    tp, pp = _sizes(draft)
    return max(1, len(get(draft.config, "device_map.actor")) // (tp * pp))


def _sizes(draft: Draft) -> tuple[int, int]:
    mcore = draft.config.mcore_config
    return mcore.tensor_model_parallel_size, mcore.pipeline_model_parallel_size


def _size_key(tp: int) -> str:
    return f"mcore_config.{'tensor' if tp > 1 else 'pipeline'}_model_parallel_size"


def _count(devices: tuple[int, ...]) -> str:
    return f"{len(devices)} device{'s' * (len(devices) != 1)}"


def _parsed(draft: Draft, role: str) -> tuple[int, ...]:
    key = f"device_map.{role}"
    value = get(draft.config, key)
    try:
        return () if value is None else parse_devices(value, key)
    except ConfigError as error:
        draft.refuse_as(key, error)
        return ()


def _say_logical(draft: Draft, named: dict[str, tuple[int, ...]]) -> None:
    values = {role: get(draft.config, f"device_map.{role}") for role in named}
    if draft.device_type == "cpu" and any("cuda" in str(value) for value in values.values()):
        listed = ", ".join(f"{role} {values[role]}" for role in named)
        draft.note("device_map", f"{listed}: without GPUs, cuda:N is logical device N")


def _check_overlap(draft: Draft, roles: list[str]) -> None:
    map_of = {role: set(get(draft.config, f"device_map.{role}")) for role in ON_DEVICES}
    for index, first in enumerate(ON_DEVICES):
        for second in ON_DEVICES[index + 1 :]:
            common = map_of[first] & map_of[second]
            if common and map_of[first] != map_of[second]:
                key = second if second in roles or first not in roles else first
                draft.refuse(
                    f"device_map.{key}",
                    f"{first} on {sorted(map_of[first])} and {second} on {sorted(map_of[second])} share "
                    f"{sorted(common)} but not all",
                    "give the two roles the same devices (colocated), or disjoint ones",
                )


def _rollout_layout(draft: Draft) -> None:
    rollout = draft.config.rollout
    devices, tp = get(draft.config, "device_map.rollout"), rollout.tensor_model_parallel_size
    if len(devices) % tp:
        draft.refuse(
            "rollout.tensor_model_parallel_size",
            f"{_count(devices)} of the rollout cannot be cut into engines of TP {tp}",
            f"use a multiple of {tp} devices (launcher.devices, device_map.rollout), or a TP that divides "
            f"{len(devices)}",
        )
    elif rollout.replicas not in (None, len(devices) // tp):
        draft.refuse(
            "rollout.replicas",
            f"{_count(devices)} at TP {tp} are {len(devices) // tp} replicas, not {rollout.replicas}",
            f"leave it out, or give the rollout {rollout.replicas * tp} devices",
        )
    else:
        draft.decide("rollout.replicas", len(devices) // tp)


def _fsdp(draft: Draft, dp: int) -> None:
    mcore = draft.config.mcore_config
    if mcore.fsdp_use_orig_params is False:
        draft.adjust("mcore_config.fsdp_use_orig_params", True, "FSDP2 always keeps the original parameters")
    if mcore.fsdp and dp > 1:
        draft.refuse(
            "mcore_config.fsdp",
            f"FSDP over {dp} data-parallel ranks is not built yet",
            "set mcore_config.fsdp=false: weights are replicated over data-parallel ranks",
        )
    elif mcore.fsdp:
        draft.adjust("mcore_config.fsdp", False, "DP is 1, there are no ranks to cut the weights over")


def _check_training(draft: Draft, model: ModelInfo, tp: int, pp: int, whose: str) -> None:
    key = "mcore_config.tensor_model_parallel_size"
    fitting = [
        size
        for size in range(1, model.kv_heads + 1)
        if not (model.heads % size or model.kv_heads % size or model.intermediate % size)
    ]
    for count, what in (
        (model.heads, "attention heads"),
        (model.kv_heads, "KV heads"),
        (model.intermediate, "columns of the MLP"),
    ):
        if count % tp:
            draft.refuse(key, f"TP {tp} does not divide the model's {count} {what}{whose}", f"possible: {fitting}")
            break
    if model.layers % pp:
        draft.refuse(
            "mcore_config.pipeline_model_parallel_size",
            f"PP {pp} does not divide the model's {model.layers} layers{whose}",
            f"possible: {[size for size in range(1, model.layers + 1) if model.layers % size == 0]}",
        )
