"""Arithmetic whose order is stated, so that results are bit for bit the same on any machine.

No BLAS, no ``einsum``, no ``sum``: their order depends on threads, SIMD width and shape. Here every
sum is a chain of elementwise float32 additions, which IEEE 754 fixes, and no multiply-add is fused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

DTYPES = ("float32", "bfloat16", "float16")
# Rows of a step -> elements added one after the other in a block, as kernels choose tiles by shape.
BLOCK_BY_ROWS = ((4, 8), (16, 16), (64, 32))
BLOCK_OF_MANY_ROWS = 64
INVARIANT_BLOCK = 16
VERSIONS = ("1.0", "1.1")
# Products held in memory at once (half a MiB): what stays in a core's cache.
ELEMENTS_AT_ONCE = 1 << 17


@dataclass(frozen=True, slots=True)
class SumOrder:
    """How one rank adds the K products of a matrix product.

    K is cut into ``threads`` contiguous partial sums, added in thread order. In each, blocks of
    elements are added one after the other, and then the blocks in order (``reverse``: last first).
    The block follows from the number of rows unless ``batch_invariant``. Version 1.1 deals the
    elements to the blocks in turn, where 1.0 gives each block a contiguous run.
    """

    threads: int = 1
    batch_invariant: bool = False
    version: str = "1.0"
    reverse: bool = False

    def block(self, rows: int) -> int:
        """Elements per block for a product of ``rows`` rows."""
        if self.batch_invariant:
            return INVARIANT_BLOCK
        for below, block in BLOCK_BY_ROWS:
            if rows < below:
                return block
        return BLOCK_OF_MANY_ROWS

    def chunks(self, k: int) -> Iterator[tuple[int, int]]:
        """The range of K that each thread adds."""
        threads = min(self.threads, k)
        for i in range(threads):
            yield i * k // threads, (i + 1) * k // threads


def product(x: Array, w: Array, order: SumOrder) -> Array:
    """``x`` [ranks, rows, K] times ``w`` [ranks, K, out] -> float32 [ranks, rows, out],
    unrounded."""
    block = order.block(x.shape[1])
    total: Array | None = None
    for start, end in order.chunks(x.shape[2]):
        partial = _blocks(x[:, :, start:end], w[:, start:end], block, order)
        total = partial if total is None else total + partial
    assert total is not None
    return total


def _blocks(x: Array, w: Array, block: int, order: SumOrder) -> Array:
    ranks, rows, k = x.shape
    columns = w.shape[2]
    block = min(block, k)
    n_blocks = k // block
    whole = n_blocks * block
    if order.version == "1.1":
        xs = x[:, :, :whole].reshape(ranks, rows, block, n_blocks).transpose(2, 3, 0, 1)
        ws = w[:, :whole].reshape(ranks, block, n_blocks, columns).transpose(1, 2, 0, 3)
    else:
        xs = x[:, :, :whole].reshape(ranks, rows, n_blocks, block).transpose(3, 2, 0, 1)
        ws = w[:, :whole].reshape(ranks, n_blocks, block, columns).transpose(2, 1, 0, 3)
    if order.reverse:
        xs, ws = xs[:, ::-1], ws[:, ::-1]
    ws = np.ascontiguousarray(ws)[:, :, :, None]
    total = np.empty((ranks, rows, columns), dtype=np.float32)
    at_once = max(1, ELEMENTS_AT_ONCE // (ranks * whole * columns))
    for row in range(0, rows, at_once):
        some = slice(row, row + at_once)
        total[:, some] = add_along_first(
            add_along_first(np.multiply(xs[..., some, None], ws, order="C"))
        )
    for j in range(whole, k):
        total += x[:, :, j, None] * w[:, j, None, :]
    total += np.float32(0.0)
    return total


def add_along_first(x: Array) -> Array:
    """x[0] + x[1] + ..., in that order. Over any axis but the fastest in memory numpy's
    ``add.reduce`` adds one after the other (pairwise summation is for the fastest alone: see
    ``numpy.sum``)."""
    if len(x) == 1:
        only: Array = x[0]
        return only
    total: Array = np.add.reduce(np.ascontiguousarray(x), axis=0)
    return total


def fold_sum(x: Array) -> Array:
    """Sum over the last axis by halving it: the second half is added to the first until one is
    left."""
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        folded = x[..., :half].copy()
        folded[..., : x.shape[-1] - half] += x[..., half:]
        x = folded
    return x[..., 0]


def exp(x: Array) -> Array:
    """exp in float32 from additions and multiplications alone (Cephes ``expf``; 2 ULP).

    ``np.exp`` differs between SIMD levels. Arguments below -87.3 give about 1e-38 rather than 0.
    """
    x = np.clip(x, np.float32(-87.3), np.float32(88.3))
    power = np.rint(x * np.float32(1.44269504))
    r = x - power * np.float32(0.693359375)
    r = r - power * np.float32(-2.12194440e-4)
    y = np.full_like(r, 1.9875691500e-4)
    for coefficient in (
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    ):
        y *= r
        y += np.float32(coefficient)
    y *= r * r
    y += r
    y += np.float32(1.0)
    exponent = np.where(np.isnan(power), 0, power).astype(np.int32)
    scale: Array = ((exponent + 127) << 23).astype(np.int32).view(np.float32)
    result: Array = y * scale
    return result


def log_softmax(logits: Array) -> Array:
    """float32 [rows, vocabulary] -> log-probabilities in nats; a row with NaN is NaN throughout."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total = fold_sum(exp(shifted)).astype(np.float64)
    logprobs: Array = shifted - np.log(total).astype(np.float32)[:, None]
    return logprobs


def round_to(x: Array, dtype: str) -> Array:
    """``x`` rounded to the nearest value of ``dtype`` (ties to even), still held as float32."""
    if dtype == "float32":
        return x
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(x).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    result = rounded.view(np.float32)
    nan = np.isnan(x)
    return np.where(nan, x, result) if nan.any() else result


def flip_bit(x: Array, index: int, bit: int, dtype: str) -> None:
    """Flip ``bit`` (0 is the lowest) of the flat element ``index`` in its ``dtype`` form, in
    place."""
    flat = x.reshape(-1)
    if dtype == "float16":
        half = flat[index : index + 1].astype(np.float16).view(np.uint16)
        half ^= np.uint16(1 << bit)
        flat[index] = half.view(np.float16)[0]
        return
    shift = bit + 16 if dtype == "bfloat16" else bit
    flat.view(np.uint32)[index] ^= np.uint32(1 << shift)


def dtype_bits(dtype: str) -> int:
    """Width of one element in bits."""
    return 32 if dtype == "float32" else 16
