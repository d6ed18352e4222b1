"""One run of an algorithm: its folder, Ray, pools, telemetry and checkpoints, and the steps between.

The algorithm (``jobs/ppo.py``) asks a ``Run`` for its steps and calls pools; every call is seen here, so that metrics
and times of a step are collected without the algorithm saying so.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.batch.plan import Planner
from hybridflow.batch.ref import BatchRef
from hybridflow.config.schema import Config
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.folder import RunFolder, comparable
from hybridflow.pool import Call, Pool
from hybridflow.seeds import derive_seed
from hybridflow.session import connect
from hybridflow.start import Pools
from hybridflow.telemetry.cards import RoleRow, RunCard
from hybridflow.telemetry.console import print_failure
from hybridflow.telemetry.metrics import Max, Mean, Metric, Sum, merge
from hybridflow.telemetry.recorder import Recorder
from placement.device import DeviceKind
from placement.plan import PlacementPlan

INTERRUPTED = 130
_EVALUATION = {
    "reward/mean": "eval/reward_mean",
    "reward/failures": "eval/failures",
    "response/length_mean": "eval/response_length_mean",
}


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM came; the step was finished and a checkpoint written."""


@dataclass(frozen=True)
class Placed:
    """A run on its machines: the config resolved for them, the plan, and what the run card says beside the layout."""

    config: Config
    plan: PlacementPlan
    card: Mapping[str, Any] = field(default_factory=dict)
    resolved_yaml: str = ""


class Run:
    """Everything around an algorithm's loop. Use as a context manager; ``run["actor"]`` is a pool.

    Args:
        config: checked; it may still be resolved for the machines by ``place``.
        workers: each role's class, as "module:name".
        place: called once the kind of device of the cluster is known.
        written: the config as the user wrote it, by which a checkpoint is known to be of this run.
        verbose: say more.
    """

    def __init__(
        self,
        config: Config,
        workers: Mapping[str, str],
        place: Callable[[DeviceKind], Placed],
        *,
        written: Config | None = None,
        verbose: bool = False,
    ):
        self.config, self._workers, self._place, self.verbose = config, workers, place, verbose
        self._identity = comparable(written or config)
        self.total_steps = config.training.total_steps or 0
        self._stack = ExitStack()
        self._calls: list[tuple[str, Call]] = []
        self._phase = "start"
        self.saved: Path | None = None
        self._stop_requested = False
        self._signal = ""
        self._in_steps = False

    # -- beginning and end -------------------------------------------------------------------------------------------
    def __enter__(self) -> Run:
        with ExitStack() as stack:
            self.folder = stack.enter_context(RunFolder(self.config, self._identity))
            self.checkpoint = self.folder.checkpoint
            self.first_step = self.checkpoint.step + 1 if self.checkpoint else 1
            self.recorder = Recorder(
                self.folder.path,
                total_steps=self.total_steps,
                resumed_step=self.first_step - 1,
                log_interval=self.config.training.log_interval,
            )
            stack.enter_context(self._signals())
            kind = stack.enter_context(connect(self.config.launcher, namespace=f"hybridflow/{self.folder.path.name}"))
            placed = self._place(kind)
            self.config = placed.config
            (self.path / "plan.json").write_text(placed.plan.to_json() + "\n")
            (self.path / "config.resolved.yaml").write_text(placed.resolved_yaml)
            self._show_card(placed)
            self.pools = Pools(
                placed.plan,
                self._workers,
                run_dir=str(self.folder.path),
                register=self.config.register,
                threads=self.config.launcher.threads,
                wait_seconds=self.config.launcher.wait_seconds,
                on_call=self._saw_call,
                say=self.recorder.note,
            )
            stack.callback(self.pools.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._in_steps = False
        self._stack.close()

    def succeed(self) -> None:
        """The end of a good run: summary, report and the success line."""
        model = self.path / "model"
        load = f"python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{model}')\""
        self.recorder.finish(checkpoint=str(self.saved or ""), next_steps=[load, f"hybridflow report {self.path}"])

    def fail(self, error: BaseException) -> int:
        """The end of a bad run: one boxed cause on stderr; returns the exit code."""
        # Ray raises bare ones of its own while it waits, and SystemExit where it holds SIGTERM.
        if isinstance(error, SystemExit) or (isinstance(error, KeyboardInterrupt) and not str(error)):
            error = KeyboardInterrupt(self._signal or "Ctrl-C")
        if hasattr(self, "recorder"):
            self.recorder.fail(error, checkpoint=str(self.saved or ""))
        else:
            print_failure(error)
        if isinstance(error, HybridFlowError):
            return error.exit_code
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1

    @property
    def path(self) -> Path:
        return self.folder.path

    def __getitem__(self, role: str) -> Pool:
        return self.pools[role]

    # -- steps -------------------------------------------------------------------------------------------------------
    def steps(self) -> Iterator[int]:
        """The steps still to do, counted from 1. Stops with ``Interrupted`` after a signal, at a step's end."""
        self._in_steps = True
        for step in range(self.first_step, self.total_steps + 1):
            self.recorder.begin_step(step)
            yield step
        self._in_steps = False

    def limit_steps(self, steps: int) -> None:
        """Do at most this many steps (the dataset's length times the epochs, once it is known).

        Raises:
            ConfigError: no step is left to do.
        """
        self.total_steps = min(self.total_steps or steps, steps)
        self.recorder.set_total_steps(self.total_steps)
        if self.first_step > self.total_steps:
            raise ConfigError(
                f"nothing is left to do: step {self.first_step - 1} of {self.total_steps} is done",
                hint="raise training.total_steps or training.num_epochs, or choose another exp_name",
                where=str(self.path),
            )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Calls made inside count as this phase. Nothing is waited for: its time is that of the workers' spans."""
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = outer

    def planner(self, step: int) -> Planner:
        """How the step is cut into mini- and micro-batches."""
        training = self.config.training
        return Planner(
            mini_batch_size=training.ppo_mini_batch_size,
            max_tokens=training.ppo_max_token_len_per_gpu,
            max_sequences=training.ppo_micro_batch_size_per_gpu,
            seed=derive_seed(self.config.seed, "mini_batches", step),
        )

    def wait(self) -> dict[str, Metric]:
        """Wait for every call made so far; returns what their ranks reported, merged, and books their times.

        Raises:
            HybridFlowError: the first failure among them.
        """
        calls, self._calls = self._calls, []
        merged: dict[str, Metric] = {}
        spans: dict[str, list[tuple[float, float]]] = {}
        for phase, call in calls:
            self.recorder.timeline.failed_in = phase
            merged = merge([merged, _metrics_of(call)])
            for rank, (start, stop) in enumerate(call.spans()):
                self.recorder.timeline.add_span(call.pool.role, call.method, start, stop, rank=rank)
            spans.setdefault(phase, []).append(call.span())
            memory = Max(float(call.memory_bytes()))
            merged = merge([merged, {f"memory/{phase}_bytes": memory}])
        for phase, parts in spans.items():
            self.recorder.timeline.add_phase(phase, parts)
        self.recorder.timeline.failed_in = ""
        return merged

    def finish_step(self, step: int, batch: BatchRef) -> None:
        """Wait for the step's calls and record what they reported."""
        metrics: dict[str, Metric] = self.wait()
        prompts = batch.prompt_lengths
        metrics |= {
            "batch/samples": Sum(len(batch)),
            "batch/tokens": Sum(int(prompts.sum() + batch.response_lengths.sum())),
            "prompt/length_mean": Mean(float(prompts.sum()), len(batch)),
            "prompt/length_max": Max(float(prompts.max(initial=0))),
            "policy/version": Max(step),
        }
        self.recorder.step(step, metrics)

    def finish_evaluation(self, step: int) -> None:
        """Wait for an evaluation's calls and record them under ``eval/``."""
        metrics = self.wait()
        names = {name: _EVALUATION[name] for name in metrics if name in _EVALUATION}
        self.recorder.eval(step, {names[name]: metrics[name] for name in names})

    def due(self, interval: int, step: int) -> bool:
        """Whether something done every ``interval`` steps (0: never) is due after this step."""
        return bool(interval) and step % interval == 0

    # -- checkpoints -------------------------------------------------------------------------------------------------
    def save(self, step: int, pools: list[Pool], state: Mapping[str, Any]) -> None:
        """Write and commit a checkpoint when one is due: at the interval, at the end, and when a signal came.

        Raises:
            Interrupted: after the checkpoint, if a signal came.
        """
        last = step == self.total_steps
        if self._stop_requested or last or self.due(self.config.checkpoint.save_interval, step):
            with self.phase("checkpoint"):
                aside = self.folder.store.begin(step)
                for pool in pools:
                    pool.save(str(aside / pool.role))
                self.wait()
            state = {"step": step, "config": self._identity, "wandb_id": self.recorder.wandb_id, **state}
            self.saved = self.folder.store.commit(aside, step, state)
        if self._stop_requested and not last:  # after the last one only the export is left; a second signal stops that
            raise Interrupted(f"stopped after step {step}; the checkpoint is {self.saved}")

    def export(self, actor: Pool) -> None:
        """Write the trained policy as a Hugging Face folder, ``<run folder>/model``."""
        with self.phase("export"):
            actor.export(str(self.path / "model"))
            self.wait()

    def restore(self, pools: list[Pool]) -> dict[str, Any]:
        """Load the checkpoint this run goes on from into the pools; returns the driver's state ({} without one)."""
        if self.checkpoint is None:
            return {}
        for pool in pools:
            pool.restore(str(self.checkpoint.folder / pool.role))
        self.wait()
        return self.checkpoint.state

    # -- inside ------------------------------------------------------------------------------------------------------
    def _saw_call(self, call: Call) -> None:
        self._calls.append((self._phase, call))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM lets the step end and saves; a second one, or one before the steps, stops now."""

        def handle(number: int, _frame: Any) -> None:
            self._signal = signal.Signals(number).name
            if self._stop_requested or not self._in_steps:
                raise KeyboardInterrupt(signal.Signals(number).name)
            self._stop_requested = True
            # It may have struck inside a print, which cannot be entered twice; and the terminal may be gone.
            with suppress(RuntimeError, OSError):
                self.recorder.note(f"{self._signal}: finishing this step, then a checkpoint (again: stop now)")

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        caught = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # nohup stays nohup
        previous = {number: signal.signal(number, handle) for number in caught}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _show_card(self, placed: Placed) -> None:
        config = self.config
        card = RunCard(
            name=self.path.name,
            run_dir=str(self.path),
            total_steps=self.total_steps,
            resumed_step=self.first_step - 1,
            layout=[RoleRow(**row) for row in placed.plan.rows()],
            stop="Ctrl-C (once: finish the step and save; twice: at once)",
            **placed.card,
        )
        self.recorder.start(
            card,
            config=self._identity,
            tensorboard=config.tensorboard,
            wandb_project=config.wandb.project or "hybridflow",
            wandb_mode=config.wandb.mode or "disabled",
            wandb_id=self.checkpoint.state.get("wandb_id", "") if self.checkpoint else "",
        )


def _metrics_of(call: Call) -> dict[str, Metric]:
    """The metrics a call's collected ranks report; {} for calls that return something else."""
    values = [value for value in call.result() if isinstance(value, dict)]
    return merge({k: v for k, v in value.items() if hasattr(v, "merge")} for value in values)
