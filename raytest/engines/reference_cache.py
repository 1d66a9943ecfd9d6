"""The reference engine's KV cache: blocks of positions, and prompts that share them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from raytest.engines.reference_numerics import Array

NULL_BLOCK = 0


class BlockPool:
    """Keys [ranks, blocks, heads, head size, block size] and values [ranks, blocks, heads, block
    size, head size] of each layer, handed out by block id. Block 0 pads block tables and stays
    zero.

    With ``prefix_caching``, full blocks of a prompt are kept until ``reset`` and found again by the
    token ids up to their end.
    """

    def __init__(
        self,
        *,
        layers: int,
        ranks: int,
        heads: int,
        head_size: int,
        block_size: int,
        prefix_caching: bool,
    ) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._key_shape = (ranks, heads, head_size, block_size)
        self._value_shape = (ranks, heads, block_size, head_size)
        self._layers = layers
        # (layer, rank) whose blocks keep what they held: see the fault stale_kv_block
        self.kept_dirty: tuple[int, int] | None = None
        self.reset()

    def reset(self) -> None:
        """Drop every block and every cached prefix."""
        self.keys: list[Array] = [self._empty(self._key_shape, 64) for _ in range(self._layers)]
        self.values: list[Array] = [self._empty(self._value_shape, 64) for _ in range(self._layers)]
        self._free = list(range(1, 64))
        self._users: dict[int, int] = {}
        self._prefixes: dict[tuple[int, ...], int] = {}

    @staticmethod
    def _empty(shape: tuple[int, ...], blocks: int) -> Array:
        return np.zeros((shape[0], blocks, *shape[1:]), dtype=np.float32)

    def allocate(self) -> int:
        """The lowest free block, cleared."""
        if not self._free:
            self._grow()
        block = heapq.heappop(self._free)
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            for rank in range(keys.shape[0]):
                if (layer, rank) != self.kept_dirty:
                    keys[rank, block] = 0.0
                    values[rank, block] = 0.0
        self._users[block] = 1
        return block

    def _grow(self) -> None:
        held = self.keys[0].shape[1]
        for arrays in (self.keys, self.values):
            for i, array in enumerate(arrays):
                arrays[i] = np.concatenate([array, np.zeros_like(array)], axis=1)
        self._free = list(range(held, 2 * held))

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one use of each block; one without users is free again."""
        for block in blocks:
            self._users[block] -= 1
            if self._users[block] == 0:
                del self._users[block]
                heapq.heappush(self._free, block)

    def fork(self, blocks: Sequence[int]) -> list[int]:
        """Copies of ``blocks``, for a beam that goes its own way."""
        copies = [self.allocate() for _ in blocks]
        for arrays in (self.keys, self.values):
            for array in arrays:
                array[:, copies] = array[:, list(blocks)]
        return copies

    def cached(self, prompt: Sequence[int]) -> list[int]:
        """Blocks that hold the start of ``prompt``, each now used once more; the last token is
        never among them, since its logits are needed."""
        blocks: list[int] = []
        if not self.prefix_caching:
            return blocks
        for end in range(self.block_size, len(prompt), self.block_size):
            block = self._prefixes.get(tuple(prompt[:end]))
            if block is None:
                break
            self._users[block] += 1
            blocks.append(block)
        return blocks

    def remember(self, prompt: Sequence[int], blocks: Sequence[int]) -> None:
        """Keep the full blocks of a prompt for later ones."""
        if not self.prefix_caching:
            return
        for i in range(len(prompt) // self.block_size):
            key = tuple(prompt[: (i + 1) * self.block_size])
            if key not in self._prefixes:
                self._prefixes[key] = blocks[i]
                self._users[blocks[i]] += 1
