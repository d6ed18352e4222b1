"""Small real roles for the tests of processes and pools: they run in real Ray actors and do real work on batches."""

from __future__ import annotations

import os
import time

import numpy as np

from hybridflow.batch.batch import Batch, Ragged
from hybridflow.telemetry.metrics import Mean
from hybridflow.transfer import ALL, PROTOCOLS, TransferProtocol, register_protocol, transfer
from hybridflow.worker import Worker

if "RAY_TEST_LAST_STAGE" not in PROTOCOLS:
    register_protocol(
        TransferProtocol("RAY_TEST_LAST_STAGE", lambda c, l: ALL, lambda c, l: c.pp == l.pp - 1 and c.tp == 0)
    )
    register_protocol(TransferProtocol("TEST_NOBODY", lambda c, l: c.dp, lambda c, l: c.rank == 0))


class Source(Worker):
    needs_process_group = False

    @transfer("ONE_TO_ALL", writes=("group_id", "prompt_tokens"))
    def prompts(self, count: int, length: int = 0) -> Batch:
        rows = [np.arange(length or 1 + i % 3, dtype=np.int32) + i for i in range(count)]
        return Batch.of(np.arange(count), group_id=np.arange(count), prompt_tokens=Ragged.of(rows, "int32"))


class Echo(Worker):
    needs_process_group = False

    @transfer("3D_PROTO", reads=("prompt_tokens",), writes=("response_tokens",))
    def respond(self, batch: Batch, scale: int = 2) -> Batch:
        """Each response is the prompt times ``scale``."""
        prompt = batch.ragged("prompt_tokens")
        return Batch.of(
            batch.sample_ids, response_tokens=Ragged((prompt.values * scale).astype(np.int32), prompt.offsets)
        )

    @transfer("3D_PROTO", reads=("prompt_tokens", "response_tokens"), writes=("values",))
    def score(self, batch: Batch) -> tuple[Batch, dict]:
        response = batch.ragged("response_tokens")
        values = Ragged((response.values * 0.5).astype(np.float32), response.offsets)
        return Batch.of(batch.sample_ids, values=values), {"rows": Mean(float(len(batch)), 1.0)}

    @transfer("3D_PROTO", reads=("prompt_tokens",), writes=("values",))
    def score_in_another_order(self, batch: Batch) -> Batch:
        rows = np.arange(len(batch))[::-1]
        prompt = batch.ragged("prompt_tokens").select(rows)
        return Batch.of(batch.sample_ids[rows], values=Ragged(prompt.values.astype(np.float32), prompt.offsets))

    @transfer("TEST_NOBODY", reads=("prompt_tokens",), writes=("values",))
    def score_for_nobody(self, batch: Batch) -> Batch:
        return self.score_in_another_order(batch)

    @transfer("3D_PROTO", reads=("prompt_tokens", "response_tokens", "values"))
    def look(self, batch: Batch) -> dict:
        return {
            "ids": batch.sample_ids.tolist(),
            "plan": batch.plan,
            "values": batch.ragged("values").values.tolist(),
            "tokens": batch.ragged("response_tokens").values.tolist(),
        }

    @transfer("ONE_TO_ALL")
    def where(self) -> tuple:
        c = self.context.coord
        return self.context.role, c.rank, c.dp, c.tp, c.pp

    @transfer("RAY_TEST_LAST_STAGE")
    def where_last(self) -> int:
        return self.context.rank

    @transfer("3D_PP_ONLY")
    def where_pp(self) -> int:
        return self.context.rank

    @transfer("DP_PROTO", reads=("prompt_tokens",))
    def where_dp(self, batch: Batch) -> int:
        return len(batch)

    @transfer("3D_ALL_MICRO_DP", reads=("prompt_tokens",))
    def where_micro_dp(self, batch: Batch) -> tuple[int, list[int]]:
        return self.context.rank, batch.sample_ids.tolist()

    @transfer("ALL_TO_ALL")
    def own(self, value: int) -> tuple[int, int]:
        return self.context.rank, value

    @transfer("ONE_TO_ALL")
    def received(self, results: list) -> list:
        return results

    @transfer("ONE_TO_ALL")
    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    @transfer("ONE_TO_ALL")
    def fail(self, rank: int) -> None:
        if self.context.rank == rank:
            raise ValueError("broken on purpose")

    @transfer("ONE_TO_ALL")
    def die(self, rank: int) -> None:
        if self.context.rank == rank:
            os._exit(3)
        time.sleep(60)

    def sleep(self):
        self.log("sleep")

    def wake(self):
        self.log("wake")

    def log(self, what: str) -> None:
        with open(os.path.join(self.context.run_dir, "turns.log"), "a") as file:
            file.write(f"{self.context.role} {what} {time.time()}\n")


class Restless(Echo):
    """Cannot sleep."""

    def sleep(self):
        raise RuntimeError("no rest")


class Unmakeable(Echo):
    """Cannot even be made."""

    def __init__(self, context):
        raise RuntimeError("not today")


class Second(Echo):
    """The same methods under another role, to share or not to share a device set with."""
