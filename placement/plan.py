"""Which role runs where: roles and their devices become teams of processes on device sets. Pure: no Ray here.

Words: a *device set* is a group of devices that some roles share (colocated) and no other role touches; sets are equal
or disjoint. A *team* is one process per device of its set, hosting one or more roles of equal engine and layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from placement.device import DeviceKind
from placement.errors import ConfigError
from placement.layout import Layout


@dataclass(frozen=True)
class RoleDemand:
    """One role's wish. ``engine`` names what it runs in ("megatron", "vllm", "cpu"): roles of the same engine, devices
    and layout share processes. No ``devices``: it needs CPU alone."""

    role: str
    engine: str
    layout: Layout = field(default_factory=Layout)
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class Team:
    """Processes that host ``roles``: rank r runs on ``devices[r]`` (CPU teams have one process and no device)."""

    roles: tuple[str, ...]
    engine: str
    layout: Layout
    devices: tuple[int, ...]

    @property
    def name(self) -> str:
        return "+".join(self.roles)

    @property
    def size(self) -> int:
        return len(self.devices) or 1

    def process_name(self, rank: int) -> str:
        """What the Ray dashboard shows for one process."""
        return f"{self.name} {self.layout.coord(rank)}" if self.devices else self.name


@dataclass(frozen=True)
class Bundle:
    """What one device's slot asks of a node: Ray resources by name."""

    resources: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class PlacementPlan:
    """``sets[i]``: devices of set i (empty: CPU only); ``teams_of[i]``: the teams that share it."""

    kind: DeviceKind
    sets: tuple[tuple[int, ...], ...]
    teams_of: tuple[tuple[Team, ...], ...]

    @property
    def teams(self) -> tuple[Team, ...]:
        return tuple(team for teams in self.teams_of for team in teams)

    @property
    def processes(self) -> int:
        return sum(team.size for team in self.teams)

    def share(self, index: int) -> float:
        """The fraction of a device that one tenant of set ``index`` reserves."""
        return int(1e4 / len(self.teams_of[index])) / 1e4

    def bundles(self, index: int) -> list[Bundle]:
        cpus = round(self.kind.cpus * len(self.teams_of[index]), 4)
        if not self.sets[index]:
            return [Bundle((("CPU", cpus),))]
        return [Bundle((("CPU", cpus), (self.kind.resource, 1.0)))] * len(self.sets[index])

    def demand(self) -> dict[str, float]:
        """Ray resources of the whole run."""
        total: dict[str, float] = {}
        for index in range(len(self.sets)):
            for bundle in self.bundles(index):
                for name, amount in bundle.resources:
                    total[name] = round(total.get(name, 0.0) + amount, 4)
        return total

    def rows(self) -> list[dict[str, str]]:
        """One row per role for the run card and plan.json: role, process, devices, layout, engine."""
        rows = []
        for team in self.teams:
            devices = ",".join(f"{self.kind.name}:{device}" for device in team.devices) or "cpu"
            layout = str(team.layout) if team.devices else ""
            for role in team.roles:
                row = {"role": role, "process": team.name, "devices": devices, "layout": layout, "engine": team.engine}
                rows.append(row)
        return rows

    def to_json(self) -> str:
        content = {"device": self.kind.name, "demand": self.demand(), "roles": self.rows()}
        return json.dumps(content | {"processes": self.processes}, indent=2)


def make_plan(demands: Iterable[RoleDemand], kind: DeviceKind, *, fuse: bool = True) -> PlacementPlan:
    """Group roles into teams and teams into device sets.

    Args:
        fuse: roles of the same engine, devices and layout share processes; otherwise each role has its own.

    Raises:
        ConfigError: device sets that overlap without being equal, or a layout that does not fill its devices.
    """
    demands = list(demands)
    for demand in demands:
        _check_fits(demand)
    _check_sets(demands)
    teams: list[Team] = []
    for demand in demands:
        key = (demand.engine, demand.layout, demand.devices)
        position = next((i for i, t in enumerate(teams) if fuse and (t.engine, t.layout, t.devices) == key), None)
        if position is None:
            teams.append(Team((demand.role,), demand.engine, demand.layout, demand.devices))
        else:
            known = teams[position]
            teams[position] = Team((*known.roles, demand.role), known.engine, known.layout, known.devices)
    sets = list(dict.fromkeys(team.devices for team in teams))
    return PlacementPlan(kind, tuple(sets), tuple(tuple(t for t in teams if t.devices == s) for s in sets))


def _check_fits(demand: RoleDemand) -> None:
    if demand.devices and demand.layout.world_size != len(demand.devices):
        raise ConfigError(
            f"{demand.role} has {len(demand.devices)} devices, its layout {demand.layout} needs "
            f"{demand.layout.world_size}",
            hint="change the layout, or the number of devices in the device map",
            where=f"device_map.{demand.role}",
        )


def _check_sets(demands: list[RoleDemand]) -> None:
    for index, first in enumerate(demands):
        for second in demands[index + 1 :]:
            common = set(first.devices) & set(second.devices)
            if common and first.devices != second.devices:
                raise ConfigError(
                    f"{first.role} on {list(first.devices)} and {second.role} on {list(second.devices)} share "
                    f"{sorted(common)} but not all",
                    hint="give the two roles the same devices (colocated), or disjoint ones",
                    where="device_map",
                )
