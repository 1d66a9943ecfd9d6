"""Builds run folders for tests and benchmarks: any plan, completions from a function, planted
differences; written through the same store as a real run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raytest.digest import prompt_digest
from raytest.engines.base import Completion, Request
from raytest.inventory import Device, Inventory, Node
from raytest.observations import observations_table
from raytest.plan import Launch, Plan, Trial, make_plan, plan_to_json
from raytest.spec import Spec
from raytest.spec_file import parse_spec
from raytest.store import RunFolder
from raytest.workload import requests_table

STARTED = datetime(2026, 12, 1, tzinfo=UTC)
VOCABULARY = 32000


@dataclass(frozen=True)
class Where:
    """Which observation a planted difference may change."""

    launch: Launch
    trial: Trial
    request: Request

    @property
    def node(self) -> str:
        return self.launch.cell.slot.node

    @property
    def slot(self) -> str:
        return self.launch.cell.slot.name

    @property
    def variant(self) -> str:
        return self.launch.cell.variant


Change = Callable[[Where, Completion], Completion | None]


def inventory(nodes: int = 1, devices: int = 2, models: Sequence[str] = ("H200",)) -> Inventory:
    """``nodes`` nodes of ``devices`` GPUs; node i has model ``models[i % len]``."""
    return Inventory(
        tuple(
            Node(
                name=f"node-{n}",
                node_id=f"id-{n}",
                hostname=f"host-{n}",
                devices=tuple(
                    Device(f"node-{n}", i, f"GPU-{n}-{i}", "gpu", models[n % len(models)])
                    for i in range(devices)
                ),
            )
            for n in range(nodes)
        )
    )


def spec(text: str = "", **sections: str) -> Spec:
    """A spec from TOML; a model and one variant are filled in where ``text`` names none."""
    base = 'name = "t"\nbackend = "reference"\n'
    body = "\n".join([text, *sections.values()])
    if "[model]" not in body:
        body += '\n[model]\npath = "synthetic:tiny"\ndtype = "bfloat16"\n'
    if "[[variants]]" not in body:
        body += '\n[[variants]]\nname = "tp1"\n'
    return parse_spec(base + body, "test.toml")


def completion(
    request: Request, sample: int = 0, *, length: int = 12, k: int | None = 5, salt: int = 0
) -> Completion:
    """What a healthy engine says: the same for the same request, whoever asks."""
    rng = np.random.default_rng([*request.prompt_token_ids, sample, salt])
    tokens = rng.integers(3, VOCABULARY, size=length).astype(np.int32)
    if k is None:
        empty = np.empty(0, np.float32)
        return Completion(
            request.request_id, sample, tokens, empty, 0, np.empty(0, np.int32), empty, "length"
        )
    logprobs = -rng.uniform(0.01, 1.0, size=length).astype(np.float32)
    ids = np.tile(tokens[:, None], (1, k)) + np.arange(k, dtype=np.int32)
    steps = np.arange(k, dtype=np.float32) * np.float32(0.05)
    top = logprobs[:, None] - steps
    return Completion(
        request.request_id,
        sample,
        tokens,
        logprobs,
        k,
        (ids % VOCABULARY).astype(np.int32).reshape(-1),
        top.astype(np.float32).reshape(-1),
        "length",
        cumulative_logprob=float(logprobs.astype(np.float64).sum()),
        n_cached_tokens=0,
    )


def flip_bit(at: int = 3) -> Callable[[Completion], Completion]:
    """Flip the lowest mantissa bit of one logprob."""

    def change(c: Completion) -> Completion:
        bits = c.logprobs.copy().view(np.int32)
        bits[at] ^= 1
        return replace(c, logprobs=bits.view(np.float32))

    return change


def swap_token(at: int = 3) -> Callable[[Completion], Completion]:
    """Take the second candidate at one position (a near-tie flip), and other text from there on."""

    def change(c: Completion) -> Completion:
        tokens, logprobs = c.token_ids.copy(), c.logprobs.copy()
        ids = c.top_token_ids.copy().reshape(-1, c.top_k)
        top = c.top_logprobs.copy().reshape(-1, c.top_k)
        ids[at, :2] = ids[at, 1::-1]
        tokens[at], logprobs[at] = ids[at, 0], top[at, 0]
        tokens[at + 1 :] = (tokens[at + 1 :] + 7) % VOCABULARY
        return replace(
            c,
            token_ids=tokens,
            logprobs=logprobs,
            top_token_ids=ids.reshape(-1),
            top_logprobs=top.reshape(-1),
        )

    return change


def noise(scale: float, seed: int = 0) -> Callable[[Completion], Completion]:
    """Lower every logprob a little, tokens kept."""

    def change(c: Completion) -> Completion:
        rng = np.random.default_rng(seed)
        shift = -np.abs(rng.normal(0, scale, size=len(c.logprobs))).astype(np.float32)
        top = c.top_logprobs + np.repeat(shift, c.top_k)
        return replace(c, logprobs=c.logprobs + shift, top_logprobs=top)

    return change


def plant(
    change: Callable[[Completion], Completion], **only: Any
) -> Callable[[Where, Completion], Completion]:
    """Apply ``change`` where every key matches: node, slot, variant, launch, trial, repeat,
    arrangement, request (an index or a container of them)."""

    def planted(where: Where, c: Completion) -> Completion:
        facts = {
            "node": where.node,
            "slot": where.slot,
            "variant": where.variant,
            "launch": where.launch.launch,
            "trial": where.trial.trial,
            "repeat": where.trial.repeat,
            "arrangement": where.trial.arrangement.value,
            "request": where.request.request_index,
        }
        for key, wanted in only.items():
            value = facts[key]
            if value != wanted and not (
                isinstance(wanted, list | set | tuple | range) and value in wanted
            ):
                return c
        return change(c)

    return planted


@dataclass
class RunMaker:
    """One run to be written. ``skip`` names trials (cell_id, launch, trial) that never ran;
    ``edit`` may change an observations table before it is written."""

    spec: Spec
    inventory: Inventory
    n_requests: int = 4
    length: int = 12
    changes: Sequence[Change] = ()
    prompts: Sequence[Sequence[int]] | None = None
    seeds: Sequence[int] | None = None
    request_errors: Mapping[int, str] = field(default_factory=dict)
    skip: Sequence[tuple[str, int, int]] = ()
    edit: Callable[[tuple[str, int, int], pa.Table], pa.Table] | None = None
    batch_size: Callable[[Launch, Trial], int | None] | None = None
    n_cached: int = 0
    control: bool = True
    uuids: Callable[[Launch], list[str]] | None = None

    @property
    def plan(self) -> Plan:
        return make_plan(self.spec, self.inventory)

    def requests(self) -> list[Request]:
        sampling = self.spec.workload.sampling.resolve(self.spec.seed)
        prompts = self.prompts or [(i, i + 1, i + 2) for i in range(self.n_requests)]
        seeds = self.seeds or [42 + i for i in range(len(prompts))]
        return [
            Request(f"r{i}", i, tuple(p), prompt_digest(p), replace(sampling, seed=seeds[i]))
            for i, p in enumerate(prompts)
        ]

    def write(self, results: Path, run_id: str = "run") -> RunFolder:
        plan = self.plan
        folder = RunFolder.create(
            results,
            run_id,
            {
                "spec": self.spec.model_dump(mode="json"),
                "plan": plan_to_json(plan),
                "vocabulary_size": VOCABULARY,
                "created_at": STARTED.isoformat(),
            },
        )
        requests = self.requests()
        folder.write_requests(requests_table(requests, self.request_errors))
        known: set[bytes] = set()
        for launch in plan.launches():
            for trial in plan.trials:
                key = (launch.cell.cell_id, launch.launch, trial.trial)
                if key in self.skip:
                    continue
                table, payloads = self._trial(folder.run_id, launch, trial, requests)
                fresh = [p not in known for p in payloads.column("payload_id").to_pylist()]
                known.update(payloads.column("payload_id").to_pylist())
                table = self.edit(key, table) if self.edit else table
                folder.write_trial(key, table, payloads.filter(pa.array(fresh, pa.bool_())))
        if self.control and requests:
            self._write_control(folder, next(plan.launches()), plan.trials[0], requests[0])
        return folder

    def _trial(
        self, run_id: str, launch: Launch, trial: Trial, requests: Sequence[Request]
    ) -> tuple[pa.Table, pa.Table]:
        variant = next(v for v in self.spec.variants if v.name == launch.cell.variant)
        k = self.spec.logprobs(variant)
        usable = [
            replace(r, sampling=replace(r.sampling, logprobs=k))
            for r in requests
            if r.request_index not in self.request_errors
        ]
        completions = []
        for request in usable:
            for sample in range(request.sampling.n):
                made: Completion | None = completion(request, sample, length=self.length, k=k)
                for change in self.changes:
                    if made is not None:
                        made = change(Where(launch, trial, request), made)
                if made is not None:
                    completions.append(replace(made, n_cached_tokens=self.n_cached))
        size = 1 if trial.arrangement.value == "solo" else len(usable)
        cell = launch.cell
        uuids = self.uuids(launch) if self.uuids else [d.uuid for d in cell.slot.devices]
        return observations_table(
            usable,
            completions,
            where={
                "run_id": run_id,
                "cell_id": cell.cell_id,
                "variant": cell.variant,
                "tensor_parallel_size": cell.tensor_parallel_size,
                "pipeline_parallel_size": cell.pipeline_parallel_size,
                "node_id": f"id-{cell.slot.node}",
                "hostname": cell.slot.node,
                "gpu_uuids": uuids,
                "slot": cell.slot.name,
                "launch": launch.launch,
                "attempt": 0,
                "trial": trial.trial,
                "repeat": trial.repeat,
                "arrangement": trial.arrangement.value,
            },
            batch_size=self.batch_size(launch, trial) if self.batch_size else size,
            started_at=STARTED,
            duration_s=1.0,
            vocabulary_size=VOCABULARY,
        )

    def _write_control(
        self, folder: RunFolder, launch: Launch, trial: Trial, request: Request
    ) -> None:
        bare = replace(self, changes=(), edit=None, request_errors={})
        plain, _ = bare._trial(folder.run_id, launch, trial, [request])
        changed = RunMaker(
            self.spec, self.inventory, changes=[lambda _, c: swap_or_change(c)], length=self.length
        )
        other, _ = changed._trial(folder.run_id, launch, trial, [request])
        folder.write_control([plain, other])


def swap_or_change(c: Completion) -> Completion:
    """Another first token, with or without candidates."""
    tokens = c.token_ids.copy()
    tokens[:1] ^= 1
    return replace(c, token_ids=tokens)
