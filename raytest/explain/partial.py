"""Columns that explain a part of the partition where none explains all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raytest.explain.candidates import candidate_of
from raytest.explain.chance import mutual_information, sampled
from raytest.explain.columns import Column
from raytest.explain.noise import SIGNIFICANT
from raytest.explain.partition import blocks, explained, holm, refines, size
from raytest.explain.tables import Candidate, Role
from raytest.explain.work import Work

MOST_TESTED = 8


def partial_of(work: Work) -> tuple[Candidate, ...]:
    """Single columns that explain a part of the partition beyond chance, the largest first: node by
    node as well as slot by slot, unless half of the requests are parted exactly."""
    n = len(work.partition)
    tried = [c for c in work.of_role(Role.LABEL) if size(c.codes) <= max(2, n // 3)]
    classes = size(work.partition)

    def weight(column: Column) -> float:
        # the G statistic per degree of freedom: a factor of many values fits more by itself
        freedom = (size(column.codes) - 1) * (classes - 1)
        return explained(work.partition, column.codes) / freedom

    tried.sort(key=lambda c: (-weight(c), c.preference))
    tested = tried[:MOST_TESTED]
    made = [candidate_of(work, (c,), 1.0, 1.0, None) for c in tested]
    chances = _chances(work, tested, made)
    by_slot = holm([p for p, _ in chances], len(tried))
    by_node = holm([q for _, q in chances], len(tried))
    kept: list[tuple[Column, Candidate]] = []
    for i, (column, own) in enumerate(zip(tested, made, strict=True)):
        # a finer factor that parts no request more than a coarser one adds nothing
        idle = any(
            own.requests <= other.requests and refines(column.codes, coarser.codes)
            for coarser, other in kept
        )
        held = by_node[i] < SIGNIFICANT or parts_half(own)
        if by_slot[i] < SIGNIFICANT and held and not idle:
            p, q = chances[i]
            kept.append((column, replace(own, p_value=p, adjusted=by_slot[i], p_by_node=q)))
    kept.sort(key=lambda k: (-k[1].requests, k[0].role, -k[1].explained, k[0].preference))
    return tuple(candidate for _, candidate in kept)


def _chances(
    work: Work, columns: Sequence[Column], candidates: Sequence[Candidate]
) -> list[tuple[float, float]]:
    """P-values of what columns explain, by dealing out slots, and by dealing out nodes; what fails
    by nodes and parts less than half of the requests is not tried by slots (1.0)."""
    import numpy as np

    statistic = mutual_information(work.partition)
    rng = np.random.default_rng(0)
    found = []
    for column, candidate in zip(columns, candidates, strict=True):
        by_node = sampled(statistic, column.codes, work.units, rng)
        by_slot = by_node
        if blocks(column.codes, work.node) is not None:
            tried = by_node < SIGNIFICANT or parts_half(candidate)
            by_slot = sampled(statistic, column.codes, work.units[1:], rng) if tried else 1.0
        found.append((by_slot, by_node))
    return found


def parts_half(candidate: Candidate) -> bool:
    return 2 * candidate.requests >= candidate.n_requests
