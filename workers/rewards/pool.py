"""A pool of processes that run a reward function, and can be killed.

Reward functions are other people's code on text that a policy made up: they hang in regular expressions, eat memory
and crash. So each sample has a time limit of its own, counted from its own start (not from when it was queued); a
process that is over it is killed and replaced, and only that sample is lost. Nothing is ever scored 0 by failing.

Processes are plain children (``child.py``), not multiprocessing's: those import the parent's main module again. They
die with the thread that started them (Linux tells them, see prctl(2) PR_SET_PDEATHSIG), even while they hang.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait

from hybridflow.errors import HybridFlowError, WorkerError
from workers.rewards.child import DONE, MAX_CHUNK, PAGE_BYTES, SCORES, STARTED
from workers.rewards.functions import NOT_TRIED, Outcome

_LONGEST_WAIT_SECONDS = 0.5  # between looks at whether the processes live
_NAN = float("nan")


class RewardPool:
    """Processes that score samples with one function.

    Args:
        function: its name, see ``workers.rewards.functions.load_function``.
        processes: how many.
        timeout_seconds: for one sample; for the one call of a batched function.
        start_seconds: for a process to start and load the function.

    The processes start at once; the first ``score`` (or ``wait_ready``) waits for them.
    """

    def __init__(self, function: str, *, processes: int = 1, timeout_seconds: float = 10.0, start_seconds: float = 120):
        self.function, self.timeout_seconds, self.start_seconds = function, timeout_seconds, start_seconds
        self._children = [_Child(function) for _ in range(processes)]

    def wait_ready(self) -> None:
        """Wait until every process has loaded the function.

        Raises:
            ConfigError: the function cannot be loaded.
            WorkerError: a process died or took too long while it loaded the function.
        """
        while waiting := [child for child in self._children if not child.ready]:
            self._wait(waiting)

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        answers: Sequence[str],
        *,
        max_failures: int | None = None,
    ) -> list[Outcome]:
        """Score N samples; ``answers`` are JSON (the ``answer`` column). Failures are outcomes, never exceptions.

        With more than ``max_failures`` of them it stops: what is left is ``NOT_TRIED``, no time limit is waited for.

        Raises:
            HybridFlowError: as ``wait_ready``, for processes that had to be replaced too.
        """
        columns = (list(prompts), list(responses), list(answers))
        outcomes = [NOT_TRIED] * len(columns[0])
        todo = deque([(0, len(outcomes))] if outcomes else [])
        while todo or any(child.chunk for child in self._children):
            for child in self._children:
                if todo and child.ready and not child.chunk and child.read():
                    child.begin(self._next_chunk(todo, child.batched), columns)
            self._wait([child for child in self._children if child.chunk or not child.ready])
            for index, child in enumerate(self._children):
                cause = self._loss(child)
                if child.chunk and (cause or child.finished):
                    stop = child.chunk[1]
                    left = child.collect(outcomes, cause)
                    if left < stop:
                        todo.appendleft((left, stop))
                if cause:
                    self._children[index] = _Child(self.function)
            if max_failures is not None and sum(outcome.failed for outcome in outcomes) > max_failures:
                self._give_up(outcomes)
                break
        return outcomes

    def close(self) -> None:
        """Kill the processes, and whatever they started."""
        for child in self._children:
            child.kill()
        self._children = []

    def _give_up(self, outcomes: list[Outcome]) -> None:
        """Replace the processes that are at work, and keep what they have scored."""
        for index, child in enumerate(self._children):
            if child.chunk:
                child.kill()
                child.collect(outcomes, "killed")
                self._children[index] = _Child(self.function)

    def _next_chunk(self, todo: deque[tuple[int, int]], batched: bool) -> tuple[int, int]:
        """Half of an even share: large while much is left, small at the end, so that processes end together."""
        start, stop = todo.popleft()
        share = stop - start
        if len(self._children) > 1 and not batched:
            share = max(1, (sum(b - a for a, b in todo) + share) // (2 * len(self._children)))
        cut = min(stop, start + min(share, MAX_CHUNK))
        if cut < stop:
            todo.appendleft((cut, stop))
        return start, cut

    def _wait(self, children: list[_Child]) -> None:
        """Wait for news from any of these, at most until the first time limit."""
        now = time.monotonic()
        limits = [child.running_since + self.timeout_seconds - now for child in children if child.running_since]
        wait([child.connection for child in children], max(0.0, min([*limits, _LONGEST_WAIT_SECONDS])))
        for child in children:
            child.read()
            if child.refused:
                self.close()
                raise child.refused
            if not child.ready and (child.died or time.monotonic() - child.made > self.start_seconds):
                how = f"died ({child.ending})" if child.died else f"was not done in {self.start_seconds:g} s"
                self.close()
                raise WorkerError(
                    f"the process that loads reward function {self.function} {how}",
                    hint="import the file by itself (python FILE) and see what it does at import",
                )

    def _loss(self, child: _Child) -> str:
        """Why this process is lost ("" if it is not); it is dead afterwards."""
        if child.died:
            child.kill()
            return f"died: {child.ending}"
        began = child.running_since
        if not began or time.monotonic() - began <= self.timeout_seconds:
            return ""
        child.kill()
        # It may have gone on to the next sample just before the kill: then nobody is to blame.
        overran = child.running_since == began
        return f"timeout: more than {self.timeout_seconds:g} s" if overran else "killed"


class _Child:
    """One process, as the pool sees it. ``chunk``: the range of samples it has been given; None while it has none."""

    def __init__(self, function: str):
        ours, theirs = socket.socketpair()
        page_file = os.memfd_create("hybridflow-reward")
        os.ftruncate(page_file, PAGE_BYTES)
        self.page = memoryview(mmap.mmap(page_file, PAGE_BYTES)).cast("d")
        self.connection = Connection(ours.detach())
        self.made = time.monotonic()
        self.ready = self.batched = self.finished = self.died = False
        self.chunk: tuple[int, int] | None = None
        self.refused: HybridFlowError | None = None
        self.failures: dict[int, str] = {}
        numbers = [str(number) for number in (theirs.fileno(), page_file, os.getpid())]
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "workers.rewards.child", function, *numbers],
            env={
                "OMP_NUM_THREADS": "1",
                **os.environ,
                "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
            },
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), page_file),
            start_new_session=True,  # a Ctrl-C is the pool's business; and the whole session can be killed
        )
        theirs.close()
        os.close(page_file)

    @property
    def running_since(self) -> float:
        """When the running sample began (``time.monotonic``); 0 if none runs."""
        return self.page[STARTED] if self.chunk and not self.finished else 0.0

    @property
    def ending(self) -> str:
        code = self.process.poll()
        if code is None:
            return "it closed its connection"
        return f"exit code {code}" if code >= 0 else f"{signal.Signals(-code).name}"

    def begin(self, chunk: tuple[int, int], columns: tuple[list[str], list[str], list[str]]) -> None:
        self.chunk, self.finished, self.failures = chunk, False, {}
        self.page[STARTED] = self.page[DONE] = 0.0
        try:
            self.connection.send(tuple(column[slice(*chunk)] for column in columns))
        except OSError:
            self.died = True

    def read(self) -> bool:
        """Take in what the process said; whether it lives."""
        ended = self.process.poll() is not None  # before reading: what it said last is still read
        try:
            while self.connection.poll():
                kind, *content = self.connection.recv()
                if kind == "ready":
                    self.ready, self.batched = True, content[0]
                elif kind == "failure":
                    self.failures[content[0]] = content[1]
                elif kind == "done":
                    self.finished = True
                else:
                    self.refused = content[0]
        except (EOFError, OSError):
            ended = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)  # files close a moment before the exit code is there
        self.died = self.died or ended
        return not self.died

    def collect(self, outcomes: list[Outcome], cause: str) -> int:
        """Write the outcomes of the chunk, give the chunk up, and return the first sample that is left of it.

        ``cause`` says why the process was lost: the sample that it was running, or all of a batched call, failed so.
        """
        assert self.chunk
        (start, stop), done = self.chunk, int(self.page[DONE])
        for index in range(done):
            outcomes[start + index] = Outcome(self.page[SCORES + index], self.failures.get(index, ""))
        self.chunk, left = None, start + done
        if cause and cause != "killed" and left < stop:
            blamed = stop if self.batched else left + 1
            outcomes[left:blamed] = [Outcome(_NAN, cause)] * (blamed - left)
            left = blamed
        return left

    def kill(self) -> None:
        """Kill the process and its own children, wait for its end, and read what it had said."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.read()
        self.connection.close()
