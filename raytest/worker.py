"""The Ray actor: seeds first, then its pin, its fingerprint, the engine, the trials.

Nothing that could draw a random number is imported at the top: the first thing a fresh process does
is to seed itself.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytest.engines.base import Engine, EngineConfig, Request
from raytest.engines.trace import Trace, TraceJob
from raytest.errors import CellError, RaytestError
from raytest.fingerprint.knobs import is_relevant
from raytest.fingerprint.knobs_data import REWRITTEN_WHEN_BATCH_INVARIANT
from raytest.scoring import ScoreJob
from raytest.seeding import compare_audits, seed_everything, state_digests

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Job:
    """What one launch of one cell is told: everything it needs, in plain values.

    ``where`` are the observation columns known to the plan; ``env`` what must be set in every
    process.
    """

    config: EngineConfig
    where: Mapping[str, Any]
    env: Mapping[str, str]
    node_id: str
    log_path: str


@dataclass(frozen=True, slots=True)
class TrialJob:
    """One trial: its keys and the requests, in the batches that the arrangement makes of them."""

    trial: int
    repeat: int
    arrangement: str
    seed: int
    batches: tuple[tuple[Request, ...], ...]


class Worker:
    """Runs one launch of one cell. Methods raise RaytestError alone; Ray carries it to the
    driver."""

    def __init__(self, job: Job) -> None:
        config = job.config
        seed_everything(config.seed, level=config.level, warn_only=config.warn_only)
        self._states_at_start = state_digests()
        self._health_at_start: dict[str, str] = {}
        self._job = job
        self._engine: Engine | None = None
        self._payloads: pa.Table | None = None
        if job.log_path:
            _keep_output(job.log_path)

    def prove_pin(self) -> dict[str, Any]:
        """Where this process really is: node id, devices by UUID, pid. Raises CellError if it is
        not where the plan put it, or if a variable did not reach it."""
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        if node_id != self._job.node_id:
            raise CellError(f"planned on node {self._job.node_id}, but runs on {node_id}")
        check_environment(self._job.env, os.environ, "the actor")
        config = self._job.config
        uuids = _visible_gpus() if config.device_kind == "gpu" else list(config.device_uuids)
        if config.device_kind == "gpu" and uuids and uuids != list(config.device_uuids):
            raise CellError(
                f"planned on {', '.join(config.device_uuids)}, but sees {', '.join(uuids)}"
            )
        return {"node_id": node_id, "pid": os.getpid(), "gpu_uuids": uuids}

    def clock(self) -> float:
        """This node's time, in seconds since the epoch."""
        return time.time()

    def start(self) -> list[tuple[int, str, dict[str, str]]]:
        """Load the engine. Returns fingerprints as (rank, stage, facts); rank -1 is this
        process."""
        from raytest.fingerprint.capture import capture
        from raytest.fingerprint.health import device_health

        facts = {**capture("actor"), **_seed_facts(self._states_at_start)}
        self._health_at_start = device_health(facts)
        records = [(-1, "before load", facts)]
        engine = _build_engine(self._job.config)
        self._engine = engine
        engine.start()
        before_load = engine.states_before_load()
        for rank, states in enumerate(before_load):
            records.append((rank, "before load", _seed_facts(states)))
        self._check_agreement(
            {f"rank {r}": s for r, s in enumerate(before_load)}, "before the model was loaded"
        )
        for rank, rank_facts in enumerate(engine.rank_fingerprints()):
            seen = self._check_rank(rank, rank_facts)
            changed = {f"rewritten.{k}": v for k, v in rewritten(self._job.env, seen).items()}
            records.append((rank, "loaded", {**rank_facts, **changed}))
        return records

    def run_trial(self, trial: TrialJob) -> tuple[pa.Table, dict[str, dict[str, str]]]:
        """One pass; observations, and the seed audit: digests by process and generator. Payloads
        are kept until the next trial."""
        from datetime import UTC, datetime

        from raytest.observations import observations_table

        engine = self._require_engine()
        config = self._job.config
        seed_everything(trial.seed, level=config.level, warn_only=config.warn_only)
        # at once: the call to the ranks below may itself draw from this process' generators
        states = state_digests()
        ranks = {f"rank {r}": dict(s) for r, s in enumerate(engine.reset(trial.seed))}
        audits = {"actor": states, **ranks}
        self._check_agreement(audits, f"before trial {trial.trial}")
        started_at, clock = datetime.now(UTC), time.monotonic()
        completions, steps = engine.generate(trial.batches)
        requests = sorted(
            (r for batch in trial.batches for r in batch), key=lambda r: r.request_index
        )
        observations, self._payloads = observations_table(
            requests,
            completions,
            where={
                **self._job.where,
                "trial": trial.trial,
                "repeat": trial.repeat,
                "arrangement": trial.arrangement,
            },
            batch_size=steps.batch_size,
            started_at=started_at,
            duration_s=time.monotonic() - clock,
            vocabulary_size=engine.vocabulary_size(),
        )
        return observations, audits

    def health(self) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
        """Facts of this process' GPUs that change by themselves (temperature, clocks, throttling,
        memory errors), now; and before and after of those that tell of trouble during the
        trials."""
        from raytest.fingerprint.capture import capture_health
        from raytest.fingerprint.health import worsened

        now = capture_health()
        return now, worsened(self._health_at_start, now)

    def warm_up(self, trial: TrialJob) -> int:
        """A pass whose results are discarded; the number of completions, so that it can be told."""
        engine = self._require_engine()
        engine.reset(trial.seed)
        completions, _ = engine.generate(trial.batches)
        return len(completions)

    def score(self, job: ScoreJob) -> tuple[pa.Table, pa.Table]:
        """Logprobs of fixed tokens instead of generated ones: observations, and their payloads."""
        from datetime import UTC, datetime

        from raytest.observations import observations_table

        engine = self._require_engine()
        config = self._job.config
        seed_everything(job.seed, level=config.level, warn_only=config.warn_only)
        engine.reset(job.seed)
        started_at, clock = datetime.now(UTC), time.monotonic()
        completions = engine.score(job.requests, job.completions)
        return observations_table(
            job.requests,
            completions,
            where={**self._job.where, "trial": 0, "repeat": 0, "arrangement": "replay"},
            batch_size=None,
            started_at=started_at,
            duration_s=time.monotonic() - clock,
            vocabulary_size=engine.vocabulary_size(),
        )

    def trace(self, job: TraceJob) -> Trace:
        """One pass with hooks on every module, seeded as a trial is; what they saw of one
        request."""
        engine = self._require_engine()
        config = self._job.config
        seed_everything(job.seed, level=config.level, warn_only=config.warn_only)
        engine.reset(job.seed)
        return engine.trace_batches(job)

    def payloads(self, payload_ids: Sequence[bytes]) -> pa.Table:
        """Payload rows of the last trial by id."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if self._payloads is None:
            raise CellError("no trial has run in this worker")
        wanted = pa.array(list(payload_ids), pa.binary(16))
        return self._payloads.filter(pc.is_in(self._payloads.column("payload_id"), wanted))

    def stop(self) -> None:
        """Close the engine in good order."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _require_engine(self) -> Engine:
        if self._engine is None:
            raise CellError("the engine is not running")
        return self._engine

    def _check_agreement(self, audits: Mapping[str, Mapping[str, str]], when: str) -> None:
        """Processes of one engine that should agree on their random state, and do not, are an
        error."""
        if self._job.config.level == 0:
            return
        differences = compare_audits(audits)
        if differences:
            raise CellError(f"seed audit {when}: {'; '.join(differences)}")

    def _check_rank(self, rank: int, facts: Mapping[str, str]) -> dict[str, str]:
        """Hold a rank to its variables and its device; the variables it has."""
        config = self._job.config
        seen = {k.removeprefix("env."): v for k, v in facts.items() if k.startswith("env.")}
        # a rank records what determinism may depend on, and no other variable
        wanted = {k: v for k, v in self._job.env.items() if is_relevant(k)}
        check_environment(wanted, seen, f"rank {rank}")
        uuid = facts.get("device.uuid")
        if uuid and config.device_kind == "gpu" and uuid != config.device_uuids[rank]:
            raise CellError(
                f"rank {rank} computes on {uuid}, planned on {config.device_uuids[rank]}"
            )
        return seen


def rewritten(wanted: Mapping[str, str], seen: Mapping[str, str]) -> dict[str, str]:
    """Variables that a rank has otherwise than demanded because batch-invariant mode sets them
    itself: what was demanded, and what is there. One that is absent was never passed on."""
    if wanted.get("VLLM_BATCH_INVARIANT") != "1":
        return {}
    return {
        name: f"{value} -> {seen[name]}"
        for name, value in wanted.items()
        if name.startswith(REWRITTEN_WHEN_BATCH_INVARIANT) and seen.get(name, value) != value
    }


def check_environment(wanted: Mapping[str, str], seen: Mapping[str, str], process: str) -> None:
    """Raise CellError for the first variable that ``process`` has otherwise than demanded, or not
    at all."""
    tolerated = rewritten(wanted, seen) if process != "the actor" else {}
    for name, value in wanted.items():
        found = seen.get(name)
        if found == value or name in tolerated:
            continue
        shown = "is unset" if found is None else f"is {found!r}"
        raise CellError(f"{name} {shown} in {process}, the spec demands {value!r}")


def _visible_gpus() -> list[str]:
    """UUIDs of the GPUs that this process may use, in its own order, asked of NVML."""
    from raytest.fingerprint.gpu import gpus

    known = gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [g["uuid"] for g in known]
    by_name = {name: g["uuid"] for g in known for name in (g["index"], g["uuid"])}
    return [by_name[v.strip()] for v in visible.split(",") if v.strip() in by_name]


def _seed_facts(states: Mapping[str, str]) -> dict[str, str]:
    return {f"seed.{generator}": digest for generator, digest in states.items()}


def _build_engine(config: EngineConfig) -> Engine:
    if config.backend == "reference":
        from raytest.engines.reference import ReferenceEngine

        return ReferenceEngine(config)
    from raytest.engines.vllm import VllmEngine

    return VllmEngine(config)


def _keep_output(path: str) -> None:
    """Send what this process and its children print to one file, which the driver fetches."""
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise RaytestError(f"{path}: cannot be written: {error.strerror}") from None
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
