"""The digest of one row of an activation: order-aware, exact on any device, additive over columns.

``sum_i (bits_i xor c) * k_i mod 2^64`` with odd pseudo-random ``k_i``, under two keys. Integer
addition is associative, so the order in which a device reduces changes nothing, and the digests
of a row's pieces, each at its own columns, add up to the digest of the row. It tells rows apart
that differ by chance or by fault; it is no cryptographic hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

KEYS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
# Both constants are set in every element, so that a zero element still counts.
XOR = (0x2545F4914F6CDD1D, 0x5851F42D4C957F2D)


def multipliers(columns: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Odd multipliers of the given column numbers, uint64 [2, columns] (the SplitMix64 finaliser,
    doi:10.1145/2714064.2660195)."""
    import numpy as np

    with np.errstate(over="ignore"):
        keyed = [(columns + np.uint64(1)) * np.uint64(key) for key in KEYS]
        rows = []
        for z in keyed:
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            rows.append((z ^ (z >> np.uint64(31))) | np.uint64(1))
    return np.stack(rows)


def row_digests(
    bits: npt.NDArray[Any], columns: npt.NDArray[np.uint64] | None = None
) -> npt.NDArray[np.uint64]:
    """Digests of rows of unsigned bits [rows, columns], uint64 [rows, 2].

    ``columns`` are the places of the columns in the whole row; 0, 1, 2, … if not given.
    """
    import numpy as np

    wide = bits.astype(np.uint64)
    places = np.arange(wide.shape[1], dtype=np.uint64) if columns is None else columns
    with np.errstate(over="ignore"):
        keyed = [
            ((wide ^ np.uint64(c)) * k).sum(axis=1, dtype=np.uint64)
            for c, k in zip(XOR, multipliers(places), strict=True)
        ]
    return np.stack(keyed, axis=1)


def slice_columns(rank: int, size: int, partitions: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Places in the whole row of the columns that rank ``rank`` of ``size`` holds, where each of
    the row's ``partitions`` (widths on one rank) is cut among the ranks in rank order."""
    import numpy as np

    places, start = [], 0
    for width in partitions:
        first = start + rank * width
        places.append(np.arange(first, first + width, dtype=np.uint64))
        start += width * size
    return np.concatenate(places)
