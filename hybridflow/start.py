"""From a placement plan to running pools: reserves the groups, starts the processes, forms their process groups."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridflow.lease import Lease
from hybridflow.loading import load
from hybridflow.pool import Call, Pool
from hybridflow.process import RemoteProcess
from hybridflow.session import worker_env
from hybridflow.worker import Worker
from placement.groups import bundle_order, release, reserve
from placement.plan import PlacementPlan, Team

_CLOSE_SECONDS = 20.0


class Pools:
    """All pools of a run, by role name, and what they stand on.

    Args:
        plan: where each role runs.
        workers: for each role, its class as "module:name".
        run_dir: the run's folder; register: the user's modules, imported in every process.
        threads: CPU threads of each process.
        wait_seconds: how long to wait for the cluster to have room.
        on_call: told of every pool call (telemetry); say: shows a line while waiting.
    """

    def __init__(
        self,
        plan: PlacementPlan,
        workers: Mapping[str, str],
        *,
        run_dir: str,
        register: tuple[str, ...] = (),
        threads: int = 1,
        wait_seconds: float = 60.0,
        on_call: Callable[[Call], None] | None = None,
        say: Callable[[str], None] | None = None,
    ):
        self.plan = plan
        self._env = worker_env(plan.kind, threads)
        # Ray wants names unique on a cluster, and two runs may share one.
        self.label = f"{Path(run_dir).name}-{uuid.uuid4().hex[:6]}"
        self._groups = reserve(plan, self.label, wait_seconds=wait_seconds, say=say)
        self._orders = [bundle_order(group) for group in self._groups]
        self._processes: list[Any] = []
        self._pools: dict[str, Pool] = {}
        try:
            teams = self._start_processes(run_dir)
            leases = {devices: Lease() for devices in plan.sets if devices}
            for team, processes in teams:
                self._make_pools(team, processes, workers, register, leases.get(team.devices), on_call)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, role: str) -> Pool:
        return self._pools[role]

    def __contains__(self, role: str) -> bool:
        return role in self._pools

    @property
    def processes(self) -> list[Any]:
        return self._processes

    def close(self) -> None:
        """Close every role, end every process, give the placement groups back. Safe to call twice."""
        processes, self._processes = self._processes, []
        groups, self._groups = self._groups, []
        try:
            if closing := [process.close.remote() for process in processes]:
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS)
        finally:  # also when a second Ctrl-C ends the wait
            for process in processes:
                ray.kill(process)
            release(groups)

    def _start_processes(self, run_dir: str) -> list[tuple[Team, list[Any]]]:
        """Start all processes of all teams side by side; nothing is waited for."""
        teams = []
        for index, members in enumerate(self.plan.teams_of):
            for team in members:
                processes = [self._start_process(index, team, rank, run_dir) for rank in range(team.size)]
                self._processes.extend(processes)
                teams.append((team, processes))
        return teams

    def _make_pools(
        self,
        team: Team,
        processes: list[Any],
        workers: Mapping[str, str],
        register: tuple[str, ...],
        lease: Lease | None,
        on_call: Callable[[Call], None] | None,
    ) -> None:
        classes: dict[str, type[Worker]] = {role: load(workers[role]) for role in team.roles}
        # What made a process ready is an input of every later call of it: what went wrong here is what that call says.
        ready = [[process.load_user_code.remote(register)] for process in processes]
        if any(worker.needs_process_group for worker in classes.values()):
            per_replica = any(worker.group_per_replica for worker in classes.values())
            size = team.layout.model_size if per_replica else team.size
            for held, joined in zip(ready, _form_groups(processes, size, self.plan.kind.backend), strict=True):
                held.append(joined)
        device = self.plan.kind.in_process if team.devices else "cpu"
        for role in team.roles:
            for process, held in zip(processes, ready, strict=True):
                held.append(process.add_role.remote(role, workers[role], device))
            self._pools[role] = Pool(
                role,
                classes[role],
                processes,
                team.layout,
                lease=lease,
                nodes=[process.address.remote() for process in processes],
                ready=ready,
                on_call=on_call,
            )

    def _start_process(self, index: int, team: Team, rank: int, run_dir: str) -> Any:
        kind, group = self.plan.kind, self._groups[index]
        options: dict[str, Any] = {"num_cpus": kind.cpus, "runtime_env": {"env_vars": self._env}}
        if team.devices:
            share = self.plan.share(index)
            options |= {"num_gpus": share} if kind.resource == "GPU" else {"resources": {kind.resource: share}}
        bundle = self._orders[index][rank if team.devices else 0]
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        name = team.process_name(rank)
        options |= {"name": f"{self.label}/{name}", "scheduling_strategy": strategy, "max_restarts": 0}
        return RemoteProcess.options(**options).remote(name, rank, team.layout, run_dir)


def _form_groups(processes: list[Any], size: int, backend: str) -> list[Any]:
    """Let each run of ``size`` consecutive ranks initialise a process group of its own; the calls, in rank order."""
    joined = []
    for first in range(0, len(processes), size):
        members = processes[first : first + size]
        address = members[0].open_store.remote()
        for rank, process in enumerate(members):
            joined.append(process.join_group.remote(address, rank, size, backend))
    return joined
