"""Executes a plan: every launch is a coroutine that waits for its devices, starts its worker, runs
its trials and makes each safe on disk; what dies is tried again on the same slot, then given up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from raytest import cluster
from raytest.audit import Record, started_facts
from raytest.configure import Target, configure
from raytest.devices import Devices, all_of, shared_cores
from raytest.engines.base import Request
from raytest.errors import ExitCode, RaytestError, StoreError
from raytest.inventory import Inventory
from raytest.live_worker import LiveWorker, cause_of
from raytest.needs import Look, Needs
from raytest.observations import with_text
from raytest.plan import Cell, Launch, Plan, Trial
from raytest.replay_folder import Recorded, reference_of, scored_files, write_scored
from raytest.reservation import Reservation
from raytest.schema import CellState
from raytest.scoring import score_job
from raytest.spec import Spec
from raytest.stopping import StoppedError, stopped_by_signals
from raytest.store import RunFolder
from raytest.worker import Job, TrialJob
from raytest.workload import arrange

if TYPE_CHECKING:
    import pyarrow as pa


class Progress(Protocol):
    """What the runner tells whoever watches."""

    def begin(self, plan: Plan, trials_done: int) -> None:
        """The plan is made; ``trials_done`` of it were on disk already."""

    def launch(self, launch: Launch, state: CellState, note: str = "") -> None:
        """A launch reached ``state``."""

    def trial(self, launch: Launch, trial: Trial) -> None:
        """A trial is safe on disk."""


@dataclass(slots=True)
class Run:
    """One run's fixed inputs."""

    spec: Spec
    plan: Plan
    inventory: Inventory
    target: Target
    folder: RunFolder
    requests: list[Request]
    model_path: str
    tokenizer_path: str
    vocabulary_size: int | None
    progress: Progress
    look: Look | None = None
    decode: Callable[[Sequence[int]], str] | None = None


def execute(run: Run) -> None:
    """Run every unfinished trial. Raises StoppedError on a signal or at the deadline; cells that
    failed for good are events of the run folder, not exceptions."""
    asyncio.run(_Execution(run).main())


@dataclass(slots=True)
class _Execution:
    run: Run
    known_payloads: set[bytes] = field(default_factory=set)
    reservation: Reservation = field(default_factory=Reservation)
    control_wanted: bool = False
    reference: Recorded | None = None
    needs: Needs = field(init=False)

    def __post_init__(self) -> None:
        self.needs = Needs(self.run.folder, self.run.look)

    async def main(self) -> None:
        run = self.run
        await self.needs.again()
        self.known_payloads = run.folder.known_payload_ids()
        finished = run.folder.finished_trials()
        pending = [
            (launch, missing)
            for launch in run.plan.launches()
            if (missing := _missing(launch, run.plan, finished))
        ]
        self.control_wanted = run.folder.control() is None
        run.progress.begin(run.plan, sum(1 for k in _keys(run.plan) if k in finished))
        devices = Devices(run.spec.limits.parallel or shared_cores(run.inventory))
        try:
            with stopped_by_signals():
                await asyncio.to_thread(self._reserve, [launch.cell for launch, _ in pending])
                async with asyncio.timeout(run.spec.limits.deadline_s):
                    jobs = [asyncio.create_task(self._launch(devices, x, m)) for x, m in pending]
                    await all_of(jobs)
        except TimeoutError:
            stopped = StoppedError(
                f"the run's own limit of {run.spec.limits.deadline_s:g} s is over"
            )
            stopped.exit_code = ExitCode.DEADLINE
            raise stopped from None
        finally:
            self.reservation.release()

    def _reserve(self, cells: list[Cell]) -> None:
        run = self.run
        nodes = {n.name: n.node_id for n in run.inventory.nodes}
        devices = [d for c in cells for d in c.slot.devices]
        self.reservation.take(devices, nodes, run.spec.limits.place_s)

    async def _launch(self, devices: Devices, launch: Launch, missing: list[Trial]) -> None:
        """All attempts of one launch, one after the other, on the same slot."""
        run, cell = self.run, launch.cell
        async with devices.hold(cell.slot):
            missing = self.needs.of(launch, missing)
            if not missing:
                run.progress.launch(launch, CellState.DONE, "decided without it")
                return
            before = sum(
                e["event"] == "attempt failed" and _is(e, launch) for e in run.folder.events()
            )
            for attempt in range(before, before + run.spec.limits.retries + 1):
                try:
                    await _Attempt(self, launch, attempt).run(missing)
                except _FailureError as failure:
                    finished = run.folder.finished_trials()
                    missing = _missing(launch, run.plan, finished)
                    final = attempt == before + run.spec.limits.retries
                    self._record_failure(launch, attempt, failure, final)
                else:
                    run.folder.event("launch done", cell_id=cell.cell_id, launch=launch.launch)
                    run.progress.launch(launch, CellState.DONE)
                    return

    def _record_failure(
        self, launch: Launch, attempt: int, failure: _FailureError, final: bool
    ) -> None:
        slot = launch.cell.slot
        facts = {
            "cell_id": launch.cell.cell_id,
            "variant": launch.cell.variant,
            "launch": launch.launch,
            "attempt": attempt,
            "slot": slot.name,
            "nodes": list(slot.nodes),
            "gpu_uuids": [d.uuid for d in slot.devices],
            "phase": failure.phase,
            "kind": failure.kind,
            "reason": failure.reason,
            "log": failure.log_tail,
        }
        self.run.folder.event("attempt failed", **facts)
        if final:
            self.run.folder.event("launch failed", **facts)
        state = CellState.FAILED if final else CellState.PLANNED
        self.run.progress.launch(launch, state, f"{failure.phase}: {failure.reason}")


class _FailureError(Exception):
    """One attempt of a launch ended badly."""

    def __init__(self, phase: str, kind: str, reason: str, log_tail: str) -> None:
        super().__init__(reason)
        self.phase, self.kind, self.reason, self.log_tail = phase, kind, reason, log_tail


class _Attempt:
    """One process' worth of a launch."""

    def __init__(self, execution: _Execution, launch: Launch, attempt: int) -> None:
        self._execution = execution
        self._run = execution.run
        self._launch = launch
        self._attempt = attempt
        self._phase = "placing"
        self._worker: LiveWorker | None = None
        self._records: list[Record] = []
        node = self._run.inventory.node(launch.cell.slot.nodes[0])
        self._node_id, self._hostname = node.node_id, node.hostname
        name = f"{launch.cell.cell_id}-{launch.launch}-{attempt}.log"
        self._log = f"{cluster.node_temporary_folder(self._run.folder.run_id)}/{name}"

    async def run(self, missing: list[Trial]) -> None:
        """Start the worker and run ``missing``. Raises _FailureError; the worker is gone then."""
        failed: tuple[str, str] | None = None
        try:
            await self._start()
            await self._warm_up(missing)
            await self._control(missing[0])
            for trial in missing:
                if self._execution.needs.of(self._launch, [trial]):
                    await self._trial(trial)
            await self._health()
            if await self._score():
                await self._answer("stop", 60.0)
        except StoreError:
            raise
        except TimeoutError as error:
            failed = "time-out", str(error)
        except RaytestError as error:
            failed = "error", cause_of(error)
        # A worker's process edge: whatever ended it marks the cell, and the text is kept.
        except Exception as error:  # noqa: BLE001
            failed = type(error).__name__, cause_of(error)
        finally:
            log = await asyncio.shield(asyncio.to_thread(self._clean_up))
        if failed is not None:
            raise _FailureError(self._phase, *failed, log)

    async def _start(self) -> None:
        run, cell, limits = self._run, self._launch.cell, self._run.spec.limits
        variant = next(v for v in run.spec.variants if v.name == cell.variant)
        config, env = configure(
            run.spec, cell, run.target, model_path=run.model_path, tokenizer_path=run.tokenizer_path
        )
        job = Job(config, self._where(), env, self._node_id, self._log)
        self._tell(CellState.PLACED)
        self._worker = LiveWorker(job, cell.slot, variant.runtime_env)
        pin = await self._worker.place(limits.place_s)
        self._event("pinned", **pin)
        self._enter("loading", CellState.LOADING)
        self._records = await self._answer("start", limits.start_s)
        self._records[0][2]["process.clock_skew"] = str(pin["clock_skew_s"])
        self._write_fingerprints()
        self._event("started", **started_facts(self._records, config))
        self._enter("running", CellState.RUNNING)

    async def _warm_up(self, missing: list[Trial]) -> None:
        for _ in range(self._run.spec.trials.warmup if missing else 0):
            job = self._trial_job(missing[0])
            n = await self._answer("warm_up", self._run.spec.limits.trial_s, job)
            self._event("warm-up discarded", completions=n)

    async def _control(self, trial: Trial) -> None:
        """The positive control: one request, and the same with one prompt token changed, passed off
        as its repeat. The analysis must see two classes, or the run proves nothing."""
        if not self._execution.control_wanted:
            return
        run = self._run
        job = self._trial_job(trial)
        plain = min((r for b in job.batches for r in b), key=lambda r: len(r.prompt_token_ids))
        *kept, last = plain.prompt_token_ids
        other = (last + 1) % (run.vocabulary_size or last + 2)
        changed = replace(plain, prompt_token_ids=(*kept, other))
        tables = []
        for repeat, request in enumerate((plain, changed)):
            batches = ((request,),)
            job = replace(job, arrangement="solo", repeat=repeat, batches=batches)
            table, _ = await self._answer("run_trial", run.spec.limits.trial_s, job)
            tables.append(table)
        # the first launch that gets here; one that dies on the way leaves it to another
        self._execution.control_wanted = False
        run.folder.write_control(tables)
        self._event("control ran", request_id=plain.request_id)

    async def _trial(self, trial: Trial) -> None:
        limits = self._run.spec.limits
        observations, states = await self._answer(
            "run_trial", limits.trial_s, self._trial_job(trial)
        )
        known = self._execution.known_payloads
        ids = set(observations.column("payload_id").drop_null().to_pylist())
        unseen = sorted(ids - known)
        payloads: pa.Table | None = None
        if unseen:
            found = await self._answer("payloads", limits.trial_s, unseen)
            payloads = with_text(found, self._run.decode)
        key = (self._launch.cell.cell_id, self._launch.launch, trial.trial)
        self._run.folder.write_trial(key, observations, payloads)
        known |= ids
        self._event("trial done", trial=trial.trial, seed_states=states)
        self._run.progress.trial(self._launch, trial)
        await self._execution.needs.again()

    async def _score(self) -> bool:
        """Replay, where the spec asks for it and the tokens to score are there by now; 'raytest
        replay' makes up for what is not. False where the engine failed at it: the trials stand."""
        run, cell_id = self._run, self._launch.cell.cell_id
        if not run.spec.trials.replay or cell_id in scored_files(run.folder):
            return True
        reference = self._execution.reference or reference_of(run.folder, any_cell=False)
        self._execution.reference = reference
        if reference is None:
            return True
        job = score_job(run.spec, run.requests, reference)
        failures: tuple[type[Exception], ...] = (
            TimeoutError,
            RaytestError,
            *cluster.worker_errors(),
        )
        try:
            tables = await self._answer("score", run.spec.limits.trial_s, job)
        except failures as error:
            self._event("replay failed", reason=cause_of(error))
            return False
        write_scored(run.folder, cell_id, self._launch.launch, *tables)
        self._event("replay done")
        return True

    def _trial_job(self, trial: Trial) -> TrialJob:
        run, cell = self._run, self._launch.cell
        variant = next(v for v in run.spec.variants if v.name == cell.variant)
        requests = with_logprobs(run.requests, run.spec.logprobs(variant))
        batches = arrange(requests, trial.arrangement, run.spec.seed)
        return TrialJob(
            trial=trial.trial,
            repeat=trial.repeat,
            arrangement=trial.arrangement.value,
            seed=run.spec.seed,
            batches=tuple(tuple(b) for b in batches),
        )

    def _where(self) -> dict[str, Any]:
        cell = self._launch.cell
        return {
            "run_id": self._run.folder.run_id,
            "cell_id": cell.cell_id,
            "variant": cell.variant,
            "tensor_parallel_size": cell.tensor_parallel_size,
            "pipeline_parallel_size": cell.pipeline_parallel_size,
            "node_id": self._node_id,
            "hostname": self._hostname,
            "gpu_uuids": [d.uuid for d in cell.slot.devices],
            "slot": cell.slot.name,
            "launch": self._launch.launch,
            "attempt": self._attempt,
        }

    async def _answer(self, method: str, timeout_s: float, *args: Any) -> Any:
        """A worker method's result within its time limit."""
        assert self._worker is not None
        return await self._worker.answer(method, timeout_s, *args)

    async def _health(self) -> None:
        """What of the devices changed by itself while the trials ran, kept beside what was there
        before them."""
        facts, worse = await self._answer("health", 60.0)
        if facts:
            self._records.append((-1, "after trials", facts))
            self._write_fingerprints()
        if worse:
            self._event("health worsened", changes=worse)

    def _write_fingerprints(self) -> None:
        import pyarrow as pa

        from raytest.schema import fingerprints_schema

        cell, launch = self._launch.cell, self._launch.launch
        rows = [
            (cell.cell_id, launch, self._attempt, rank, stage, key, value)
            for rank, stage, facts in self._records
            for key, value in sorted(facts.items())
        ]
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(fingerprints_schema())
        arrays = [pa.array(c, f.type) for c, f in zip(columns, fingerprints_schema(), strict=True)]
        table = pa.table(arrays, schema=fingerprints_schema())
        self._run.folder.write_fingerprints((cell.cell_id, launch), self._attempt, table)

    def _enter(self, phase: str, state: CellState) -> None:
        self._phase = phase
        self._tell(state)

    def _tell(self, state: CellState) -> None:
        self._event(state.value)
        self._run.progress.launch(self._launch, state)

    def _event(self, kind: str, **fields: Any) -> None:
        self._run.folder.event(
            kind,
            cell_id=self._launch.cell.cell_id,
            launch=self._launch.launch,
            attempt=self._attempt,
            **fields,
        )

    def _clean_up(self) -> str:
        """End the worker and everything it started, keep its output; the end of that output."""
        if self._worker is None:
            return ""
        text = self._worker.end()
        path = self._run.folder.log_path(
            self._launch.cell.cell_id, self._launch.launch, self._attempt
        )
        with contextlib.suppress(OSError):
            path.write_text(text, encoding="utf-8")
        return "\n".join(text.splitlines()[-15:])[-4000:]


def _keys(plan: Plan) -> Iterable[tuple[str, int, int]]:
    return ((x.cell.cell_id, x.launch, t.trial) for x in plan.launches() for t in plan.trials)


def _missing(launch: Launch, plan: Plan, finished: set[tuple[str, int, int]]) -> list[Trial]:
    return [t for t in plan.trials if (launch.cell.cell_id, launch.launch, t.trial) not in finished]


def _is(event: Mapping[str, Any], launch: Launch) -> bool:
    return event.get("cell_id") == launch.cell.cell_id and event.get("launch") == launch.launch


def with_logprobs(requests: list[Request], logprobs: int | None) -> list[Request]:
    """The same requests with another number of logprobs kept (an arm of the observer-effect
    control)."""
    return [
        r
        if r.sampling.logprobs == logprobs
        else replace(r, sampling=replace(r.sampling, logprobs=logprobs))
        for r in requests
    ]
