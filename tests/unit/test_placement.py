"""Device names and placement plans: pure planning, no Ray."""

from __future__ import annotations

import json

import pytest

from placement.device import CPU, CUDA, kind_of, parse_devices
from placement.errors import ConfigError
from placement.layout import Layout
from placement.plan import RoleDemand, make_plan


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        (0, (0,)),
        ("cuda:0", (0,)),
        ("cuda:2-5", (2, 3, 4, 5)),
        ("0,3", (0, 3)),
        ("cpu:1", (1,)),
        (["cuda:1", 0], (0, 1)),
        (("cuda:0-1", "cuda:4"), (0, 1, 4)),
    ],
)
def test_every_spelling_of_devices(text, devices):
    assert parse_devices(text, "device_map.actor") == devices


@pytest.mark.parametrize(
    ("text", "says"),
    [("gpu0", "names no device"), ("cuda:3-1", "counts downwards"), ([0, "cuda:0"], "twice"), (1.5, "names no device")],
)
def test_a_wrong_device_names_the_key_and_the_value(text, says):
    with pytest.raises(ConfigError, match=f"device_map.critic: .*{says}"):
        parse_devices(text, "device_map.critic")


def test_cuda_is_used_as_soon_as_the_cluster_has_a_gpu():
    assert kind_of({"CPU": 8.0, "GPU": 1.0}) is CUDA
    assert kind_of({"CPU": 8.0, "hf_device": 8.0}) is CPU


def test_a_process_names_its_device_as_ray_shows_it():
    torch = pytest.importorskip("torch")
    assert torch.device(CUDA.in_process).index == 0
    assert torch.device(CPU.in_process).type == "cpu"


def test_equal_sets_share_disjoint_sets_do_not_and_nothing_else_is_allowed():
    two = Layout(dp=2)
    colocated = [RoleDemand("actor", "megatron", two, (0, 1)), RoleDemand("rollout", "vllm", two, (0, 1))]
    plan = make_plan(colocated, CPU)
    assert plan.sets == ((0, 1),) and len(plan.teams) == 2 and plan.processes == 4
    assert plan.share(0) == 0.5 and plan.demand() == {"CPU": 0.4, "hf_device": 2.0}
    apart = [RoleDemand("actor", "megatron", two, (0, 1)), RoleDemand("rollout", "vllm", two, (2, 3))]
    assert make_plan(apart, CPU).sets == ((0, 1), (2, 3))
    half = [RoleDemand("actor", "megatron", two, (0, 1)), RoleDemand("rollout", "vllm", two, (1, 2))]
    with pytest.raises(ConfigError, match=r"actor on \[0, 1\] and rollout on \[1, 2\] share \[1\] but not all"):
        make_plan(half, CPU)


def test_roles_of_one_engine_layout_and_set_share_processes_unless_told_not_to():
    demands = [RoleDemand(role, "megatron", Layout(tp=2), (0, 1)) for role in ("actor", "critic", "reference")]
    demands.append(RoleDemand("rollout", "vllm", Layout(tp=2), (0, 1)))
    plan = make_plan(demands, CUDA)
    assert [team.name for team in plan.teams] == ["actor+critic+reference", "rollout"]
    assert plan.teams[0].process_name(1) == "actor+critic+reference dp=0 tp=1 pp=0"
    assert make_plan(demands, CUDA, fuse=False).processes == 8
    other_layout = [*demands[:1], RoleDemand("critic", "megatron", Layout(dp=2), (0, 1))]
    assert make_plan(other_layout, CUDA).processes == 4


def test_a_layout_that_does_not_fill_its_devices():
    with pytest.raises(ConfigError, match="device_map.actor: actor has 3 devices, its layout TP2 DP1 needs 2"):
        make_plan([RoleDemand("actor", "megatron", Layout(tp=2), (0, 1, 2))], CPU)
    with pytest.raises(ConfigError, match="6 devices cannot be cut into model copies of TP 4 x PP 1 x CP 1 = 4"):
        Layout.for_world(6, tp=4)
    assert Layout.for_world(8, tp=2, pp=2) == Layout(tp=2, pp=2, dp=2)


def test_rank_order_is_megatrons():
    coords = Layout(tp=2, dp=2, pp=2).coords()
    assert [(c.tp, c.dp, c.pp) for c in coords] == [
        (0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1),
    ]  # fmt: skip


def test_the_plan_is_written_whole():
    plan = make_plan([RoleDemand("actor", "megatron", Layout(), (0,)), RoleDemand("data", "cpu")], CPU)
    content = json.loads(plan.to_json())
    assert content["demand"] == {"CPU": 0.2, "hf_device": 1.0} and content["processes"] == 2
    assert content["roles"][1] == {"role": "data", "process": "data", "devices": "cpu", "layout": "", "engine": "cpu"}
