"""The rows of one part of one module as they gather on a vLLM rank, digested on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from raytest.engines.row_digest import XOR, multipliers
from raytest.engines.vllm_layout import Held
from raytest.engines.vllm_rows import StepRows

# Elements that are widened to 64 bits at once while digests are computed.
ELEMENTS_AT_ONCE = 1 << 21


class Digester:
    """Makes digests on whatever device rows are on; multipliers are made once for each width."""

    def __init__(self) -> None:
        self._multipliers: dict[tuple[Held, int, Any], torch.Tensor] = {}

    def digest(self, bits: torch.Tensor, held: Held) -> torch.Tensor:
        """Digests of integer rows [rows, columns], int64 [rows, 2]."""
        key = (held, bits.shape[1], bits.device)
        factors = self._multipliers.get(key)
        if factors is None:
            made = multipliers(held.places(bits.shape[1])).view(np.int64)
            factors = self._multipliers[key] = torch.from_numpy(made).to(bits.device)
        return digest_rows(bits, factors)


def digest_rows(bits: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """:func:`raytest.engines.row_digest.row_digests` with torch, int64 [rows, 2]; ``factors`` is
    int64 [2, columns]. 64-bit integers wrap around, which is the modulus."""
    width = 8 * bits.element_size()
    at_once = max(1, ELEMENTS_AT_ONCE // max(1, bits.shape[1]))
    found = []
    for part in bits.split(at_once):
        integers = part.to(torch.int64)
        if width < 64:
            integers = integers & ((1 << width) - 1)
        sums = [((integers ^ c) * k).sum(dim=1) for c, k in zip(XOR, factors, strict=True)]
        found.append(torch.stack(sums, dim=1))
    return torch.cat(found)


def bits_of(rows: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return rows.contiguous().view(kinds[rows.element_size()])


@dataclass(slots=True)
class Gathered:
    """One part over the steps so far; ``values`` holds (positions, owners, rows of bits)."""

    kind: str
    order: int
    held: Held
    dtype: str
    columns: int
    digests: list[tuple[StepRows, torch.Tensor]] = field(default_factory=list)
    values: list[tuple[tuple[int, ...], tuple[str, ...], torch.Tensor]] = field(
        default_factory=list
    )

    def reply(self, owner: str | None) -> dict[str, Any] | None:
        """The rows of the request ``owner`` in plain values; None where it has none here."""
        positions = np.concatenate([r.positions for r, _ in self.digests])
        owners = np.array([o for r, _ in self.digests for o in r.owners], dtype=object)
        mine = np.flatnonzero(owners == owner)
        # a request that was preempted has some rows twice: the first stands
        _, first = np.unique(positions[mine], return_index=True)
        chosen = mine[first]
        if not len(chosen):
            return None
        digests = torch.cat([d for _, d in self.digests]).cpu().numpy()
        steps = np.concatenate([np.full(len(r.rows), r.step) for r, _ in self.digests])
        return {
            "kind": self.kind,
            "order": self.order,
            "layout": self.held.layout.value,
            "dtype": self.dtype,
            "columns": self.columns,
            "positions": positions[chosen].astype("<i4").tobytes(),
            "steps": steps[chosen].astype("<i4").tobytes(),
            "digests": digests[chosen].astype("<i8").tobytes(),
            **self._values(owner),
        }

    def _values(self, owner: str | None) -> dict[str, Any]:
        rows: dict[int, bytes] = {}
        element_bytes = 0
        for positions, owners, bits in self.values:
            host = bits.cpu().numpy()
            element_bytes = host.dtype.itemsize
            for position, who, row in zip(positions, owners, host, strict=True):
                if who == owner:
                    rows.setdefault(position, row.tobytes())
        at = sorted(rows)
        return {
            "element_bytes": element_bytes,
            "value_positions": np.array(at, dtype="<i4").tobytes(),
            "values": b"".join(rows[p] for p in at),
        }
