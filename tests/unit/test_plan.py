"""The micro-batch plan: every row once, within the budgets, balanced, and the same for every call."""

import time

import numpy as np
import pytest

from hybridflow.batch.plan import Planner
from hybridflow.errors import ConfigError


def lengths(seed: int, count: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Long-tailed lengths, a few responses empty."""
    rng = np.random.default_rng(seed)
    response = np.minimum(rng.geometric(0.02, count) - 1, 400)
    return rng.integers(1, 60, count), response


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
@pytest.mark.parametrize("mini_batch_size,seed", [(32, 0), (64, None), (200, 1), (1000, 2), (7, 3)])
def test_invariants(dp, mini_batch_size, seed):
    prompts, responses = lengths(0)
    total = prompts + responses
    plan = Planner(mini_batch_size, max_tokens=900, max_sequences=8, seed=seed).plan(prompts, responses, dp)
    assert sorted(np.concatenate(plan.rows).tolist()) == list(range(200)), "every row has one place"
    minis = -(-200 // mini_batch_size)
    for rows, rank in zip(plan.rows, plan.ranks, strict=True):
        assert len(rank.mini_batches) == minis, "each rank takes part in each optimizer step"
        covered = [row for start, stop in rank.micro_batches for row in range(start, stop)]
        assert covered == list(range(len(rows))), "row ranges follow the order in which the rank receives its rows"
        for start, stop in rank.micro_batches:
            assert 0 < stop - start <= 8
            assert total[rows[start:stop]].sum() <= 900
    for step in range(minis):
        mini = [rank.mini_batches[step] for rank in plan.ranks]
        members = [
            row
            for rows, share in zip(plan.rows, mini, strict=True)
            for start, stop in share.micro_batches
            for row in rows[start:stop]
        ]
        assert {share.sequences for share in mini} == {len(members)}, "counts are global"
        assert {share.response_tokens for share in mini} == {int(responses[members].sum())}


def test_mini_batches_do_not_depend_on_dp():
    """The same sequences form an optimizer step whatever the number of ranks: the gradient is the same."""
    prompts, responses = lengths(1)
    planner = Planner(32, max_tokens=900, max_sequences=8, seed=5)

    def members(dp: int) -> list[set[int]]:
        plan = planner.plan(prompts, responses, dp)
        steps: list[set[int]] = [set() for _ in plan.ranks[0].mini_batches]
        for rows, rank in zip(plan.rows, plan.ranks, strict=True):
            for step, mini in zip(steps, rank.mini_batches, strict=True):
                step.update(int(row) for start, stop in mini.micro_batches for row in rows[start:stop])
        return steps

    assert members(1) == members(2) == members(5)


def test_ranks_are_balanced_by_tokens():
    prompts, responses = lengths(2, count=512)
    total = prompts + responses
    plan = Planner(128, max_tokens=2000, max_sequences=64, seed=0).plan(prompts, responses, 4)
    for step in range(4):
        loads = [
            sum(int(total[rows[start:stop]].sum()) for start, stop in rank.mini_batches[step].micro_batches)
            for rows, rank in zip(plan.rows, plan.ranks, strict=True)
        ]
        assert max(loads) - min(loads) <= total.max(), loads
        assert max(loads) < 1.05 * np.mean(loads), loads


def test_the_same_seed_gives_the_same_plan_and_another_another():
    prompts, responses = lengths(3)
    first, second, third = (Planner(32, 900, 8, seed).plan(prompts, responses, 2) for seed in (1, 1, 2))
    assert [rows.tolist() for rows in first.rows] == [rows.tolist() for rows in second.rows]
    assert first.ranks == second.ranks
    assert [rows.tolist() for rows in first.rows] != [rows.tolist() for rows in third.rows]


def test_without_a_seed_the_order_stays():
    prompts, responses = lengths(4)
    assert Planner(32, 900, 8).plan(prompts, responses, 1).rows[0].tolist() == list(range(200))


def test_a_micro_batch_closes_at_whichever_cap_comes_first():
    ones = np.ones(6, np.int64)
    by_count = Planner(6, max_tokens=100, max_sequences=4).plan(ones, ones, 1)
    by_tokens = Planner(6, max_tokens=5, max_sequences=4).plan(ones, ones, 1)
    assert by_count.ranks[0].micro_batches == [(0, 4), (4, 6)]
    assert by_tokens.ranks[0].micro_batches == [(0, 2), (2, 4), (4, 6)]


def test_fewer_sequences_than_ranks():
    """A rank without a sequence still has the mini-batch, so that it joins the optimizer step's collectives."""
    plan = Planner(2, 100, 8).plan(np.ones(3, np.int64), np.ones(3, np.int64), 4)
    assert [len(rows) for rows in plan.rows] == [2, 1, 0, 0]
    assert [len(rank.mini_batches) for rank in plan.ranks] == [2] * 4
    assert plan.ranks[3].micro_batches == []


def test_no_sequences_at_all():
    plan = Planner(2, 100, 8).plan(np.empty(0, np.int64), np.empty(0, np.int64), 2)
    assert [len(rows) for rows in plan.rows] == [0, 0] and plan.ranks[0].mini_batches == ()


def test_a_sequence_over_the_budget_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"120 tokens \(row 1\).*100") as error:
        Planner(2, max_tokens=100, max_sequences=8).plan(np.array([10, 60]), np.array([10, 60]), 1)
    assert "ppo_max_token_len_per_gpu to 120" in error.value.hint


def test_a_step_of_a_thousand_takes_milliseconds():
    prompts, responses = lengths(5, count=1024)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        Planner(256, 4000, 64, seed=0).plan(prompts, responses, 8)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1  # 5 ms on an idle core
