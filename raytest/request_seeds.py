"""A seed for every request, from the spec's seed and the request's id, never from its position.

One seeded set of parameters handed to a whole batch would give every prompt the same noise.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Mapping

from raytest.engines.base import Sampling

# Seeds leave room below 2**31 - 1 for the samples of one request (seed, seed + 1, …).
MOST_SAMPLES = 64
SEED_RANGE = 2**31 - 1 - MOST_SAMPLES


def derive_seed(base: int, request_id: str, attempt: int = 0) -> int:
    """A seed in [0, 2**31 - 1 - 64), from SHA-256 of the base seed and the request's id.

    ``attempt`` counts the seeds already refused because another request's samples used them.
    """
    text = f"raytest-seed/{base}/{attempt}/{request_id}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") % SEED_RANGE


def assign_seeds(samplings: Mapping[str, Sampling], fixed: Mapping[str, int]) -> dict[str, int]:
    """Seeds by request id, such that no derived seed's samples [seed, seed + n) are another's.

    ``samplings`` has each request's parameters with the base seed; ``fixed`` the seeds that lines
    of a prompt file ask for, which stay as they are. The order of the requests does not matter.
    """
    seeds = dict(fixed)
    taken = sorted((seed, seed + samplings[i].n) for i, seed in fixed.items())
    widest = max((sampling.n for sampling in samplings.values()), default=1)
    for request_id in sorted(samplings.keys() - fixed.keys()):
        sampling = samplings[request_id]
        attempt = 0
        seed = derive_seed(sampling.seed, request_id)
        while _overlaps(taken, seed, seed + sampling.n, widest):
            attempt += 1
            seed = derive_seed(sampling.seed, request_id, attempt)
        insort(taken, (seed, seed + sampling.n))
        seeds[request_id] = seed
    return seeds


def _overlaps(taken: list[tuple[int, int]], start: int, end: int, widest: int) -> bool:
    """Whether [start, end) meets any of the sorted ranges, none of which is wider than
    ``widest``."""
    i = bisect_left(taken, (start - widest + 1,))
    while i < len(taken) and taken[i][0] < end:
        if taken[i][1] > start:
            return True
        i += 1
    return False
