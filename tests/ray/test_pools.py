"""Processes, pools, transfer protocols, the lease and errors, on real Ray actors."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from hybridflow.batch.plan import Planner
from hybridflow.errors import ConfigError, ResourceError, WorkerError
from hybridflow.pool import Call
from hybridflow.start import Pools
from placement.device import CPU
from placement.layout import Layout
from placement.plan import RoleDemand, make_plan

pytestmark = pytest.mark.ray
BROKEN = {
    "echo": "tests.ray.roles:Unmakeable",
    "restless": "tests.ray.roles:Restless",
    "second": "tests.ray.roles:Second",
}
ROLES = {"source": "tests.ray.roles:Source", "echo": "tests.ray.roles:Echo", "second": "tests.ray.roles:Second"}


@pytest.fixture(scope="module")
def pools(ray_session, tmp_path_factory):
    demands = [
        RoleDemand("source", "cpu"),
        RoleDemand("echo", "megatron", Layout(tp=2, dp=2), (0, 1, 2, 3)),
        RoleDemand("second", "vllm", Layout(pp=2), (4, 5)),
    ]
    made = Pools(make_plan(demands, CPU), ROLES, run_dir=str(tmp_path_factory.mktemp("run")))
    yield made
    made.close()


def test_pools_have_exactly_the_methods_of_their_role(pools):
    assert pools["echo"].respond.__doc__ == "Each response is the prompt times ``scale``."
    assert str(pools["echo"].respond.__signature__).startswith("(batch: 'Batch', scale: 'int' = 2)")
    with pytest.raises(AttributeError, match=r"the echo pool has no 'prompts'; it has: .*respond"):
        pools["echo"].prompts
    with pytest.raises(TypeError, match="unexpected keyword"):
        pools["echo"].respond(None, scal=3)


def test_processes_are_named_for_the_dashboard(pools):
    import ray

    assert ray.get_actor(f"{pools.label}/echo dp=1 tp=0 pp=0") is not None
    names = [ray.get(p.address.remote())["pid"] for p in pools["echo"].processes]
    assert len(set(names)) == 4


def test_each_protocol_scatters_and_gathers_as_the_paper_says(pools):
    echo, second = pools["echo"], pools["second"]
    batch = pools["source"].prompts(8)
    assert echo.where().result() == [
        ("echo", 0, 0, 0, 0),
        ("echo", 1, 0, 1, 0),
        ("echo", 2, 1, 0, 0),
        ("echo", 3, 1, 1, 0),
    ]
    assert second.where().result() == [("second", 0, 0, 0, 0), ("second", 1, 0, 0, 1)]
    assert second.where_last().result() == [1]
    assert second.where_pp().result() == [0, 1]
    assert echo.where_pp().result() == [0]
    assert echo.where_dp(batch).result() == [2, 2, 2, 2]
    assert echo.where_micro_dp(batch).result() == [(0, [0, 1, 2, 3]), (2, [4, 5, 6, 7])]
    assert echo.own([10, 11, 12, 13]).result() == [(0, 10), (1, 11), (2, 12), (3, 13)]
    with pytest.raises(TypeError, match="one element for each of 4 ranks"):
        echo.own([1, 2])
    assert second.received(echo.own([1, 2, 3, 4])).result() == [[(0, 1), (1, 2), (2, 3), (3, 4)]] * 2


def test_columns_walk_by_reference_and_join_by_id(pools):
    prompts = pools["source"].prompts(7)
    batch = prompts.join(pools["echo"].respond(prompts, scale=3))
    planned = batch.with_plan(Planner(mini_batch_size=3, max_tokens=7, max_sequences=2, seed=1))
    scored = pools["echo"].score(planned)
    planned = planned.join(scored)
    seen = pools["echo"].look(planned).result()
    assert sorted(seen[0]["ids"] + seen[1]["ids"]) == list(range(7))
    expected = {i: [(v + i) * 3 for v in range(1 + i % 3)] for i in range(7)}
    for share in seen:
        assert share["tokens"] == [t for i in share["ids"] for t in expected[i]]
        assert share["values"] == [t * 0.5 for t in share["tokens"]]
        rows = [range(a, b) for a, b in share["plan"].micro_batches]
        assert [r for micro in rows for r in micro] == list(range(len(share["ids"])))
        assert sum(mini.sequences for mini in share["plan"].mini_batches) == 7
    assert scored.call.metrics()["rows"].value == 3.5
    rest = planned.select(np.array([5, 2]))
    assert rest.response_lengths.tolist() == [3, 3] and rest.sample_ids.tolist() == [5, 2]
    one = pools["second"].look(rest).result()
    assert one[0]["ids"] == [5, 2] and one[0]["tokens"] == expected[5] + expected[2]


def test_an_unknown_or_missing_column_is_named_at_the_call(pools):
    with pytest.raises(KeyError, match="no column 'response_tokens'"):
        pools["echo"].score(pools["source"].prompts(4))


def test_more_ranks_than_samples_leaves_ranks_with_nothing(pools):
    batch = pools["source"].prompts(1)
    assert pools["echo"].where_dp(batch).result() == [1, 0, 0, 0]
    assert len(pools["echo"].respond(batch)) == 1


def test_calls_of_pools_on_disjoint_devices_overlap(pools):
    first, second = pools["echo"].nap(1.0), pools["second"].nap(1.0)
    (a0, a1), (b0, b1) = first.span(), second.span()
    assert max(a0, b0) < min(a1, b1), "the two spans do not overlap"


def test_one_failed_rank_is_one_error_with_its_place_and_cause(pools):
    with pytest.raises(WorkerError) as caught:
        pools["echo"].fail(2).result()
    text = str(caught.value)
    assert "echo rank 2 (dp=1 tp=0 pp=0) on " in text and "ValueError: broken on purpose" in text
    assert caught.value.exit_code == 4


def test_the_driver_holds_no_token_column(pools):
    """What comes back to the driver is ids, lengths and times: far less than the tokens, however long they are."""
    prompts = pools["source"].prompts(8, length=20_000)
    response = pools["echo"].respond(prompts)
    batch = prompts.join(response)
    assert not hasattr(batch, "fetch") and not hasattr(batch, "ragged")
    assert batch.response_lengths.tolist() == [20_000] * 8
    for part in (prompts, response):
        assert len(pickle.dumps(part.call._all)) < 4 * 8 * 20_000 / 50
    for source in batch.sources:
        assert all(type(ref).__name__ == "ObjectRef" for ref in source.refs)


def test_rows_in_another_order_are_refused_at_the_call(pools):
    with pytest.raises(WorkerError, match="rows of the result are not those of the batch, in their order"):
        pools["echo"].score_in_another_order(pools["source"].prompts(8)).call.result()


def test_a_protocol_that_drops_a_share_is_refused(pools):
    with pytest.raises(ValueError, match="TEST_NOBODY keeps nobody's result for 4 of 8 samples"):
        pools["echo"].score_for_nobody(pools["source"].prompts(8))


def test_what_went_wrong_while_a_process_was_made_ready_is_what_its_calls_say(ray_session, tmp_path):
    user_code = tmp_path / "mine.py"
    user_code.write_text("raise OSError('only on this node')")
    demands = [RoleDemand("echo", "megatron", Layout(), (6,)), RoleDemand("second", "vllm", Layout(), (7,))]
    pools = Pools(make_plan(demands, CPU), BROKEN, run_dir=str(tmp_path))
    try:
        with pytest.raises(WorkerError, match="RuntimeError: not today"):
            pools["echo"].where().result()
    finally:
        pools.close()
    pools = Pools(make_plan(demands[1:], CPU), BROKEN, run_dir=str(tmp_path), register=(str(user_code),))
    try:
        with pytest.raises(ConfigError, match="only on this node"):
            pools["second"].where().result()
    finally:
        pools.close()


def test_a_tenant_that_cannot_sleep_is_named_by_who_waits_for_its_devices(ray_session, tmp_path):
    demands = [RoleDemand("restless", "megatron", Layout(), (0,)), RoleDemand("second", "vllm", Layout(), (0,))]
    pools = Pools(make_plan(demands, CPU), BROKEN, run_dir=str(tmp_path))
    try:
        pools["restless"].where().result()
        with pytest.raises(WorkerError, match=r"restless rank 0 .*sleep raised RuntimeError: no rest"):
            pools["second"].where().result()
    finally:
        pools.close()


def test_the_control_group_answers_while_a_call_runs(pools):
    import ray

    call = pools["second"].nap(5.0)
    process, seen = pools["second"].processes[0], ""
    while "in nap" not in seen and not ray.wait(call.summaries, timeout=0.05)[0]:
        seen = ray.get(process.stacks.remote(), timeout=5)
    assert "in nap" in seen
    call.result()


def test_colocated_teams_take_turns(ray_session, tmp_path):
    demands = [
        RoleDemand("echo", "megatron", Layout(), (0,)),
        RoleDemand("second", "vllm", Layout(), (0,)),
    ]
    pools = Pools(make_plan(demands, CPU), ROLES, run_dir=str(tmp_path))
    try:
        first: Call = pools["echo"].nap(0.3)
        second: Call = pools["second"].nap(0.3)
        third: Call = pools["second"].nap(0.1)
        back: Call = pools["echo"].nap(0.1)
        spans = [call.span() for call in (first, second, third, back)]
        assert all(spans[i][1] <= spans[i + 1][0] for i in range(3))
        turns = [line.split()[:2] for line in (tmp_path / "turns.log").read_text().splitlines()]
        assert turns == [["echo", "sleep"], ["second", "wake"], ["second", "sleep"], ["echo", "wake"]]
    finally:
        pools.close()


def test_roles_of_one_engine_and_layout_share_processes(ray_session, tmp_path):
    demands = [RoleDemand("echo", "megatron", Layout(), (0,)), RoleDemand("second", "megatron", Layout(), (0,))]
    plan = make_plan(demands, CPU)
    assert plan.processes == 1 and plan.teams[0].process_name(0) == "echo+second dp=0 tp=0 pp=0"
    assert make_plan(demands, CPU, fuse=False).processes == 2
    pools = Pools(plan, ROLES, run_dir=str(tmp_path))
    try:
        assert pools["echo"].processes is pools["second"].processes
        assert pools["second"].where().result() == [("second", 0, 0, 0, 0)]
    finally:
        pools.close()


def test_a_dead_process_is_named_and_its_peers_do_not_hang_the_driver(ray_session, tmp_path):
    plan = make_plan([RoleDemand("echo", "megatron", Layout(dp=2), (0, 1))], CPU)
    pools = Pools(plan, ROLES, run_dir=str(tmp_path))
    try:
        with pytest.raises(WorkerError, match=r"echo rank 1 \(dp=1 tp=0 pp=0\) on .*process died during die"):
            pools["echo"].die(1).result()
    finally:
        pools.close()


def test_more_devices_than_the_cluster_has(ray_session, tmp_path):
    plan = make_plan([RoleDemand("echo", "megatron", Layout(dp=9), tuple(range(9)))], CPU)
    with pytest.raises(ResourceError) as caught:
        Pools(plan, ROLES, run_dir=str(tmp_path), wait_seconds=1.0, say=lambda text: None)
    text = str(caught.value)
    assert "the cluster lacks 1 hf_device" in text and "has 2 CPU, 8 hf_device" in text and "ray start" in text


def test_devices_that_other_work_holds(pools, tmp_path):
    """Waited for in sight and with a bound; afterwards nothing of the one who waited stays reserved."""
    import ray

    plan = make_plan([RoleDemand("second", "vllm", Layout(dp=8), tuple(range(8)))], CPU)
    with pytest.raises(ResourceError, match="no room for second .*other work holds it") as caught:
        Pools(plan, ROLES, run_dir=str(tmp_path / "waiter"), wait_seconds=2.0, say=lambda text: None)
    assert "asked:" in str(caught.value) and "free " in str(caught.value)
    groups = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    names = [group["name"] for group in groups]
    assert not [name for name in names if name.startswith("waiter")]
    assert [name for name in names if name.startswith(pools.label)]
