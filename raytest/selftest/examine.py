"""One case of the examination: a fleet with one faulty slot goes through the normal pipeline."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from raytest.compare.evaluate import Evaluation, evaluate
from raytest.configure import Target, configure
from raytest.digest import prompt_digest
from raytest.engines.base import Completion, EngineConfig, Request
from raytest.engines.reference import ReferenceEngine
from raytest.engines.reference_settings import BATCH_INVARIANT, THREADS
from raytest.engines.reference_weights import ModelShape
from raytest.engines.trace import TraceJob
from raytest.errors import CellError
from raytest.explain.localize import localize
from raytest.explain.traces import compare_traces
from raytest.inventory import Device, Inventory, Node
from raytest.observations import observations_table
from raytest.plan import Cell, Plan, make_plan, plan_to_json
from raytest.schema import Axis, Verdict
from raytest.seeding import compare_audits
from raytest.selftest.planting import Planted
from raytest.spec import Spec
from raytest.spec_file import parse_spec
from raytest.store import RunFolder
from raytest.worker import check_environment
from raytest.workload import requests_table

SLOTS = 4
VOCABULARY = 512
_SPEC = """
name = "selftest"
backend = "reference"
[model]
path = "reference"
dtype = "float32"
max_model_len = 256
[workload]
sampling = {{ max_tokens = {tokens}, logprobs = 5, ignore_eos = true }}
[trials]
repeats = {repeats}
[gates]
repeat = "bitwise"
gpu = "bitwise"
[[variants]]
name = "v"
tensor_parallel_size = {tp}
env = {{ OMP_NUM_THREADS = "1" }}
engine = {{ num_hidden_layers = 2, hidden_size = 64, vocab_size = 512 }}
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one case showed. ``changed``: any logprob bit or token of the faulty slot differs from a
    healthy one's, found by comparing payloads directly. ``caught``: the pipeline's axes or audits
    flagged it. ``blamed``: every difference between slots puts the faulty one outside. ``module``:
    localize named the right one (None where the fault has none, or nothing differed there)."""

    changed: bool
    caught: bool
    blamed: bool | None
    module: bool | None
    channels: Mapping[str, bool | None]
    verdicts: tuple[str, ...]


@dataclass(slots=True)
class Fleet:
    """Four equal slots of one node and a workload; healthy results are made once."""

    tp: int
    prompts: int
    tokens: int
    repeats: int
    seed: int
    spec: Spec = field(init=False)
    plan: Plan = field(init=False)
    requests: list[Request] = field(init=False)
    healthy: list[list[Completion]] = field(init=False)

    def __post_init__(self) -> None:
        text = _SPEC.format(tokens=self.tokens, repeats=self.repeats, tp=self.tp)
        self.spec = parse_spec(text, "selftest")
        devices = tuple(
            Device("node-0", i, f"cpu:node-0:{i}", "cpu") for i in range(SLOTS * self.tp)
        )
        self.plan = make_plan(self.spec, Inventory((Node("node-0", "n", "here", devices),)))
        rng = random.Random(self.seed)
        sampling = self.spec.workload.sampling.resolve(self.spec.seed)
        self.requests = []
        for i in range(self.prompts):
            ids = tuple(rng.randrange(3, VOCABULARY) for _ in range(12 + i % 9))
            own = replace(sampling, seed=rng.randrange(2**31))
            self.requests.append(Request(f"r{i}", i, ids, prompt_digest(ids), own))
        self.healthy = self._passes(self.plan.cells[0], None)

    @property
    def shape(self) -> ModelShape:
        """The reference model's modules and ranks."""
        return ModelShape(layers=2, hidden=64, vocabulary=VOCABULARY, tensor_parallel_size=self.tp)

    def engine(self, cell: Cell, fault: Mapping[str, Any] | None) -> ReferenceEngine:
        """A started engine of one slot. Raises CellError."""
        config = self._config(cell, fault)
        with _environment(config.env):
            one = ReferenceEngine(config)
            one.start()
        return one

    def _config(self, cell: Cell, fault: Mapping[str, Any] | None) -> EngineConfig:
        config, env = configure(
            self.spec, cell, Target("cpu", ""), model_path="reference", tokenizer_path="reference"
        )
        return replace(config, env=env, fault=fault)

    def _passes(self, cell: Cell, fault: Mapping[str, Any] | None) -> list[list[Completion]]:
        one = self.engine(cell, fault)
        found = []
        for _ in range(self.repeats):
            one.reset(self.spec.seed)
            completions, _ = one.generate([self.requests])
            found.append(sorted(completions, key=lambda c: c.request_id))
        return found

    def clean(self) -> bool:
        """A run without a fault, every slot really run; whether anything was flagged."""
        passes = {c.cell_id: self._passes(c, None) for c in self.plan.cells}
        found = self._judge(passes)
        return _flagged(found) or any(f.severity == "isolate" for f in found.findings)

    def examine(self, planted: Planted, rng: random.Random) -> Seen:
        """Plant a fault in one random slot and see what the pipeline makes of it."""
        cell = rng.choice(self.plan.cells)
        audited = self._audits(cell, planted)
        faulty = self._passes(cell, planted.fault)
        passes = {c.cell_id: self.healthy for c in self.plan.cells} | {cell.cell_id: faulty}
        found = self._judge(passes)
        tokens, bits = _differences(self.healthy, faulty)
        channels: dict[str, bool | None] = {
            "tokens": tokens,
            "logprobs": bits,
            "replay": self._replay(cell, planted),
            "activations": None,
            "audit": audited,
        }
        module = None
        if planted.module:
            channels["activations"], module = self._localize(cell, planted, faulty[0])
        axis = next(a for a in found.axes if a.axis is Axis.GPU)
        return Seen(
            changed=tokens or bits,
            caught=_flagged(found) or audited,
            blamed=_blamed(found, cell) if axis.numbers.n_groups_divergent else None,
            module=module,
            channels=channels,
            verdicts=tuple(sorted({str(v) for v in found.verdicts.column("verdict").to_pylist()})),
        )

    def _audits(self, cell: Cell, planted: Planted) -> bool:
        """Whether seeds or variables of a rank are found to be other than demanded."""
        one = self.engine(cell, planted.fault)
        states = {f"rank {r}": dict(s) for r, s in enumerate(one.reset(self.spec.seed))}
        demanded = self._config(cell, None).env
        try:
            for rank, facts in enumerate(one.rank_fingerprints()):
                seen = {k.removeprefix("env."): v for k, v in facts.items() if k[:4] == "env."}
                check_environment(demanded, seen, f"rank {rank}")
        except CellError:
            return True
        return bool(compare_audits(states))

    def _replay(self, cell: Cell, planted: Planted) -> bool:
        tokens = [c.token_ids.tolist() for c in self.healthy[0]]
        ordered = sorted(self.requests, key=lambda r: r.request_id)
        sides = [self.engine(cell, f).score(ordered, tokens) for f in (None, planted.fault)]
        return any(_differ(a, b) for a, b in zip(*sides, strict=True))

    def _localize(
        self, cell: Cell, planted: Planted, faulty: Sequence[Completion]
    ) -> tuple[bool, bool | None]:
        """Whether activations differ, and whether the first that does is the fault's module."""
        pairs = [p for p in zip(self.healthy[0], faulty, strict=True) if _differ(*p)]
        plain, other = pairs[0] if pairs else (self.healthy[0][0], faulty[0])
        request = next(r for r in self.requests if r.request_id == plain.request_id)
        equal = 0
        for a, b in zip(plain.token_ids, other.token_ids, strict=False):
            if a != b:
                break
            equal += 1
        tokens = (*request.prompt_token_ids, *plain.token_ids[:equal].tolist())
        job = TraceJob((tuple(self.requests),), request.request_id, tokens, self.spec.seed)
        a, b = (self.engine(cell, f).trace_batches(job) for f in (None, planted.fault))
        found = localize(compare_traces(a, b))
        if not found.module:
            return False, None
        return True, found.module == planted.module

    def _judge(self, passes: Mapping[str, Sequence[Sequence[Completion]]]) -> Evaluation:
        """Write a run folder as a run does, and judge it as a run is judged."""
        with tempfile.TemporaryDirectory(prefix="raytest-selftest-") as results:
            return evaluate(self._written(Path(results), passes))

    def _written(
        self, results: Path, passes: Mapping[str, Sequence[Sequence[Completion]]]
    ) -> RunFolder:
        manifest = {
            "spec": self.spec.model_dump(mode="json"),
            "plan": plan_to_json(self.plan),
            "vocabulary_size": VOCABULARY,
        }
        folder = RunFolder.create(str(results), "case", manifest)
        folder.write_requests(requests_table(self.requests))
        known: set[bytes] = set()
        for launch in self.plan.launches():
            cell = launch.cell
            for trial in self.plan.trials:
                table, payloads = observations_table(
                    self.requests,
                    passes[cell.cell_id][trial.repeat],
                    where={
                        "run_id": "case",
                        "cell_id": cell.cell_id,
                        "variant": cell.variant,
                        "tensor_parallel_size": self.tp,
                        "pipeline_parallel_size": 1,
                        "node_id": "n",
                        "hostname": "here",
                        "gpu_uuids": [d.uuid for d in cell.slot.devices],
                        "slot": cell.slot.name,
                        "launch": launch.launch,
                        "attempt": 0,
                        "trial": trial.trial,
                        "repeat": trial.repeat,
                        "arrangement": trial.arrangement.value,
                    },
                    batch_size=len(self.requests),
                    started_at=datetime.now(UTC),
                    duration_s=1.0,
                    vocabulary_size=VOCABULARY,
                )
                fresh = [p not in known for p in payloads.column("payload_id").to_pylist()]
                known.update(payloads.column("payload_id").to_pylist())
                kept = payloads.filter(fresh)
                folder.write_trial((cell.cell_id, launch.launch, trial.trial), table, kept)
        return folder


@contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    """The variables that the reference engine reads, as a worker's process would have them."""
    names = (THREADS, BATCH_INVARIANT)
    before = {n: os.environ.pop(n, None) for n in names}
    os.environ.update({n: env[n] for n in names if n in env})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _flagged(found: Evaluation) -> bool:
    """Whether an axis that must be bitwise equal is not, or values cannot be right."""
    return any(a.numbers.n_groups_divergent for a in found.axes) or any(
        f.category == "values" and f.severity != "monitor" for f in found.findings
    )


def _blamed(found: Evaluation, cell: Cell) -> bool:
    """Whether the faulty slot, and no other, stands outside in every difference between slots."""
    rows = [r for r in found.verdicts.to_pylist() if r["axis"] == Axis.GPU.value]
    return bool(rows) and all(
        any(m.startswith(cell.cell_id) for m in r["members"])
        and not any(not m.startswith(cell.cell_id) for m in r["members"])
        for r in rows
        if r["verdict"] != Verdict.BITWISE.value
    )


def _differ(a: Completion, b: Completion) -> bool:
    return (
        a.token_ids.tobytes() != b.token_ids.tobytes()
        or a.logprobs.tobytes() != b.logprobs.tobytes()
        or a.top_logprobs.tobytes() != b.top_logprobs.tobytes()
    )


def _differences(
    healthy: Sequence[Sequence[Completion]], faulty: Sequence[Sequence[Completion]]
) -> tuple[bool, bool]:
    """Whether any tokens differ, and whether any bits do."""
    pairs = [p for a, b in zip(healthy, faulty, strict=True) for p in zip(a, b, strict=True)]
    tokens = any(a.token_ids.tobytes() != b.token_ids.tobytes() for a, b in pairs)
    return tokens, any(_differ(a, b) for a, b in pairs)
