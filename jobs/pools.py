"""From a config to pools: which class each role is, and which devices and layout it gets."""

from __future__ import annotations

from collections.abc import Mapping

from hybridflow.config.schema import Config
from hybridflow.errors import ConfigError
from placement.device import CUDA, DeviceKind, parse_devices
from placement.layout import Layout
from placement.plan import PlacementPlan, RoleDemand, make_plan

# For each role: its class, and what it runs in (roles of one engine, devices and layout share processes).
WORKERS = {
    "actor": "workers.actor:ActorWorker",
    "critic": "workers.critic:CriticWorker",
    "reference": "workers.reference:ReferenceWorker",
    "rollout": "workers.rollout:RolloutWorker",
    "reward": "workers.reward:RewardWorker",
    "data": "workers.data:DataWorker",
}


def device_count(config: Config, kind: DeviceKind, cluster: Mapping[str, float]) -> int:
    """Devices of the run: what the launcher says, else all GPUs of the cluster, else one logical device."""
    if config.launcher.devices is not None:
        return config.launcher.devices
    return int(cluster.get("GPU", 0)) if kind is CUDA else 1


def plan_of(config: Config, kind: DeviceKind, devices: int) -> PlacementPlan:
    """The placement of PPO's roles.

    Raises:
        ConfigError: the device map names devices that the run has not got, or a layout does not fill its devices.
    """
    for role in ("actor", "critic", "reference", "rollout"):
        outside = [device for device in _named(config, role) if device >= devices]
        if outside:
            raise ConfigError(
                f"device {outside[0]} does not exist: the run has {devices} (0 to {devices - 1})",
                hint=f"name other devices, or set launcher.devices={outside[0] + 1} or more",
                where=f"device_map.{role}",
            )
    actor = _named(config, "actor") or tuple(range(devices))
    demands = [_generation(config, _named(config, "rollout") or actor), _training(config, "actor", actor)]
    for role in ("critic", "reference"):
        demands.append(_training(config, role, _named(config, role) or actor))
    demands += [RoleDemand("reward", "cpu"), RoleDemand("data", "cpu")]
    return make_plan(demands, kind, fuse=config.fuse)


def _named(config: Config, role: str) -> tuple[int, ...]:
    value = getattr(config.device_map, role)
    return () if value is None else parse_devices(value, f"device_map.{role}")


def _training(config: Config, role: str, devices: tuple[int, ...]) -> RoleDemand:
    mcore = config.mcore_config
    layout = Layout.for_world(
        len(devices),
        tp=mcore.tensor_model_parallel_size,
        pp=mcore.pipeline_model_parallel_size,
        where=f"device_map.{role}",
    )
    return RoleDemand(role, "megatron", layout, devices)


def _generation(config: Config, devices: tuple[int, ...]) -> RoleDemand:
    layout = Layout.for_world(
        len(devices), tp=config.rollout.tensor_model_parallel_size, where="rollout.tensor_model_parallel_size"
    )
    if config.rollout.replicas not in (None, layout.dp):
        raise ConfigError(
            f"{len(devices)} devices at TP {layout.tp} are {layout.dp} replicas, not {config.rollout.replicas}",
            hint=f"leave rollout.replicas out, or give the rollout {config.rollout.replicas * layout.tp} devices",
            where="rollout.replicas",
        )
    return RoleDemand("rollout", "vllm", layout, devices)
