"""Asks of an engine that is started again, with some settings changed, whether it gives what a side
of the run had given."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raytest import cluster
from raytest.configure import Target, configure
from raytest.engines.base import Request
from raytest.errors import RaytestError
from raytest.execution import with_logprobs
from raytest.explain.divergence import Side
from raytest.explain.interventions import Trialled
from raytest.explain.minimal import Answer, ask_more, verdict_of
from raytest.inventory import Inventory
from raytest.live_worker import LiveWorker, cause_of
from raytest.plan import Cell, Trial, family
from raytest.reservation import Reservation
from raytest.runner import Model
from raytest.spec import Spec
from raytest.stopping import stopped_by_signals
from raytest.store import RunFolder
from raytest.worker import Job, TrialJob
from raytest.workload import arrange

if TYPE_CHECKING:
    import pyarrow as pa

# Where repeats disagree, so many are taken before the answer is called unsure.
MOST_REPEATS = 10
Digests = Mapping[tuple[str, int], tuple[bytes, bytes]]
_COLUMNS = ["request_id", "sample_index", "token_digest", "logprob_digest"]


@dataclass(frozen=True, slots=True)
class Asked:
    """One question's answer: repeats that were equal, of how many; how many requests differed at
    most; why there is no answer."""

    answer: Answer
    equal: int = 0
    repeats: int = 0
    differed: int = 0
    error: str = ""


def recorded(
    folder: RunFolder, side: Side
) -> tuple[dict[tuple[str, int], tuple[bytes, bytes]], int]:
    """What all trials of the side's kind gave, and how many samples of theirs are not stable (those
    are left out)."""
    seen: dict[tuple[str, int], set[tuple[bytes, bytes]]] = {}
    kind = {t.trial for t in folder.plan().trials if t.arrangement == side.trial.arrangement}
    for cell_id, launch, trial in sorted(folder.finished_trials()):
        if cell_id == side.cell.cell_id and trial in kind:
            for key, digests in digests_of(folder, (cell_id, launch, trial)):
                seen.setdefault(key, set()).add(digests)
    steady = {key: next(iter(found)) for key, found in seen.items() if len(found) == 1}
    return steady, len(seen) - len(steady)


def digests_of(
    folder: RunFolder, key: tuple[str, int, int]
) -> list[tuple[tuple[str, int], tuple[bytes, bytes]]]:
    """Token and logprob digest of each request and sample of one trial that gave a result."""
    return _digests(folder.read_trial(key, _COLUMNS))


def _digests(table: pa.Table) -> list[tuple[tuple[str, int], tuple[bytes, bytes]]]:
    rows = table.select(_COLUMNS).to_pylist()
    return [
        ((r["request_id"], r["sample_index"]), (r["token_digest"], r["logprob_digest"]))
        for r in rows
        if r["token_digest"] is not None
    ]


@dataclass(frozen=True, slots=True)
class Bench:
    """Where questions are asked: a connected cluster, and the run that they are about."""

    folder: RunFolder
    spec: Spec
    requests: Sequence[Request]
    model: Model
    inventory: Inventory
    target: Target
    expected: Digests
    repeats: int
    python: str

    def ask(self, wanted: Trialled, arrangements: Sequence[Trial], name: str) -> list[Asked]:
        """One engine start; an answer for each arrangement. Raises StoppedError on a signal."""
        return asyncio.run(self._ask(wanted, arrangements, name))

    async def _ask(self, wanted: Trialled, arrangements: Sequence[Trial], name: str) -> list[Asked]:
        limits = self.spec.limits
        failures: tuple[type[Exception], ...] = (
            TimeoutError,
            RaytestError,
            *cluster.worker_errors(),
        )
        reservation = Reservation()
        nodes = {n.name: n.node_id for n in self.inventory.nodes}
        worker: LiveWorker | None = None
        with stopped_by_signals():
            try:
                spec, worker = self._worker(wanted, name)
                await asyncio.to_thread(
                    reservation.take, wanted.slot.devices, nodes, limits.place_s
                )
                await worker.place(limits.place_s)
                await worker.answer("start", limits.start_s)
                return [await self._trials(worker, spec, wanted, t) for t in arrangements]
            except failures as error:
                return [Asked(Answer.UNSURE, error=cause_of(error))] * len(arrangements)
            finally:
                if worker is not None:
                    text = await asyncio.shield(asyncio.to_thread(worker.end))
                    with contextlib.suppress(OSError):
                        path = self.folder.log_path(f"isolate-{name}", 0, 0)
                        path.write_text(text, encoding="utf-8")
                reservation.release()

    async def _trials(
        self, worker: LiveWorker, spec: Spec, wanted: Trialled, trial: Trial
    ) -> Asked:
        job = self._job(spec, wanted, trial)
        limit = spec.limits.trial_s
        for _ in range(spec.trials.warmup):
            await worker.answer("warm_up", limit, job)
        said: list[bool] = []
        most_differed = 0
        while ask_more(said, self.repeats, MOST_REPEATS):
            table, _ = await worker.answer("run_trial", limit, replace(job, repeat=len(said)))
            got = dict(_digests(table))
            differed = sum(got.get(key) != value for key, value in self.expected.items())
            most_differed = max(most_differed, differed)
            said.append(differed == 0)
        return Asked(verdict_of(said), sum(said), len(said), most_differed)

    def _job(self, spec: Spec, wanted: Trialled, trial: Trial) -> TrialJob:
        requests = with_logprobs(list(self.requests), spec.logprobs(wanted.variant))
        batches = arrange(requests, trial.arrangement, spec.seed)
        return TrialJob(
            trial=0,
            repeat=0,
            arrangement=trial.arrangement.value,
            seed=spec.seed,
            batches=tuple(tuple(b) for b in batches),
        )

    def _worker(self, wanted: Trialled, name: str) -> tuple[Spec, LiveWorker]:
        spec = self.spec.model_copy(update={"variants": (wanted.variant,)})
        variant, slot = wanted.variant, wanted.slot
        cell = Cell(
            name,
            variant.name,
            slot,
            1,
            variant.tensor_parallel_size,
            variant.pipeline_parallel_size,
            family(spec, variant),
        )
        config, env = configure(
            spec,
            cell,
            self.target,
            model_path=self.model.path,
            tokenizer_path=self.model.tokenizer_path,
        )
        node = self.inventory.node(slot.nodes[0])
        runtime_env = dict(variant.runtime_env)
        if wanted.unset:
            # Ray can set variables of a process, but not take away what its node has
            own = runtime_env.get("py_executable", self.python)
            runtime_env["py_executable"] = " ".join(
                ["env", *(f"-u {n}" for n in wanted.unset), own]
            )
        where = {
            "run_id": self.folder.run_id,
            "cell_id": name,
            "variant": variant.name,
            "tensor_parallel_size": cell.tensor_parallel_size,
            "pipeline_parallel_size": cell.pipeline_parallel_size,
            "node_id": node.node_id,
            "hostname": node.hostname,
            "gpu_uuids": [d.uuid for d in slot.devices],
            "slot": slot.name,
            "launch": 0,
            "attempt": 0,
        }
        log = f"{cluster.node_temporary_folder(self.folder.run_id)}/isolate-{name}.log"
        return spec, LiveWorker(Job(config, where, env, node.node_id, log), slot, runtime_env)
