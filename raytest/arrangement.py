"""Arrangements: in which order and company the requests reach a running engine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise

from raytest.engines.base import Request
from raytest.schema import Arrangement

# Fewer shared tokens than one block of vLLM's cache holds are never reused.
CACHE_BLOCK = 16


def arrange(
    requests: Sequence[Request], arrangement: Arrangement, seed: int
) -> list[list[Request]]:
    """The batches, run one after the other, that hand ``requests`` to an engine.

    The same requests and seed give the same batches; only ``shuffled`` depends on the seed.
    """
    ordered = list(requests)
    if not ordered:
        return []
    if arrangement is Arrangement.SOLO:
        return [[r] for r in ordered]
    if arrangement is Arrangement.REVERSED:
        return [ordered[::-1]]
    if arrangement is Arrangement.SHUFFLED:
        # sorting by a hash needs no generator, whose sequence another Python might change
        return [sorted(ordered, key=lambda r: _hash(f"{seed}/{r.request_id}"))]
    if arrangement is Arrangement.PREFIX:
        return _by_prefix(ordered)
    return [ordered]


def shared_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens at the start that two prompts have in common."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


def _by_prefix(requests: list[Request]) -> list[list[Request]]:
    """One batch for each family of requests that share a cache block or more, longest shared
    prefix first; then all that share nothing.

    In token order the neighbours of a prompt are those it shares most with, so families are runs.
    """
    ordered = sorted(requests, key=lambda r: (r.prompt_token_ids, r.request_id))
    families = [[ordered[0]]]
    shared = [0]
    for before, request in pairwise(ordered):
        common = shared_prefix(before.prompt_token_ids, request.prompt_token_ids)
        if common >= CACHE_BLOCK:
            shared[-1] = min(shared[-1] or common, common)
            families[-1].append(request)
        else:
            families.append([request])
            shared.append(0)
    ranked = sorted(zip(shared, families, strict=True), key=lambda pair: -pair[0])
    alone = [family[0] for length, family in ranked if not length]
    return [family for length, family in ranked if length] + ([alone] if alone else [])


def _hash(text: str) -> bytes:
    return hashlib.sha256(f"raytest-shuffle/{text}".encode()).digest()
