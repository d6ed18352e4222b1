"""Carries a placement plan out: checks it against the cluster, reserves Ray placement groups, waits with a bound."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from placement.errors import ResourceError
from placement.plan import PlacementPlan

_SAY_EVERY_SECONDS = 10.0


def reserve(
    plan: PlacementPlan, label: str, *, wait_seconds: float = 60.0, say: Callable[[str], None] | None = None
) -> list[PlacementGroup]:
    """One placement group per device set of the plan, all reserved; ``label`` sets this run's names apart.

    Raises:
        ResourceError: the cluster has not got what the plan asks within ``wait_seconds``; nothing stays reserved.
    """
    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    deadline = time.monotonic() + wait_seconds
    _await_total(plan, deadline, say)
    groups: list[PlacementGroup] = []
    try:
        for index in range(len(plan.sets)):
            bundles = [dict(bundle.resources) for bundle in plan.bundles(index)]
            groups.append(placement_group(bundles, strategy="PACK", name=f"{label}: {_name(plan, index)}"))
        for index, group in enumerate(groups):
            _await_group(plan, index, group, deadline, say)
    except BaseException:
        release(groups)
        raise
    return groups


def bundle_order(group: PlacementGroup) -> list[int]:
    """Bundles of a reserved group, those of one node together: so neighbouring ranks (TP) share a node if they can."""
    node_of: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    first: dict[str, int] = {}
    for index in sorted(node_of):
        first.setdefault(node_of[index], index)
    return sorted(node_of, key=lambda index: (first[node_of[index]], index))


def release(groups: list[PlacementGroup]) -> None:
    for group in groups:
        remove_placement_group(group)


def _name(plan: PlacementPlan, index: int) -> str:
    return " | ".join(team.name for team in plan.teams_of[index])


def _await_total(plan: PlacementPlan, deadline: float, say: Callable[[str], None]) -> None:
    """Wait until the cluster's nodes together have the resources at all (an autoscaler may still add some)."""
    said = 0.0
    while missing := _missing(plan):
        now = time.monotonic()
        if now >= deadline:
            raise ResourceError(
                f"the run asks for {_amounts(plan.demand())}, the cluster lacks {_amounts(missing)}\n{_table(plan)}",
                hint=_cure(plan, missing),
                where="cluster",
            )
        if now - said >= _SAY_EVERY_SECONDS:
            say(f"waiting for {_amounts(missing)} more (up to {deadline - now:.0f} s)")
            said = now
        time.sleep(min(0.5, max(0.0, deadline - now)))


def _await_group(
    plan: PlacementPlan, index: int, group: PlacementGroup, deadline: float, say: Callable[[str], None]
) -> None:
    while not group.wait(timeout_seconds=min(_SAY_EVERY_SECONDS, max(0.1, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            raise ResourceError(
                f"no room for {_name(plan, index)} (devices {list(plan.sets[index])}): other work holds it\n"
                f"{_table(plan)}",
                hint="stop the other job (ray list actors), or wait longer with launcher.wait_seconds",
                where="cluster",
            )
        say(f"waiting for room for {_name(plan, index)}\n{_table(plan)}")


def _missing(plan: PlacementPlan) -> dict[str, float]:
    have = ray.cluster_resources()
    return {name: asked - have.get(name, 0.0) for name, asked in plan.demand().items() if asked > have.get(name, 0.0)}


def _cure(plan: PlacementPlan, missing: dict[str, float]) -> str:
    resource = plan.kind.resource
    if resource in missing and resource != "GPU":
        return (
            "ask for fewer devices (device_map, launcher.devices), or offer more: "
            f"ray start --resources='{{\"{resource}\": 8}}'"
        )
    return "ask for fewer devices (device_map, layouts), or add nodes to the cluster"


def _table(plan: PlacementPlan) -> str:
    """What is asked, set by set, and what each node has and has free."""
    lines = ["asked:"]
    for index in range(len(plan.sets)):
        bundles = plan.bundles(index)
        lines.append(f"  {_name(plan, index)}: {len(bundles)} x {_amounts(dict(bundles[0].resources))}")
    lines.append("nodes:")
    free = ray._private.state.available_resources_per_node()
    for node in ray.nodes():
        if node["Alive"]:
            names = ("CPU", plan.kind.resource)
            has = {name: node["Resources"].get(name, 0.0) for name in names}
            left = {name: free.get(node["NodeID"], {}).get(name, 0.0) for name in names}
            lines.append(f"  {node['NodeManagerAddress']}: has {_amounts(has)}; free {_amounts(left)}")
    return "\n".join(lines)


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items())) or "nothing"
