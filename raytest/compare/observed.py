"""Observations of one or more runs as dense matrices: one row a planned trial, one column a
request's sample. What is missing, failed or double is a state of its own, never an absent row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from raytest.digest import json_digest
from raytest.plan import Cell, Plan, Trial, family_settings
from raytest.spec import Spec
from raytest.store import TrialKey

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    Ints = npt.NDArray[np.int64]

COUNTERS = ("n_nan", "n_inf", "n_positive_logprob", "n_out_of_vocabulary")
COLUMNS = [
    "cell_id", "launch", "trial", "gpu_uuids", "batch_size", "request_index", "request_id",
    "sample_index", "prompt_digest", "token_digest", "logprob_digest", "top_digest", "payload_id",
    "n_tokens", "finish_reason", *COUNTERS, "n_cached_tokens", "error_kind", "error",
]  # fmt: skip


class State(IntEnum):
    """Where one observation stands. SKIPPED: the prompt itself is unusable, or no such sample."""

    OK = 0
    MISSING = 1
    ERROR = 2
    DUPLICATE = 3
    INVALID = 4
    SKIPPED = 5


@dataclass(frozen=True, slots=True)
class Member:
    """One planned trial: the keys that comparisons group by, and what must be known of its setting.

    ``logprobs`` names k and mode (two that differ are comparable by tokens only); ``unformed`` says
    why its arrangement did not form ('' where it did); ``unlooked`` is equal for variants that
    differ in nothing but how many logprobs they are asked for; ``needed`` is False for a trial that
    did not run because every axis was decided without it.
    """

    name: str
    run: int
    cell: Cell
    trial: Trial
    launch: int
    keys: Mapping[str, Any]
    logprobs: str
    has_logprobs: bool
    unlooked: str
    dtype: str
    level: int
    found: bool = False
    needed: bool = True
    gpu_uuids: tuple[str, ...] = ()
    batch_size: int | None = None
    unformed: str = ""

    @property
    def key(self) -> TrialKey:
        """How the run folder knows the trial."""
        return self.cell.cell_id, self.launch, self.trial.trial


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of the first run, by position. ``sampled``: temperature above 0 (bool [R])."""

    request_index: Sequence[int]
    request_id: Sequence[str]
    prompt_digest: Sequence[bytes]
    sampling: Sequence[str]
    error: Sequence[str | None]
    reference: Sequence[str | None]
    sampled: npt.NDArray[np.bool_]
    n_samples: int


@dataclass(frozen=True, slots=True)
class Observed:
    """Matrices are [members, units], unit = request position * n_samples + sample index.

    ``bitwise`` and ``tokens`` are class codes (equal codes: equal results; -1 where ``state`` is
    not OK); ``tokens`` covers token ids and finish reason. ``payload`` indexes ``payload_ids``.
    """

    members: tuple[Member, ...]
    workload: Workload
    state: npt.NDArray[np.int8]
    bitwise: Ints
    tokens: Ints
    payload: Ints
    n_tokens: Ints
    finish: Ints
    finish_reasons: Sequence[str]
    payload_ids: pa.Array
    counters: Mapping[str, tuple[Ints, Ints, Ints]]
    problems: tuple[str, ...]
    errors: tuple[Mapping[str, Any], ...]
    unmatched: Mapping[str, int] = field(default_factory=dict)

    @property
    def n_requests(self) -> int:
        """Requests of the workload."""
        return len(self.workload.request_id)

    def request_of(self, units: Ints) -> Ints:
        """Request position of each unit."""
        return units // self.workload.n_samples


def workload_of(requests: pa.Table, n_samples: int) -> Workload:
    """The request table as plain columns."""
    import numpy as np

    texts = requests.column("sampling").to_pylist()
    return Workload(
        request_index=requests.column("request_index").to_pylist(),
        request_id=requests.column("request_id").to_pylist(),
        prompt_digest=requests.column("prompt_digest").to_pylist(),
        sampling=texts,
        error=requests.column("error").to_pylist(),
        reference=requests.column("reference").to_pylist(),
        sampled=np.array([_is_sampled(s) for s in texts], dtype=np.bool_),
        n_samples=n_samples,
    )


def members_of(spec: Spec, plan: Plan, run: int, run_id: str) -> list[Member]:
    """Every planned trial in running order."""
    variants = {v.name: v for v in spec.variants}
    members = []
    for launch in plan.launches():
        cell = launch.cell
        variant = variants[cell.variant]
        k = None if spec.workload.sampling.beam_width else spec.logprobs(variant)
        mode = variant.engine.get("logprobs_mode", "raw_logprobs")
        unlooked = json_digest("unlooked", {**family_settings(spec, variant), "logprobs": None})
        shared = {
            **cell.keys(),
            "models": "+".join(sorted({d.model for d in cell.slot.devices})),
            "launch": launch.launch,
        }
        members += [
            Member(
                name=f"{cell.cell_id}/{launch.launch}-{trial.trial}",
                run=run,
                cell=cell,
                trial=trial,
                launch=launch.launch,
                keys={
                    **shared,
                    "run": run_id,
                    "arrangement": trial.arrangement.value,
                    "repeat": trial.repeat,
                },
                logprobs="none" if k is None else f"k={k} {mode}",
                has_logprobs=k is not None,
                unlooked=unlooked,
                dtype=variant.dtype or spec.model.dtype,
                level=spec.level(variant),
            )
            for trial in plan.trials
        ]
    return members


_TEMPERATURE = re.compile(r'"temperature": ?([0-9.eE+-]+)')


def _is_sampled(text: str) -> bool:
    """Whether the temperature is above 0; a thousand JSON documents a run are worth a short cut."""
    found = _TEMPERATURE.search(text)
    return found is not None and float(found[1]) > 0


def _sampling_key(text: str) -> str:
    """Sampling parameters that shape the tokens; how many logprobs are kept is another matter."""
    shaping = {k: v for k, v in json.loads(text).items() if k != "logprobs"}
    return json.dumps(shaping, sort_keys=True)


def unit_map(first: Workload, other: Workload) -> tuple[list[int], dict[str, int]]:
    """Position in ``first`` of each request of ``other`` (-1: none), and how many have no partner.

    Matched by prompt digest and sampling, among equal ones by their order; never by position.
    """
    places = {key: position for position, key in enumerate(_occurrences(first))}
    mapped = [places.get(key, -1) for key in _occurrences(other)]
    prompts = set(first.prompt_digest)
    strangers = [d for d, p in zip(other.prompt_digest, mapped, strict=True) if p < 0]
    sampled = sum(1 for d in strangers if d in prompts)
    return mapped, {
        "requests have the same prompt but other sampling": sampled,
        "requests are in a later run only": len(strangers) - sampled,
        "requests are in the first run only": len(places)
        - (len(mapped) - len(strangers))
        - sampled,
    }


def _occurrences(workload: Workload) -> Iterable[tuple[bytes, str, int]]:
    seen: dict[tuple[bytes, str], int] = {}
    keys = map(_sampling_key, workload.sampling)
    for key in zip(workload.prompt_digest, keys, strict=True):
        seen[key] = seen.get(key, -1) + 1
        yield *key, seen[key]
