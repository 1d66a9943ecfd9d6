"""The workers of a run that have results, their classes, and the folded factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytest.explain.columns import Column, fold
from raytest.explain.partition import refines, relabel, rows_as_codes, size
from raytest.explain.tables import UNKNOWN, UNSTABLE, Factor, Outcomes, Role

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Work:
    """The workers that have results [n], their classes and the folded factors."""

    outcomes: Outcomes
    keep: Ints
    slot: Ints
    node: Ints
    launch: Ints
    partition: Ints
    by_slot: bool
    tied: bool
    divergent: Ints
    unstable: npt.NDArray[np.bool_]
    columns: tuple[Column, ...]

    @classmethod
    def of(cls, outcomes: Outcomes, factors: Sequence[Factor]) -> Work:
        import numpy as np

        keep = np.flatnonzero((outcomes.codes != UNKNOWN).any(axis=1))
        codes = outcomes.codes[keep]
        shared = (codes >= 0).all(axis=0)
        found = rows_as_codes(codes[:, shared])
        counts = np.bincount(found) if len(found) else np.zeros(0, dtype=np.int64)
        # numbered by size, the largest first; equal sizes in order of appearance
        rank = np.empty(len(counts), dtype=np.int64)
        rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
        partition = rank[found]
        slot, node, launch = (
            relabel(x[keep]) for x in (outcomes.slot, outcomes.node, outcomes.launch)
        )
        largest = np.sort(counts)[::-1]
        high = np.where(codes >= 0, codes, -1).max(axis=0, initial=-1)
        low = np.where(codes >= 0, codes, np.iinfo(np.int64).max).min(
            axis=0, initial=np.iinfo(np.int64).max
        )
        return cls(
            outcomes=outcomes,
            keep=keep,
            slot=slot,
            node=node,
            launch=launch,
            partition=partition,
            by_slot=refines(slot, partition) if len(slot) else True,
            tied=len(largest) > 1 and bool(largest[0] == largest[1]),
            divergent=codes[:, (high >= 0) & (low < high)],
            unstable=codes == UNSTABLE,
            columns=tuple(fold(factors, keep, outcomes.slot, outcomes.node)),
        )

    @property
    def names(self) -> tuple[Ints, ...]:
        """Partitions that a set of settings may not merely spell out: by slot, and by node."""
        by_node = (self.node,) if 2 < size(self.node) < size(self.slot) else ()
        return (self.slot, *by_node) if size(self.slot) > 2 else ()

    @property
    def units(self) -> tuple[Ints, ...]:
        """What is dealt anew as a whole in a permutation, coarsest first. Nodes are among them: the
        slots of a node share what is the node's, and are no independent evidence for it."""
        import numpy as np

        return self.node, self.slot, self.launch, np.arange(len(self.slot))

    def of_role(self, most: Role) -> list[Column]:
        """Columns up to a role."""
        return [c for c in self.columns if c.role <= most]

    def slots_of(self, rows: Ints) -> list[str]:
        """Names of the slots of some workers, sorted."""
        own = self.outcomes.slot[self.keep[rows]]
        return sorted({self.outcomes.slot_names[int(s)] for s in own})
