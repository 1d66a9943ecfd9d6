"""Scores the tokens of one finished trial in every cell of a run that has not done so yet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from raytest import cluster
from raytest.configure import Target, configure, target_of
from raytest.devices import Devices, all_of, shared_cores
from raytest.errors import RaytestError
from raytest.explain.replay_pair import Tell, read_requests, require_same_cluster
from raytest.inventory import Inventory
from raytest.live_worker import LiveWorker, cause_of
from raytest.plan import Cell
from raytest.replay_folder import Recorded, ReplayPath, write_scored
from raytest.reservation import Reservation
from raytest.runner import Model, find_model, vllm_version
from raytest.scoring import ScoreJob, score_job
from raytest.spec import Spec
from raytest.stopping import stopped_by_signals
from raytest.store import RunFolder
from raytest.worker import Job


def score_cells(
    folder: RunFolder,
    cells: Sequence[Cell],
    reference: Recorded,
    address: str,
    tell: Tell,
    path: ReplayPath,
) -> dict[str, str]:
    """Start each cell's engine as the run did and keep its scores; why, where a cell gave none.
    Raises RaytestError: a cluster that lacks the run's devices, another vLLM, a signal."""
    spec = folder.spec()
    model = find_model(spec)
    with cluster.connect(address, spec.cluster):
        inventory = cluster.take_inventory(spec.placement.share)
        target = target_of(inventory, vllm_version())
        require_same_cluster(folder, cells, inventory, target)
        job = score_job(spec, read_requests(folder), reference)
        scoring = _Scoring(folder, spec, model, inventory, target, job, tell, path)
        asyncio.run(scoring.main(cells))
    return scoring.failed


@dataclass(slots=True)
class _Scoring:
    folder: RunFolder
    spec: Spec
    model: Model
    inventory: Inventory
    target: Target
    job: ScoreJob
    tell: Tell
    path: ReplayPath
    failed: dict[str, str] = field(default_factory=dict)

    async def main(self, cells: Sequence[Cell]) -> None:
        devices = Devices(self.spec.limits.parallel or shared_cores(self.inventory))
        reservation = Reservation()
        nodes = {n.name: n.node_id for n in self.inventory.nodes}
        wanted = [d for c in cells for d in c.slot.devices]
        try:
            with stopped_by_signals():
                await asyncio.to_thread(reservation.take, wanted, nodes, self.spec.limits.place_s)
                await all_of(asyncio.create_task(self._cell(devices, c)) for c in cells)
        finally:
            reservation.release()

    async def _cell(self, devices: Devices, cell: Cell) -> None:
        failures: tuple[type[Exception], ...] = (
            TimeoutError,
            RaytestError,
            *cluster.worker_errors(),
        )
        async with devices.hold(cell.slot):
            self.tell(f"scoring in {cell.cell_id}")
            worker = self._worker(cell)
            try:
                await self._score(worker, cell)
            except failures as error:
                self.failed[cell.cell_id] = cause_of(error)
                self.folder.event("replay failed", cell_id=cell.cell_id, reason=cause_of(error))
            finally:
                text = await asyncio.shield(asyncio.to_thread(worker.end))
                path = self.folder.log_path(f"replay-{cell.cell_id}", 0, 0)
                with contextlib.suppress(OSError):
                    path.write_text(text, encoding="utf-8")

    async def _score(self, worker: LiveWorker, cell: Cell) -> None:
        limits = self.spec.limits
        await worker.place(limits.place_s)
        await worker.answer("start", limits.start_s)
        observations, payloads = await worker.answer("score", limits.trial_s, self.job)
        write_scored(self.folder, cell.cell_id, 0, observations, payloads, self.path)
        self.folder.event("replay done", cell_id=cell.cell_id)

    def _worker(self, cell: Cell) -> LiveWorker:
        config, env = configure(
            self.spec,
            cell,
            self.target,
            model_path=self.model.path,
            tokenizer_path=self.model.tokenizer_path,
        )
        config = replace(config, trace_replay=self.path == "decode")
        node = self.inventory.node(cell.slot.nodes[0])
        variant = next(v for v in self.spec.variants if v.name == cell.variant)
        log = f"{cluster.node_temporary_folder(self.folder.run_id)}/replay-{cell.cell_id}.log"
        where = {
            "run_id": self.folder.run_id,
            "cell_id": cell.cell_id,
            "variant": cell.variant,
            "tensor_parallel_size": cell.tensor_parallel_size,
            "pipeline_parallel_size": cell.pipeline_parallel_size,
            "node_id": node.node_id,
            "hostname": node.hostname,
            "gpu_uuids": [d.uuid for d in cell.slot.devices],
            "slot": cell.slot.name,
            "launch": 0,
            "attempt": 0,
        }
        return LiveWorker(
            Job(config, where, env, node.node_id, log), cell.slot, variant.runtime_env
        )
