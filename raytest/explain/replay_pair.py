"""Runs both sides of a divergence again, with hooks, in two passes: digests of every module, then
the tensors around the first difference."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from raytest import cluster
from raytest.configure import Target, configure, target_of
from raytest.engines.base import Completion, EngineConfig, Request, Sampling
from raytest.engines.trace import Trace, TraceJob, missing_positions
from raytest.errors import CellError, NotComparableError, RaytestError, UnavailableError, UsageError
from raytest.execution import with_logprobs
from raytest.explain.divergence import Divergence, Side
from raytest.explain.localize import rows_to_keep
from raytest.explain.traces import Comparison, compare_traces
from raytest.inventory import Inventory
from raytest.live_worker import LiveWorker, cause_of
from raytest.plan import Cell
from raytest.reservation import Reservation
from raytest.runner import Model, find_model, vllm_version
from raytest.spec import Spec
from raytest.stopping import stopped_by_signals
from raytest.store import Payload, RunFolder
from raytest.worker import Job
from raytest.workload import arrange

# Hooks make a pass slower; its time limit grows with them.
HOOKS_SLOW_DOWN = 4.0
Tell = Callable[[str], None]


@dataclass(slots=True)
class Replay:
    """What the passes gave. ``second`` is None where the first found no difference.

    ``reproduced`` says of each side whether it gave what the run had recorded, bit by bit;
    ``diverged`` whether the two sides' completions still differ.
    """

    first: Comparison
    second: Comparison | None
    traces: tuple[Trace, Trace]
    reproduced: tuple[bool, bool]
    diverged: bool
    engine_starts: int
    notes: list[str] = field(default_factory=list)


def replay_pair(folder: RunFolder, found: Divergence, address: str, tell: Tell) -> Replay:
    """Start the engines of both sides as the run did (one after the other where they share
    devices) and trace the request. Raises RaytestError: a cluster that lacks the run's devices,
    another vLLM, an engine that does not start."""
    spec = folder.spec()
    requests = read_requests(folder)
    if any(r.request_id == found.request_id and r.sampling.beam_width for r in requests):
        raise UsageError(
            f"request {found.request_id}: beam search runs many sequences for one completion, "
            "which cannot be followed through the modules"
        )
    model = find_model(spec)
    with cluster.connect(address, spec.cluster):
        inventory = cluster.take_inventory(spec.placement.share)
        target = target_of(inventory, vllm_version())
        require_same_cluster(folder, [found.a.cell, found.b.cell], inventory, target)
        driver = _Driver(folder, spec, found, requests, model, inventory, target, tell)
        return asyncio.run(driver.main())


def read_requests(folder: RunFolder) -> list[Request]:
    """The run's own requests, from its folder: the prompt file may be gone or changed."""
    requests = []
    for row in folder.requests().to_pylist():
        if row["error"] is not None:
            continue
        sampling = json.loads(row["sampling"])
        sampling["stop_token_ids"] = tuple(sampling.get("stop_token_ids", ()))
        requests.append(
            Request(
                row["request_id"],
                row["request_index"],
                tuple(row["prompt_token_ids"]),
                row["prompt_digest"],
                Sampling(**sampling),
            )
        )
    return requests


def require_same_cluster(
    folder: RunFolder, cells: Sequence[Cell], inventory: Inventory, target: Target
) -> None:
    """The engines can only be started again on the same devices, by the same vLLM. Raises
    UnavailableError or NotComparableError."""
    here = {(d.node, d.uuid, d.share) for d in inventory.devices}
    for cell in cells:
        for device in cell.slot.devices:
            if (device.node, device.uuid, device.share) not in here:
                raise UnavailableError(
                    f"{cell.cell_id}: {device.kind.upper()} {device.index} of node "
                    f"{device.node} ({device.uuid}) is not in this cluster; --address names another"
                )
    was = folder.manifest.get("environment", {})
    for key, value in (("platform", target.platform), ("vllm", target.vllm)):
        if was.get(key, value) != value:
            raise NotComparableError(
                f"{folder.path}: {key} was {was[key]!r} and is {value!r} now; a replay would "
                "explain another engine"
            )


@dataclass(slots=True)
class _Driver:
    folder: RunFolder
    spec: Spec
    found: Divergence
    requests: list[Request]
    model: Model
    inventory: Inventory
    target: Target
    tell: Tell
    engine_starts: int = 0
    notes: set[str] = field(default_factory=set)

    async def main(self) -> Replay:
        a, b = self.found.a, self.found.b
        reservation = Reservation()
        nodes = {n.name: n.node_id for n in self.inventory.nodes}
        devices = [*a.cell.slot.devices, *b.cell.slot.devices]
        try:
            with stopped_by_signals():
                await asyncio.to_thread(reservation.take, devices, nodes, self.spec.limits.place_s)
                if a.engine == b.engine:
                    async with self._engine(a) as worker:
                        return await self._passes(worker, worker)
                if _devices(a).isdisjoint(_devices(b)):
                    async with self._engine(a) as one, self._engine(b) as other:
                        return await self._passes(one, other)
                return await self._one_at_a_time()
        finally:
            reservation.release()

    async def _passes(self, one: LiveWorker, other: LiveWorker) -> Replay:
        a, b = self.found.a, self.found.b
        first = await self._trace(one, a, {}), await self._trace(other, b, {})
        comparison = compare_traces(*first)
        keep = rows_to_keep(comparison)
        if not keep:
            return self._replay(first, comparison, None)
        second = await self._trace(one, a, keep), await self._trace(other, b, keep)
        return self._replay(first, comparison, second)

    async def _one_at_a_time(self) -> Replay:
        a, b = self.found.a, self.found.b
        async with self._engine(a) as worker:
            first_a = await self._trace(worker, a, {})
        async with self._engine(b) as worker:
            first = first_a, await self._trace(worker, b, {})
            comparison = compare_traces(*first)
            keep = rows_to_keep(comparison)
            if not keep:
                return self._replay(first, comparison, None)
            second_b = await self._trace(worker, b, keep)
        async with self._engine(a) as worker:
            second_a = await self._trace(worker, a, keep)
        return self._replay(first, comparison, (second_a, second_b))

    def _replay(
        self, traces: tuple[Trace, Trace], first: Comparison, second: tuple[Trace, Trace] | None
    ) -> Replay:
        last = second or traces
        a, b = (self._completion(t.completions) for t in last)
        tokens = self._tokens()
        for side, trace in zip("ab", last, strict=True):
            self.notes.update(f"side {side}: {note}" for note in trace.notes)
            missing = [p for p in missing_positions(trace, tokens) if p < self._last_position()]
            if missing:
                self.notes.add(
                    f"side {side}: {len(missing)} positions (first: {missing[0]}) were not "
                    "computed in this pass: a prefix cache held them, or the replay went astray"
                )
        return Replay(
            first=first,
            second=None if second is None else compare_traces(*second),
            traces=last,
            reproduced=(_same(a, self.found.payload_a), _same(b, self.found.payload_b)),
            diverged=not _equal(a, b),
            engine_starts=self.engine_starts,
            notes=sorted(self.notes),
        )

    @contextlib.asynccontextmanager
    async def _engine(self, side: Side) -> AsyncIterator[LiveWorker]:
        """One side's engine, started; ended with everything it started, whatever happens."""
        config, env = self._configure(side)
        node = self.inventory.node(side.cell.slot.nodes[0])
        self.engine_starts += 1
        folder = cluster.node_temporary_folder(self.folder.run_id)
        log = f"{folder}/localize-{side.cell.cell_id}-{self.engine_starts}.log"
        variant = next(v for v in self.spec.variants if v.name == side.cell.variant)
        worker = LiveWorker(
            Job(config, {}, env, node.node_id, log), side.cell.slot, variant.runtime_env
        )
        failures: tuple[type[Exception], ...] = (RaytestError, *cluster.worker_errors())
        self.tell(f"starting {side.cell.cell_id} (engine start {self.engine_starts})")
        try:
            try:
                await worker.place(self.spec.limits.place_s)
                await worker.answer("start", self.spec.limits.start_s)
                yield worker
            except TimeoutError as error:
                raise CellError(f"{side.cell.cell_id}: {error}") from None
            except failures as error:
                raise CellError(f"{side.cell.cell_id}: {cause_of(error)}") from None
        finally:
            text = await asyncio.shield(asyncio.to_thread(worker.end))
            path = self.folder.log_path(f"localize-{side.cell.cell_id}", side.launch, 0)
            with contextlib.suppress(OSError):
                path.write_text(text, encoding="utf-8")

    def _configure(self, side: Side) -> tuple[EngineConfig, dict[str, str]]:
        config, env = configure(
            self.spec,
            side.cell,
            self.target,
            model_path=self.model.path,
            tokenizer_path=self.model.tokenizer_path,
        )
        if config.backend == "vllm" and config.engine_args.get("enforce_eager") is not True:
            # compiled and captured graphs call no hooks
            arguments = {**config.engine_args, "enforce_eager": True}
            config = replace(config, engine_args=arguments)
            self.notes.add(
                f"{side.cell.cell_id} ran with compiled graphs and was replayed without "
                "(enforce_eager = true)"
            )
        return config, env

    async def _trace(
        self, worker: LiveWorker, side: Side, keep: Mapping[str, tuple[int, ...]]
    ) -> Trace:
        passes = "tensors around the first difference" if keep else "digests of every module"
        self.tell(f"tracing {side.name}: {passes}")
        job = TraceJob(
            batches=self._batches(side),
            request_id=self.found.request_id,
            token_ids=self._tokens(),
            seed=self.spec.seed,
            keep=keep,
            sample_index=self.found.sample_index,
        )
        limit = self.spec.limits.trial_s * HOOKS_SLOW_DOWN
        trace: Trace = await worker.answer("trace", limit, job)
        return trace

    def _batches(self, side: Side) -> tuple[tuple[Request, ...], ...]:
        """The batches of the side's trial up to the request's own. Where no prefix is cached, one
        batch leaves nothing to the next, and the request's own is enough."""
        variant = next(v for v in self.spec.variants if v.name == side.cell.variant)
        requests = with_logprobs(self.requests, self.spec.logprobs(variant))
        batches = [tuple(b) for b in arrange(requests, side.trial.arrangement, self.spec.seed)]
        own = next(
            i for i, b in enumerate(batches) if self.found.request_id in {r.request_id for r in b}
        )
        config, _ = self._configure(side)
        caches = config.engine_args.get("enable_prefix_caching", config.backend == "vllm")
        return tuple(batches[0 if caches else own : own + 1])

    def _tokens(self) -> tuple[int, ...]:
        prompt = next(
            r.prompt_token_ids for r in self.requests if r.request_id == self.found.request_id
        )
        return (*prompt, *self.found.common_tokens())

    def _last_position(self) -> int:
        """Tokens of the request that are run: the last of a whole completion is not."""
        tokens = self._tokens()
        return len(tokens) - (self.found.first is None)

    def _completion(self, completions: list[Completion]) -> Completion | None:
        wanted = self.found.request_id, self.found.sample_index
        return next((c for c in completions if (c.request_id, c.sample_index) == wanted), None)


def _devices(side: Side) -> set[tuple[str, str, int]]:
    return {(d.node, d.uuid, d.share) for d in side.cell.slot.devices}


def _same(completion: Completion | None, payload: Payload) -> bool:
    return (
        completion is not None
        and completion.token_ids.tobytes() == payload.token_ids.tobytes()
        and completion.logprobs.tobytes() == payload.logprobs.tobytes()
    )


def _equal(a: Completion | None, b: Completion | None) -> bool:
    return (
        a is not None
        and b is not None
        and a.token_ids.tobytes() == b.token_ids.tobytes()
        and a.logprobs.tobytes() == b.logprobs.tobytes()
    )
