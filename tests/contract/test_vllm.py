"""The generation engine on real vLLM, three engine starts in all; and every protocol into its live parameters."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import ray

from tests.contract import vllm_facts as facts

pytestmark = [pytest.mark.engine, pytest.mark.ray]
TIMEOUT_SECONDS = 150


def collect(*calls: tuple) -> list[dict]:
    """Run each (function, *arguments) in a process of its own, at once; their facts."""
    context = multiprocessing.get_context("spawn")
    children = []
    for call in calls:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=facts.run, args=(theirs, *call), daemon=True)
        process.start()
        theirs.close()
        children.append((process, mine))
    results = []
    try:
        for _, pipe in children:
            assert pipe.poll(TIMEOUT_SECONDS), f"{calls} took more than {TIMEOUT_SECONDS} s"
            found, error = pipe.recv()
            assert error is None, error
            results.append(found)
    finally:
        for process, _ in children:
            process.kill()
            process.join()
    return results


@pytest.fixture(scope="module")
def store():
    """A Ray for its object store."""
    context = ray.init(
        address="local", num_cpus=1, include_dashboard=False, logging_level="error", object_store_memory=128 << 20
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture(scope="module")
def single(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("single") / "llama"
    folder.mkdir()
    return collect((facts.single, folder, store))[0]


@pytest.fixture(scope="module")
def pair(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return collect(*((facts.pair, folder, store, rank) for rank in range(2)))


# -- what we touch of vLLM ---------------------------------------------------------------------------------------------
def test_internals_are_as_we_left_them(single):
    assert single["multiprocessing"] is False
    assert single["onednn"] is False
    assert single["amx"] is False
    assert single["dynamo_disabled"] is True
    assert single["executor"] == "GroupExecutor"
    assert single["logprobs_mode"] == "processed_logprobs"
    assert single["prefix_caching"] is True
    assert single["empty_parameters"] == []
    assert single["kv_storages"] == 1


def test_the_engine_joins_the_group_that_exists_and_opens_no_port(single):
    assert single["same_group"]
    assert single["ports"] == []
    assert single["group_after_close"] == 1


def test_shared_memory_of_vllm_has_a_name_of_its_own_and_is_unlinked(single, pair):
    assert single["dist_ident"].startswith("hybridflow-")
    assert pair[0]["dist_ident"] == pair[1]["dist_ident"] != single["dist_ident"]
    assert [rank["left_in_shm"] for rank in pair] == [[], []]


# -- resharding --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("protocol", facts.PROTOCOLS)
@pytest.mark.parametrize("layout", facts.LAYOUTS, ids=lambda layout: "TP{}-PP{}".format(*layout))
@pytest.mark.parametrize("target", ["TP1", "TP2"])
def test_every_layout_and_protocol_gives_the_same_engine_weights(request, protocol, layout, target):
    found = [request.getfixturevalue("single")] if target == "TP1" else request.getfixturevalue("pair")
    cell = "{} TP{} PP{}".format(protocol, *layout)
    assert [rank["matrix"][cell] for rank in found] == [0] * len(found)


def test_nothing_is_left_in_shared_memory(single, pair):
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("hybridflow-") and "weights" in name]


# -- generation --------------------------------------------------------------------------------------------------------
def test_log_probs_equal_hugging_face(single, pair):
    assert single["error_at_temperature"] < 1e-4
    assert single["greedy_error"] < 1e-4
    assert max(rank["error"] for rank in pair) < 1e-4
    assert single["greedy"]


def test_tp_ranks_agree(pair):
    assert pair[0]["responses"] == pair[1]["responses"]


def test_rows_keep_their_order_and_ids(single):
    assert single["ids"] == list(range(100, 132))
    assert single["versions"] == [20] * 32


def test_a_sample_does_not_depend_on_its_company(single):
    assert single["some_again"] == [single["responses"][row] for row in range(31, 10, -2)]


def test_end_tokens_are_kept_and_none_is_made_up(single):
    for response, reason in zip(single["responses"], single["reasons"], strict=True):
        assert 1 <= len(response) <= 12
        assert not {7, 9} & set(response[:-1])
        assert (response[-1] in (7, 9)) == (reason == "stop")
        assert reason == "stop" or len(response) == 12
    assert set(single["reasons"]) == {"stop", "length"}
    assert single["truncated"] == single["reasons"].count("length") / 32


def test_missing_and_stale_weights_are_refused(single):
    assert single["no_weights"].startswith("WorkerError: rollout")
    assert "received no weights" in single["no_weights"]
    assert "NumericsError" in single["stale"]
    assert "holds policy version 20, the step expects 21" in single["stale"]
    assert "holds policy version 22, the step expects 21" in single["old_version"]


def test_prompts_that_cannot_be_answered_are_refused(single):
    assert "ConfigError: a prompt of 96 tokens (row 0) leaves no room" in single["no_room"]
    assert "a prompt holds token id 250, the model has 250 tokens" in single["foreign"]


def test_models_that_the_engine_cannot_run_are_refused_before_it_starts(single):
    narrow, missing = single["no_engine"]
    assert "ConfigError: rollout dp=0 tp=0 pp=0: the model's attention heads have 16 numbers" in narrow
    assert "ConfigError: there is no config.json in" in missing


def test_a_replica_without_samples_returns_none(single):
    assert single["nothing"] == 0


def test_new_weights_forget_the_prefix_cache(single):
    assert single["changed"]
    assert single["error_after_update"] < 1e-4
    assert single["other_seed_other_version"]


def test_sleep_frees_the_kv_cache_and_wake_brings_it_back(single):
    assert single["kv_used"] > 100_000
    assert single["kv_left"] < 8192  # the rest of the first and last page may belong to others
    assert single["freed"] > single["kv_used"] // 2
    assert all("WorkerError: rollout dp=0 tp=0 pp=0: the engine is asleep" in text for text in single["asleep"])
    assert single["same_after_wake"]


def test_adapters_are_swapped(single):
    assert "an adapter came before the base weights" in single["adapter_before_base"]
    assert single["lora_wrong"] == 0
    assert max(single["lora_errors"]) < 1e-4
