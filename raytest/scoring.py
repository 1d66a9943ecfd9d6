"""What a worker is told when it scores fixed tokens instead of generating its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raytest.engines.base import Request
from raytest.replay_folder import Recorded
from raytest.spec import Spec


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """Fixed completions to score, one per request: their token ids, in the requests' order."""

    seed: int
    requests: tuple[Request, ...]
    completions: tuple[tuple[int, ...], ...]


def score_job(spec: Spec, requests: list[Request], reference: Recorded) -> ScoreJob:
    """The reference's tokens as every cell scores them: greedy's plain logprobs, and as many
    candidates everywhere (one at least: the most likely token is compared)."""
    k = max(1, spec.workload.sampling.logprobs or 0)
    recorded = [r for r in requests if r.request_id in reference.payloads]
    tokens = [tuple(reference.payloads[r.request_id].token_ids.tolist()) for r in recorded]
    kept = [(r, t) for r, t in zip(recorded, tokens, strict=True) if t]
    return ScoreJob(
        seed=spec.seed,
        requests=tuple(
            replace(r, sampling=replace(r.sampling, temperature=0.0, n=1, beam_width=0, logprobs=k))
            for r, _ in kept
        ),
        completions=tuple(t for _, t in kept),
    )
